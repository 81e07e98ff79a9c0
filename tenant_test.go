package codeq

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// produceFor produces tasks of a queue for tenants, so many for each, in batches.
func produceFor(t *testing.T, q *Queue, like Task, each int, tenants ...string) {
	t.Helper()
	var batch []Task
	flush := func() {
		_, err := q.ProduceBatch(context.Background(), batch)
		require.NoError(t, err)
		batch = batch[:0]
	}
	for _, tenant := range tenants {
		like.Tenant = tenant
		for range each {
			if batch = append(batch, like); len(batch) == 10_000 {
				flush()
			}
		}
	}
	flush()
}

// tenantsOf are the tenants of the next claims, in their order.
func tenantsOf(t *testing.T, q *Queue, queue string, claims int) string {
	t.Helper()
	var b strings.Builder
	for range claims {
		l := claimNow(t, q, queue)
		require.NotNil(t, l)
		b.WriteString(l.Tenant)
	}
	return b.String()
}

// TestTenantWeights: a tenant gets as many claims in a row as its weight, from its
// first turn on, and in batches too.
func TestTenantWeights(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.TenantWeights = map[string]int{"A": 3, "C": 2} })
		produceFor(t, q, Task{Queue: "a"}, 100, "A", "B", "C")
		produceFor(t, q, Task{Queue: "b"}, 100, "A", "B", "C")
		require.Equal(t, "AAABCCAAABCC", tenantsOf(t, q, "a", 12))
		require.Equal(t, "ABCABC", tenantsOf(t, q, "b", 6), "another queue")
		batch, err := q.ClaimBatch(t.Context(), ClaimRequest{Queues: []string{"a"}, Max: 6})
		require.NoError(t, err)
		got := ""
		for _, l := range batch {
			got += l.Tenant
		}
		require.Equal(t, "AAABCC", got)

		produceFor(t, q, Task{Queue: "a", Priority: 5}, 100, "A", "B")
		require.Equal(t, "AAABAAAB", tenantsOf(t, q, "a", 8), "another priority")
		requireSettled(t, q)
	})
}

// TestTenantWeightsChanged: new weights are in force when Configure returns, also
// in a turn that has begun.
func TestTenantWeightsChanged(t *testing.T) {
	bubble(t, Options{Shards: 1, WindowTasks: 8}, func(t *testing.T, q *Queue) {
		weights := func(w map[string]int) { configure(t, q, "a", func(s *Settings) { s.TenantWeights = w }) }
		weights(map[string]int{"A": 1000})
		produceFor(t, q, Task{Queue: "a"}, 100, "A", "B")
		require.Equal(t, "AAAA", tenantsOf(t, q, "a", 4))
		weights(map[string]int{"A": 2, "B": 3})
		require.Equal(t, "AABBBAABBB", tenantsOf(t, q, "a", 10))
		weights(nil)
		require.Equal(t, "ABAB", tenantsOf(t, q, "a", 4))
		requireSettled(t, q)
	})
}

// TestTenantWeightsRestart: weights outlive a restart.
func TestTenantWeightsRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := Options{fs: vfs.NewMem()}
		q := openForRun(t, opts)
		configure(t, q, "a", func(s *Settings) { s.TenantWeights = map[string]int{"A": 3} })
		produceFor(t, q, Task{Queue: "a"}, 100, "A", "B")
		require.NoError(t, q.Close())
		q = openForRun(t, opts)
		require.Equal(t, "AAABAAAB", tenantsOf(t, q, "a", 8))
		requireSettled(t, q)
	})
}

// TestTenantWeightsShares: over several shards the shares are those of the weights.
func TestTenantWeightsShares(t *testing.T) {
	bubble(t, Options{Shards: 3}, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.TenantWeights = map[string]int{"A": 3} })
		for range 600 {
			produce(t, q, Task{Queue: "a", Tenant: "A"}, Task{Queue: "a", Tenant: "B"})
		}
		const claims = 400
		got := tenantsOf(t, q, "a", claims)
		// Each shard is off by less than a round of turns.
		require.InDelta(t, claims*3/4, strings.Count(got, "A"), 3*3)
		require.NotContains(t, got, strings.Repeat("A", 40))
		requireSettled(t, q)
	})
}

// TestManyTenants: ten thousand tenants take turns, and what memory holds is
// bounded by Options.WindowBytes, and a little for each tenant.
func TestManyTenants(t *testing.T) {
	const tenants, each, bytes = 10_000, 2, 512 << 10
	const perTenant = 1 << 10
	bubble(t, Options{Shards: 1, WindowBytes: bytes}, func(t *testing.T, q *Queue) {
		names := make([]string, tenants)
		for i := range names {
			names[i] = fmt.Sprintf("tenant %05d", i)
		}
		before := heap()
		produceFor(t, q, Task{Queue: "a", Payload: make([]byte, 200)}, each, names...)
		held := func() (n int) {
			require.NoError(t, q.shard(0).probe(func(s *shard) error { n = s.Probe().Usage().WindowBytes; return nil }))
			return n
		}
		require.LessOrEqual(t, held(), bytes)
		requireSettled(t, q)
		grown := heap() - before
		// The table in memory of Pebble, and the file system of the test, have each task.
		stored := int64(tenants * each * (200 + 300))
		t.Logf("heap has grown by %d KiB", grown>>10)
		require.Less(t, grown, bytes+2*stored+tenants*perTenant)

		seen := make(map[string]int)
		for range each {
			for claimed := 0; claimed < tenants; {
				batch, err := q.ClaimBatch(t.Context(), ClaimRequest{Queues: []string{"a"}, Max: min(1000, tenants-claimed), NoWait: true})
				require.NoError(t, err)
				for _, l := range batch {
					seen[l.Tenant]++
				}
				claimed += len(batch)
				require.LessOrEqual(t, held(), bytes)
			}
		}
		require.Len(t, seen, tenants)
		for name, n := range seen {
			require.Equal(t, each, n, name)
		}
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
	})
}

// heap is how many bytes are in use.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestTenantsAreNotStarved: behind the deepest backlog of one tenant, the only
// tasks of a hundred others are among the next three hundred claims.
func TestTenantsAreNotStarved(t *testing.T) {
	backlog := sized(100_000, 300_000, 1_000_000)
	const others, claims = 100, 300
	for _, shards := range []int{1, 2} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			bubble(t, Options{Shards: shards}, func(t *testing.T, q *Queue) {
				for from := range shards { // a share for each, which chance would give it too
					produceFor(t, q.startingAt(from), Task{Queue: "a"}, backlog/shards, "large")
				}
				for range 10 {
					require.Equal(t, "large", claimNow(t, q, "a").Tenant)
				}
				for i := range others {
					produce(t, q, Task{Queue: "a", Tenant: fmt.Sprint("small ", i)})
				}
				seen := make(map[string]bool)
				begin := time.Now()
				for range claims {
					seen[claimNow(t, q, "a").Tenant] = true
				}
				require.Len(t, seen, others+1)
				require.Equal(t, begin, time.Now(), "nothing waits")
				require.NoError(t, q.checkMemory())
			})
		})
	}
}
