package codeq

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/wire"
)

// allocated is how many bytes f allocates, with what others do meanwhile.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// fillQueue produces tasks into a queue, and leases some of them.
func fillQueue(t *testing.T, q *Queue, queue string, tasks, leases int) (ids []ID) {
	t.Helper()
	ctx := context.Background()
	for len(ids) < tasks {
		batch := make([]Task, min(1000, tasks-len(ids)))
		for i := range batch {
			batch[i] = Task{Queue: queue, Payload: []byte("x")}
		}
		made, err := q.ProduceBatch(ctx, batch)
		require.NoError(t, err)
		ids = append(ids, made...)
	}
	for n := 0; n < leases; {
		got, err := q.ClaimBatch(ctx, ClaimRequest{Queues: []string{queue}, Max: min(1000, leases-n), LeaseFor: time.Hour})
		require.NoError(t, err)
		n += len(got)
	}
	return ids
}

// TestReadsCostByWhatTheyYield: Get and List read and keep what they return, and
// not what is leased, ready, or in other queues beside it.
func TestReadsCostByWhatTheyYield(t *testing.T) {
	const backlog, few = 20_000, 20
	ctx := context.Background()
	q, err := Open(t.TempDir(), &Options{Shards: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()

	leased := fillQueue(t, q, "leased", backlog, backlog-few) // the last few are ready
	ready := fillQueue(t, q, "ready", backlog, few)           // the first few are leased
	count := func(o ListOptions) (n int) {
		for info, err := range q.List(ctx, o) {
			require.NoError(t, err)
			require.Equal(t, o.State, info.State)
			n++
		}
		return n
	}
	for name, c := range map[string]func(){
		"Get of a ready task": func() {
			info, err := q.Get(ctx, ready[backlog-1])
			require.NoError(t, err)
			require.Equal(t, Ready, info.State)
		},
		"Get of a leased task": func() {
			info, err := q.Get(ctx, leased[0])
			require.NoError(t, err)
			require.Equal(t, Leased, info.State)
			require.WithinDuration(t, time.Now().Add(time.Hour), info.At, time.Minute)
		},
		"List of the ready tasks behind leases": func() { require.Equal(t, few, count(ListOptions{State: Ready, Queue: "leased"})) },
		"List of the leased tasks of a backlog": func() { require.Equal(t, few, count(ListOptions{State: Leased, Queue: "ready"})) },
		"List of a queue without tasks": func() {
			for _, state := range []State{Ready, Leased, Scheduled, Blocked, Dead, Done, Canceled} {
				require.Zero(t, count(ListOptions{State: state, Queue: "none"}))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c()
			require.Less(t, allocated(c), uint64(1<<20), fmt.Sprint("bytes, beside ", backlog, " leases and ready tasks"))
		})
	}
}

// TestListBeginsBehindTheConsumed: List of one queue's ready tasks reads the lanes of that
// queue only, each from its first ready task on.
func TestListBeginsBehindTheConsumed(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	q, err := Open(t.TempDir(), &Options{Shards: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	for i := range 50 {
		produce(t, q, Task{Queue: fmt.Sprint("other ", i)})
	}
	ids := fillQueue(t, q, "a", 100, 0)
	for range 90 {
		l, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.NoError(t, q.Complete(ctx, l.Receipt, nil))
	}
	l := newLister(ListOptions{State: Ready, Queue: "a"})
	op := &readOp{completion: newCompletion(callRead), list: l}
	_, err = q.do(ctx, 0, op)
	require.NoError(t, err)
	s := q.shard(0)
	require.NoError(t, s.probe(func(s *shard) error {
		v := viewOf(s)
		defer v.close()
		l.Visit(&s.State, v.Snapshot)
		return nil
	}))
	r := wire.NewReader(l.Append(nil))
	require.True(t, r.Bool(), "it is known what there is to read")
	r.Uint()
	require.EqualValues(t, 1, r.Uint(), "lanes to read")
	first := ids[90]
	require.Equal(t, keys.AppendTask(nil, keys.LaneOf(first), keys.SinceOf(keys.ID(first)), first), r.Bytes())
	require.Len(t, collect(t, q.List(ctx, ListOptions{State: Ready, Queue: "a"})), 10)
}
