package codeq_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestTenantWeightsChanged: new weights apply when Configure returns, even within a turn that has
// begun.
func TestTenantWeightsChanged(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1, WindowTasks: 8}, func(t *testing.T, q *codeq.Queue) {
		weights := func(w map[string]int) {
			queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.TenantWeights = w })
		}
		weights(map[string]int{"A": 1000})
		produceFor(t, q, codeq.Task{Queue: "a"}, 100, "A", "B")
		require.Equal(t, "AAAA", tenantsOf(t, q, "a", 4))
		weights(map[string]int{"A": 2, "B": 3})
		require.Equal(t, "AABBBAABBB", tenantsOf(t, q, "a", 10))
		weights(nil)
		require.Equal(t, "ABAB", tenantsOf(t, q, "a", 4))
		queuetest.RequireSettled(t, q)
	})
}

// TestTenantSharesOverShards: tenants get their shares of the claims of a queue, however their
// tasks are distributed over the shards. The bounds are six standard deviations wide.
func TestTenantSharesOverShards(t *testing.T) {
	testbase.SkipUnderRace(t)
	everywhere := []int{0, 1, 2, 3}
	for name, c := range map[string]struct {
		weights map[string]int
		shards  map[string][]int // shards with tasks of the tenant
		of      int              // number of shards; 0: four
		batch   int
		want    map[string]float64 // of 3,000 claims
	}{
		"one bound": {
			shards: map[string][]int{"A": everywhere, "B": everywhere, "C": everywhere, "D": everywhere, "X": {2}},
			want:   map[string]float64{"A": 600, "B": 600, "C": 600, "D": 600, "X": 600},
		},
		"batches": {
			shards: map[string][]int{"A": everywhere, "B": everywhere, "C": everywhere, "D": everywhere, "X": {2}}, batch: 7,
			want: map[string]float64{"A": 600, "B": 600, "C": 600, "D": 600, "X": 600},
		},
		"a heavy one bound": {
			weights: map[string]int{"X": 3}, shards: map[string][]int{"A": everywhere, "X": {1}},
			want: map[string]float64{"A": 750, "X": 2250},
		},
		"two, three and one": {
			shards: map[string][]int{"A": {0, 1}, "B": {1, 2, 3}, "X": {0}},
			want:   map[string]float64{"A": 1000, "B": 1000, "X": 1000},
		},
		"many in one, one in another": {
			shards: map[string][]int{"A": {0}, "B": {0}, "C": {0}, "D": {0}, "E": {0}, "F": {0}, "G": {0}, "H": {0}, "I": {0}, "X": {3}},
			want:   map[string]float64{"A": 300, "B": 300, "C": 300, "D": 300, "E": 300, "F": 300, "G": 300, "H": 300, "I": 300, "X": 300},
		},
		"one of a thousand": {
			weights: map[string]int{"A": 999}, shards: map[string][]int{"A": everywhere, "X": {1}},
			want: map[string]float64{"A": 2997, "X": 3},
		},
		"one shard": {
			of: 1, shards: map[string][]int{"A": {0}, "X": {0}}, want: map[string]float64{"A": 1500, "X": 1500},
		},
		"sixteen shards": {
			of: 16, shards: map[string][]int{"A": {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, "B": {3, 4, 15}, "X": {3}},
			want: map[string]float64{"A": 1000, "B": 1000, "X": 1000},
		},
		"one without a name": {
			weights: map[string]int{"": 2}, shards: map[string][]int{"": everywhere, "X": {3}},
			want: map[string]float64{"": 2000, "X": 1000},
		},
	} {
		t.Run(name, func(t *testing.T) {
			queuetest.Bubble(t, codeq.Options{Shards: cmp.Or(c.of, 4)}, func(t *testing.T, q *codeq.Queue) {
				queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.TenantWeights = c.weights })
				for tenant, shards := range c.shards {
					for _, shard := range shards {
						produceFor(t, queuetest.StartingAt(q, shard), codeq.Task{Queue: "a"}, 3000/len(shards), tenant)
					}
				}
				counts := make(map[string]int)
				for claimed := 0; claimed < 3000; {
					leases, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: max(1, c.batch), NoWait: true})
					require.NoError(t, err)
					for _, l := range leases {
						counts[l.Tenant]++
						require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
					}
					claimed += len(leases)
				}
				for tenant, want := range c.want {
					share := want / 3000
					deviation := math.Sqrt(3000 * share * (1 - share) * float64(max(1, c.batch)))
					require.InDelta(t, want, counts[tenant], 6*deviation, "%s of %v", tenant, counts)
				}
				queuetest.RequireSettled(t, q)
			})
		})
	}
}

// TestTenantSharesOneAtATime: a tenant that always has exactly one ready task gets the same share
// as the others, and no more. The bounds are six standard deviations wide.
func TestTenantSharesOneAtATime(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, shards := range []int{1, 4} {
		for name, task := range map[string]codeq.Task{
			"group": {Group: "g"}, "limit key": {LimitKey: "k"}, "next": {}, "next in any shard": {},
		} {
			t.Run(fmt.Sprint(name, " of ", shards), func(t *testing.T) {
				queuetest.Bubble(t, codeq.Options{Shards: shards}, func(t *testing.T, q *codeq.Queue) {
					queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 })
					for shard := range shards {
						produceFor(t, queuetest.StartingAt(q, shard), codeq.Task{Queue: "a"}, 1600/shards, "A", "B")
					}
					task.Queue, task.Tenant = "a", "X"
					more := func() {}
					switch name {
					case "next":
						more = func() { queuetest.Produce(t, queuetest.StartingAt(q, 0), task) }
						more()
					case "next in any shard":
						more = func() { queuetest.Produce(t, q, task) }
						more()
					default:
						queuetest.Produce(t, q, slices.Repeat([]codeq.Task{task}, 900)...)
					}
					const claims = 900
					counts := make(map[string]int)
					for range claims {
						l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
						require.NoError(t, err)
						require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
						if counts[l.Tenant]++; l.Tenant == "X" {
							more()
						}
						synctest.Wait()
					}
					for tenant := range counts {
						require.InDelta(t, claims/3, counts[tenant], 6*math.Sqrt(claims*2/9.), "%s of %v", tenant, counts)
					}
				})
			})
		}
	}
}

// TestTenantSharesBehindLimits: tenants get their shares where limits make claims wait, or refuse
// claims that do not wait. The cases are Run, single claims, and batches.
func TestTenantSharesBehindLimits(t *testing.T) {
	for name, c := range map[string]struct {
		settings codeq.Settings
		claims   codeq.ClaimRequest
		run      bool
		shards   int  // 0: four
		keys     bool // each tenant has a LimitKey, so all its tasks are in one shard
		want     int  // claims of X (in one shard) out of 2,500; 0: as many as the others
	}{
		"concurrency":           {settings: codeq.Settings{Concurrency: 8}, run: true},
		"concurrency of one":    {settings: codeq.Settings{Concurrency: 1}, run: true},
		"rate":                  {settings: codeq.Settings{Rate: 1000, Burst: 1}, run: true},
		"rate and burst":        {settings: codeq.Settings{Rate: 1000, Burst: 100}, run: true},
		"both":                  {settings: codeq.Settings{Concurrency: 8, Rate: 2000, Burst: 20}, run: true},
		"sixteen shards":        {settings: codeq.Settings{Concurrency: 8}, run: true, shards: 16},
		"keys":                  {settings: codeq.Settings{Concurrency: 8, ConcurrencyPerKey: 20}, run: true, keys: true},
		"a thousand to one":     {settings: codeq.Settings{Concurrency: 8, TenantWeights: map[string]int{"X": 1000}}, run: true, want: 2490},
		"one to a thousand":     {settings: codeq.Settings{Concurrency: 8, TenantWeights: map[string]int{"A": 1000}}, run: true, want: 3},
		"claims":                {settings: codeq.Settings{Concurrency: 8}},
		"batches":               {settings: codeq.Settings{Concurrency: 40}, claims: codeq.ClaimRequest{Max: 5}},
		"claims without a wait": {settings: codeq.Settings{Concurrency: 8}, claims: codeq.ClaimRequest{NoWait: true}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			shards := cmp.Or(c.shards, 4)
			queuetest.Bubble(t, codeq.Options{Shards: shards}, func(t *testing.T, q *codeq.Queue) {
				for shard := range shards {
					for _, tenant := range []string{"A", "B", "C", "D"} {
						produceFor(t, queuetest.StartingAt(q, shard), taskOf(tenant, c.keys), 4000/shards, tenant)
					}
				}
				produceFor(t, queuetest.StartingAt(q, 2), taskOf("X", c.keys), 3000, "X")
				queuetest.Configure(t, q, "a", func(s *codeq.Settings) { *s = c.settings })
				const claims = 2500
				counts := make(map[string]int)
				var mu sync.Mutex
				ctx, cancel := context.WithCancel(t.Context())
				handle := func(tenant string) {
					time.Sleep(time.Duration(500+rand.IntN(1000)) * time.Microsecond)
					mu.Lock()
					defer mu.Unlock()
					counts[tenant]++
					if counts[""]++; counts[""] == claims {
						cancel()
					}
				}
				if c.run {
					var m codeq.Mux
					codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
						handle(j.Tenant)
						return nil
					})
					require.NoError(t, q.Run(ctx, &m, &codeq.RunOptions{Concurrency: 64}))
				} else {
					var wg sync.WaitGroup
					c.claims.Queues = []string{"a"}
					for range 32 {
						wg.Go(func() {
							for ctx.Err() == nil {
								leases, err := q.ClaimBatch(ctx, c.claims)
								for _, l := range leases {
									handle(l.Tenant)
									require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
								}
								if errors.Is(err, codeq.ErrEmpty) {
									time.Sleep(time.Duration(rand.IntN(1000)) * time.Microsecond)
								}
							}
						})
					}
					wg.Wait()
				}
				want := cmp.Or(float64(c.want), claims/5)
				deviation := math.Sqrt(want * (1 - want/claims))
				require.InDelta(t, want, counts["X"], 6*deviation+float64(c.claims.Max), "%v", counts)
				queuetest.RequireSettled(t, q)
			})
		})
	}
}

// taskOf returns a task of a tenant. With key, the task has the LimitKey of its tenant.
func taskOf(tenant string, key bool) codeq.Task {
	task := codeq.Task{Queue: "a", Tenant: tenant}
	if key {
		task.LimitKey = "key of " + tenant
	}
	return task
}

// TestTenantSharesBehindLimitsChange: where limits make claims wait, shares follow new weights, a
// pause, and tenants that come and go. Tasks of a higher priority go first.
func TestTenantSharesBehindLimitsChange(t *testing.T) {
	for name, limits := range map[string]codeq.Settings{"concurrency": {Concurrency: 8}, "rate": {Rate: 5000, Burst: 5}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			queuetest.Bubble(t, codeq.Options{Shards: 4}, func(t *testing.T, q *codeq.Queue) {
				weights := func(w map[string]int) {
					queuetest.Configure(t, q, "a", func(s *codeq.Settings) {
						*s = limits
						s.TenantWeights = w
					})
				}
				weights(nil)
				for shard := range 4 {
					produceFor(t, queuetest.StartingAt(q, shard), codeq.Task{Queue: "a"}, 1500, "A", "B", "C", "D")
				}
				var mu sync.Mutex
				var order []string
				var m codeq.Mux
				codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
					time.Sleep(time.Duration(500+rand.IntN(1000)) * time.Microsecond)
					mu.Lock()
					defer mu.Unlock()
					order = append(order, strings.Repeat("urgent ", min(j.Priority, 1))+j.Tenant)
					return nil
				})
				ctx, cancel := context.WithCancel(t.Context())
				var run sync.WaitGroup
				run.Go(func() { require.NoError(t, q.Run(ctx, &m, &codeq.RunOptions{Concurrency: 64})) })
				defer run.Wait()
				defer cancel()
				next := func(n int) (of []string) {
					synctest.Wait()
					mu.Lock()
					defer mu.Unlock()
					for from := len(order); len(order) < from+n; {
						mu.Unlock()
						time.Sleep(10 * time.Millisecond)
						mu.Lock()
					}
					return slices.Clone(order[len(order)-n:])
				}
				expect := func(shares map[string]float64) {
					t.Helper()
					const claims = 1600
					counts := make(map[string]int)
					for _, of := range next(claims) {
						counts[of]++
					}
					for tenant, share := range shares {
						deviation := math.Sqrt(claims * share * (1 - share))
						require.InDelta(t, claims*share, counts[tenant], 6*deviation+8, "%s of %v", tenant, counts)
					}
				}
				expect(map[string]float64{"A": 1. / 4, "X": 0})
				produceFor(t, queuetest.StartingAt(q, 1), codeq.Task{Queue: "a"}, 3000, "X")
				expect(map[string]float64{"A": 1. / 5, "X": 1. / 5})
				weights(map[string]int{"X": 3, "A": 2})
				expect(map[string]float64{"A": 2. / 8, "B": 1. / 8, "X": 3. / 8})
				require.NoError(t, q.Pause(t.Context(), "a"))
				time.Sleep(time.Second)
				require.NoError(t, q.Resume(t.Context(), "a"))
				expect(map[string]float64{"A": 2. / 8, "B": 1. / 8, "X": 3. / 8})
				weights(nil)
				produceFor(t, queuetest.StartingAt(q, 3), codeq.Task{Queue: "a", Priority: 5}, 100, "X", "Y")
				urgent := next(300)
				at := slices.Index(urgent, "urgent X")
				require.GreaterOrEqual(t, at, 0)
				others := 0 // of several simultaneous claims, some get a less urgent task first
				for _, name := range urgent[at+20 : at+170] {
					if !strings.HasPrefix(name, "urgent") {
						others++
					}
				}
				require.LessOrEqual(t, others, 15, "%v", urgent)
				_, err := q.Bulk(t.Context(), codeq.BulkOptions{
					Action: codeq.BulkCancel, TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Ready}, Queue: "a", Tenants: []string{"X"}},
				})
				require.NoError(t, err)
				next(50)
				expect(map[string]float64{"A": 1. / 4, "X": 0})
			})
		})
	}
}

// TestPausedQueueBesideTenants: a claim's list has a paused queue, an empty queue, and a queue at
// its limit. These do not change the shares of the tenants in another queue of the list.
func TestPausedQueueBesideTenants(t *testing.T) {
	for _, weights := range []map[string]int{nil, {"paused": 1000}} {
		queuetest.Bubble(t, codeq.Options{Shards: 4}, func(t *testing.T, q *codeq.Queue) {
			require.NoError(t, q.Pause(t.Context(), "paused"))
			queuetest.Configure(t, q, "full", func(s *codeq.Settings) { s.Concurrency = 1 })
			for shard := range 4 {
				produceFor(t, queuetest.StartingAt(q, shard), codeq.Task{Queue: "paused"}, 100, "A", "B")
				produceFor(t, queuetest.StartingAt(q, shard), codeq.Task{Queue: "full"}, 100, "A", "B")
				produceFor(t, queuetest.StartingAt(q, shard), codeq.Task{Queue: "a"}, 600, "A", "B", "C", "D")
			}
			produceFor(t, queuetest.StartingAt(q, 2), codeq.Task{Queue: "a"}, 600, "X")
			require.NotNil(t, queuetest.ClaimNow(t, q, "full"))
			counts := make(map[string]int)
			for range 2000 {
				l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"paused", "empty", "full", "a"}, Weights: weights, NoWait: true})
				require.NoError(t, err)
				require.Equal(t, "a", l.Queue)
				counts[l.Tenant]++
			}
			require.InDelta(t, 400, counts["X"], 108, "%v", counts)
		})
	}
}

// TestTenantsAreNotStarved: one tenant has a very deep backlog. The next 300 claims still include
// the only tasks of 100 other tenants.
func TestTenantsAreNotStarved(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	backlog := testkit.Sized(100_000, 1_000_000)
	const others, claims = 100, 300
	for _, shards := range []int{1, 2} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			queuetest.Bubble(t, codeq.Options{Shards: shards}, func(t *testing.T, q *codeq.Queue) {
				for from := range shards { // an equal part for each shard, as random shards would get
					produceFor(t, queuetest.StartingAt(q, from), codeq.Task{Queue: "a"}, backlog/shards, "large")
				}
				for range 10 {
					require.Equal(t, "large", queuetest.ClaimNow(t, q, "a").Tenant)
				}
				for i := range others {
					queuetest.Produce(t, q, codeq.Task{Queue: "a", Tenant: fmt.Sprint("small ", i)})
				}
				seen := make(map[string]bool)
				begin := time.Now()
				for range claims {
					seen[queuetest.ClaimNow(t, q, "a").Tenant] = true
				}
				require.Len(t, seen, others+1)
				require.Equal(t, begin, time.Now(), "nothing waits")
				require.NoError(t, queuetest.CheckMemory(q))
			})
		})
	}
}

// produceFor produces a number of tasks for each tenant, in batches.
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

// tenantsOf returns the tenants of the next claims, in their order.
func tenantsOf(t *testing.T, q *codeq.Queue, queue string, claims int) string {
	t.Helper()
	var b strings.Builder
	for range claims {
		l := queuetest.ClaimNow(t, q, queue)
		require.NotNil(t, l)
		b.WriteString(l.Tenant)
	}
	return b.String()
}
