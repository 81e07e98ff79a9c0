package codeq_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/test/queuetest"
)

var errPolicy = errors.New("no luck")

// retryOf claims a task of queue a and ends its attempt.
func retryOf(t *testing.T, q *codeq.Queue) codeq.ID {
	t.Helper()
	l := queuetest.ClaimNow(t, q, "a")
	require.NotNil(t, l)
	require.NoError(t, q.Retry(t.Context(), l.Receipt, codeq.RetryOptions{Err: errPolicy}))
	return l.ID
}

// TestPolicyOfQueue: the policy of a queue decides about tasks that have none, in place of the
// options, also about those that wait when it changes.
func TestPolicyOfQueue(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{MaxAttempts: 9, Backoff: codeq.Backoff{Base: time.Hour}}, func(t *testing.T, q *codeq.Queue) {
		own := queuetest.Produce(t, q, codeq.Task{Queue: "a", MaxAttempts: 3, Timeout: time.Second})[0]
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) {
			s.Policy = codeq.Policy{MaxAttempts: 2, Backoff: codeq.Backoff{Base: time.Second, Step: 2 * time.Second, Jitter: -1}, Timeout: time.Minute}
		})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		for attempt, wait := range []time.Duration{time.Second, 3 * time.Second} {
			for _, timeout := range []time.Duration{time.Second, time.Minute} {
				l := queuetest.ClaimNow(t, q, "a")
				require.NotNil(t, l)
				require.Equal(t, timeout, l.Timeout)
				require.NoError(t, q.Retry(t.Context(), l.Receipt, codeq.RetryOptions{Err: errPolicy}))
			}
			require.Equal(t, wait, time.Until(queuetest.InfoOf(t, q, own).At))
			if attempt == 0 {
				require.Equal(t, wait, time.Until(queuetest.InfoOf(t, q, id).At))
			}
			time.Sleep(wait)
		}
		require.Equal(t, codeq.Dead, queuetest.InfoOf(t, q, id).State)
		require.Equal(t, codeq.Ready, queuetest.InfoOf(t, q, own).State, "its own attempts count")
		require.Zero(t, queuetest.InfoOf(t, q, id).Timeout, "the policy is not the task's")

		id = queuetest.Produce(t, q, codeq.Task{Queue: "b"})[0]
		l := queuetest.ClaimNow(t, q, "b")
		queuetest.Configure(t, q, "b", func(s *codeq.Settings) { s.MaxAttempts = 1 })
		require.NoError(t, q.Retry(t.Context(), l.Receipt, codeq.RetryOptions{}))
		require.Equal(t, codeq.Dead, queuetest.InfoOf(t, q, id).State)
	})
}

// TestPolicyOfExpiry: a lease that expires counts by the policy of the queue.
func TestPolicyOfExpiry(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{LeaseFor: time.Second}, func(t *testing.T, q *codeq.Queue) {
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.MaxAttempts = 1 })
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		require.NotNil(t, queuetest.ClaimNow(t, q, "a"))
		time.Sleep(2 * time.Second)
		require.Equal(t, codeq.Dead, queuetest.InfoOf(t, q, id).State)
	})
}

// TestRetryFirst: a task that is tried again goes before those that were produced after it, at once
// or after a wait, also over a restart. A snoozed task does not.
func TestRetryFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 1, Backoff: codeq.Backoff{Base: time.Second}})
		q, err := codeq.Open("q", opts)
		require.NoError(t, err)
		ids := queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.RetryFirst = true })
		require.Equal(t, ids[0], retryOf(t, q))
		require.NoError(t, q.Close())
		q, err = codeq.Open("q", opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		l := queuetest.ClaimNow(t, q, "a")
		require.Equal(t, ids[1], l.ID)
		require.NoError(t, q.Release(t.Context(), l.Receipt, 500*time.Millisecond))
		time.Sleep(2 * time.Second)
		l = queuetest.ClaimNow(t, q, "a")
		require.Equal(t, ids[0], l.ID)
		require.NoError(t, q.Retry(t.Context(), l.Receipt, codeq.RetryOptions{After: -1}))
		require.Equal(t, ids[0], retryOf(t, q), "at once")
		require.Equal(t, ids[2], queuetest.ClaimNow(t, q, "a").ID, "the snoozed task comes last")
		require.Equal(t, ids[1], queuetest.ClaimNow(t, q, "a").ID)
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestPolicyOfHandler: the policy of a handler wins over that of its queue, and that of the task
// over both.
func TestPolicyOfHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) {
			s.Policy = codeq.Policy{MaxAttempts: 1, Backoff: codeq.Backoff{Base: time.Hour}, Timeout: time.Hour, Retention: time.Hour}
		})
		var m codeq.Mux
		var succeeds atomic.Bool
		var mu sync.Mutex // guards timeouts
		timeouts := make(map[codeq.ID]time.Duration)
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			end, _ := ctx.Deadline()
			mu.Lock()
			timeouts[j.ID] = time.Until(end)
			mu.Unlock()
			if succeeds.Load() {
				return nil
			}
			return errPolicy
		}, codeq.Policy{
			MaxAttempts: 2, Backoff: codeq.Backoff{Base: time.Second, Factor: 1, Jitter: -1}, Timeout: time.Minute, Retention: time.Minute,
		})
		codeq.HandleBatch(&m, "batch", codeq.BatchOptions{}, func(_ context.Context, jobs []*codeq.Job[[]byte]) []error {
			return []error{errPolicy}
		}, codeq.Policy{MaxAttempts: 1})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		own := queuetest.Produce(t, q, codeq.Task{Queue: "a", MaxAttempts: 1, Timeout: time.Second, Retention: time.Second})[0]
		batch := queuetest.Produce(t, q, codeq.Task{Queue: "batch"})[0]
		synctest.Wait()
		require.Equal(t, time.Second, time.Until(queuetest.InfoOf(t, q, id).At))
		require.Equal(t, codeq.Dead, queuetest.InfoOf(t, q, own).State)
		require.Equal(t, codeq.Dead, queuetest.InfoOf(t, q, batch).State)
		mu.Lock()
		require.Equal(t, map[codeq.ID]time.Duration{id: time.Minute, own: time.Second}, timeouts)
		mu.Unlock()
		time.Sleep(time.Second)
		synctest.Wait()
		info := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Dead, info.State)
		require.Equal(t, 2, info.Attempts)
		require.Equal(t, errPolicy.Error(), info.LastError)

		succeeds.Store(true)
		require.NoError(t, q.RedriveDead(t.Context(), id))
		require.NoError(t, q.RedriveDead(t.Context(), own))
		synctest.Wait()
		require.Equal(t, time.Minute, queuetest.InfoOf(t, q, id).Retention)
		time.Sleep(3 * time.Second)
		_, err := q.Get(t.Context(), own)
		require.ErrorIs(t, err, codeq.ErrNotFound)
		require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, id).State)
		time.Sleep(2 * time.Minute)
		_, err = q.Get(t.Context(), id)
		require.ErrorIs(t, err, codeq.ErrNotFound)
		require.NoError(t, run.End(nil))
	})
}

// TestPolicyOfHandlerInPart: for each field that the policy of a handler does not set, that of the
// queue counts.
func TestPolicyOfHandlerInPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) {
			s.Policy = codeq.Policy{MaxAttempts: 2, Backoff: codeq.Backoff{Base: time.Minute, Jitter: -1}, Timeout: time.Hour, Retention: time.Hour}
		})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			if end, _ := ctx.Deadline(); time.Until(end) != time.Hour || len(j.Payload) > 0 {
				return errPolicy
			}
			return nil
		}, codeq.Policy{RetryFirst: true})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		done, dead := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0], queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: []byte("fails")})[0]
		synctest.Wait()
		require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, done).State)
		require.Equal(t, time.Minute, time.Until(queuetest.InfoOf(t, q, dead).At))
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, codeq.Dead, queuetest.InfoOf(t, q, dead).State)
		require.NoError(t, run.End(nil))
		require.NotImplements(t, (*codeq.HandlerOption)(nil), codeq.Settings{}, "they embed a Policy")
	})
}

// TestHandlerRetriesFirst: the place of a retry is that of the handler's policy, too.
func TestHandlerRetriesFirst(t *testing.T) {
	for _, first := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, codeq.Options{})
			queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: []byte("1")}, codeq.Task{Queue: "a", Payload: []byte("2")})
			var m codeq.Mux
			got := ""
			codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
				if got += string(j.Payload); len(got) == 1 {
					return codeq.RetryAfter(0, errPolicy)
				}
				time.Sleep(time.Second)
				return nil
			}, codeq.Policy{RetryFirst: first})
			run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
			time.Sleep(time.Minute)
			require.NoError(t, run.End(nil))
			require.Equal(t, map[bool]string{false: "121", true: "112"}[first], got)
		})
	}
}

// TestApply: Apply stores what differs and tells it, keeps a pause, and checks everything first.
// Settings of other queues stay.
func TestApply(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		ctx := t.Context()
		queuetest.Configure(t, q, "other", func(s *codeq.Settings) { s.Burst = 7 })
		require.NoError(t, q.Pause(ctx, "a"))
		weights := map[string]int{"x": 2}
		a := codeq.Settings{Concurrency: 2, TenantWeights: weights, Policy: codeq.Policy{MaxAttempts: 3}}
		declared := map[string]codeq.Settings{"a": a, "b": {TenantWeights: map[string]int{}}}
		changes, err := q.Apply(ctx, declared)
		require.NoError(t, err)
		paused := a
		paused.Paused = true
		require.Equal(t, []codeq.SettingsChange{{Queue: "a", Before: codeq.Settings{Paused: true}, After: paused}}, changes)
		require.Equal(t, paused, settingsOf(t, q, "a"))
		changes[0].After.TenantWeights["x"] = 9
		require.Equal(t, 2, weights["x"])

		require.NoError(t, q.Resume(ctx, "a"))
		changes, err = q.Apply(ctx, declared)
		require.NoError(t, err)
		require.Empty(t, changes)
		queuetest.RequireInShards(t, q, "a", 3, a) // the version of Resume: nothing was stored

		a.Concurrency = 0
		declared["a"] = a
		for queue, bad := range map[string]codeq.Settings{
			"": {}, "\xff": {}, strings.Repeat("x", 256): {}, "paused": {Paused: true}, "rate": {Rate: -1}, "c": {DeadLetterQueue: "c"},
		} {
			declared[queue] = bad
			_, err = q.Apply(ctx, declared)
			require.ErrorIs(t, err, codeq.ErrInvalid)
			delete(declared, queue)
		}
		require.Equal(t, 2, settingsOf(t, q, "a").Concurrency, "nothing was applied")
		changes, err = q.Apply(ctx, declared)
		require.NoError(t, err)
		require.Len(t, changes, 1)
		require.Zero(t, settingsOf(t, q, "a").Concurrency)
		require.Equal(t, 7, settingsOf(t, q, "other").Burst)
		queuetest.RequireSettled(t, q)
	})
}

// TestApplyAgain: Apply tells a change that not all shards have, and brings it to them when it is
// called again, though there is nothing to change.
func TestApplyAgain(t *testing.T) {
	queuetest.InFlow(t, codeq.Options{Shards: 3}, func(f *queuetest.FlowTest) {
		ctx, want := context.Background(), codeq.Settings{Rate: 5}
		queuetest.FailShard(t, f.Q, 1)
		for again := range 2 {
			changes, err := f.Q.Apply(ctx, map[string]codeq.Settings{"a": want, "b": {}})
			require.ErrorIs(f, err, codeq.ErrUncertain)
			require.Len(f, changes, 1-again)
		}
		require.ErrorIs(f, f.Q.Close(), codeq.ErrFailed)
		f.Open()
		changes, err := f.Q.Apply(ctx, map[string]codeq.Settings{"a": want, "b": {}})
		require.NoError(f, err)
		require.Empty(f, changes)
		queuetest.RequireInShards(t, f.Q, "a", 1, want)
		stats, err := f.Q.Stats(ctx)
		require.NoError(f, err)
		require.NotContains(f, stats, "b")
	})
}

// TestDeadLetterQueue: each death produces one task in the dead-letter queue, with the payload,
// headers, tenant and priority of the dead one, however it dies.
func TestDeadLetterQueue(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2, MaxAttempts: 1, LeaseFor: time.Second}, func(t *testing.T, q *codeq.Queue) {
		ctx := t.Context()
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.DeadLetterQueue = "dead" })
		for reason, die := range map[string]func(*codeq.Lease) error{
			"retried": func(l *codeq.Lease) error {
				return q.Retry(ctx, l.Receipt, codeq.RetryOptions{Err: errors.New("retried")})
			},
			"given up":      func(l *codeq.Lease) error { return q.DeadLetter(ctx, l.Receipt, errors.New("given up")) },
			"lease expired": func(*codeq.Lease) error { time.Sleep(2 * time.Second); return nil },
		} {
			id := queuetest.Produce(t, q, codeq.Task{
				Queue: "a", Kind: "kind", Tenant: "t", Priority: 3, Payload: []byte("p"), Headers: map[string]string{"k": "v"}, Group: "g", Unique: codeq.Unique{Key: "u"},
			})[0]
			for range 2 {
				require.NoError(t, die(queuetest.ClaimNow(t, q, "a")))
				require.Equal(t, codeq.Dead, queuetest.InfoOf(t, q, id).State)
				l := queuetest.ClaimNow(t, q, "dead")
				require.NotNil(t, l)
				require.Nil(t, queuetest.ClaimNow(t, q, "dead"))
				d, ok := codeq.DeathOf(l.Headers)
				require.True(t, ok)
				require.Equal(t, codeq.Death{ID: id, Queue: "a", Kind: "kind", Reason: reason}, d)
				require.Equal(t, []any{"", "t", 3, "p", "v", "", ""}, []any{l.Kind, l.Tenant, l.Priority, string(l.Payload), l.Headers["k"], l.Group, l.Unique.Key})
				require.Equal(t, queuetest.ShardOf(id, 2), queuetest.ShardOf(l.ID, 2))
				queuetest.Complete(t, q, l)
				require.NoError(t, q.RedriveDead(ctx, id)) // and it dies again
			}
			require.NoError(t, q.Cancel(ctx, id))
		}
		queuetest.Produce(t, q, codeq.Task{Queue: "a", Headers: map[string]string{"k": "v"}})
		require.NoError(t, q.DeadLetter(ctx, queuetest.ClaimNow(t, q, "a").Receipt, errPolicy))
		_, err := q.Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkMove, ToQueue: "a", TaskFilter: inStates("dead", codeq.Ready)})
		require.NoError(t, err)
		require.Equal(t, map[string]string{"k": "v"}, queuetest.ClaimNow(t, q, "a").Headers, "it begins anew")
		_, ok := codeq.DeathOf(map[string]string{"k": "v"})
		require.False(t, ok)
		for _, bad := range []string{"a", "\xff", strings.Repeat("x", 256)} {
			require.ErrorIs(t, q.Configure(ctx, "a", func(s *codeq.Settings) { s.DeadLetterQueue = bad }), codeq.ErrInvalid)
		}
	})
}

// TestDeathsInACircle: tasks that die in the dead-letter queues of each other come to an end.
func TestDeathsInACircle(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{}, func(t *testing.T, q *codeq.Queue) {
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.DeadLetterQueue = "b" })
		queuetest.Configure(t, q, "b", func(s *codeq.Settings) { s.DeadLetterQueue = "a" })
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		n := 0
		for l := queuetest.ClaimNow(t, q, "a", "b"); l != nil; l = queuetest.ClaimNow(t, q, "a", "b") {
			require.NoError(t, q.DeadLetter(t.Context(), l.Receipt, errPolicy))
			n++
		}
		require.Equal(t, 1+8, n)
	})
}
