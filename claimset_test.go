package codeq

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/dispatch"
	"codeq/internal/testkit"
)

// closedGate lets no claim pass.
type closedGate struct{}

func (closedGate) Look(*dispatch.Dispatcher, time.Time) (bool, time.Duration)  { return false, 0 }
func (closedGate) Enter(*dispatch.Dispatcher, time.Time) (bool, time.Duration) { return false, 0 }
func (closedGate) Leave(int) []*dispatch.Dispatcher                            { return nil }
func (closedGate) MayAsk() bool                                                { return false }
func (closedGate) Ask(*dispatch.Claim) bool                                    { return false }

// countingGate counts how often claims look at the queues that have it.
type countingGate struct{ looks int }

func (g *countingGate) Look(*dispatch.Dispatcher, time.Time) (bool, time.Duration) {
	g.looks++
	return true, 0
}
func (g *countingGate) Enter(*dispatch.Dispatcher, time.Time) (bool, time.Duration) { return true, 0 }
func (g *countingGate) Leave(int) []*dispatch.Dispatcher                            { return nil }
func (g *countingGate) MayAsk() bool                                                { return false }
func (g *countingGate) Ask(*dispatch.Claim) bool                                    { return false }

// TestClaimsOverManyQueues: what a claim over many queues looks at, and leaves behind while
// it waits, does not depend on how many they are; with weights, or in strict order.
func TestClaimsOverManyQueues(t *testing.T) {
	t.Parallel()
	const queues, tasks, claims = 3000, 50, 40
	names, weights := testkit.ManyQueues(queues)
	for name, weights := range map[string]map[string]int{"weighted": weights, "strict": nil} {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
				ctx := t.Context()
				for i := range tasks {
					produce(t, q, Task{Queue: names[(i*61+5)%queues]})
				}
				s := q.shard(0)
				gate := new(countingGate)
				require.NoError(t, s.probe(func(s *shard) error {
					for _, name := range names {
						s.setGate(name, gate)
					}
					return nil
				}))
				req := ClaimRequest{Queues: names, Weights: weights, NoWait: true}
				var got []string
				for range tasks {
					l, err := q.Claim(ctx, req)
					require.NoError(t, err)
					got = append(got, l.Queue)
				}
				_, err := q.Claim(ctx, req)
				require.ErrorIs(t, err, ErrEmpty)
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
					require.NoError(t, s.probe(func(s *shard) error {
						tickets = s.claims.Usage().Tickets
						return nil
					}))
					return tickets
				}
				require.Equal(t, claims, waiting(), "tickets of claims that wait")
				gate.looks = 0
				for i := range claims {
					produce(t, q, Task{Queue: names[i*7]})
					synctest.Wait()
					require.Equal(t, names[i*7], <-served)
				}
				require.Zero(t, waiting())
				require.Less(t, gate.looks, 6*claims)

				// A batch takes tasks of several queues.
				for i := range 10 {
					produce(t, q, Task{Queue: names[i*100]})
				}
				leases, err := q.ClaimBatch(ctx, ClaimRequest{Queues: names, Weights: weights, Max: 20})
				require.NoError(t, err)
				require.Len(t, leases, 10)
				require.NoError(t, s.probe(func(s *shard) error {
					for _, name := range names {
						s.setGate(name, nil)
					}
					return nil
				}))
			})
		})
	}
}

// TestClaimSetsGo: a claim over many queues that ends leaves no ticket, and a Run no set
// nor queue.
func TestClaimSetsGo(t *testing.T) {
	names, _ := testkit.ManyQueues(500)
	var nobodys []string
	for _, name := range names {
		nobodys = append(nobodys, "nobody's "+name)
	}
	for _, shards := range []int{1, 3} {
		bubble(t, Options{Shards: shards}, func(t *testing.T, q *Queue) {
			ctx, cancel := context.WithCancel(t.Context())
			var ended sync.WaitGroup
			for range 20 {
				ended.Go(func() {
					_, err := q.Claim(ctx, ClaimRequest{Queues: nobodys})
					require.ErrorIs(t, err, context.Canceled)
				})
			}
			m := new(Mux)
			var done sync.WaitGroup
			done.Add(100)
			for _, name := range names {
				Handle(m, name, func(context.Context, *Job[string]) error {
					done.Done()
					return nil
				})
			}
			ended.Go(func() { require.NoError(t, q.Run(ctx, m, nil)) })
			synctest.Wait()
			for i := range 100 {
				produce(t, q, Task{Queue: names[i*5], Payload: []byte(`"x"`)})
			}
			synctest.Wait()
			cancel()
			ended.Wait()
			synctest.Wait()
			for _, s := range q.led() {
				require.NoError(t, s.probe(func(s *shard) error {
					// Only the list of the claims is left: it is dropped when nobody has used it
					// for long.
					if u := s.claims.Usage(); u.Tickets > 0 || u.SetNames > len(nobodys) {
						return fmt.Errorf("%d tickets, sets of %d queues", u.Tickets, u.SetNames)
					}
					return nil
				}))
			}
		})
	}
}

// TestUnusedClaimSetsGo: claims with ever new lists leave nothing for long, though nothing else
// happens.
func TestUnusedClaimSetsGo(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		for i := range 300 {
			names, _ := testkit.ManyQueues(100)
			_, err := q.Claim(t.Context(), ClaimRequest{Queues: append(names, fmt.Sprint("new ", i)), NoWait: true})
			require.ErrorIs(t, err, ErrEmpty)
		}
		sets := func(s *shard) int {
			u := s.claims.Usage()
			return u.Sets + u.DroppedSets
		}
		for _, s := range q.led() {
			require.NoError(t, s.probe(func(s *shard) error {
				if n := sets(s); n != 300 {
					return fmt.Errorf("%d sets", n)
				}
				return nil
			}))
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		for _, s := range q.led() { // without an operation, which would wake the owner
			require.Zero(t, sets(s))
		}
	})
}
