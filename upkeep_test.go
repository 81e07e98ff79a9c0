package codeq_test

import (
	"context"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestCallersPassUpkeep: while much is due at the same time, each call is served within two groups,
// and no step does more than its budget.
func TestCallersPassUpkeep(t *testing.T) {
	n := testkit.Sized(8000, 100_000)
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
	noWait := func(t *testing.T, q *codeq.Queue) { require.Nil(t, queuetest.ClaimNow(t, q, "a")) }
	limited := func(t *testing.T, q *codeq.Queue) {
		require.NoError(t, q.Configure(ctx, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 }))
		fill(t, q, func(i int) codeq.Task { return codeq.Task{Queue: "a", LimitKey: "k"} })
		require.NotNil(t, queuetest.ClaimNow(t, q, "a"))
	}
	for _, load := range []struct {
		name    string
		prepare func(t *testing.T, q *codeq.Queue)
		begin   func(t *testing.T, q *codeq.Queue) // makes much work due
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
			queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
				load.prepare(t, q)
				const commit = time.Millisecond
				queuetest.SlowDown(t, q, 0, commit)
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
					l := queuetest.ClaimNow(t, q, "innocent")
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
					case codeq.UpkeepRefill, codeq.UpkeepSeal, codeq.UpkeepCommit, codeq.UpkeepGroup, codeq.UpkeepRelease, codeq.UpkeepOperations: // these include the steps of prepare
					default:
						require.LessOrEqual(t, s.MaxRecords, int64(2100), s.Kind)
						require.LessOrEqual(t, s.MaxBytes, int64(600<<10), s.Kind)
					}
				}
			})
		})
	}
}

// TestUpkeepStats: the steps of an owner are counted by kind, with their durations and sizes.
func TestUpkeepStats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 1})
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		steps := func() []codeq.UpkeepStats {
			synctest.Wait()
			st, err := q.StorageStats()
			require.NoError(t, err)
			require.Len(t, st.Shards[0].Upkeep, int(codeq.UpkeepGroup)+1)
			return st.Shards[0].Upkeep
		}
		before := steps()
		queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: make([]byte, 1000)})
		after := steps()
		for i := range after {
			require.Equal(t, codeq.UpkeepKind(i), after[i].Kind)
			require.NotEmpty(t, after[i].Kind.String())
			n := after[i].Count - before[i].Count
			switch after[i].Kind {
			case codeq.UpkeepOperations, codeq.UpkeepSeal, codeq.UpkeepCommit, codeq.UpkeepRelease, codeq.UpkeepGroup:
				require.EqualValues(t, 1, n, after[i].Kind)
			default:
				require.Zero(t, n, after[i].Kind)
			}
		}
		require.Greater(t, after[codeq.UpkeepOperations].MaxBytes, int64(1000))
		require.Greater(t, after[codeq.UpkeepCommit].MaxBytes, int64(1000))
		require.Greater(t, after[codeq.UpkeepGroup].MaxBytes, int64(1000))
		require.GreaterOrEqual(t, after[codeq.UpkeepCommit].MaxRecords, int64(2), "the task, and counters")

		// A long step.
		require.NoError(t, inspect.Of(q).Owner(0, func(*inspect.Owner) error {
			time.Sleep(3 * time.Millisecond)
			return nil
		}))
		slow := steps()[codeq.UpkeepOperations]
		require.Equal(t, 3*time.Millisecond, slow.Max)
		require.EqualValues(t, 1, slow.Buckets[12], "2,048 us to 4,096 us")
		require.Equal(t, slow.Max, slow.Quantile(1))
		require.LessOrEqual(t, slow.Quantile(0.5), time.Microsecond)
		require.Equal(t, codeq.UpkeepOperations, longestStep(t, q, codeq.UpkeepGroup))
		require.Equal(t, codeq.UpkeepGroup, longestStep(t, q, codeq.UpkeepOperations))

		// Upkeep is counted when it has work, together with its reads.
		l := queuetest.ClaimNow(t, q, "a")
		time.Sleep(time.Until(l.Deadline) + time.Second)
		reaped := steps()[codeq.UpkeepReap]
		require.Positive(t, reaped.Count)
		require.GreaterOrEqual(t, reaped.MaxRecords, int64(2), "a record is read, and written")
		require.Greater(t, reaped.MaxBytes, int64(2000))
	})
}

// longestStep returns the kind of the longest step of the owner, of all kinds but except.
func longestStep(t *testing.T, q *codeq.Queue, except codeq.UpkeepKind) (kind codeq.UpkeepKind) {
	st, err := q.StorageStats()
	require.NoError(t, err)
	longest := time.Duration(0)
	for _, s := range st.Shards[0].Upkeep {
		if s.Kind != except && s.Max > longest {
			kind, longest = s.Kind, s.Max
		}
	}
	return kind
}
