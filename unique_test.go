package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/keys"
	"codeq/test/queuetest"
)

// TestUniqueRace: many calls produce the same key at the same time. One stores its task, and the
// others get its ID.
func TestUniqueRace(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2, GroupCap: 7}, func(t *testing.T, q *codeq.Queue) {
		var calls sync.WaitGroup
		var stored atomic.Int64
		var ids [64]codeq.ID
		for i := range ids {
			calls.Go(func() {
				var err error
				if ids[i], err = q.Produce(t.Context(), queuetest.Keyed("k")); err == nil {
					stored.Add(1)
				} else {
					require.ErrorIs(t, err, codeq.ErrDuplicate)
				}
			})
		}
		calls.Wait()
		require.EqualValues(t, 1, stored.Load())
		for _, id := range ids {
			require.Equal(t, ids[0], id)
		}
	})
}

// TestReleaseOnEnd: a key becomes free at the ends that Unique names, and at no other before its
// time.
func TestReleaseOnEnd(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{}, func(t *testing.T, q *codeq.Queue) {
		for _, u := range []codeq.Unique{{}, {ReleaseOnComplete: true}, {ReleaseOnDead: true}} {
			for _, dies := range []bool{false, true} {
				u.Key, u.For = "k", time.Hour
				task := codeq.Task{Queue: fmt.Sprint(u, dies), Unique: u}
				id := queuetest.Produce(t, q, task)[0]
				require.Equal(t, u, queuetest.InfoOf(t, q, id).Unique)
				l := queuetest.ClaimNow(t, q, task.Queue)
				released := u.ReleaseOnComplete
				if dies {
					released = u.ReleaseOnDead
					require.NoError(t, q.DeadLetter(t.Context(), l.Receipt, nil))
				} else {
					queuetest.Complete(t, q, l)
				}
				_, err := q.Produce(t.Context(), task)
				require.Equal(t, released, err == nil, task.Queue)
			}
		}
	})
}

// TestReplaceRace: tasks replace each other while workers take them. None is lost, none is handled
// twice, and the last one is handled.
func TestReplaceRace(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 2, GroupCap: 5}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		const producers, each = 8, 50
		var producing, working sync.WaitGroup
		var produced, refused, worked atomic.Int64
		task := queuetest.Keyed("k")
		task.Unique.Replace = true
		claims, stop := context.WithCancel(ctx)
		for range 4 {
			working.Go(func() {
				for {
					l, err := p.Claim(claims, codeq.ClaimRequest{Queues: []string{"a"}})
					if err != nil {
						return
					}
					worked.Add(1)
					require.NoError(t, p.Complete(ctx, l.Receipt, nil))
				}
			})
		}
		for range producers {
			producing.Go(func() {
				for range each {
					if _, err := p.Produce(ctx, task); err == nil {
						produced.Add(1)
					} else {
						require.ErrorIs(t, err, codeq.ErrDuplicate)
						refused.Add(1)
					}
				}
			})
		}
		producing.Wait()
		synctest.Wait()
		stop()
		working.Wait()
		require.EqualValues(t, producers*each, produced.Load()+refused.Load())
		require.Positive(t, worked.Load())
		require.LessOrEqual(t, worked.Load(), produced.Load())
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, p.Queue, "a"))
		require.Zero(t, p.Stored(keys.Unique))
	})
}

func TestDuplicateError(t *testing.T) {
	id := codeq.ID{1, 2, 3}
	err := error(&codeq.DuplicateError{Key: "order 17", ID: id, Index: 3})
	require.ErrorIs(t, err, codeq.ErrDuplicate)
	require.NotErrorIs(t, err, codeq.ErrInvalid)
	require.ErrorContains(t, err, `"order 17"`)
	require.ErrorContains(t, err, id.String())
}

// TestUniqueRefused: values of Unique that Produce, ProduceBatch, Complete and ReleaseKey refuse.
func TestUniqueRefused(t *testing.T) {
	q := openLimited(t)
	ctx := context.Background()
	for _, tc := range []struct {
		unique codeq.Unique
		field  string
		value  any
		limit  string
	}{
		{codeq.Unique{Key: text(11)}, "Task.Unique.Key", "11 bytes", "at most 10 bytes"},
		{codeq.Unique{Key: "k", For: -1}, "Task.Unique.For", time.Duration(-1), "0 or more"},
		{codeq.Unique{For: 1}, "Task.Unique.Key", `""`, "a key, if other fields of Unique are set"},
		{codeq.Unique{Replace: true}, "Task.Unique.Key", `""`, "a key, if other fields of Unique are set"},
		{codeq.Unique{ReleaseOnDead: true}, "Task.Unique.Key", `""`, "a key, if other fields of Unique are set"},
		{codeq.Unique{ReleaseOnComplete: true}, "Task.Unique.Key", `""`, "a key, if other fields of Unique are set"},
		{codeq.Unique{Key: "k", Replace: true, MaxWait: -1}, "Task.Unique.MaxWait", time.Duration(-1), "0 or more, with Replace"},
		{codeq.Unique{Key: "k", MaxWait: time.Second}, "Task.Unique.MaxWait", time.Second, "0 or more, with Replace"},
		{codeq.Unique{Key: "k", ReleaseOnClaim: true, For: 1}, "Task.Unique.ReleaseOnClaim", "with For", "one of both"},
	} {
		bad := codeq.Task{Queue: "a", Unique: tc.unique}
		l := q.lease()
		for _, verb := range []func() error{
			func() error { _, err := q.Produce(ctx, bad); return err },
			func() error { _, err := q.ProduceBatch(ctx, []codeq.Task{queuetest.Keyed("fine"), bad}); return err },
			func() error { return q.Complete(ctx, l.Receipt, nil, queuetest.Keyed("fine"), bad) },
		} {
			q.refused(tc.field, tc.value, tc.limit, verb)
		}
	}
	for _, tc := range []struct {
		key   codeq.UniqueKey
		field string
		value any
		limit string
	}{
		{codeq.UniqueKey{Queue: "a"}, "UniqueKey.Key", `""`, "not empty"},
		{codeq.UniqueKey{Key: "k"}, "UniqueKey.Queue", `""`, "not empty"},
		{codeq.UniqueKey{Queue: text(11), Key: "k"}, "UniqueKey.Queue", "11 bytes", "at most 10 bytes"},
		{codeq.UniqueKey{Queue: "a", Tenant: text(11), Key: "k"}, "UniqueKey.Tenant", "11 bytes", "at most 10 bytes"},
		{codeq.UniqueKey{Queue: "a", Group: text(11), Key: "k"}, "UniqueKey.Group", "11 bytes", "at most 10 bytes"},
		{codeq.UniqueKey{Queue: "a", LimitKey: text(11), Key: "k"}, "UniqueKey.LimitKey", "11 bytes", "at most 10 bytes"},
		{codeq.UniqueKey{Queue: "a", Key: text(11)}, "UniqueKey.Key", "11 bytes", "at most 10 bytes"},
	} {
		q.refused(tc.field, tc.value, tc.limit, func() error { return q.ReleaseKey(ctx, tc.key) })
	}

	replacing := queuetest.Keyed("twin")
	replacing.Unique.Replace = true
	accepted, err := q.ProduceBatch(ctx, []codeq.Task{replacing, queuetest.Keyed(text(10)), queuetest.Keyed("twin")})
	require.Equal(t, map[int]codeq.ID{2: accepted[0]}, queuetest.Duplicates(t, err))
	require.NoError(t, queuetest.CheckAll(q.Queue))
}

// TestReplaceInBatch: in a batch too, the last task that replaces others of its key wins. The key
// may be free, taken by a waiting task, or taken by a leased task. The ID and After are those of
// the first task.
func TestReplaceInBatch(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 4} {
		queuetest.ThroughSteps(t, codeq.Options{Shards: shards}, func(t *testing.T, p *queuetest.Process) {
			ctx := context.Background()
			of := func(key, payload string, replace bool) codeq.Task {
				task := queuetest.Keyed(key)
				task.Payload, task.Unique.Replace = []byte(payload), replace
				return task
			}
			holds := func(id codeq.ID, payload string) {
				t.Helper()
				require.Equal(t, payload, string(queuetest.InfoOf(t, p.Queue, id).Payload))
			}
			urgent := of("k", "3", true)
			urgent.Priority = 9
			ids, err := p.ProduceBatch(ctx, []codeq.Task{of("k", "1", true), of("x", "other", true), of("k", "2", true), urgent})
			require.NoError(t, err)
			require.Equal(t, []codeq.ID{ids[0], ids[1], ids[0], ids[0]}, ids)
			p.Step()
			holds(ids[0], "3")
			require.Equal(t, 9, queuetest.InfoOf(t, p.Queue, ids[0]).Priority)
			require.Equal(t, codeq.Counts{Ready: 2}, queuetest.CountsOf(t, p.Queue, "a"))

			again, err := p.ProduceBatch(ctx, []codeq.Task{of("k", "4", false), of("k", "5", true), of("k", "6", false)})
			require.Equal(t, map[int]codeq.ID{2: ids[0]}, queuetest.Duplicates(t, err))
			require.Equal(t, []codeq.ID{ids[0], ids[0], ids[0]}, again)
			p.Step()
			holds(ids[0], "5")

			for range 2 { // both are leased
				_, err = p.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Hour})
				require.NoError(t, err)
			}
			again, err = p.ProduceBatch(ctx, []codeq.Task{of("k", "7", true), of("k", "8", true)})
			require.Equal(t, map[int]codeq.ID{0: ids[0], 1: ids[0]}, queuetest.Duplicates(t, err))
			require.Equal(t, []codeq.ID{ids[0], ids[0]}, again)
			holds(ids[0], "5")
			p.Step()
			require.NoError(t, queuetest.CheckAll(p.Queue))
		})
	}
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		waits, last := queuetest.Keyed("k"), queuetest.Keyed("k")
		waits.After, waits.Unique.Replace = []codeq.ID{codeq.Nth(0)}, true
		last.Payload, last.Unique.Replace = []byte("last"), true
		ids, err := p.ProduceBatch(ctx, []codeq.Task{{Queue: "first"}, waits, last, {Queue: "a", After: []codeq.ID{codeq.Nth(2)}}})
		require.NoError(t, err)
		require.Equal(t, ids[1], ids[2])
		p.Step()
		require.Equal(t, codeq.Counts{Blocked: 2}, queuetest.CountsOf(t, p.Queue, "a"))
		for i, queue := range []string{"first", "a", "a"} {
			l, err := p.Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}, LeaseFor: time.Hour})
			require.NoError(t, err)
			require.Equal(t, []codeq.ID{ids[0], ids[1], ids[3]}[i], l.ID)
			require.NoError(t, p.Complete(ctx, l.Receipt, nil))
			p.Step()
		}
		require.NoError(t, queuetest.CheckAll(p.Queue))
	})
}

// TestDebounce: a task is put off by each produce, but not beyond MaxWait, and while it is at work
// the next produce makes a new one, over restarts.
func TestDebounce(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		queuetest.ThroughSteps(t, codeq.Options{Shards: shards}, func(t *testing.T, p *queuetest.Process) {
			begun := p.Now().Truncate(time.Millisecond)
			change := func(payload string, wait time.Duration) codeq.ID {
				t.Helper()
				id, err := p.Produce(t.Context(), codeq.Task{
					Queue: "a", Payload: []byte(payload), RunAt: p.Now().Add(wait),
					Unique: codeq.Unique{Key: "k", Replace: true, MaxWait: 10 * time.Minute, ReleaseOnClaim: true},
				})
				require.NoError(t, err)
				return id
			}
			first := change("0", time.Minute)
			for n := 1; n <= 20; n++ {
				time.Sleep(30 * time.Second)
				p.Step()
				require.Equal(t, first, change(fmt.Sprint(n), time.Minute))
				due := p.Now().Add(time.Minute)
				if limit := begun.Add(10 * time.Minute); due.After(limit) {
					due = limit
				}
				info := queuetest.InfoOf(t, p.Queue, first)
				if n < 20 {
					require.WithinDuration(t, due, info.RunAt, time.Second)
					require.Equal(t, codeq.Scheduled, info.State)
				}
			}
			l, err := p.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Hour})
			require.NoError(t, err)
			require.Equal(t, "20", string(l.Payload))
			require.Equal(t, 10*time.Minute, l.Unique.MaxWait)
			p.Step()
			second := change("next", time.Minute)
			require.NotEqual(t, first, second)
			require.Equal(t, second, change("next one", time.Hour))
			p.Step()
			require.NoError(t, p.Retry(t.Context(), l.Receipt, codeq.RetryOptions{After: -1}))
			require.Equal(t, second, change("last", 0), "the first one has no key any more")
			p.Step()
			for range 2 {
				l, err = p.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
				require.NoError(t, err)
				require.Contains(t, []string{"20", "last"}, string(l.Payload))
				require.NoError(t, p.Complete(t.Context(), l.Receipt, nil))
			}
			require.NotEqual(t, second, change("free", 0))
		})
	}
}

// TestReleaseOnClaim: a produce takes the key of a task at work if both have ReleaseOnClaim, and
// not while it waits.
func TestReleaseOnClaim(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		for _, first := range []bool{false, true} {
			for _, second := range []bool{false, true} {
				task := func(release bool) codeq.Task {
					return codeq.Task{Queue: "a", Unique: codeq.Unique{Key: fmt.Sprint(first, second), ReleaseOnClaim: release}}
				}
				id := queuetest.Produce(t, q, task(first))[0]
				_, err := q.Produce(t.Context(), task(second))
				require.ErrorIs(t, err, codeq.ErrDuplicate)
				l := queuetest.ClaimNow(t, q, "a")
				now, err := q.Produce(t.Context(), task(second))
				require.Equal(t, first && second, err == nil)
				require.Equal(t, first && second, now != id)
				holder, err := q.FindByKey(t.Context(), codeq.UniqueKey{Queue: "a", Key: task(first).Unique.Key})
				require.NoError(t, err)
				require.Equal(t, now, holder.ID)
				require.NoError(t, q.Complete(t.Context(), l.Receipt, nil, task(second)), "a follow-up is a duplicate, or free")
				for range queuetest.CountsOf(t, q, "a").Ready {
					queuetest.Complete(t, q, queuetest.ClaimNow(t, q, "a"))
				}
			}
		}
	})
}

// TestDebounceOfFailedTask: tasks with MaxWait do not make a failed one run before its backoff, nor
// more often than MaxAttempts. It runs with their contents.
func TestDebounceOfFailedTask(t *testing.T) {
	t.Parallel()
	opts := codeq.Options{Shards: 1, MaxAttempts: 3, Backoff: codeq.Backoff{Base: 5 * time.Minute, Factor: 1, Jitter: -1}}
	queuetest.ThroughSteps(t, opts, func(t *testing.T, p *queuetest.Process) {
		change := func(n int) codeq.ID {
			t.Helper()
			id, err := p.Produce(t.Context(), codeq.Task{
				Queue: "a", Payload: fmt.Append(nil, n), RunAt: p.Now().Add(time.Minute),
				Unique: codeq.Unique{Key: "k", Replace: true, MaxWait: 2 * time.Minute},
			})
			require.NoError(t, err)
			return id
		}
		first := change(0)
		var runs []string
		for n := 1; queuetest.InfoOf(t, p.Queue, first).State != codeq.Dead; n++ {
			require.Less(t, n, 1000)
			require.Equal(t, first, change(n))
			time.Sleep(30 * time.Second)
			p.Step()
			if l := queuetest.ClaimNow(t, p.Queue, "a"); l != nil {
				runs = append(runs, string(l.Payload))
				require.NoError(t, p.Retry(t.Context(), l.Receipt, codeq.RetryOptions{Err: errors.New("boom")}))
			}
		}
		require.Equal(t, []string{"4", "14", "24"}, runs)
	})
}

// TestReleaseOnClaimBetweenSteps: the key of a task with ReleaseOnClaim is free while the task
// waits between two steps.
func TestReleaseOnClaimBetweenSteps(t *testing.T) {
	for _, replace := range []bool{false, true} {
		queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
			task := codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k", Replace: replace, ReleaseOnClaim: true}}
			ran := make(chan codeq.ID, 3)
			var m codeq.Mux
			codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
				if _, err := codeq.Step(ctx, "first", func(context.Context) (int, error) { return 0, nil }); err != nil {
					return err
				}
				if err := codeq.Sleep(ctx, "pause", time.Hour); err != nil {
					return err
				}
				ran <- j.ID
				return nil
			})
			startRun(t, q, &m, codeq.RunOptions{})
			first := queuetest.Produce(t, q, task)[0]
			time.Sleep(time.Minute)
			second, err := q.Produce(t.Context(), task)
			require.NoError(t, err)
			require.NotEqual(t, first, second)
			require.ElementsMatch(t, []codeq.ID{first, second}, []codeq.ID{<-ran, <-ran})
			synctest.Wait()
			require.Empty(t, ran)
			require.NoError(t, queuetest.CheckAll(q))
		})
	}
}

// TestReplacedKeepsNoProgress: a task that was replaced begins without the metadata, the progress
// and the cursors of the former contents, and keeps its history.
func TestReplacedKeepsNoProgress(t *testing.T) {
	for _, maxWait := range []time.Duration{0, time.Hour} {
		queuetest.Bubble(t, codeq.Options{Shards: 1, Backoff: codeq.Backoff{Base: time.Hour}}, func(t *testing.T, q *codeq.Queue) {
			task := codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k", Replace: true, MaxWait: maxWait}}
			var m codeq.Mux
			codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
				return errors.Join(
					codeq.SetMetadata(ctx, "at", "3"), codeq.ReportProgress(ctx, 3, 4, "x"), codeq.SetCursor(ctx, "at", 3), errors.New("no"),
				)
			})
			startRun(t, q, &m, codeq.RunOptions{})
			id := queuetest.Produce(t, q, task)[0]
			synctest.Wait()
			before := queuetest.InfoOf(t, q, id)
			require.NotEmpty(t, before.Metadata)
			require.NotEmpty(t, before.Cursors)
			task.Payload, task.RunAt = []byte("new"), time.Now().Add(time.Minute)
			_, err := q.Produce(t.Context(), task)
			require.NoError(t, err)
			got := queuetest.InfoOf(t, q, id)
			require.Equal(t, "new", string(got.Payload))
			require.Empty(t, got.Metadata)
			require.Empty(t, got.Cursors)
			require.Zero(t, got.Progress)
			require.Equal(t, before.History, got.History)
		})
	}
}
