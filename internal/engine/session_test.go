package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// TestRemovedNodesAreRemembered: a shard remembers the last removed nodes, in memory and on disk,
// with or without produces of them.
func TestRemovedNodesAreRemembered(t *testing.T) {
	shared := store.NewCaches(8<<20, 1<<20, 1)
	defer shared.Close()
	nothing := func(*drivenShard) {}
	d := driver{
		t: t, shared: shared, config: Config{Shards: 1, WindowTasks: 16, WindowBytes: 1 << 20}, Instant: Instant{Wall: storyStart},
		sealing: nothing, persisted: nothing, clockAge: func(int) uint64 { return 0 },
	}
	d.open()
	defer d.close()
	s := d.shards[0]
	call := func(n int) *keys.CallNumber {
		return &keys.CallNumber{Node: fmt.Sprint("node ", n), Incarnation: 5, Seq: 1, Low: 1}
	}
	const more = 3
	hasProduced := func(n int) bool { return n%2 == 0 || n == store.GoneSessions+more }
	for n := range store.GoneSessions + more + 1 {
		if !hasProduced(n) {
			continue
		}
		d.begin(s)
		task := NewTask{Key: LaneKey{Queue: "a"}}
		task.Encode(&record.Record{}, nil)
		_, err := s.Produce([]NewTask{task}, call(n), new(Produced))
		require.NoError(t, err)
		if n%100 == 0 {
			d.commit(s)
		}
	}
	for n := range store.GoneSessions + more {
		d.begin(s)
		s.Mail.SetInterest(call(n).Node, keys.InterestValue{}, true)
		if n%7 == 0 {
			d.commit(s)
			d.Wall += uint64(time.Second.Milliseconds())
		}
	}
	d.commit(s)
	for range 2 {
		require.Equal(t, store.GoneSessions+1, s.Mail.Sessions.Len())
		stored := 0
		require.NoError(t, store.Scan(s.Store.DB(), keys.Session, func(key, value []byte) error {
			v, err := keys.ParseSession(value)
			require.Equal(t, v, *s.Mail.Sessions.Of(string(key[1:])))
			stored++
			return err
		}))
		require.Equal(t, store.GoneSessions+1, stored)
		for n := range store.GoneSessions + more + 1 {
			_, err := s.Mail.Sessions.Outcome(call(n))
			removed := n >= more && n < store.GoneSessions+more
			require.Equal(t, removed && hasProduced(n), err != nil, n)
			forgotten, err := store.IsForgotten(s.Store.DB(), call(n).Node)
			require.NoError(t, err)
			require.Equal(t, removed, forgotten, n)
			require.Equal(t, n == store.GoneSessions+more, s.Mail.Sessions.Continues(call(n)), n)
		}
		d.crash()
		s = d.shards[0]
	}
}
