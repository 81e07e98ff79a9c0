package codeq

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/listing"
)

// TestPageIsReadAgain: a page that is read again, as the shard's leader has changed meanwhile, is
// read from where it begins.
func TestPageIsReadAgain(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		for range listing.PageTasks + 1 {
			produce(t, q, Task{Queue: "a"})
		}
		s := q.led()[0]
		op := &readOp{completion: newCompletion(callRead), list: newLister(ListOptions{State: Ready})}
		visit := func() (again bool) { // what the owner does, and then who reads
			require.NoError(t, s.probe(func(s *shard) (err error) {
				v := viewOf(s)
				defer v.close()
				op.list.Visit(&s.State, v.Snapshot)
				again, err = op.read(v)
				return err
			}))
			return again
		}
		require.False(t, visit(), "what there is to read")
		require.True(t, visit(), "the tasks of a page")
		op.again()
		for range listing.PageTasks {
			require.NoError(t, q.Complete(t.Context(), claimNow(t, q, "a").Receipt, nil))
		}
		require.True(t, visit())
		require.False(t, visit())
		require.Len(t, op.list.Page, 1)
		require.False(t, op.list.More())
	})
}
