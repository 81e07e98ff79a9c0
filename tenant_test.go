package codeq

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"

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
