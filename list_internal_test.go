package codeq

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/listing"
	"codeq/internal/wire"
)

// TestPageIsReadAgain: if the leader of the shard changes during a page, the page is read again
// from its beginning.
func TestPageIsReadAgain(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		for range listing.PageTasks + 1 {
			produce(t, q, Task{Queue: "a"})
		}
		s := q.led()[0]
		l := newLister(listing.Query{State: engine.Ready})
		visit := func() (again bool) { // the owner's part, then the reader's part
			require.NoError(t, s.probe(func(s *shard) (err error) {
				v := s.replica.slot.View()
				defer v.Done()
				l.Visit(&s.rules, v.Snapshot)
				again, err = l.Look(v.Snapshot, s.hasEnded)
				return err
			}))
			return again
		}
		require.True(t, visit(), "what there is to read")
		require.True(t, visit(), "the tasks of a page")
		l.Again()
		for range listing.PageTasks {
			require.NoError(t, q.Complete(t.Context(), claimNow(t, q, "a").Receipt, nil))
		}
		require.True(t, visit())
		require.False(t, visit())
		require.Len(t, l.Page, 1)
		require.False(t, l.More())
	})
}

// TestListBeginsBehindTheConsumed: List of one queue's ready tasks reads only the lanes of that
// queue, each from its first ready task on.
func TestListBeginsBehindTheConsumed(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	q, err := Open(t.TempDir(), &Options{Shards: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	for i := range 50 {
		produce(t, q, Task{Queue: fmt.Sprint("other ", i)})
	}
	ids, err := q.ProduceBatch(ctx, slices.Repeat([]Task{{Queue: "a"}}, 100))
	require.NoError(t, err)
	for range 90 {
		l, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.NoError(t, q.Complete(ctx, l.Receipt, nil))
	}
	l := newLister(listing.Query{State: engine.Ready, Queue: "a"})
	require.NoError(t, q.shard(0).probe(func(s *shard) error {
		v := s.replica.slot.View()
		defer v.Done()
		l.Visit(&s.rules, v.Snapshot)
		again, err := l.Look(v.Snapshot, s.hasEnded)
		require.True(t, again)
		l.Visit(&s.rules, v.Snapshot)
		return err
	}))
	r := wire.NewReader(l.Append(nil))
	for range 3 + 2 + 4 + 3 { // the filter, the limits and no position: each one byte or number
		r.Uint()
	}
	require.True(t, r.Bool(), "it is known what there is to read")
	r.Uint()
	require.EqualValues(t, 1, r.Uint(), "lanes to read")
	first := ids[90]
	require.Equal(t, keys.AppendTask(nil, keys.LaneOf(first), keys.SinceOf(keys.ID(first)), first), r.Bytes())
	left := 0
	for _, err := range q.List(ctx, ListOptions{State: Ready, Queue: "a"}) {
		require.NoError(t, err)
		left++
	}
	require.Equal(t, 10, left)
}
