package codeq

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/dispatch"
	"codeq/internal/testkit"
)

// staleCap is how many void tickets a shard may have beyond the number of good ones.
const staleCap = 1 << 10

// requireNobodyWaits makes sure that no shard remembers a claim, or a queue.
func requireNobodyWaits(t *testing.T, q *Queue, queues int) {
	t.Helper()
	for _, s := range q.led() {
		require.NoError(t, s.probe(func(s *shard) error {
			if u := s.claims.Usage(); u.Tickets+u.Queues > 0 || len(s.Queues) > queues {
				return fmt.Errorf("shard %d has %d tickets for %d queues, and knows %d", s.index, u.Tickets, u.Queues, len(s.Queues))
			}
			return nil
		}))
	}
}

// TestWaitersOfUnknownQueues: a queue that nobody but its waiters knows goes with the
// last of them.
func TestWaitersOfUnknownQueues(t *testing.T) {
	for _, shards := range []int{1, 3} {
		bubble(t, Options{Shards: shards}, func(t *testing.T, q *Queue) {
			ctx, cancel := context.WithCancelCause(t.Context())
			enough := errors.New("enough")
			const claims = 500
			gone := make(chan error, claims)
			for i := range claims {
				go func() {
					_, err := q.Claim(ctx, ClaimRequest{Queues: []string{fmt.Sprint("nobody's ", i), "nobody's", "nobody's"}})
					gone <- err
				}()
			}
			synctest.Wait()
			for _, s := range q.led() {
				require.NoError(t, s.probe(func(s *shard) error {
					require.Len(t, s.Queues, claims+1)
					return nil
				}))
			}
			cancel(enough)
			for range claims {
				require.ErrorIs(t, <-gone, enough)
			}
			synctest.Wait()
			requireNobodyWaits(t, q, 0)
			_, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"nobody's"}, NoWait: true})
			require.ErrorIs(t, err, ErrEmpty)
			settings, err := q.Settings("nobody's")
			require.NoError(t, err)
			require.Equal(t, Settings{}, settings)
			requireNobodyWaits(t, q, 0)
		})
	}
}

// TestServedClaimsLeaveQuietQueues: claims that one queue serves are forgotten by the
// others for which they waited, without anybody asking these.
func TestServedClaimsLeaveQuietQueues(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		bubble(t, Options{Shards: shards}, func(t *testing.T, q *Queue) {
			claims := testkit.Sized(8, 40, 40) * staleCap
			tickets := 0
			for i := range claims {
				got := make(chan error)
				go func() {
					l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"busy", fmt.Sprint("quiet ", i%(staleCap/4))}})
					if err == nil {
						err = q.Complete(t.Context(), l.Receipt, nil)
					}
					got <- err
				}()
				if i%64 == 0 {
					synctest.Wait() // the claim waits
				}
				produce(t, q, Task{Queue: "busy"})
				require.NoError(t, <-got)
			}
			synctest.Wait()
			for _, s := range q.led() {
				require.NoError(t, s.probe(func(s *shard) error {
					tickets += s.claims.Usage().Tickets
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

// TestServedClaimsOfListsLeaveNothing: so it is after claims for long lists of queues, which
// wait in no queue.
func TestServedClaimsOfListsLeaveNothing(t *testing.T) {
	t.Parallel()
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		one := q.startingAt(0)
		serve := func(queues []string) {
			got := make(chan error)
			go func() {
				l, err := q.Claim(t.Context(), ClaimRequest{Queues: queues})
				if err == nil {
					err = q.Complete(t.Context(), l.Receipt, nil)
				}
				got <- err
			}()
			synctest.Wait()
			produce(t, one, Task{Queue: "busy"})
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
		require.NoError(t, q.led()[1].probe(func(s *shard) error { listed = s.claims.Usage().Queues; return nil }))
		require.LessOrEqual(t, listed, staleCap)
	})
}

// TestServedClaimsReleasePayloads: what a claim was given does not stay with the queues
// for which it waited in vain.
func TestServedClaimsReleasePayloads(t *testing.T) {
	const claims, size = 50, 1 << 20
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // what was in pools, too
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	q, err := Open(t.TempDir(), &Options{Shards: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	served := make(chan error, claims)
	before := heap()
	for range claims {
		go func() {
			l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"quiet", "busy"}, LeaseFor: time.Hour})
			if err == nil {
				err = q.Complete(t.Context(), l.Receipt, nil)
			}
			served <- err
		}()
	}
	for _, s := range q.led() {
		require.Eventually(t, func() bool {
			n := 0
			require.NoError(t, s.probe(func(s *shard) error {
				n = s.claims.Usage().Tickets
				return nil
			}))
			return n == 2*claims
		}, 20*time.Second, time.Millisecond)
	}
	for range claims {
		produce(t, q, Task{Queue: "busy", Payload: make([]byte, size)})
		require.NoError(t, <-served)
	}
	require.Less(t, int64(heap()-before), int64(claims*size/2))
}
