package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// TestSessionTable: the table keeps the recent produces of a node as long as its caller may ask for
// them.
func TestSessionTable(t *testing.T) {
	var table sessionTable
	one := CallNumber{Node: "n", Incarnation: 5, Seq: 1, Low: 1}
	done, err := table.outcome(&one)
	require.NoError(t, err)
	require.Nil(t, done)
	table.note(&one, []keys.ID{{1}}, []int{0})
	done, err = table.outcome(&one)
	require.NoError(t, err)
	require.Equal(t, &keys.SessionCall{Seq: 1, IDs: []keys.ID{{1}}, Duplicates: []int{0}}, done)
	three := CallNumber{Node: "n", Incarnation: 5, Seq: 3, Low: 2}
	table.note(&three, []keys.ID{{3}}, nil)
	_, err = table.outcome(&one)
	require.ErrorIs(t, err, base.ErrUncertain, "its caller knows its outcome")
	require.Len(t, table.byNode["n"].Calls, 1, "what nobody asks for is forgotten")
	later := CallNumber{Node: "n", Incarnation: 6, Seq: 1, Low: 1}
	done, err = table.outcome(&later)
	require.NoError(t, err)
	require.Nil(t, done, "another life of the node")
	table.note(&later, []keys.ID{{9}}, nil)
	require.Len(t, table.byNode["n"].Calls, 1)
	_, err = table.outcome(&three)
	require.Equal(t, &IncarnationOverError{"n", 6}, err)
	require.ErrorIs(t, err, base.ErrNotMember)
	require.NotErrorIs(t, err, base.ErrUncertain)
	v, err := keys.ParseSession(table.byNode["n"].Append(nil))
	require.NoError(t, err)
	require.Equal(t, *table.byNode["n"], v)
}

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
	call := func(n int) *CallNumber {
		return &CallNumber{Node: fmt.Sprint("node ", n), Incarnation: 5, Seq: 1, Low: 1}
	}
	const more = 3
	hasProduced := func(n int) bool { return n%2 == 0 || n == goneSessions+more }
	for n := range goneSessions + more + 1 {
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
	for n := range goneSessions + more {
		d.begin(s)
		s.Mail.SetInterest(call(n).Node, keys.InterestValue{}, true)
		if n%7 == 0 {
			d.commit(s)
			d.Wall += uint64(time.Second.Milliseconds())
		}
	}
	d.commit(s)
	for range 2 {
		require.Len(t, s.Mail.sessions.byNode, goneSessions+1)
		stored := 0
		require.NoError(t, store.Scan(s.Store.DB(), keys.Session, func(key, value []byte) error {
			v, err := keys.ParseSession(value)
			require.Equal(t, v, *s.Mail.sessions.byNode[string(key[1:])])
			stored++
			return err
		}))
		require.Equal(t, goneSessions+1, stored)
		for n := range goneSessions + more + 1 {
			_, err := s.Mail.sessions.outcome(call(n))
			removed := n >= more && n < goneSessions+more
			require.Equal(t, removed && hasProduced(n), err != nil, n)
			forgotten, err := store.IsForgotten(s.Store.DB(), call(n).Node)
			require.NoError(t, err)
			require.Equal(t, removed, forgotten, n)
			require.Equal(t, n == goneSessions+more, s.Mail.Continues(call(n)), n)
		}
		d.crash()
		s = d.shards[0]
	}
}
