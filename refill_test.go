package codeq

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"testing/synctest"
	"unsafe"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
	"codeq/internal/testkit"
)

// names are so many, in the order of their numbers.
func names(prefix string, n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprintf("%s %05d", prefix, i)
	}
	return all
}

// produceInTurn produces one task for each tenant, and so on until each has so many.
func produceInTurn(t *testing.T, q *Queue, like Task, each int, tenants []string) {
	t.Helper()
	for range each {
		produceFor(t, q, like, 1, tenants...)
	}
}

// claimSome claims at most so many tasks of a queue without waiting.
func claimSome(t *testing.T, q *Queue, queue string, most int) []*Lease {
	t.Helper()
	batch, err := q.ClaimBatch(context.Background(), ClaimRequest{Queues: []string{queue}, Max: most, NoWait: true})
	require.NoError(t, err)
	return batch
}

// refilled is what the refills of the first shard have done since it was loaded.
func refilled(t *testing.T, q *Queue) (f engine.Usage) {
	t.Helper()
	require.NoError(t, q.shard(0).probe(func(s *shard) error { f = s.Probe().Usage(); return nil }))
	return f
}

// TestRefillsReadWhatIsServed: with more tenants than memory has room for, each task is read
// about once, in few passes; and what windows hold stays within its bound.
func TestRefillsReadWhatIsServed(t *testing.T) {
	t.Parallel()
	const each, payload, windowBytes = 20, 100, 128 << 10
	for _, c := range []struct{ tenants, claim int }{{300, 1}, {300, 64}, {1000, 1}, {1000, 64}} {
		t.Run(fmt.Sprintf("%d tenants, claims of %d", c.tenants, c.claim), func(t *testing.T) {
			bubble(t, Options{Shards: 1, WindowBytes: windowBytes}, func(t *testing.T, q *Queue) {
				produceInTurn(t, q, Task{Queue: "a", Payload: make([]byte, payload)}, each, names("tenant", c.tenants))
				tasks := uint64(each * c.tenants)
				for claimed := uint64(0); claimed < tasks; {
					n := len(claimSome(t, q, "a", c.claim))
					require.Positive(t, n)
					claimed += uint64(n)
				}
				f := refilled(t, q)
				t.Logf("%d tasks: %d passes, %d lanes, %d tasks and %d bytes read", tasks, f.Refills, f.RefilledLanes, f.RefilledTasks, f.RefilledBytes)
				require.LessOrEqual(t, f.RefilledTasks, tasks*5/4)
				require.LessOrEqual(t, f.RefilledLanes, tasks*5/4)
				require.LessOrEqual(t, f.Refills, tasks/8)
				requireSettled(t, q)
			})
		})
	}
}

// TestRefillsEnd: however little memory windows have, less than one task or more, an owner whom nobody
// asks for anything does not go on reading.
func TestRefillsEnd(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 0))
		opts := Options{Shards: 1, fs: vfs.NewMem(), WindowBytes: []int{1, 900, 3000}[rng.IntN(3)], WindowTasks: 2 + rng.IntN(3)}
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		for range 60 {
			if rng.IntN(3) > 0 {
				tasks := make([]Task, 1+rng.IntN(8))
				for i := range tasks {
					payload := make([]byte, []int{10, 100, 300, 2000}[rng.IntN(4)])
					tasks[i] = Task{Queue: fmt.Sprint(rng.IntN(3)), Tenant: fmt.Sprint(rng.IntN(5)), Priority: rng.IntN(2), Payload: payload}
				}
				produce(t, q, tasks...)
			} else {
				queues := []string{fmt.Sprint(rng.IntN(3)), fmt.Sprint(rng.IntN(3))}
				_, err := q.ClaimBatch(context.Background(), ClaimRequest{Queues: queues, Max: 1 + rng.IntN(3), NoWait: true})
				if err != nil {
					require.ErrorIs(t, err, ErrEmpty)
				}
			}
			const looks = 50 // each of them is a group
			before, after := refilled(t, q).Refills, uint64(0)
			for range looks {
				after = refilled(t, q).Refills
			}
			require.Less(t, after-before, uint64(looks*9/10), "seed %d", seed)
		}
		require.NoError(t, q.Close())
	}
}

// TestTurnsAreKept: however little of it is in memory, tenants take turns: each has had as
// many claims as any other, but for one.
func TestTurnsAreKept(t *testing.T) {
	t.Parallel()
	tenants, each := testkit.Sized(2000, 10_000, 10_000), 4
	for _, windowBytes := range []int{1, 64 << 10, 32 << 20} {
		t.Run(fmt.Sprint(windowBytes, " bytes"), func(t *testing.T) {
			opts := Options{Shards: 1, WindowBytes: windowBytes, fs: vfs.NewMem()}
			tenants, each := tenants, each
			if windowBytes == 1 { // one task at a time
				tenants = 100
			}
			synctest.Test(t, func(t *testing.T) {
				q := openForRun(t, opts)
				produceInTurn(t, q, Task{Queue: "a", Payload: make([]byte, 100)}, each, names("tenant", tenants))
				seen := make(map[string]int)
				claimed := 0
				claim := func(n int) {
					for end := claimed + n; claimed < end; {
						batch := claimSome(t, q, "a", min(97, end-claimed))
						require.NotEmpty(t, batch)
						for _, l := range batch {
							require.Equal(t, claimed/tenants, seen[l.Tenant], "claim %d, of %s", claimed, l.Tenant)
							seen[l.Tenant]++
							claimed++
						}
					}
				}
				claim(tenants + tenants/2)
				requireSettled(t, q)
				claim(tenants/2 + tenants)
				require.NoError(t, q.Close())
				q = openForRun(t, opts)
				claim(tenants)
				require.Empty(t, claimNow(t, q, "a"))
				requireSettled(t, q)
			})
		})
	}
}

// TestTurnsByWeight: tenants whose tasks are not in memory get as many claims in a row as
// their weight.
func TestTurnsByWeight(t *testing.T) {
	bubble(t, Options{Shards: 1, WindowTasks: 4, WindowBytes: 4 << 10}, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.TenantWeights = map[string]int{"A": 3, "C": 2} })
		produceFor(t, q, Task{Queue: "a", Payload: make([]byte, 500)}, 40, "A", "B", "C", "D", "E")
		for range 10 {
			require.Equal(t, "AAABCCDE", tenantsOf(t, q, "a", 8))
		}
		requireSettled(t, q)
	})
}

// TestFirstClaimReadsFewLanes: the first claim after Open reads what it needs, however
// many tenants have tasks.
func TestFirstClaimReadsFewLanes(t *testing.T) {
	t.Parallel()
	const tenants = 5_000
	synctest.Test(t, func(t *testing.T) {
		opts := Options{Shards: 1, fs: vfs.NewMem()}
		q := openForRun(t, opts)
		produceInTurn(t, q, Task{Queue: "a"}, 2, names("tenant", tenants))
		require.NoError(t, q.Close())
		q = openForRun(t, opts)
		require.Equal(t, "tenant 00000", claimNow(t, q, "a").Tenant)
		f := refilled(t, q)
		require.LessOrEqual(t, f.RefilledLanes, uint64(engine.RingReach))
		require.LessOrEqual(t, f.Refills, uint64(2))
		requireSettled(t, q)
	})
}

// TestLanesWithoutTasksAreSkipped: lanes that have lost their tasks before Open cost a
// claim no more than a look.
func TestLanesWithoutTasksAreSkipped(t *testing.T) {
	t.Parallel()
	const tenants = 5_000
	synctest.Test(t, func(t *testing.T) {
		opts := Options{Shards: 1, fs: vfs.NewMem()}
		q := openForRun(t, opts)
		all := names("tenant", tenants)
		produceFor(t, q, Task{Queue: "a"}, 1, all...)
		for n := 0; n < tenants-1; {
			for _, l := range claimSome(t, q, "a", min(500, tenants-1-n)) {
				require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
				n++
			}
		}
		require.NoError(t, q.Close())
		q = openForRun(t, opts)
		require.Equal(t, all[tenants-1], claimNow(t, q, "a").Tenant)
		require.LessOrEqual(t, refilled(t, q).RefilledLanes, uint64(tenants))
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
	})
}

// TestInnocentQueueReadsNothing: beside queues that do not fit into memory, tasks that are
// claimed as they come are claimed from memory.
func TestInnocentQueueReadsNothing(t *testing.T) {
	t.Parallel()
	const queues, each = 60, 40
	bubble(t, Options{Shards: 1, WindowBytes: 512 << 10}, func(t *testing.T, q *Queue) {
		all := names("queue", queues)
		for _, name := range all {
			produceFor(t, q, Task{Queue: name, Payload: make([]byte, 1<<10)}, each, "")
		}
		for i := range queues * each {
			require.Len(t, claimSome(t, q, all[i%queues], 1), 1)
			produce(t, q, Task{Queue: "innocent"}, Task{Queue: "innocent"})
			for range 2 {
				require.NoError(t, q.Complete(t.Context(), claimNow(t, q, "innocent").Receipt, nil))
			}
		}
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			require.False(t, s.Probe().WasRefilled("innocent", "", 0))
			return nil
		}))
		f := refilled(t, q)
		require.LessOrEqual(t, f.RefilledTasks, uint64(queues*each*5/4))
		requireSettled(t, q)
	})
}

// TestRefillIsBounded: one refill reads no more than a pass may, and a task.
func TestRefillIsBounded(t *testing.T) {
	t.Parallel()
	const payload = 10 << 10
	bubble(t, Options{Shards: 1, WindowBytes: 8 * engine.RefillBytes}, func(t *testing.T, q *Queue) {
		tenants := names("tenant", 100)
		produceInTurn(t, q, Task{Queue: "large", Payload: make([]byte, payload)}, 20, tenants)
		produceInTurn(t, q, Task{Queue: "small"}, 500, tenants)
		for _, queue := range []string{"large", "small", "large", "small"} {
			for range 20 {
				require.NotEmpty(t, claimSome(t, q, queue, 50))
			}
		}
		st := stepStats(q.shard(0).steps.Table)[StepRefill]
		require.Positive(t, st.Count)
		require.LessOrEqual(t, st.MaxBytes, int64(engine.RefillBytes+2*payload))
		require.LessOrEqual(t, st.MaxRecords, int64(2*engine.RefillTasks))
		requireSettled(t, q)
	})
}

// TestMemoryMovesToWhoClaims: a lane gives back what it has taken alone, when others that
// claims ask for need it.
func TestMemoryMovesToWhoClaims(t *testing.T) {
	const windowBytes = 64 << 10
	bubble(t, Options{Shards: 1, WindowBytes: windowBytes}, func(t *testing.T, q *Queue) {
		produceFor(t, q, Task{Queue: "idle", Payload: make([]byte, 1000)}, 100, "")
		held := func(queue string) (n int) {
			require.NoError(t, q.shard(0).probe(func(s *shard) error {
				n = s.Probe().WindowBytesOf(queue)
				return nil
			}))
			return n
		}
		require.Greater(t, held("idle"), windowBytes/2)
		tenants := names("tenant", 20)
		produceInTurn(t, q, Task{Queue: "a", Payload: make([]byte, 1000)}, 10, tenants)
		for range 20 * 3 {
			require.Len(t, claimSome(t, q, "a", 1), 1)
		}
		requireSettled(t, q)
		require.Greater(t, held("a"), windowBytes/3)
		require.NotNil(t, claimNow(t, q, "idle"))
		requireSettled(t, q)
	})
}

// TestTaskLargerThanMemory: a task that alone is larger than the bound is claimed all the same.
func TestTaskLargerThanMemory(t *testing.T) {
	bubble(t, Options{Shards: 1, WindowBytes: 1000}, func(t *testing.T, q *Queue) {
		produceFor(t, q, Task{Queue: "a", Payload: make([]byte, 4000)}, 5, "A", "B")
		produceFor(t, q, Task{Queue: "b"}, 5, "A")
		require.Equal(t, "ABABABABAB", tenantsOf(t, q, "a", 10))
		require.Equal(t, "AAAAA", tenantsOf(t, q, "b", 5))
		requireSettled(t, q)
	})
}

// TestLaneIsSmall: what a lane costs in memory that has no task there.
func TestLaneIsSmall(t *testing.T) {
	if runtime.GOARCH == "amd64" || runtime.GOARCH == "arm64" {
		require.LessOrEqual(t, unsafe.Sizeof(engine.Lane{}), uintptr(256))
	}
}
