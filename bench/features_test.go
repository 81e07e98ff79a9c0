package bench

import (
	"context"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/bench/workload"
)

// BenchmarkFeatures is FullCycle with one feature in use on every task, and
// without any (plain), in one run.
func BenchmarkFeatures(b *testing.B) {
	names := func(prefix string, n int) []string {
		all := make([]string, n)
		for i := range all {
			all[i] = prefix + strconv.Itoa(i)
		}
		return all
	}
	tenants, groups := names("tenant-", 1000), names("group-", 100_000)
	key := func(producer, n int) string { return strconv.Itoa(producer) + "-" + strconv.Itoa(n) }
	for _, f := range []struct {
		name  string
		shape func(producer, n int, t codeq.Task) codeq.Task
	}{
		{"plain", nil},
		{"unique", func(p, n int, t codeq.Task) codeq.Task { t.Unique.Key = key(p, n); return t }},
		{"unique-for-1h", func(p, n int, t codeq.Task) codeq.Task {
			t.Unique = codeq.Unique{Key: key(p, n), For: time.Hour}
			return t
		}},
		{"tenants=1000", func(_, _ int, t codeq.Task) codeq.Task { t.Tenant = tenants[rand.IntN(len(tenants))]; return t }},
		{"groups=100000", func(_, _ int, t codeq.Task) codeq.Task { t.Group = groups[rand.IntN(len(groups))]; return t }},
	} {
		b.Run(f.name, func(b *testing.B) {
			measure(b, workload.Load{}, workload.Calls{Queues: []*codeq.Queue{newQueue(b, process(1))}, Shape: f.shape})
		})
	}
}

// BenchmarkFairness begins with one tenant with a million waiting tasks. Then a hundred tenants
// arrive, with one task each. It reports the number of claims until these are served.
func BenchmarkFairness(b *testing.B) {
	const late = 100
	waiting := 1_000_000
	if testing.Short() {
		waiting = 100_000
	}
	for _, shards := range []int{1, 2} {
		b.Run("shards="+strconv.Itoa(shards), func(b *testing.B) {
			ctx := context.Background()
			q := newQueue(b, process(shards))
			fill(b, q, 1, waiting, 10_000, func(int) codeq.Task { return codeq.Task{Queue: queueName, Tenant: "crowd", Payload: payload} })
			fill(b, q, 1, late, 1, func(i int) codeq.Task { return codeq.Task{Queue: queueName, Tenant: strconv.Itoa(i), Payload: payload} })
			claims, served := 0, 0
			for served < late {
				l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{queueName}, NoWait: true})
				require.NoError(b, err)
				claims++
				if l.Tenant != "crowd" {
					served++
				}
				require.NoError(b, q.Complete(ctx, l.Receipt, nil))
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(claims), "claims")
		})
	}
}
