package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/dispatch"
	"codeq/internal/inspect"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// countingGate counts how often claims look at its queues.
type countingGate struct{ looks int }

func (g *countingGate) Look(*dispatch.Dispatcher, time.Time) (bool, time.Duration) {
	g.looks++
	return true, 0
}
func (g *countingGate) Enter(*dispatch.Dispatcher, time.Time) (bool, time.Duration) { return true, 0 }
func (g *countingGate) Leave(int) []*dispatch.Dispatcher                            { return nil }
func (g *countingGate) MayAsk() bool                                                { return false }
func (g *countingGate) Ask(*dispatch.Claim) bool                                    { return false }

// TestClaimsOverManyQueues: the work of a claim over many queues, and its tickets while it waits,
// do not depend on the number of queues. This holds with weights and in strict order.
func TestClaimsOverManyQueues(t *testing.T) {
	t.Parallel()
	const queues, tasks, claims = 3000, 50, 40
	names, weights := testkit.ManyQueues(queues)
	for name, weights := range map[string]map[string]int{"weighted": weights, "strict": nil} {
		t.Run(name, func(t *testing.T) {
			queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
				ctx := t.Context()
				for i := range tasks {
					queuetest.Produce(t, q, codeq.Task{Queue: names[(i*61+5)%queues]})
				}
				gate := new(countingGate)
				require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
					for _, name := range names {
						s.Claims.SetGateway(s.Claims.Of(s.Rules.Names.QueueNamed(name)), gate)
					}
					return nil
				}))
				req := codeq.ClaimRequest{Queues: names, Weights: weights, NoWait: true}
				var got []string
				for range tasks {
					l, err := q.Claim(ctx, req)
					require.NoError(t, err)
					got = append(got, l.Queue)
				}
				_, err := q.Claim(ctx, req)
				require.ErrorIs(t, err, codeq.ErrEmpty)
				if weights == nil {
					require.True(t, slices.IsSortedFunc(got, func(a, b string) int {
						return slices.Index(names, a) - slices.Index(names, b)
					}), "in the order of the list")
				}
				require.Less(t, gate.looks, 4*tasks, "queues that claims looked at")

				req.NoWait = false
				served := make(chan string, claims)
				for range claims {
					go func() {
						if l, err := q.Claim(ctx, req); err == nil {
							served <- l.Queue
						}
					}()
				}
				synctest.Wait()
				waiting := func() (tickets int) {
					require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
						tickets = s.Claims.Usage().Tickets
						return nil
					}))
					return tickets
				}
				require.Equal(t, claims, waiting(), "tickets of claims that wait")
				gate.looks = 0
				for i := range claims {
					queuetest.Produce(t, q, codeq.Task{Queue: names[i*7]})
					synctest.Wait()
					require.Equal(t, names[i*7], <-served)
				}
				require.Zero(t, waiting())
				require.Less(t, gate.looks, 6*claims)

				// A batch takes tasks of several queues.
				for i := range 10 {
					queuetest.Produce(t, q, codeq.Task{Queue: names[i*100]})
				}
				leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: names, Weights: weights, Max: 20})
				require.NoError(t, err)
				require.Len(t, leases, 10)
				require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
					for _, name := range names {
						s.Claims.SetGateway(s.Claims.Of(s.Rules.Names.QueueNamed(name)), nil)
					}
					return nil
				}))
			})
		})
	}
}

// TestClaimSetsGo: a claim over many queues leaves no ticket after its end. Run leaves no set of
// queues and no queue.
func TestClaimSetsGo(t *testing.T) {
	names, _ := testkit.ManyQueues(500)
	var nobodys []string
	for _, name := range names {
		nobodys = append(nobodys, "nobody's "+name)
	}
	for _, shards := range []int{1, 3} {
		queuetest.Bubble(t, codeq.Options{Shards: shards}, func(t *testing.T, q *codeq.Queue) {
			ctx, cancel := context.WithCancel(t.Context())
			var ended sync.WaitGroup
			for range 20 {
				ended.Go(func() {
					_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: nobodys})
					require.ErrorIs(t, err, context.Canceled)
				})
			}
			m := new(codeq.Mux)
			var done sync.WaitGroup
			done.Add(100)
			for _, name := range names {
				codeq.Handle(m, name, func(context.Context, *codeq.Job[string]) error {
					done.Done()
					return nil
				})
			}
			ended.Go(func() { require.NoError(t, q.Run(ctx, m, nil)) })
			synctest.Wait()
			for i := range 100 {
				queuetest.Produce(t, q, codeq.Task{Queue: names[i*5], Payload: []byte(`"x"`)})
			}
			synctest.Wait()
			cancel()
			ended.Wait()
			synctest.Wait()
			for shard := range queuetest.Led(q) {
				require.NoError(t, inspect.Of(q).Owner(shard, func(s *inspect.Owner) error {
					// Only the list of the claims is left. The shard drops it after a long time
					// without use.
					if u := s.Claims.Usage(); u.Tickets > 0 || u.SetNames > len(nobodys) {
						return fmt.Errorf("%d tickets, sets of %d queues", u.Tickets, u.SetNames)
					}
					return nil
				}))
			}
		})
	}
}

// TestUnusedClaimSetsGo: each claim has a new list of queues. After a while, the shards drop all
// these lists, even if nothing else happens.
func TestUnusedClaimSetsGo(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		for i := range 300 {
			names, _ := testkit.ManyQueues(100)
			_, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: append(names, fmt.Sprint("new ", i)), NoWait: true})
			require.ErrorIs(t, err, codeq.ErrEmpty)
		}
		sets := func(s *inspect.Owner) int {
			u := s.Claims.Usage()
			return u.Sets + u.DroppedSets
		}
		for shard := range queuetest.Led(q) {
			require.NoError(t, inspect.Of(q).Owner(shard, func(s *inspect.Owner) error {
				if n := sets(s); n != 300 {
					return fmt.Errorf("%d sets", n)
				}
				return nil
			}))
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		for shard := range queuetest.Led(q) { // without an operation, since it would wake the owner
			inspect.Of(q).Asleep(shard, func(o *inspect.Owner) { require.Zero(t, sets(o)) })
		}
	})
}

// staleCap is the limit of void tickets in a shard, on top of the number of valid tickets.
const staleCap = 1 << 10

// requireNobodyWaits requires that no shard has tickets, or more queues than the given number.
func requireNobodyWaits(t *testing.T, q *codeq.Queue, queues int) {
	t.Helper()
	for shard := range queuetest.Led(q) {
		require.NoError(t, inspect.Of(q).Owner(shard, func(s *inspect.Owner) error {
			if u := s.Claims.Usage(); u.Tickets+u.Queues > 0 || len(s.Rules.Names.Queues) > queues {
				return fmt.Errorf("shard %d has %d tickets for %d queues, and knows %d", shard, u.Tickets, u.Queues, len(s.Rules.Names.Queues))
			}
			return nil
		}))
	}
}

// TestWaitersOfUnknownQueues: a queue without tasks and settings goes with the last claim that
// waits for it.
func TestWaitersOfUnknownQueues(t *testing.T) {
	for _, shards := range []int{1, 3} {
		queuetest.Bubble(t, codeq.Options{Shards: shards}, func(t *testing.T, q *codeq.Queue) {
			ctx, cancel := context.WithCancelCause(t.Context())
			enough := errors.New("enough")
			const claims = 500
			gone := make(chan error, claims)
			for i := range claims {
				go func() {
					_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{fmt.Sprint("nobody's ", i), "nobody's", "nobody's"}})
					gone <- err
				}()
			}
			synctest.Wait()
			for shard := range queuetest.Led(q) {
				require.NoError(t, inspect.Of(q).Owner(shard, func(s *inspect.Owner) error {
					require.Len(t, s.Rules.Names.Queues, claims+1)
					return nil
				}))
			}
			cancel(enough)
			for range claims {
				require.ErrorIs(t, <-gone, enough)
			}
			synctest.Wait()
			requireNobodyWaits(t, q, 0)
			_, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"nobody's"}, NoWait: true})
			require.ErrorIs(t, err, codeq.ErrEmpty)
			settings, err := q.Settings("nobody's")
			require.NoError(t, err)
			require.Equal(t, codeq.Settings{}, settings)
			requireNobodyWaits(t, q, 0)
		})
	}
}

// TestServedClaimsLeaveQuietQueues: a claim waits for several queues, and one of them serves it.
// The other queues forget the claim, even if no further claim asks them.
func TestServedClaimsLeaveQuietQueues(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, shards := range []int{1, 3} {
		queuetest.Bubble(t, codeq.Options{Shards: shards}, func(t *testing.T, q *codeq.Queue) {
			claims := testkit.Sized(3, 40) * staleCap
			tickets := 0
			for i := range claims {
				got := make(chan error)
				go func() {
					l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"busy", fmt.Sprint("quiet ", i%(staleCap/4))}})
					if err == nil {
						err = q.Complete(t.Context(), l.Receipt, nil)
					}
					got <- err
				}()
				if i%64 == 0 {
					synctest.Wait() // the claim waits
				}
				queuetest.Produce(t, q, codeq.Task{Queue: "busy"})
				require.NoError(t, <-got)
			}
			synctest.Wait()
			for shard := range queuetest.Led(q) {
				require.NoError(t, inspect.Of(q).Owner(shard, func(s *inspect.Owner) error {
					tickets += s.Claims.Usage().Tickets
					return nil
				}))
			}
			if shards == 1 {
				requireNobodyWaits(t, q, 1)
			}
			require.LessOrEqual(t, tickets, (shards-1)*(staleCap+2), "those of other shards are dropped when they are many")
		})
	}
}

// TestServedClaimsOfListsLeaveNothing: the same holds after claims for long lists of queues. Such a
// claim does not wait in the queues.
func TestServedClaimsOfListsLeaveNothing(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		one := queuetest.StartingAt(q, 0)
		serve := func(queues []string) {
			got := make(chan error)
			go func() {
				l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: queues})
				if err == nil {
					err = q.Complete(t.Context(), l.Receipt, nil)
				}
				got <- err
			}()
			synctest.Wait()
			queuetest.Produce(t, one, codeq.Task{Queue: "busy"})
			require.NoError(t, <-got)
		}
		long := []string{"busy"}
		for i := range dispatch.ShortList {
			long = append(long, fmt.Sprint("listed ", i))
		}
		for range staleCap + 1 {
			serve(long)
		}
		synctest.Wait()
		for i := range 2 * staleCap {
			serve([]string{"busy", fmt.Sprint("quiet ", i)})
		}
		synctest.Wait()
		listed := 0
		require.NoError(t, inspect.Of(q).Owner(1, func(s *inspect.Owner) error { listed = s.Claims.Usage().Queues; return nil }))
		require.LessOrEqual(t, listed, staleCap)
	})
}

// TestServedClaimsReleasePayloads: after one queue has served a claim, the other queues of the
// claim do not keep the payload in memory.
func TestServedClaimsReleasePayloads(t *testing.T) {
	testbase.SkipUnderRace(t)
	const claims, size = 50, 1 << 20
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // frees the contents of pools, too
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	served := make(chan error, claims)
	before := heap()
	for range claims {
		go func() {
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"quiet", "busy"}, LeaseFor: time.Hour})
			if err == nil {
				err = q.Complete(t.Context(), l.Receipt, nil)
			}
			served <- err
		}()
	}
	for shard := range queuetest.Led(q) {
		require.Eventually(t, func() bool {
			n := 0
			require.NoError(t, inspect.Of(q).Owner(shard, func(s *inspect.Owner) error {
				n = s.Claims.Usage().Tickets
				return nil
			}))
			return n == 2*claims
		}, 20*time.Second, time.Millisecond)
	}
	for range claims {
		queuetest.Produce(t, q, codeq.Task{Queue: "busy", Payload: make([]byte, size)})
		require.NoError(t, <-served)
	}
	require.Less(t, int64(heap()-before), int64(claims*size/2))
}
