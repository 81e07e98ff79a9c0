package codeq_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/testkit"
)

// TestTenantWeights: a tenant gets as many claims in a row as its weight, from its
// first turn on, and in batches too.
func TestTenantWeights(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		configure(t, q, "a", func(s *codeq.Settings) { s.TenantWeights = map[string]int{"A": 3, "C": 2} })
		produceFor(t, q, codeq.Task{Queue: "a"}, 100, "A", "B", "C")
		produceFor(t, q, codeq.Task{Queue: "b"}, 100, "A", "B", "C")
		require.Equal(t, "AAABCCAAABCC", tenantsOf(t, q, "a", 12))
		require.Equal(t, "ABCABC", tenantsOf(t, q, "b", 6), "another queue")
		batch, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: 6})
		require.NoError(t, err)
		got := ""
		for _, l := range batch {
			got += l.Tenant
		}
		require.Equal(t, "AAABCC", got)

		produceFor(t, q, codeq.Task{Queue: "a", Priority: 5}, 100, "A", "B")
		require.Equal(t, "AAABAAAB", tenantsOf(t, q, "a", 8), "another priority")
		requireSettled(t, q)
	})
}

// TestTenantWeightsChanged: new weights are in force when Configure returns, also
// in a turn that has begun.
func TestTenantWeightsChanged(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1, WindowTasks: 8}, func(t *testing.T, q *codeq.Queue) {
		weights := func(w map[string]int) { configure(t, q, "a", func(s *codeq.Settings) { s.TenantWeights = w }) }
		weights(map[string]int{"A": 1000})
		produceFor(t, q, codeq.Task{Queue: "a"}, 100, "A", "B")
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
		opts := *onDisk(crashfs.New(), &codeq.Options{})
		q := openForRun(t, opts)
		configure(t, q, "a", func(s *codeq.Settings) { s.TenantWeights = map[string]int{"A": 3} })
		produceFor(t, q, codeq.Task{Queue: "a"}, 100, "A", "B")
		require.NoError(t, q.Close())
		q = openForRun(t, opts)
		require.Equal(t, "AAABAAAB", tenantsOf(t, q, "a", 8))
		requireSettled(t, q)
	})
}

// TestTenantWeightsShares: over several shards the shares are those of the weights.
func TestTenantWeightsShares(t *testing.T) {
	bubble(t, codeq.Options{Shards: 3}, func(t *testing.T, q *codeq.Queue) {
		configure(t, q, "a", func(s *codeq.Settings) { s.TenantWeights = map[string]int{"A": 3} })
		for range 600 {
			produce(t, q, codeq.Task{Queue: "a", Tenant: "A"}, codeq.Task{Queue: "a", Tenant: "B"})
		}
		const claims = 400
		got := tenantsOf(t, q, "a", claims)
		// Each shard is off by less than a round of turns.
		require.InDelta(t, claims*3/4, strings.Count(got, "A"), 3*3)
		require.NotContains(t, got, strings.Repeat("A", 40))
		requireSettled(t, q)
	})
}

// TestTenantsAreNotStarved: behind the deepest backlog of one tenant, the only
// tasks of a hundred others are among the next three hundred claims.
func TestTenantsAreNotStarved(t *testing.T) {
	t.Parallel()
	backlog := testkit.Sized(100_000, 300_000, 1_000_000)
	const others, claims = 100, 300
	for _, shards := range []int{1, 2} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			bubble(t, codeq.Options{Shards: shards}, func(t *testing.T, q *codeq.Queue) {
				for from := range shards { // a share for each, which chance would give it too
					produceFor(t, startingAt(q, from), codeq.Task{Queue: "a"}, backlog/shards, "large")
				}
				for range 10 {
					require.Equal(t, "large", claimNow(t, q, "a").Tenant)
				}
				for i := range others {
					produce(t, q, codeq.Task{Queue: "a", Tenant: fmt.Sprint("small ", i)})
				}
				seen := make(map[string]bool)
				begin := time.Now()
				for range claims {
					seen[claimNow(t, q, "a").Tenant] = true
				}
				require.Len(t, seen, others+1)
				require.Equal(t, begin, time.Now(), "nothing waits")
				require.NoError(t, checkMemory(q))
			})
		})
	}
}

// produceFor produces tasks of a queue for tenants, so many for each, in batches.
func produceFor(t *testing.T, q *codeq.Queue, like codeq.Task, each int, tenants ...string) {
	t.Helper()
	var batch []codeq.Task
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
func tenantsOf(t *testing.T, q *codeq.Queue, queue string, claims int) string {
	t.Helper()
	var b strings.Builder
	for range claims {
		l := claimNow(t, q, queue)
		require.NotNil(t, l)
		b.WriteString(l.Tenant)
	}
	return b.String()
}
