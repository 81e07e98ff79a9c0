package engine

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"codeq/internal/record"
	"codeq/internal/testkit"
)

// TestRefillsReadWhatIsServed: with more tenants than memory has room for, the owner reads each
// task about once, in few passes. The windows' memory stays within its bound.
func TestRefillsReadWhatIsServed(t *testing.T) {
	t.Parallel()
	const payload, windowBytes = 100, 128 << 10
	each := testkit.Sized(10, 20)
	for _, c := range []struct{ tenants, claim int }{{300, 1}, {300, 64}, {1000, 1}, {1000, 64}} {
		t.Run(fmt.Sprintf("%d tenants, claims of %d", c.tenants, c.claim), func(t *testing.T) {
			r := newRuled(t, Config{WindowBytes: windowBytes})
			r.produceFor("a", payload, each, namesOf("tenant", c.tenants)...)
			tasks := uint64(each * c.tenants)
			for claimed := uint64(0); claimed < tasks; {
				n := len(r.claim("a", c.claim))
				require.Positive(t, n)
				claimed += uint64(n)
				require.LessOrEqual(t, r.Names.ready.Usage(nil).Windows, windowBytes)
			}
			f := r.Names.ready.Usage(nil)
			t.Logf("%d tasks: %d passes, %d lanes, %d tasks and %d bytes read", tasks, f.Passes, f.Lanes, f.Tasks, f.Read)
			require.LessOrEqual(t, f.Tasks, tasks*5/4)
			require.LessOrEqual(t, f.Lanes, tasks*5/4)
			require.LessOrEqual(t, f.Passes, tasks/8)
			r.settle()
		})
	}
}

// TestNextOfHigherRank: a claim for tasks more urgent than the queue's first has nothing to wait
// for.
func TestNextOfHigherRank(t *testing.T) {
	t.Parallel()
	r := newRuled(t, Config{})
	r.produce(newTask(LaneKey{Queue: "a", Priority: 2}, record.Record{}))
	r.begin(r.drivenShard)
	for rank, found := range map[uint64]bool{Rank(2): true, Rank(3): false} {
		l, pending := r.Next(r.Names.Queues["a"], rank)
		require.Equal(t, found, l != nil)
		require.False(t, pending)
	}
	r.end()
}

// TestRefillsEnd: without requests, an owner stops reading, even if the memory of windows is
// smaller than one task.
func TestRefillsEnd(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 0))
		r := newRuled(t, Config{WindowBytes: []int{1, 900, 3000}[rng.IntN(3)], WindowTasks: 2 + rng.IntN(3)})
		for range 60 {
			if rng.IntN(3) > 0 {
				tasks := make([]NewTask, 1+rng.IntN(8))
				for i := range tasks {
					payload := make([]byte, []int{10, 100, 300, 2000}[rng.IntN(4)])
					key := LaneKey{fmt.Sprint(rng.IntN(3)), fmt.Sprint(rng.IntN(5)), uint8(rng.IntN(2))}
					tasks[i] = newTask(key, record.Record{Payload: payload})
				}
				r.produce(tasks...)
			} else {
				r.claim(fmt.Sprint(rng.IntN(3)), 1+rng.IntN(3))
			}
			const groups = 50
			before := r.Names.ready.Usage(nil).Passes
			for range groups {
				r.begin(r.drivenShard)
				r.end()
			}
			require.Less(t, r.Names.ready.Usage(nil).Passes-before, uint64(groups*9/10), "seed %d", seed)
		}
	}
}

// TestTurnsAreKept: tenants take turns for all sizes of memory: the numbers of claims of two
// tenants differ by one at most.
func TestTurnsAreKept(t *testing.T) {
	t.Parallel()
	for _, windowBytes := range []int{1, 64 << 10, 32 << 20} {
		t.Run(fmt.Sprint(windowBytes, " bytes"), func(t *testing.T) {
			tenants, each := testkit.Sized(2000, 10_000), 4
			if windowBytes == 1 { // one task at a time
				tenants = 100
			}
			r := newRuled(t, Config{WindowBytes: windowBytes})
			r.produceFor("a", 100, each, namesOf("tenant", tenants)...)
			seen := make(map[string]int)
			claimed := 0
			claim := func(n int) {
				for end := claimed + n; claimed < end; {
					batch := r.claim("a", min(97, end-claimed))
					require.NotEmpty(t, batch)
					for i := range batch {
						tenant := batch[i].Tenant
						require.Equal(t, claimed/tenants, seen[tenant], "claim %d, of %s", claimed, tenant)
						seen[tenant]++
						claimed++
					}
				}
			}
			claim(tenants + tenants/2)
			r.settle()
			claim(tenants/2 + tenants)
			r.reopen()
			claim(tenants)
			require.Empty(t, r.claim("a", 1))
			r.settle()
		})
	}
}

// TestTurnsByWeight: if the tasks of tenants are not in memory, each tenant gets as many claims in
// a row as its weight.
func TestTurnsByWeight(t *testing.T) {
	t.Parallel()
	r := newRuled(t, Config{WindowTasks: 4, WindowBytes: 4 << 10})
	r.configure("a", `{"TenantWeights":{"A":3,"C":2}}`)
	r.produceFor("a", 500, 40, "A", "B", "C", "D", "E")
	for range 10 {
		require.Equal(t, "AAABCCDE", r.tenantsOf("a", 8))
	}
	r.settle()
}

// TestFirstClaimReadsFewLanes: the first claim after a load reads only the necessary lanes, for any
// number of tenants with tasks.
func TestFirstClaimReadsFewLanes(t *testing.T) {
	t.Parallel()
	r := newRuled(t, Config{})
	r.produceFor("a", 0, 2, namesOf("tenant", 5000)...)
	r.reopen()
	require.Equal(t, "tenant 00000", r.tenantsOf("a", 1))
	require.LessOrEqual(t, r.Names.ready.Usage(nil).Lanes, uint64(64))
	require.LessOrEqual(t, r.Names.ready.Usage(nil).Passes, uint64(2))
	r.settle()
}

// TestLanesWithoutTasksAreSkipped: a claim looks only once at each lane that lost its tasks before
// a load.
func TestLanesWithoutTasksAreSkipped(t *testing.T) {
	t.Parallel()
	const tenants = 5000
	r := newRuled(t, Config{})
	all := namesOf("tenant", tenants)
	r.produceFor("a", 0, 1, all...)
	for n := 0; n < tenants-1; {
		batch := r.claim("a", min(500, tenants-1-n))
		r.complete(batch...)
		n += len(batch)
	}
	r.reopen()
	require.Equal(t, all[tenants-1], r.tenantsOf("a", 1))
	require.LessOrEqual(t, r.Names.ready.Usage(nil).Lanes, uint64(tenants))
	require.Empty(t, r.claim("a", 1))
	r.settle()
}

// TestInnocentQueueReadsNothing: while other queues do not fit into memory, a claim that takes each
// new task at once gets it from memory.
func TestInnocentQueueReadsNothing(t *testing.T) {
	t.Parallel()
	const queues, each = 60, 40
	r := newRuled(t, Config{WindowBytes: 512 << 10})
	all := namesOf("queue", queues)
	for _, name := range all {
		r.produceFor(name, 1<<10, each, "")
	}
	for i := range queues * each {
		require.Len(t, r.claim(all[i%queues], 1), 1)
		r.produceFor("innocent", 0, 2, "")
		for range 2 {
			r.complete(r.claim("innocent", 1)...)
		}
	}
	require.Zero(t, r.countsOf("innocent").Ready)
	require.Zero(t, r.Names.ready.Usage(&r.Names.Queues["innocent"].lane("", 0).tasks).Pass, "the refill that has read it")
	require.LessOrEqual(t, r.Names.ready.Usage(nil).Tasks, uint64(queues*each*5/4))
	r.settle()
}

// TestRefillIsBounded: one refill reads at most the limit of a pass, and one task.
func TestRefillIsBounded(t *testing.T) {
	t.Parallel()
	const payload, refillBytes, refillTasks = 10 << 10, 1 << 20, 1024
	r := newRuled(t, Config{WindowBytes: 8 * refillBytes})
	tenants := namesOf("tenant", 100)
	r.produceFor("large", payload, 20, tenants...)
	r.produceFor("small", 0, 500, tenants...)
	refills := 0
	for _, queue := range []string{"large", "small", "large", "small"} {
		for range 20 {
			for r.Names.ready.WantsRefill() {
				before := r.Reads
				r.begin(r.drivenShard)
				refills++
				require.LessOrEqual(t, r.ReadBytes-before.ReadBytes, refillBytes+2*payload)
				require.LessOrEqual(t, r.ReadEntries-before.ReadEntries, 2*refillTasks)
				r.end()
			}
			r.claim(queue, 50)
		}
	}
	require.Positive(t, refills)
	r.settle()
}

// TestMemoryMovesToWhoClaims: a lane that was alone has taken memory. It gives this memory back
// when claims ask for other lanes that need it.
func TestMemoryMovesToWhoClaims(t *testing.T) {
	t.Parallel()
	const windowBytes = 64 << 10
	r := newRuled(t, Config{WindowBytes: windowBytes})
	held := func(queue string) (n int) {
		for _, l := range r.Names.lanes.All() {
			if l != nil && l.queue.Name == queue {
				n += r.Names.ready.Usage(&l.tasks).Bytes
			}
		}
		return n
	}
	r.produceFor("idle", 1000, 100, "")
	require.Greater(t, held("idle"), windowBytes/2)
	r.produceFor("a", 1000, 10, namesOf("tenant", 20)...)
	for range 20 * 3 {
		require.Len(t, r.claim("a", 1), 1)
	}
	r.settle()
	require.Greater(t, held("a"), windowBytes/3)
	require.Len(t, r.claim("idle", 1), 1)
	r.settle()
}

// TestTaskLargerThanMemory: claims get a task even if it is larger than the bound.
func TestTaskLargerThanMemory(t *testing.T) {
	t.Parallel()
	r := newRuled(t, Config{WindowBytes: 1000})
	r.produceFor("a", 4000, 5, "A", "B")
	r.produceFor("b", 0, 5, "A")
	require.Equal(t, "ABABABABAB", r.tenantsOf("a", 10))
	require.Equal(t, "AAAAA", r.tenantsOf("b", 5))
	r.settle()
}

// TestManyTenants: ten thousand tenants take turns. The memory is at most Config.WindowBytes and a
// little for each tenant.
func TestManyTenants(t *testing.T) {
	const tenants, each, bytes = 10_000, 2, 512 << 10
	const perTenant = 1 << 10
	r := newRuled(t, Config{WindowBytes: bytes})
	before := heap()
	r.produceFor("a", 200, each, namesOf("tenant", tenants)...)
	require.LessOrEqual(t, r.Names.ready.Usage(nil).Windows, bytes)
	r.settle()
	grown := heap() - before
	// Pebble's table in memory and the test's file system have each task.
	stored := int64(tenants * each * (200 + 300))
	t.Logf("heap has grown by %d KiB", grown>>10)
	require.Less(t, grown, bytes+2*stored+tenants*perTenant)

	seen := make(map[string]int)
	for range each {
		for claimed := 0; claimed < tenants; {
			batch := r.claim("a", min(1000, tenants-claimed))
			require.NotEmpty(t, batch)
			for i := range batch {
				seen[batch[i].Tenant]++
			}
			claimed += len(batch)
			require.LessOrEqual(t, r.Names.ready.Usage(nil).Windows, bytes)
		}
	}
	require.Len(t, seen, tenants)
	for name, n := range seen {
		require.Equal(t, each, n, name)
	}
	require.Empty(t, r.claim("a", 1))
	r.settle()
}

// heap is the number of bytes in use.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestLaneIsSmall: the memory of a lane without a task in memory is small.
func TestLaneIsSmall(t *testing.T) {
	if runtime.GOARCH == "amd64" || runtime.GOARCH == "arm64" {
		require.LessOrEqual(t, unsafe.Sizeof(Lane{}), uintptr(256))
	}
}
