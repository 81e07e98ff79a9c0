package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// claimed produces and claims n tasks, which are spread over the shards.
func claimed(t *testing.T, q *codeq.Queue, n int, task codeq.Task) (leases []*codeq.Lease) {
	t.Helper()
	for range n {
		queuetest.Produce(t, q, task)
	}
	for len(leases) < n {
		more, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{task.Queue}, Max: n - len(leases), NoWait: true})
		require.NoError(t, err)
		leases = append(leases, more...)
	}
	return leases
}

func receiptsOf(leases []*codeq.Lease) (all []codeq.Receipt) {
	for _, l := range leases {
		all = append(all, l.Receipt)
	}
	return all
}

// TestLeaseBatch: each task of a batch ends as its single verb would end it, or has an error of its
// own: so has the second one with the same receipt.
func TestLeaseBatch(t *testing.T) {
	failures := func(receipts []codeq.Receipt) (all []codeq.Failure) {
		for i, r := range receipts {
			all = append(all, codeq.Failure{Receipt: r, Err: fmt.Errorf("error %d", i)})
		}
		return all
	}
	for verb, c := range map[string]struct {
		end    func(q *codeq.Queue, receipts []codeq.Receipt) error
		state  codeq.State
		counts int // attempts
	}{
		"complete": {func(q *codeq.Queue, receipts []codeq.Receipt) error {
			var all []codeq.Completion
			for i, r := range receipts {
				all = append(all, codeq.Completion{Receipt: r, Result: fmt.Append(nil, "result ", i), Next: []codeq.Task{{Queue: "next"}, {Queue: "next", Unique: codeq.Unique{Key: "k"}}}})
			}
			return q.CompleteBatch(context.Background(), all)
		}, codeq.Done, 1},
		"retry": {func(q *codeq.Queue, receipts []codeq.Receipt) error {
			return q.RetryBatch(context.Background(), failures(receipts))
		}, codeq.Scheduled, 1},
		"dead letter": {func(q *codeq.Queue, receipts []codeq.Receipt) error {
			return q.DeadLetterBatch(context.Background(), failures(receipts))
		}, codeq.Dead, 1},
		"release": {func(q *codeq.Queue, receipts []codeq.Receipt) error {
			return q.ReleaseBatch(context.Background(), receipts, time.Hour)
		}, codeq.Scheduled, 0},
	} {
		t.Run(verb, func(t *testing.T) {
			queuetest.Bubble(t, codeq.Options{Shards: 3, Retention: time.Hour}, func(t *testing.T, q *codeq.Queue) {
				leases := claimed(t, q, 20, codeq.Task{Queue: "a"})
				lost, receipts := 7, receiptsOf(leases)
				require.NoError(t, q.Cancel(t.Context(), leases[lost].ID))
				err := c.end(q, append(receipts, receipts[3]))
				requirePrefix(t, verb, err)
				var batch *codeq.BatchError
				require.ErrorAs(t, err, &batch)
				require.Len(t, batch.Errors, 21)
				for i, err := range batch.Errors {
					switch i {
					case lost:
						require.ErrorIs(t, err, codeq.ErrLeaseLost)
						require.ErrorIs(t, err, codeq.ErrCanceled)
					case 20:
						require.ErrorIs(t, err, codeq.ErrLeaseLost)
						require.NotErrorIs(t, err, codeq.ErrCanceled)
					default:
						require.NoError(t, err)
						info := queuetest.InfoOf(t, q, leases[i].ID)
						require.Equal(t, c.state, info.State)
						require.Equal(t, c.counts, info.Attempts)
						switch verb {
						case "complete":
							require.Equal(t, fmt.Sprint("result ", i), string(info.Result))
						case "retry", "dead letter":
							require.Equal(t, fmt.Sprint("error ", i), info.LastError)
						}
					}
				}
				require.ErrorIs(t, err, codeq.ErrCanceled, "any of them")
				require.Len(t, batch.Unwrap(), 2)
				if verb == "complete" {
					queuetest.Quiesce(t, q)
					require.EqualValues(t, 19+1, queuetest.CountsOf(t, q, "next").Ready)
				}
				require.NoError(t, queuetest.CheckAll(q))
			})
		})
	}
}

// TestExtendBatch: the leases last as long as by Extend.
func TestExtendBatch(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 3, LeaseFor: time.Second}, func(t *testing.T, q *codeq.Queue) {
		leases := claimed(t, q, 9, codeq.Task{Queue: "a"})
		require.NoError(t, q.ExtendBatch(t.Context(), receiptsOf(leases[1:]), time.Minute))
		time.Sleep(30 * time.Second)
		require.EqualValues(t, 8, queuetest.CountsOf(t, q, "a").Leased)
		time.Sleep(31 * time.Second)
		var batch *codeq.BatchError
		require.ErrorAs(t, q.ExtendBatch(t.Context(), receiptsOf(leases), time.Minute), &batch)
		require.Len(t, batch.Unwrap(), 9)
		require.EqualError(t, batch, "codeq: 9 of a batch of 9; 0: "+short(batch, 0)+"; 1: "+short(batch, 1)+"; 2: "+short(batch, 2)+"; ...")
	})
}

func short(e *codeq.BatchError, i int) string { return e.Errors[i].Error()[len("codeq: "):] }

// TestLeaseBatchCommits: a batch costs one commit for each shard that has some of its tasks.
func TestLeaseBatchCommits(t *testing.T) {
	const shards, n = 4, 1000
	queuetest.Bubble(t, codeq.Options{Shards: shards, LeaseFor: time.Hour, Limits: codeq.Limits{Batch: n}}, func(t *testing.T, q *codeq.Queue) {
		for verb, end := range map[string]func([]codeq.Receipt) error{
			"complete": func(receipts []codeq.Receipt) error {
				all := make([]codeq.Completion, n)
				for i, r := range receipts {
					all[i].Receipt = r
				}
				return q.CompleteBatch(t.Context(), all)
			},
			"release": func(receipts []codeq.Receipt) error { return q.ReleaseBatch(t.Context(), receipts, 10*time.Hour) },
			"extend":  func(receipts []codeq.Receipt) error { return q.ExtendBatch(t.Context(), receipts, 2*time.Hour) },
		} {
			receipts := receiptsOf(claimed(t, q, n, codeq.Task{Queue: verb}))
			synctest.Wait()
			before := inspect.Of(q).Commits()
			require.NoError(t, end(receipts))
			require.LessOrEqual(t, inspect.Of(q).Commits()-before, uint64(shards), verb)
		}
	})
}

// TestLeaseBatchRefused: a batch with an element that is invalid, or that is too large, changes
// nothing.
func TestLeaseBatchRefused(t *testing.T) {
	opts := codeq.Options{Shards: 2, Limits: codeq.Limits{Batch: 3, BatchBytes: 1000, Payload: 500}}
	queuetest.Bubble(t, opts, func(t *testing.T, q *codeq.Queue) {
		ctx := t.Context()
		leases := claimed(t, q, 3, codeq.Task{Queue: "a"})
		receipts := receiptsOf(leases)
		with := func(change func(all []codeq.Completion)) error {
			all := []codeq.Completion{{Receipt: receipts[0]}, {Receipt: receipts[1]}, {Receipt: receipts[2]}}
			change(all)
			return q.CompleteBatch(ctx, all)
		}
		full := make([]byte, 500)
		next := []codeq.Task{{Queue: "b"}, {Queue: "b"}}
		missing := codeq.ID{1}
		for field, err := range map[string]error{
			"CompleteBatch elements":   q.CompleteBatch(ctx, make([]codeq.Completion, 4)),
			"CompleteBatch follow-ups": with(func(all []codeq.Completion) { all[0].Next, all[2].Next = next, next }),
			"CompleteBatch bytes":      with(func(all []codeq.Completion) { all[0].Result, all[1].Result, all[2].Result = full, full, full }),
			"Complete result":          with(func(all []codeq.Completion) { all[1].Result = make([]byte, 501) }),
			"Task.Queue":               with(func(all []codeq.Completion) { all[1].Next = []codeq.Task{{}} }),
			"Failure.After":            q.DeadLetterBatch(ctx, []codeq.Failure{{Receipt: receipts[0]}, {Receipt: receipts[1], After: 1}}),
			"Release after":            q.ReleaseBatch(ctx, receipts, -1),
			"ReleaseBatch elements":    q.ReleaseBatch(ctx, append(receipts, receipts...), 0),
			"Extend duration":          q.ExtendBatch(ctx, receipts, 0),
			"ExtendBatch elements":     q.ExtendBatch(ctx, append(receipts, receipts...), time.Hour),
			"RetryBatch elements":      q.RetryBatch(ctx, make([]codeq.Failure, 4)),
			"" /* a parent that must exist */ : with(func(all []codeq.Completion) {
				all[2].Next = []codeq.Task{{Queue: "b", After: []codeq.ID{missing}, OnMissing: codeq.RefuseOnMissing}}
			}),
		} {
			requirePrefix(t, field, err)
			var batch *codeq.BatchError
			require.False(t, errors.As(err, &batch), field)
			if field == "" {
				require.ErrorIs(t, err, codeq.ErrNotFound)
				continue
			}
			var invalid *codeq.InvalidError
			require.ErrorAs(t, err, &invalid, field)
			require.Equal(t, field, invalid.Field)
		}
		require.EqualValues(t, 3, queuetest.CountsOf(t, q, "a").Leased)
		require.NoError(t, q.CompleteBatch(ctx, nil))
	})
}

// TestLeaseBatchFails: the tasks of a shard that fails have its error, those of the others have
// ended. If it fails between two commits of the batch, the outcome is uncertain.
func TestLeaseBatchFails(t *testing.T) {
	for _, groupCap := range []int{0, 2} {
		synctest.Test(t, func(t *testing.T) {
			q, err := codeq.Open("q", queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 2, GroupCap: groupCap}))
			require.NoError(t, err)
			leases := claimed(t, q, 100, codeq.Task{Queue: "a"})
			left := groupCap
			queuetest.WrapCommits(t, q, 1, func(c inspect.Committer) inspect.Committer { return &failsLater{c, &left} })
			for _, want := range []error{codeq.ErrUncertain, codeq.ErrFailed} {
				var batch *codeq.BatchError
				require.ErrorAs(t, q.ReleaseBatch(t.Context(), receiptsOf(leases), time.Hour), &batch)
				for i, l := range leases {
					if err := batch.Errors[i]; queuetest.ShardOf(l.ID, 2) == 1 {
						require.ErrorIs(t, err, want)
					} else if err != nil {
						require.Equal(t, codeq.ErrFailed, want)
						require.ErrorIs(t, err, codeq.ErrLeaseLost, "the second time")
					}
				}
			}
			require.ErrorIs(t, q.Close(), codeq.ErrFailed)
		})
	}
}

// failsLater fails after some commits.
type failsLater struct {
	inspect.Committer
	left *int
}

func (f *failsLater) Commit(b *pebble.Batch) error {
	if *f.left--; *f.left < 0 {
		return testkit.ErrDisk
	}
	return f.Committer.Commit(b)
}

// TestLeaseBatchIsFair: the operations of other callers come between those of a batch that takes
// many commits.
func TestLeaseBatchIsFair(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1, GroupCap: 2}, func(t *testing.T, q *codeq.Queue) {
		leases := claimed(t, q, 20, codeq.Task{Queue: "a"})
		events, err := q.Subscribe(codeq.SubscribeOptions{})
		require.NoError(t, err)
		defer events.Close()
		free := make(chan struct{})
		var calls sync.WaitGroup
		call := func(do func() error) {
			calls.Go(func() { require.NoError(t, do()) })
			synctest.Wait()
		}
		call(func() error { return inspect.Of(q).Owner(0, func(*inspect.Owner) error { <-free; return nil }) })
		call(func() error { return q.ReleaseBatch(t.Context(), receiptsOf(leases), time.Hour) })
		call(func() error { _, err := q.Produce(t.Context(), codeq.Task{Queue: "b"}); return err })
		close(free)
		calls.Wait()
		var order []codeq.EventKind
		for len(order) < len(leases)+1 {
			e, err := events.Next(t.Context())
			require.NoError(t, err)
			order = append(order, e.Kind)
		}
		require.Less(t, slices.Index(order, codeq.EventProduced), 4, "%v", order)
	})
}
