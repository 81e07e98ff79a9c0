package codeq_test

import (
	"context"
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
