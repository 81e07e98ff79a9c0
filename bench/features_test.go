package bench

import (
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

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
			q, err := codeq.Open(b.TempDir(), &codeq.Options{Shards: 1, Durability: codeq.DurabilityProcess})
			if err != nil {
				b.Fatal(err)
			}
			defer func() {
				if err := q.Close(); err != nil {
					b.Error(err)
				}
			}()
			measure(b, workload.Load{}, workload.Calls{Queues: []*codeq.Queue{q}, Shape: f.shape})
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
			q, err := codeq.Open(b.TempDir(), &codeq.Options{Shards: shards, Durability: codeq.DurabilityProcess})
			if err != nil {
				b.Fatal(err)
			}
			defer func() {
				if err := q.Close(); err != nil {
					b.Error(err)
				}
			}()
			crowd := slices.Repeat([]codeq.Task{{Queue: queueName, Tenant: "crowd", Payload: payload}}, 10_000)
			for range waiting / len(crowd) {
				if _, err := q.ProduceBatch(ctx, crowd); err != nil {
					b.Fatal(err)
				}
			}
			for i := range late {
				if _, err := q.Produce(ctx, codeq.Task{Queue: queueName, Tenant: strconv.Itoa(i), Payload: payload}); err != nil {
					b.Fatal(err)
				}
			}
			claims, served := 0, 0
			for served < late {
				l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{queueName}, NoWait: true})
				if err != nil {
					b.Fatal(err)
				}
				claims++
				if l.Tenant != "crowd" {
					served++
				}
				if err := q.Complete(ctx, l.Receipt, nil); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(claims), "claims")
		})
	}
}
