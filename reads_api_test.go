package codeq_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// allocated is how many bytes f allocates, with what others do meanwhile.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestReadsCostByWhatTheyYield: Get and List read and keep what they return, and
// not what is leased, ready, or in other queues beside it.
func TestReadsCostByWhatTheyYield(t *testing.T) {
	const backlog, few = 20_000, 20
	ctx := context.Background()
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()

	leased := fillQueue(t, q, "leased", backlog, backlog-few) // the last few are ready
	ready := fillQueue(t, q, "ready", backlog, few)           // the first few are leased
	count := func(o codeq.ListOptions) (n int) {
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
			require.Equal(t, codeq.Ready, info.State)
		},
		"Get of a leased task": func() {
			info, err := q.Get(ctx, leased[0])
			require.NoError(t, err)
			require.Equal(t, codeq.Leased, info.State)
			require.WithinDuration(t, time.Now().Add(time.Hour), info.At, time.Minute)
		},
		"List of the ready tasks behind leases": func() { require.Equal(t, few, count(codeq.ListOptions{State: codeq.Ready, Queue: "leased"})) },
		"List of the leased tasks of a backlog": func() { require.Equal(t, few, count(codeq.ListOptions{State: codeq.Leased, Queue: "ready"})) },
		"List of a queue without tasks": func() {
			for _, state := range []codeq.State{codeq.Ready, codeq.Leased, codeq.Scheduled, codeq.Blocked, codeq.Dead, codeq.Done, codeq.Canceled} {
				require.Zero(t, count(codeq.ListOptions{State: state, Queue: "none"}))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c()
			require.Less(t, allocated(c), uint64(1<<20), fmt.Sprint("bytes, beside ", backlog, " leases and ready tasks"))
		})
	}
}
