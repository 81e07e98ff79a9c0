package codeq_test

import (
	"context"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
)

// TestCallersPassUpkeep: while much is due at the same time, whoever calls is served within
// two groups, and no step does more than its budget.
func TestCallersPassUpkeep(t *testing.T) {
	n := testkit.Sized(8000, 10_000, 100_000)
	const size = 1000 // of a task, in bytes
	ctx := context.Background()
	fill := func(t *testing.T, q *codeq.Queue, task func(i int) codeq.Task) {
		for i := 0; i < n; i += 1000 {
			tasks := make([]codeq.Task, min(1000, n-i))
			for j := range tasks {
				tasks[j] = task(i + j)
				tasks[j].Payload = make([]byte, size)
			}
			_, err := q.ProduceBatch(ctx, tasks)
			require.NoError(t, err)
		}
	}
	noWait := func(t *testing.T, q *codeq.Queue) { require.Nil(t, claimNow(t, q, "a")) }
	limited := func(t *testing.T, q *codeq.Queue) {
		require.NoError(t, q.Configure(ctx, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 }))
		fill(t, q, func(i int) codeq.Task { return codeq.Task{Queue: "a", LimitKey: "k"} })
		require.NotNil(t, claimNow(t, q, "a"))
	}
	for _, load := range []struct {
		name    string
		prepare func(t *testing.T, q *codeq.Queue)
		begin   func(t *testing.T, q *codeq.Queue) // makes much due
		end     codeq.Counts                       // of queue a
	}{
		{"a claim parks them", limited, noWait, codeq.Counts{Leased: 1, Blocked: uint64(n - 1)}},
		{"a limit is lifted", func(t *testing.T, q *codeq.Queue) {
			limited(t, q)
			noWait(t, q)
		}, func(t *testing.T, q *codeq.Queue) {
			require.NoError(t, q.Configure(ctx, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 0 }))
		}, codeq.Counts{Leased: 1, Ready: uint64(n - 1)}},
		{"they are due", func(t *testing.T, q *codeq.Queue) {
			at := time.Now().Add(time.Second)
			fill(t, q, func(i int) codeq.Task { return codeq.Task{Queue: "a", RunAt: at} })
		}, func(*testing.T, *codeq.Queue) { time.Sleep(time.Second) }, codeq.Counts{Ready: uint64(n)}},
		{"leases expire", func(t *testing.T, q *codeq.Queue) {
			fill(t, q, func(i int) codeq.Task { return codeq.Task{Queue: "a"} })
			for left := n; left > 0; {
				leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Max: 1000, LeaseFor: time.Second})
				require.NoError(t, err)
				left -= len(leases)
			}
		}, func(*testing.T, *codeq.Queue) { time.Sleep(time.Second) }, codeq.Counts{Ready: uint64(n)}},
		{"keys become free", func(t *testing.T, q *codeq.Queue) {
			fill(t, q, func(i int) codeq.Task {
				return codeq.Task{Queue: "a", Unique: codeq.Unique{Key: strconv.Itoa(i), For: time.Second}}
			})
		}, func(*testing.T, *codeq.Queue) { time.Sleep(time.Second) }, codeq.Counts{Ready: uint64(n)}},
	} {
		t.Run(load.name, func(t *testing.T) {
			t.Parallel()
			bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
				load.prepare(t, q)
				const commit = time.Millisecond
				slowDown(t, q, 0, commit)
				begun := make(chan struct{})
				go func() {
					defer close(begun)
					load.begin(t, q)
				}()
				for busy, rounds := true, 0; busy || rounds < 20; rounds++ {
					asked := time.Now()
					_, err := q.Produce(ctx, codeq.Task{Queue: "innocent"})
					require.NoError(t, err)
					require.LessOrEqual(t, time.Since(asked), 2*commit) // commits alone take time in a bubble
					l := claimNow(t, q, "innocent")
					require.NotNil(t, l)
					require.NoError(t, q.Complete(ctx, l.Receipt, nil))
					counts, err := q.Stats(ctx)
					require.NoError(t, err)
					busy = counts["a"] != load.end
					select {
					case <-begun:
					default:
						busy, rounds = true, 0
					}
				}
				synctest.Wait()
				st, err := q.StorageStats()
				require.NoError(t, err)
				for _, s := range st.Shards[0].Upkeep {
					switch s.Kind {
					case codeq.UpkeepRefill, codeq.UpkeepSeal, codeq.UpkeepCommit, codeq.UpkeepGroup, codeq.UpkeepRelease, codeq.UpkeepOperations: // those of prepare among them
					default:
						require.LessOrEqual(t, s.MaxRecords, int64(2100), s.Kind)
						require.LessOrEqual(t, s.MaxBytes, int64(600<<10), s.Kind)
					}
				}
			})
		})
	}
}
