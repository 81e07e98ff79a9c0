package codeq_test

import (
	"context"
	"fmt"
	"math"
	"strconv"
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

// TestUniqueScope: queue, tenant, group and limit key have keys of their own.
func TestUniqueScope(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 3}, func(t *testing.T, p *queuetest.Process) {
		scopes := []codeq.Task{
			queuetest.Keyed("k"),
			queuetest.Keyed("other"),
			{Queue: "b", Unique: codeq.Unique{Key: "k"}},
			{Queue: "a", Tenant: "x", Unique: codeq.Unique{Key: "k"}},
			{Queue: "a", Group: "x", Unique: codeq.Unique{Key: "k"}},
			{Queue: "a", LimitKey: "x", Unique: codeq.Unique{Key: "k"}},
			{Queue: "a", LimitKey: "x", Group: "x", Unique: codeq.Unique{Key: "k"}},
		}
		var ids []codeq.ID
		for _, task := range scopes {
			ids = append(ids, p.Store(task))
		}
		p.Step()
		for i, task := range scopes {
			task.Priority, task.Payload, task.RunAt = 9, []byte("another"), time.Now().Add(time.Hour) // these fields do not matter
			p.Taken(task, ids[i])
		}
	})
}

// TestUniqueIsKept: Get returns the Unique of a task as it was produced.
func TestUniqueIsKept(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
		for i, u := range []codeq.Unique{
			{Key: "1"},
			{Key: "2", For: time.Hour, Replace: true},
			{Key: "3", ReleaseOnComplete: true},
			{Key: "4", For: math.MaxInt64, ReleaseOnDead: true},
		} {
			id := p.Store(codeq.Task{Queue: "a", Unique: u})
			p.Step()
			info, err := p.Get(context.Background(), id)
			require.NoError(t, err)
			require.Equal(t, u, info.Unique, i)
		}
	})
}

// TestUniqueBatch: tasks of a batch may have the keys of stored tasks, and of each other. The rest
// of the batch is stored.
func TestUniqueBatch(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 4} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: shards}, func(t *testing.T, p *queuetest.Process) {
				ctx := context.Background()
				stored := p.Store(queuetest.Keyed("stored"))
				p.Step()
				batch := []codeq.Task{
					queuetest.Keyed("stored"), queuetest.Keyed("new"), {Queue: "a"}, queuetest.Keyed("new"), queuetest.Keyed("newer"), queuetest.Keyed("stored"), queuetest.Keyed("new"), {Queue: "a"},
				}
				for i := range batch {
					batch[i].Payload = strconv.AppendInt(nil, int64(i), 10)
				}
				ids, err := p.ProduceBatch(ctx, batch)
				require.Equal(t, map[int]codeq.ID{0: stored, 3: ids[1], 5: stored, 6: ids[1]}, queuetest.Duplicates(t, err))
				require.Len(t, ids, len(batch))
				require.Equal(t, stored, ids[0])
				require.Equal(t, codeq.Counts{Ready: 5}, queuetest.CountsOf(t, p.Queue, "a"))
				p.Step()
				for _, i := range []int{1, 2, 4, 7} {
					require.Equal(t, strconv.Itoa(i), string(queuetest.InfoOf(t, p.Queue, ids[i]).Payload))
				}

				again, err := p.ProduceBatch(ctx, batch)
				found := queuetest.Duplicates(t, err)
				require.Len(t, found, 6)
				for i, id := range found {
					require.Equal(t, ids[i], id)
					require.Equal(t, ids[i], again[i])
				}
				require.Equal(t, codeq.Counts{Ready: 7}, queuetest.CountsOf(t, p.Queue, "a"))
			})
		})
	}
}

// TestFollowUpOfOwnKey: the follow-up of a completed task does not replace this task while the For
// of their key lasts.
func TestFollowUpOfOwnKey(t *testing.T) {
	t.Parallel()
	for _, replace := range []bool{false, true} {
		t.Run(fmt.Sprint("replace ", replace), func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
				ctx := context.Background()
				task := queuetest.Keyed("k")
				task.Unique.For, task.Unique.Replace = time.Hour, replace
				id := p.Store(task)
				p.Step()
				require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil, task))
				p.Step()
				require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, p.Queue, "a"))
				p.Taken(task, id)

				p.Pass(time.Hour)
				task.Unique.ReleaseOnComplete = true
				id = p.Store(task)
				p.Step()
				require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil, task))
				p.Step()
				require.Equal(t, codeq.Counts{Ready: 1}, queuetest.CountsOf(t, p.Queue, "a"))
				require.NotEqual(t, id, p.Take("a").ID)
			})
		})
	}
}

// TestUniqueRace: many calls produce the same key at the same time. One stores its task, and the
// others get its ID.
func TestUniqueRace(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		for _, batch := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d shards, batch %t", shards, batch), func(t *testing.T) {
				queuetest.ThroughSteps(t, codeq.Options{Shards: shards, GroupCap: 7}, func(t *testing.T, p *queuetest.Process) {
					const callers, rounds = 64, 10
					for round := range rounds {
						task := queuetest.Keyed(fmt.Sprint(round))
						var wg sync.WaitGroup
						var new atomic.Int64
						ids := make([]codeq.ID, callers)
						for i := range callers {
							wg.Go(func() {
								var err error
								if batch {
									var both []codeq.ID
									both, err = p.ProduceBatch(context.Background(), []codeq.Task{{Queue: "others"}, task})
									ids[i] = both[1]
								} else {
									ids[i], err = p.Produce(context.Background(), task)
								}
								if err == nil {
									new.Add(1)
								} else {
									require.ErrorIs(t, err, codeq.ErrDuplicate)
								}
							})
						}
						wg.Wait()
						require.EqualValues(t, 1, new.Load())
						for _, id := range ids {
							require.Equal(t, ids[0], id)
						}
					}
					require.Equal(t, codeq.Counts{Ready: rounds}, queuetest.CountsOf(t, p.Queue, "a"))
				})
			})
		}
	}
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

// keyFor names the key of a task.
func keyFor(t codeq.Task) codeq.UniqueKey {
	return codeq.UniqueKey{Queue: t.Queue, Tenant: t.Tenant, Group: t.Group, LimitKey: t.LimitKey, Key: t.Unique.Key}
}

// TestReplaceInOneGroup: a task that replaces one that the same group has changed finds the change.
func TestReplaceInOneGroup(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		task := queuetest.Keyed("k")
		task.Unique.Replace = true
		first := queuetest.Produce(t, q, task)[0]
		gate := queuetest.Shut(t, q, 0)
		var wg sync.WaitGroup
		ids := make([]codeq.ID, 4)
		replace := func(i int) {
			wg.Go(func() {
				var err error
				ids[i], err = q.Produce(ctx, task)
				require.NoError(t, err)
			})
			synctest.Wait()
		}
		replace(0)
		replace(1)
		wg.Go(func() { require.NoError(t, q.SetPriority(ctx, first, 5)) })
		synctest.Wait()
		replace(2)
		close(gate)
		wg.Wait()
		require.Equal(t, []codeq.ID{first, first, first}, ids[:3])
		synctest.Wait()
		require.NoError(t, queuetest.CheckAll(q))
		require.NoError(t, queuetest.CheckMemory(q))
		require.Equal(t, codeq.Counts{Ready: 1}, queuetest.CountsOf(t, q, "a"))

		gate = queuetest.Shut(t, q, 0)
		wg.Go(func() { require.NoError(t, q.Cancel(ctx, first)) })
		synctest.Wait()
		replace(3)
		close(gate)
		wg.Wait()
		require.NotEqual(t, first, ids[3])
		require.Equal(t, codeq.Counts{Ready: 1}, queuetest.CountsOf(t, q, "a"))
		require.NoError(t, queuetest.CheckMemory(q))
	})
}

// TestDebounce: of a burst only the last task runs, once the burst is over.
func TestDebounce(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 2}, func(t *testing.T, p *queuetest.Process) {
		var id codeq.ID
		for i := range 10 {
			task := queuetest.Keyed("document 7")
			task.Unique.Replace = true
			task.RunAt = p.Now().Add(5 * time.Second)
			task.Payload = strconv.AppendInt(nil, int64(i), 10)
			next := p.Store(task)
			if i > 0 {
				require.Equal(t, id, next)
			}
			id = next
			p.Step()
			p.Pass(4 * time.Second)
			require.Nil(t, queuetest.ClaimNow(t, p.Queue, "a"))
		}
		p.Pass(time.Second)
		l := p.Take("a")
		require.Equal(t, id, l.ID)
		require.Equal(t, "9", string(l.Payload))
		require.Equal(t, codeq.Counts{Leased: 1}, queuetest.CountsOf(t, p.Queue, "a"))
	})
}

// endings end a task with a key, by the final state.
var endings = map[codeq.State]func(p *queuetest.Process, id codeq.ID){
	codeq.Done: func(p *queuetest.Process, id codeq.ID) {
		require.NoError(p.T, p.Complete(context.Background(), p.Take("a").Receipt, nil))
	},
	codeq.Canceled: func(p *queuetest.Process, id codeq.ID) { require.NoError(p.T, p.Cancel(context.Background(), id)) },
	codeq.Dead: func(p *queuetest.Process, id codeq.ID) {
		require.NoError(p.T, p.DeadLetter(context.Background(), p.Take("a").Receipt, nil))
	},
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
