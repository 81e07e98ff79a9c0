package codeq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/dispatch"
	"codeq/internal/inspect"
)

// bubble runs a test in fake time on a queue in memory, and checks what is
// stored when it ends.
func bubble(t *testing.T, opts Options, test func(t *testing.T, q *Queue)) {
	synctest.Test(t, func(t *testing.T) {
		if inspect.Options(&opts).FS == nil {
			inspect.Options(&opts).FS = crashfs.New()
		}
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		test(t, q)
		synctest.Wait()
		require.NoError(t, q.checkAll())
	})
}

func produce(t *testing.T, q *Queue, tasks ...Task) []ID {
	t.Helper()
	var ids []ID
	for _, task := range tasks {
		id, err := q.Produce(context.Background(), task)
		require.NoError(t, err)
		ids = append(ids, id)
	}
	return ids
}

// claimNow claims without waiting; nil when nothing is ready.
func claimNow(t *testing.T, q *Queue, queues ...string) *Lease {
	t.Helper()
	l, err := q.Claim(context.Background(), ClaimRequest{Queues: queues, NoWait: true})
	if errors.Is(err, ErrEmpty) {
		return nil
	}
	require.NoError(t, err)
	return l
}

// TestClaimWaits: a claim that waits is served by a later produce into any
// shard and any of its queues, first come, first served.
func TestClaimWaits(t *testing.T) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			bubble(t, Options{Shards: shards}, func(t *testing.T, q *Queue) {
				const claims = 300
				got := make(chan ID, claims)
				for range claims {
					go func() {
						l, err := q.Claim(context.Background(), ClaimRequest{Queues: []string{"a", "b"}})
						if err == nil {
							got <- l.ID
						}
					}()
				}
				synctest.Wait()
				require.Empty(t, got)
				seen := make(map[ID]bool)
				for i := range claims {
					id := produce(t, q, Task{Queue: []string{"a", "b"}[i%2]})[0]
					synctest.Wait()
					require.Equal(t, id, <-got)
					seen[id] = true
				}
				require.Len(t, seen, claims)
				for _, s := range q.led() {
					require.NoError(t, s.probe(func(s *shard) error {
						if n := s.claims.Usage().Tickets; n > 2*(2*claims+64) {
							return fmt.Errorf("%d tickets in the wait lists", n)
						}
						return nil
					}))
				}
			})
		})
	}
}

// TestClaimEndsWithContext: a claim that gives up leaves its task to others,
// and thousands of them leave no memory behind.
func TestClaimEndsWithContext(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		bubble(t, Options{Shards: shards}, func(t *testing.T, q *Queue) {
			cause := errors.New("enough")
			for range 2000 {
				ctx, cancel := context.WithTimeoutCause(context.Background(), time.Second, cause)
				_, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
				require.ErrorIs(t, err, cause)
				cancel()
			}
			synctest.Wait()
			for _, s := range q.led() {
				require.NoError(t, s.probe(func(s *shard) error {
					if q := s.Queues["a"]; q != nil {
						return fmt.Errorf("%d dead claims are kept", s.claims.Usage().Tickets)
					}
					return nil
				}))
			}
			id := produce(t, q, Task{Queue: "a"})[0]
			require.Equal(t, id, claimNow(t, q, "a").ID)
		})
	}
}

// TestLocalClaim: a local lease ends with the process, any other lasts until it expires.
func TestLocalClaim(t *testing.T) {
	ctx := context.Background()
	inFlow(t, Options{Shards: 2, LeaseFor: time.Hour}, func(f *FlowTest) {
		produce(f.T, f.Q, Task{Queue: "local", LeaseFor: time.Minute}, Task{Queue: "lasting"})
		for _, req := range []ClaimRequest{{Queues: []string{"local"}, Local: true}, {Queues: []string{"lasting"}}} {
			l, err := f.Q.Claim(ctx, req)
			require.NoError(f, err)
			require.WithinDuration(f, time.Now().Add(time.Hour), l.Deadline, time.Second)
			before := f.Q.shard(f.Q.shardOf(l.ID)).commits.Load()
			require.NoError(f, f.Q.Extend(ctx, l.Receipt, 2*time.Hour))
			written := f.Q.shard(f.Q.shardOf(l.ID)).commits.Load() - before
			require.Equal(f, !req.Local, written > 0, "an extension is stored")
		}
		f.Reopen()
		l := claimNow(f.T, f.Q, "local", "lasting")
		require.Equal(f, "local", l.Queue)
		require.Equal(f, 1, l.Attempt, "nothing has died")
		require.Nil(f, claimNow(f.T, f.Q, "lasting"))
		time.Sleep(2*time.Hour + time.Second)
		require.Equal(f, 2, claimNow(f.T, f.Q, "lasting").Attempt)
	})
}

// TestQueueOfManyWaitersDelaysNoOther: while the claims that wait for one queue are served group by
// group, those that wait for others are, too.
func TestQueueOfManyWaitersDelaysNoOther(t *testing.T) {
	for name, more := range map[string][]string{"queues": nil, "lists": make([]string, dispatch.ShortList)} {
		t.Run(name, func(t *testing.T) {
			bubble(t, *inspect.With(&Options{Shards: 1}, inspect.Private{GroupBytes: 4 << 10}), func(t *testing.T, q *Queue) {
				const n = 100
				claim := func(queue string) (group chan uint64) { // the token tells the group in which it was served
					req := ClaimRequest{Queues: []string{queue}}
					for i := range more {
						req.Queues = append(req.Queues, fmt.Sprint(queue, i))
					}
					group = make(chan uint64, 1)
					go func() {
						if l, err := q.Claim(t.Context(), req); err == nil {
							group <- l.Receipt.Token
						}
					}()
					synctest.Wait()
					return group
				}
				var many []chan uint64
				for range n {
					many = append(many, claim("a"))
				}
				one := claim("b")
				tasks := slices.Repeat([]Task{{Queue: "a", Payload: make([]byte, 4<<10)}}, n)
				_, err := q.ProduceBatch(t.Context(), append(tasks, Task{Queue: "b"}))
				require.NoError(t, err)
				served, groups, before := <-one, make(map[uint64]bool), 0
				for _, group := range many {
					token := <-group
					if groups[token] = true; token < served {
						before++
					}
				}
				require.Less(t, before, 10)
				require.Greater(t, len(groups), n/2)
			})
		})
	}
}
