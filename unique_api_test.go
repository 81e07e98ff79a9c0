package codeq_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/engine"
	"codeq/internal/hook"
	"codeq/internal/keys"
	"codeq/internal/testkit"
)

// TestUniqueScope: queue, tenant, group and limit key have keys of their own.
func TestUniqueScope(t *testing.T) {
	throughSteps(t, codeq.Options{Shards: 3}, func(t *testing.T, p *codeq.Process) {
		scopes := []codeq.Task{
			keyed("k"),
			keyed("other"),
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
			task.Priority, task.Payload, task.RunAt = 9, []byte("another"), time.Now().Add(time.Hour) // of no matter
			p.Taken(task, ids[i])
		}
	})
}

// TestUniqueIsKept: Get shows what was produced.
func TestUniqueIsKept(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *codeq.Process) {
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

// TestUniqueBatch: tasks of a batch may have the keys of stored ones, and of
// each other; the rest is stored.
func TestUniqueBatch(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 4} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			throughSteps(t, codeq.Options{Shards: shards}, func(t *testing.T, p *codeq.Process) {
				ctx := context.Background()
				stored := p.Store(keyed("stored"))
				p.Step()
				batch := []codeq.Task{
					keyed("stored"), keyed("new"), {Queue: "a"}, keyed("new"), keyed("newer"), keyed("stored"), keyed("new"), {Queue: "a"},
				}
				for i := range batch {
					batch[i].Payload = strconv.AppendInt(nil, int64(i), 10)
				}
				ids, err := p.ProduceBatch(ctx, batch)
				require.Equal(t, map[int]codeq.ID{0: stored, 3: ids[1], 5: stored, 6: ids[1]}, duplicates(t, err))
				require.Len(t, ids, len(batch))
				require.Equal(t, stored, ids[0])
				require.Equal(t, codeq.Counts{Ready: 5}, countsOf(t, p.Queue, "a"))
				p.Step()
				for _, i := range []int{1, 2, 4, 7} {
					require.Equal(t, strconv.Itoa(i), string(infoOf(t, p.Queue, ids[i]).Payload))
				}

				again, err := p.ProduceBatch(ctx, batch)
				found := duplicates(t, err)
				require.Len(t, found, 6)
				for i, id := range found {
					require.Equal(t, ids[i], id)
					require.Equal(t, ids[i], again[i])
				}
				require.Equal(t, codeq.Counts{Ready: 7}, countsOf(t, p.Queue, "a"))
			})
		})
	}
}

// TestReplaceGoesBehind: what is replaced waits anew.
func TestReplaceGoesBehind(t *testing.T) {
	throughSteps(t, codeq.Options{Shards: 1, WindowTasks: 2}, func(t *testing.T, p *codeq.Process) {
		task := keyed("k")
		task.Unique.Replace = true
		first := p.Store(task)
		var others []codeq.ID
		for range 6 {
			others = append(others, p.Store(codeq.Task{Queue: "a"}))
			p.Pass(time.Millisecond)
		}
		require.Equal(t, first, p.Store(task))
		p.Step()
		for _, id := range others {
			require.Equal(t, id, p.Take("a").ID)
		}
		require.Equal(t, first, p.Take("a").ID)
	})
}

// TestUniqueEnds: when a key is free after its task has ended.
func TestUniqueEnds(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		unique codeq.Unique
		kept   map[codeq.State]bool // until an hour after the produce
	}{
		{"until the end", codeq.Unique{}, nil},
		{"for an hour", codeq.Unique{For: time.Hour}, map[codeq.State]bool{codeq.Done: true, codeq.Canceled: true, codeq.Dead: true}},
		{"unless completed", codeq.Unique{For: time.Hour, ReleaseOnComplete: true}, map[codeq.State]bool{codeq.Canceled: true, codeq.Dead: true}},
		{"unless dead", codeq.Unique{For: time.Hour, ReleaseOnDead: true}, map[codeq.State]bool{codeq.Done: true, codeq.Canceled: true}},
		{"unless either", codeq.Unique{For: time.Hour, ReleaseOnComplete: true, ReleaseOnDead: true}, map[codeq.State]bool{codeq.Canceled: true}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for state, end := range endings {
				t.Run(state.String(), func(t *testing.T) {
					throughSteps(t, codeq.Options{Shards: 2, Retention: codeq.Forever}, func(t *testing.T, p *codeq.Process) {
						task := keyed("k")
						task.Unique.For = tc.unique.For
						task.Unique.ReleaseOnComplete = tc.unique.ReleaseOnComplete
						task.Unique.ReleaseOnDead = tc.unique.ReleaseOnDead
						id := p.Store(task)
						p.Step()
						p.Pass(20 * time.Minute)
						end(p, id)
						p.Step()
						require.Equal(t, state, p.StateOf(id))
						if tc.kept[state] {
							p.Taken(task, id)
							p.Pass(40*time.Minute - time.Millisecond)
							p.Step()
							p.Taken(task, id)
							p.Pass(time.Millisecond)
							p.Step()
						}
						require.Zero(t, p.Stored(keys.Unique))
						require.Zero(t, p.Stored(keys.Freed))
						next := p.Store(task)
						require.NotEqual(t, id, next)
						p.Taken(task, next)
					})
				})
			}
		})
	}
}

// TestUniqueOfLivingTask: a task that has not ended keeps its key, however long
// For is over: when it is ready, blocked, leased, and between two attempts.
func TestUniqueOfLivingTask(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 2, LeaseFor: time.Minute, MaxAttempts: 3}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		task := keyed("k")
		task.Unique.For = time.Second
		id := p.Store(task)
		holds := func(state codeq.State) {
			t.Helper()
			p.Step()
			p.Pass(2 * time.Second)
			require.Equal(t, state, p.StateOf(id))
			p.Taken(task, id)
		}
		holds(codeq.Ready)
		l := p.Take("a")
		holds(codeq.Leased)
		require.NoError(t, p.Retry(ctx, l.Receipt, codeq.RetryOptions{After: time.Hour}))
		holds(codeq.Scheduled)
		p.Pass(time.Hour)
		holds(codeq.Ready)
		p.Take("a")
		p.Pass(time.Minute) // the lease expires
		holds(codeq.Ready)
		l = p.Take("a")
		require.Equal(t, 3, l.Attempt)
		require.NoError(t, p.Release(ctx, l.Receipt, time.Minute))
		holds(codeq.Scheduled)
		p.Pass(time.Minute)
		require.NoError(t, p.Retry(ctx, p.Take("a").Receipt, codeq.RetryOptions{})) // the last attempt
		p.Step()
		require.Equal(t, codeq.Dead, p.StateOf(id))
		require.NotEqual(t, id, p.Store(task))
	})
}

// TestReleaseKeyOfScope: ReleaseKey finds the key by the fields that Produce does.
func TestReleaseKeyOfScope(t *testing.T) {
	throughSteps(t, codeq.Options{Shards: 4}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		task := codeq.Task{Queue: "a", Tenant: "t", Group: "g", LimitKey: "l", Unique: codeq.Unique{Key: "k"}}
		id := p.Store(task)
		p.Step()
		for _, other := range []codeq.UniqueKey{
			{Queue: "b", Tenant: "t", Group: "g", LimitKey: "l", Key: "k"},
			{Queue: "a", Group: "g", LimitKey: "l", Key: "k"},
			{Queue: "a", Tenant: "t", LimitKey: "l", Key: "k"},
			{Queue: "a", Tenant: "t", Group: "g", Key: "k"},
			{Queue: "a", Tenant: "t", Group: "g", LimitKey: "l", Key: "K"},
		} {
			require.ErrorIs(t, p.ReleaseKey(ctx, other), codeq.ErrNotFound)
		}
		p.Taken(task, id)
		require.NoError(t, p.ReleaseKey(ctx, codeq.UniqueKey{
			Queue: "a", Tenant: "t", Group: "g", LimitKey: "l", Key: "k",
		}))
		require.NotEqual(t, id, p.Store(task))
	})
}

// TestUniqueFollowUps: follow-ups whose key is taken are left out, also by one
// before them; the key of the task itself is free when it ends, unless For
// goes on.
func TestUniqueFollowUps(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 4} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			throughSteps(t, codeq.Options{Shards: shards}, func(t *testing.T, p *codeq.Process) {
				ctx := context.Background()
				stored := p.Store(codeq.Task{Queue: "b", Unique: codeq.Unique{Key: "stored"}})
				task := keyed("k")
				id := p.Store(task)
				p.Step()
				next := []codeq.Task{{Queue: "b", Unique: codeq.Unique{Key: "stored"}}, task, {Queue: "b"}}
				for i := range 10 {
					next = append(next, codeq.Task{Queue: "c", Unique: codeq.Unique{Key: fmt.Sprint(i % 5)}})
				}
				require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil, next...))
				p.Step()
				require.Equal(t, codeq.Counts{Ready: 2}, countsOf(t, p.Queue, "b"))
				require.Equal(t, codeq.Counts{Ready: 5}, countsOf(t, p.Queue, "c"))
				require.Equal(t, codeq.Counts{Ready: 1}, countsOf(t, p.Queue, "a"))
				p.Taken(codeq.Task{Queue: "b", Unique: codeq.Unique{Key: "stored"}}, stored)
				l := p.Take("a")
				require.NotEqual(t, id, l.ID)
				p.Taken(task, l.ID)
			})
		})
	}
}

// TestFollowUpOfOwnKey: as long as its For goes on, a task that has just been
// completed is not replaced by its own follow-up.
func TestFollowUpOfOwnKey(t *testing.T) {
	t.Parallel()
	for _, replace := range []bool{false, true} {
		t.Run(fmt.Sprint("replace ", replace), func(t *testing.T) {
			throughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *codeq.Process) {
				ctx := context.Background()
				task := keyed("k")
				task.Unique.For, task.Unique.Replace = time.Hour, replace
				id := p.Store(task)
				p.Step()
				require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil, task))
				p.Step()
				require.Equal(t, codeq.Counts{}, countsOf(t, p.Queue, "a"))
				p.Taken(task, id)

				p.Pass(time.Hour)
				task.Unique.ReleaseOnComplete = true
				id = p.Store(task)
				p.Step()
				require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil, task))
				p.Step()
				require.Equal(t, codeq.Counts{Ready: 1}, countsOf(t, p.Queue, "a"))
				require.NotEqual(t, id, p.Take("a").ID)
			})
		})
	}
}

// TestUniqueRace: of many that produce the same key at the same time one
// stores it, and the others learn its ID.
func TestUniqueRace(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		for _, batch := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d shards, batch %t", shards, batch), func(t *testing.T) {
				throughSteps(t, codeq.Options{Shards: shards, GroupCap: 7}, func(t *testing.T, p *codeq.Process) {
					const callers, rounds = 64, 10
					for round := range rounds {
						task := keyed(fmt.Sprint(round))
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
					require.Equal(t, codeq.Counts{Ready: rounds}, countsOf(t, p.Queue, "a"))
				})
			})
		}
	}
}

// TestReplaceRace: tasks that replace each other while workers take them: none
// is lost, none is worked on twice, and the last one is worked on.
func TestReplaceRace(t *testing.T) {
	throughSteps(t, codeq.Options{Shards: 2, GroupCap: 5}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		const producers, each = 8, 50
		var producing, working sync.WaitGroup
		var produced, refused, worked atomic.Int64
		task := keyed("k")
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
		require.Equal(t, codeq.Counts{}, countsOf(t, p.Queue, "a"))
		require.Zero(t, p.Stored(keys.Unique))
	})
}

// TestUniqueClock: a clock that is set back keeps a key taken for longer, one
// that is set forward frees it early; never while its task lives.
func TestUniqueClock(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		task := keyed("k")
		task.Unique.For = 10 * time.Minute
		id := p.Store(task)
		p.Step()
		p.SetClock(time.Hour)
		p.Taken(task, id) // the task has not ended
		p.SetClock(-time.Hour)
		p.Step()
		p.Taken(task, id)
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		p.Step()
		require.Zero(t, p.Stored(keys.Unique), "its time had come once")

		p.Pass(time.Hour) // until the clock in the IDs, which does not go back, is right again
		id = p.Store(task)
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		p.Step()
		p.Taken(task, id)
		p.SetClock(-time.Hour)
		p.Step()
		p.Pass(70*time.Minute - time.Millisecond)
		p.Taken(task, id)
		p.Pass(time.Minute) // by then it has looked at the clock
		require.Zero(t, p.Stored(keys.Unique))

		id = p.Store(task)
		require.NoError(t, p.Cancel(ctx, id))
		p.Taken(task, id)
		p.SetClock(time.Hour)
		next := p.Store(task) // at once, also before it is cleared away
		require.NotEqual(t, id, next)
		p.Step()
		p.Pass(2 * time.Minute)
		p.Taken(task, next)
		require.Equal(t, 1, p.Stored(keys.Freed), "that of the second")

		require.NoError(t, p.Cancel(ctx, next))
		p.Taken(task, next)
		p.SetClock(time.Hour)
		p.Pass(time.Minute)
		require.Zero(t, p.Stored(keys.Unique))
		require.Zero(t, p.Stored(keys.Freed))
	})
}

// TestManyKeysBecomeFree: more at the same time than one group frees.
func TestManyKeysBecomeFree(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *codeq.Process) {
		n := engine.UpkeepBudget.Records + 10 // each is read, and its time and hash are deleted
		var batch []codeq.Task
		for i := range n {
			batch = append(batch, keyed(strconv.Itoa(i)))
			batch[i].Unique.For = time.Minute + time.Duration(i%3)*time.Millisecond
		}
		ids, err := p.ProduceBatch(context.Background(), batch)
		require.NoError(t, err)
		for _, id := range ids {
			require.NoError(t, p.Cancel(context.Background(), id))
		}
		p.Step()
		require.Equal(t, n, p.Stored(keys.Unique))
		p.Pass(time.Minute + 2*time.Millisecond)
		require.Zero(t, p.Stored(keys.Unique))
		require.Zero(t, p.Stored(keys.Freed))
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

// TestUniquePowerLoss: whatever a power loss leaves of producers, workers and
// cancels that contend for some keys, each task that has not ended has its key.
func TestUniquePowerLoss(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		disk := vfs.NewCrashableMem()
		var mu sync.Mutex // guards what follows
		rng := rand.New(rand.NewPCG(5, 6))
		chance := func(n int) int {
			mu.Lock()
			defer mu.Unlock()
			return rng.IntN(n)
		}
		var images []*vfs.MemFS
		var loaded bool
		fs := &testkit.HookFS{FS: disk, Before: func(op, _ string) error {
			mu.Lock()
			defer mu.Unlock()
			if loaded && (op == "write" || op == "sync") && len(images) < 30 && rng.IntN(30) == 0 {
				images = append(images, disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(101), RNG: rng}))
			}
			return nil
		}}
		opts := *onDisk(fs, &codeq.Options{Shards: 3, Durability: codeq.DurabilityDisk, GroupCap: 4})
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		mu.Lock()
		loaded = true
		mu.Unlock()
		task := func(key int) codeq.Task {
			task := keyed(strconv.Itoa(key))
			task.Unique.Replace = key%2 == 0
			task.Unique.For = time.Duration(key%3) * time.Millisecond
			return task
		}
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				for range 100 {
					id, err := q.Produce(ctx, task(chance(8)))
					if err != nil {
						require.ErrorIs(t, err, codeq.ErrDuplicate)
					}
					if chance(5) == 0 {
						if err := q.Cancel(ctx, id); err != nil {
							require.ErrorIs(t, err, codeq.ErrNotFound)
						}
					}
					time.Sleep(time.Duration(chance(2)) * time.Millisecond)
				}
			})
			wg.Go(func() {
				for range 60 {
					l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
					if err != nil {
						require.ErrorIs(t, err, codeq.ErrEmpty)
						time.Sleep(time.Millisecond)
						continue
					}
					switch chance(3) {
					case 0:
						err = q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: time.Millisecond})
					case 1:
						err = q.Complete(ctx, l.Receipt, nil, task(chance(8)))
					default:
						err = q.Complete(ctx, l.Receipt, nil)
					}
					if err != nil {
						require.ErrorIs(t, err, codeq.ErrCanceled)
					}
				}
			})
		}
		wg.Wait()
		require.NoError(t, q.Close())
		require.NotEmpty(t, images)
		living := 0
		for i, image := range images {
			hook.SetFS(&opts, image)
			q, err := codeq.Open("queue", &opts)
			require.NoError(t, err, i)
			synctest.Wait()
			require.NoError(t, checkAll(q), i)
			require.NoError(t, checkMemory(q), i)
			require.NoError(t, checkMemory(q), i)
			tasks, err := list(q)
			require.NoError(t, err)
			for id, info := range tasks {
				info.Unique.Replace = false
				_, err := q.Produce(ctx, info.Task)
				var duplicate *codeq.DuplicateError
				require.ErrorAs(t, err, &duplicate, i)
				require.Equal(t, id, duplicate.ID, i)
				living++
			}
			require.NoError(t, q.Close())
		}
		require.Positive(t, living)
	})
}
