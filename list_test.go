package codeq

import (
	"context"
	"iter"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/listing"
)

// collect returns what List yields, by payload.
func collect(t *testing.T, list iter.Seq2[*TaskInfo, error]) (payloads []string) {
	t.Helper()
	for info, err := range list {
		require.NoError(t, err)
		payloads = append(payloads, string(info.Payload))
	}
	return payloads
}

// Listed returns the payloads of the tasks that List yields.
func (f *FlowTest) Listed(o ListOptions) []string {
	f.Helper()
	synctest.Wait()
	return collect(f.T, f.Q.List(context.Background(), o))
}

// Spread produces tasks, with their names as payloads, in one shard after the
// other, a millisecond apart.
func (f *FlowTest) Spread(tasks ...Task) (ids []ID) {
	f.Helper()
	for i, task := range tasks {
		ids = append(ids, f.ProduceAt(i%f.Opts.Shards, task))
		time.Sleep(time.Millisecond)
	}
	return ids
}

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
