package bench

import (
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"codeq"
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
			q, err := codeq.Open(b.TempDir(), &codeq.Options{Shards: 1})
			if err != nil {
				b.Fatal(err)
			}
			defer func() {
				if err := q.Close(); err != nil {
					b.Error(err)
				}
			}()
			fullCycle(b, q, f.shape)
		})
	}
}
