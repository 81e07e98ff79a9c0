package codeq

import (
	"codeq/internal/dispatch"
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// requireSettled waits until nothing moves any more, and has every shard's disk
// and memory checked.
func requireSettled(t *testing.T, q *Queue) {
	t.Helper()
	synctest.Wait()
	require.NoError(t, q.checkAll())
	require.NoError(t, q.checkMemory())
}

// configure is Configure that has to succeed.
func configure(t *testing.T, q *Queue, queue string, change func(*Settings)) {
	t.Helper()
	require.NoError(t, q.Configure(context.Background(), queue, change))
}

// complete is Complete that has to succeed.
func complete(t *testing.T, q *Queue, l *Lease) {
	t.Helper()
	require.NotNil(t, l, "nothing to complete")
	require.NoError(t, q.Complete(context.Background(), l.Receipt, nil))
}

// named returns tasks that are like the given one and have the names as payloads.
func named(like Task, names ...string) []Task {
	tasks := make([]Task, len(names))
	for i, name := range names {
		tasks[i] = like
		tasks[i].Payload = []byte(name)
	}
	return tasks
}

// requireNext claims and completes tasks of a queue, which are to have these
// payloads, and then no further one.
func requireNext(t *testing.T, q *Queue, queue string, names ...string) {
	t.Helper()
	for _, name := range names {
		l := claimNow(t, q, queue)
		require.NotNil(t, l, "no task instead of %q", name)
		require.Equal(t, name, string(l.Payload))
		complete(t, q, l)
	}
	require.Nil(t, claimNow(t, q, queue))
}

// stateOf is the state in which a task is stored.
func stateOf(t *testing.T, q *Queue, id ID) State {
	t.Helper()
	info, err := q.Get(context.Background(), id)
	require.NoError(t, err)
	return info.State
}

// waitingClaim is a Claim under way.
func waitingClaim(t *testing.T, q *Queue, queue string) <-chan *Lease {
	got := make(chan *Lease, 1)
	go func() {
		if l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{queue}}); err == nil {
			got <- l
		}
	}()
	synctest.Wait()
	require.Empty(t, got, "the claim did not wait")
	return got
}

// imager keeps an image of a disk, as a power loss would leave it, after each
// commit of a shard.
type imager struct {
	committer
	disk   *vfs.MemFS
	images []*vfs.MemFS
}

func (c *imager) Commit(b *pebble.Batch) error {
	err := c.committer.Commit(b)
	c.images = append(c.images, c.disk.CrashClone(vfs.CrashCloneCfg{}))
	return err
}

// keepImages begins to keep images of the disk of a queue with one shard.
func keepImages(t *testing.T, q *Queue, disk *vfs.MemFS) *imager {
	im := &imager{disk: disk}
	require.NoError(t, q.shard(0).probe(func(s *shard) error {
		im.committer = s.commit
		s.commit = im
		return nil
	}))
	return im
}

// TestLimitKeyCanceledOnTheWay: a task that was let go on and is withdrawn
// before it is leased leaves its room to the next.
func TestLimitKeyCanceledOnTheWay(t *testing.T) {
	for name, withdraw := range map[string]func(q *Queue, id ID) error{
		"canceled": func(q *Queue, id ID) error { return q.Cancel(context.Background(), id) },
		"put off": func(q *Queue, id ID) error {
			return q.SetRunAt(context.Background(), id, time.Now().Add(time.Hour))
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
				configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 1 })
				ids := produce(t, q, named(Task{Queue: "a", LimitKey: "k"}, "1", "2", "3", "4")...)
				first := claimNow(t, q, "a")
				require.Nil(t, claimNow(t, q, "a"))
				complete(t, q, first)
				synctest.Wait()
				require.Equal(t, Ready, stateOf(t, q, ids[1]))
				require.Equal(t, Blocked, stateOf(t, q, ids[2]))
				require.NoError(t, withdraw(q, ids[1]))
				requireSettled(t, q)
				requireNext(t, q, "a", "3", "4")
			})
		})
	}
}

// TestLimitKeyCrashWhileParked: wherever a crash falls, those that wait for
// room get it in the end, in their order.
func TestLimitKeyCrashWhileParked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := vfs.NewCrashableMem()
		opts := Options{Durability: DurabilityDisk, fs: disk}
		q := openForRun(t, opts)
		configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 1 })
		names := []string{"0", "1", "2", "3", "4"}
		produce(t, q, named(Task{Queue: "a", LimitKey: "k"}, names...)...)
		im := keepImages(t, q, disk)
		for l := claimNow(t, q, "a"); l != nil; l = claimNow(t, q, "a") {
			require.Nil(t, claimNow(t, q, "a"), "one at a time")
			complete(t, q, l)
			requireSettled(t, q)
		}
		require.GreaterOrEqual(t, len(im.images), 3*len(names))
		for i, image := range im.images {
			opts.fs = image
			q := openForRun(t, opts)
			requireSettled(t, q)
			time.Sleep(time.Minute) // leases expire
			requireSettled(t, q)
			counts, err := q.Stats(t.Context())
			require.NoError(t, err)
			left := names[len(names)-int(counts["a"].Total()):]
			requireNext(t, q, "a", left...)
			requireSettled(t, q)
			require.NoError(t, q.Close(), "image %d", i)
		}
	})
}

// hammer has workers claim tasks of a queue and end each lease one way or the
// other until as many are completed, and watches how many leases there are.
// It returns the largest number by key.
func hammer(t *testing.T, q *Queue, queue string, workers, tasks int, key func(*Lease) string) map[string]int {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var (
		mu        sync.Mutex
		completed int
		held      = make(map[string]int)
		most      = make(map[string]int)
		all       sync.WaitGroup
	)
	for range workers {
		all.Go(func() {
			for n := 0; ; n++ {
				l, err := q.Claim(ctx, ClaimRequest{Queues: []string{queue}, LeaseFor: 50 * time.Millisecond})
				if err != nil {
					return
				}
				k := key(l)
				mu.Lock()
				held[k]++
				most[k] = max(most[k], held[k])
				mu.Unlock()
				time.Sleep(time.Duration(n%3+1) * time.Millisecond)
				mu.Lock()
				held[k]-- // before the end of the lease, which others may see at once
				mu.Unlock()
				switch n % 8 {
				case 5:
					err = q.Retry(context.Background(), l.Receipt, RetryOptions{After: -1})
				case 6:
					err = q.Release(context.Background(), l.Receipt, time.Millisecond)
				case 7:
					time.Sleep(100 * time.Millisecond) // it expires
				default:
					err = q.Complete(context.Background(), l.Receipt, nil)
					mu.Lock()
					if completed++; completed == tasks {
						stop()
					}
					mu.Unlock()
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	return most
}

// forShards runs a test in fake time for queues of one shard and of three.
func forShards(t *testing.T, test func(t *testing.T, q *Queue)) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			bubble(t, Options{Shards: shards, MaxAttempts: 1000, WindowTasks: 8}, test)
		})
	}
}

// TestQueueConcurrency: a queue never has more leases than it may, however many
// workers there are, and makes use of them all.
func TestQueueConcurrency(t *testing.T) {
	forShards(t, func(t *testing.T, q *Queue) {
		const tasks, limit = 300, 5
		configure(t, q, "a", func(s *Settings) { s.Concurrency = limit })
		for range tasks {
			produce(t, q, Task{Queue: "a"}, Task{Queue: "b"})
		}
		most := hammer(t, q, "a", 16, tasks, func(*Lease) string { return "" })
		require.Equal(t, limit, most[""])
		requireSettled(t, q)

		batch, err := q.ClaimBatch(t.Context(), ClaimRequest{Queues: []string{"b"}, Max: tasks})
		require.NoError(t, err)
		require.Greater(t, len(batch), limit, "another queue")
	})
}

// TestConcurrencyWakes: a claim that waits is served at the moment at which
// there is room, whatever makes it.
func TestConcurrencyWakes(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct {
		name string
		end  func(t *testing.T, q *Queue, l *Lease) error
	}{
		{"complete", func(_ *testing.T, q *Queue, l *Lease) error { return q.Complete(ctx, l.Receipt, nil) }},
		{"retry", func(_ *testing.T, q *Queue, l *Lease) error { return q.Retry(ctx, l.Receipt, RetryOptions{}) }},
		{"release", func(_ *testing.T, q *Queue, l *Lease) error { return q.Release(ctx, l.Receipt, time.Hour) }},
		{"dead letter", func(_ *testing.T, q *Queue, l *Lease) error { return q.DeadLetter(ctx, l.Receipt, nil) }},
		{"cancel", func(_ *testing.T, q *Queue, l *Lease) error { return q.Cancel(ctx, l.ID) }},
		{"raised", func(_ *testing.T, q *Queue, _ *Lease) error {
			return q.Configure(ctx, "a", func(s *Settings) { s.Concurrency = 2 })
		}},
		{"removed", func(_ *testing.T, q *Queue, _ *Lease) error {
			return q.Configure(ctx, "a", func(s *Settings) { s.Concurrency = 0 })
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			forShards(t, func(t *testing.T, q *Queue) {
				configure(t, q, "a", func(s *Settings) { s.Concurrency = 1 })
				for range 9 {
					produce(t, q, Task{Queue: "a"})
				}
				l := claimNow(t, q, "a")
				require.Nil(t, claimNow(t, q, "a"))
				first, second := waitingClaim(t, q, "a"), waitingClaim(t, q, "a")
				requireSettled(t, q)
				require.NoError(t, c.end(t, q, l))
				synctest.Wait()
				require.Len(t, first, 1, "first come, first served")
				if c.name == "removed" {
					require.Len(t, second, 1)
				} else {
					require.Empty(t, second)
				}
				requireSettled(t, q)
			})
		})
	}
	t.Run("expiry", func(t *testing.T) {
		forShards(t, func(t *testing.T, q *Queue) {
			configure(t, q, "a", func(s *Settings) { s.Concurrency = 1 })
			for range 9 {
				produce(t, q, Task{Queue: "a"})
			}
			l := claimNow(t, q, "a")
			got := waitingClaim(t, q, "a")
			begin := time.Now()
			<-got
			require.Equal(t, l.Deadline, time.Now())
			require.Greater(t, time.Since(begin), 10*time.Second)
			requireSettled(t, q)
		})
	})
}

// TestConcurrencyLowered: no lease is taken away, and none granted before there
// is room below the new limit.
func TestConcurrencyLowered(t *testing.T) {
	forShards(t, func(t *testing.T, q *Queue) {
		for range 20 {
			produce(t, q, Task{Queue: "a"})
		}
		var held []*Lease
		for range 4 { // before there is any limit
			held = append(held, claimNow(t, q, "a"))
		}
		configure(t, q, "a", func(s *Settings) { s.Concurrency = 5 })
		held = append(held, claimNow(t, q, "a"))
		require.NotNil(t, held[4])
		require.Nil(t, claimNow(t, q, "a"), "leases that are older than the limit count")

		configure(t, q, "a", func(s *Settings) { s.Concurrency = 2 })
		for i := range 3 {
			require.Nil(t, claimNow(t, q, "a"), "%d leases", 5-i)
			require.NoError(t, q.Extend(t.Context(), held[i].Receipt, time.Hour), "a lease was taken away")
			complete(t, q, held[i])
		}
		require.Nil(t, claimNow(t, q, "a"))
		complete(t, q, held[3])
		require.NotNil(t, claimNow(t, q, "a"))
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
	})
}

// TestConcurrencyBatch: a batch takes no more than there is room for.
func TestConcurrencyBatch(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.Concurrency = 3 })
		produce(t, q, named(Task{Queue: "a"}, "1", "2", "3", "4", "5")...)
		batch, err := q.ClaimBatch(t.Context(), ClaimRequest{Queues: []string{"a"}, Max: 5})
		require.NoError(t, err)
		require.Len(t, batch, 3)
		complete(t, q, batch[1])
		batch, err = q.ClaimBatch(t.Context(), ClaimRequest{Queues: []string{"a"}, Max: 5})
		require.NoError(t, err)
		require.Len(t, batch, 1)
		requireSettled(t, q)
	})
}

// TestConcurrencyRestart: leases from before a restart count against the limit.
func TestConcurrencyRestart(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			opts := Options{Shards: shards, fs: vfs.NewMem()}
			q := openForRun(t, opts)
			configure(t, q, "a", func(s *Settings) { s.Concurrency = 2 })
			for range 20 {
				produce(t, q, Task{Queue: "a"})
			}
			first := claimNow(t, q, "a")
			require.NotNil(t, claimNow(t, q, "a"))
			require.NoError(t, q.Close())

			q = openForRun(t, opts)
			requireSettled(t, q)
			require.Nil(t, claimNow(t, q, "a"))
			complete(t, q, first)
			require.NotNil(t, claimNow(t, q, "a"))
			require.Nil(t, claimNow(t, q, "a"))
			requireSettled(t, q)
		})
	}
}

// TestConcurrencyPerKey: no key has more leases than it may while workers take
// all they can get, and each makes use of its limit.
func TestConcurrencyPerKey(t *testing.T) {
	forShards(t, func(t *testing.T, q *Queue) {
		const tasks, limit, keys = 300, 3, 5
		configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = limit })
		for i := range tasks {
			produce(t, q, Task{Queue: "a", LimitKey: fmt.Sprint("key ", i%keys), Priority: i % 2})
		}
		most := hammer(t, q, "a", 24, tasks, func(l *Lease) string { return l.LimitKey })
		require.Len(t, most, keys)
		for key, n := range most {
			require.Equal(t, limit, n, key)
		}
		requireSettled(t, q)
		for _, s := range q.led() {
			require.NoError(t, s.probe(func(s *shard) error {
				require.Zero(t, s.Probe().Usage().Limits)
				return nil
			}))
		}
	})
}

// TestLimitKeyParks: tasks without room step aside, so that others get past
// them, and come back in the order in which they were produced.
func TestLimitKeyParks(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 2 })
		ids := produce(t, q, named(Task{Queue: "a", LimitKey: "k"}, "1", "2", "3", "4", "5")...)
		other := produce(t, q, named(Task{Queue: "a", LimitKey: "other"}, "other")...)[0]
		free := produce(t, q, named(Task{Queue: "a"}, "free")...)[0]
		elsewhere := produce(t, q, named(Task{Queue: "b", LimitKey: "k"}, "elsewhere", "elsewhere", "elsewhere")...)

		var held []*Lease
		for range 4 {
			held = append(held, claimNow(t, q, "a"))
		}
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
		for i, want := range []ID{ids[0], ids[1], other, free} {
			require.Equal(t, want, held[i].ID)
		}
		for _, id := range ids[2:] {
			require.Equal(t, Blocked, stateOf(t, q, id))
		}
		for i := range elsewhere {
			require.Equal(t, elsewhere[i], claimNow(t, q, "b").ID, "another queue has no limit")
		}

		complete(t, q, held[2]) // no room for k
		require.Nil(t, claimNow(t, q, "a"))
		got := waitingClaim(t, q, "a")
		complete(t, q, held[1])
		require.Equal(t, ids[2], (<-got).ID)
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
		complete(t, q, held[0])
		requireNext(t, q, "a", "4", "5")
		requireSettled(t, q)
	})
}

// TestLimitKeyAbsent: without the setting, keys limit nothing.
func TestLimitKeyAbsent(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		produce(t, q, named(Task{Queue: "a", LimitKey: "k"}, "1", "2", "3")...)
		first := claimNow(t, q, "a")
		require.NotNil(t, claimNow(t, q, "a"))
		requireSettled(t, q)

		configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 2 })
		require.Nil(t, claimNow(t, q, "a"), "leases that are older than the limit count")
		complete(t, q, first)
		requireNext(t, q, "a", "3")
		requireSettled(t, q)
	})
}

// TestLimitKeyChanged: while tasks are parked, a higher limit lets as many go
// on as it has room for, none lets all go on, and a lower one has its way once
// leases have ended.
func TestLimitKeyChanged(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		limit := func(n int) { configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = n }) }
		next := func(want string) *Lease {
			t.Helper()
			l := claimNow(t, q, "a")
			require.NotNil(t, l)
			require.Equal(t, want, string(l.Payload))
			return l
		}
		limit(1)
		produce(t, q, named(Task{Queue: "a", LimitKey: "k"}, "1", "2", "3", "4", "5", "6", "7", "8")...)
		held := []*Lease{next("1")}
		require.Nil(t, claimNow(t, q, "a"))

		waiting := waitingClaim(t, q, "a")
		limit(3)
		synctest.Wait()
		require.Len(t, waiting, 1)
		held = append(held, <-waiting, next("3"))
		require.Equal(t, "2", string(held[1].Payload))
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)

		limit(2)
		requireSettled(t, q)
		complete(t, q, held[0])
		require.Nil(t, claimNow(t, q, "a"))
		complete(t, q, held[1])
		next("4")
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)

		limit(0)
		requireSettled(t, q)
		counts, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 4, counts["a"].Ready)
		requireNext(t, q, "a", "5", "6", "7", "8")
		requireSettled(t, q)
	})
}

// TestLimitKeyManyParked: more tasks than a group can park or let go on.
func TestLimitKeyManyParked(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 1 })
		const n = 3000
		tasks := make([]Task, n, n+1)
		for i := range tasks {
			tasks[i] = Task{Queue: "a", LimitKey: "k", Payload: make([]byte, 1000)}
		}
		ids, err := q.ProduceBatch(t.Context(), append(tasks, Task{Queue: "a", Payload: []byte("behind")}))
		require.NoError(t, err)
		require.Equal(t, ids[0], claimNow(t, q, "a").ID)
		require.Equal(t, "behind", string(claimNow(t, q, "a").Payload), "a claim that does not wait")
		requireSettled(t, q)
		counts, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, n-1, counts["a"].Blocked)

		configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 0 })
		requireSettled(t, q)
		batch, err := q.ClaimBatch(t.Context(), ClaimRequest{Queues: []string{"a"}, Max: n})
		require.NoError(t, err)
		require.Len(t, batch, n-1)
		for i, l := range batch {
			require.Equal(t, ids[i+1], l.ID)
		}
		requireSettled(t, q)
	})
}

// TestClaimThatParksManyDelaysNoOther: what is put off to the next group gets on, however long
// a claim that comes before it looks for a task.
func TestClaimThatParksManyDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := Options{Shards: 1, fs: vfs.NewMem(), groupBytes: 4 << 10}
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 1 })
		const n = 3000
		tasks := slices.Repeat([]Task{{Queue: "a", LimitKey: "k", Payload: make([]byte, 100)}}, n)
		_, err = q.ProduceBatch(t.Context(), append(tasks, Task{Queue: "b"}))
		require.NoError(t, err)
		require.NoError(t, q.Close())
		q, err = Open("queue", &opts) // the windows are empty
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		s := q.led()[0]
		require.NotNil(t, claimNow(t, q, "a"))
		groups, found := 0, 0
		require.NoError(t, s.probe(func(s *shard) error {
			s.commit = committing{s.commit, func() {
				if groups++; found == 0 && s.Queues["b"].Counts.Leased > 0 {
					found = groups
				}
			}}
			return nil
		}))
		goOn := standStill(s)
		var claims sync.WaitGroup
		for _, queue := range []string{"a", "b"} {
			claims.Go(func() { claimNow(t, q, queue) })
			synctest.Wait()
		}
		goOn()
		claims.Wait()
		synctest.Wait()
		require.Greater(t, groups, 50, "the other claim parks tasks in many groups")
		require.NotZero(t, found)
		require.Less(t, found, 10)
	})
}

// committing calls a function before each commit.
type committing struct {
	committer
	before func()
}

func (c committing) Commit(b *pebble.Batch) error {
	c.before()
	return c.committer.Commit(b)
}

// TestLimitKeyRestart: parked tasks go on after a restart, when the lease that
// they wait for ends, or at once if there is none any more.
func TestLimitKeyRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := Options{fs: vfs.NewMem()}
		q := openForRun(t, opts)
		configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 1 })
		produce(t, q, named(Task{Queue: "a", LimitKey: "k"}, "1", "2", "3", "4")...)
		first := claimNow(t, q, "a")
		require.Nil(t, claimNow(t, q, "a"))
		require.NoError(t, q.Close())

		q = openForRun(t, opts)
		requireSettled(t, q)
		require.Nil(t, claimNow(t, q, "a"))
		complete(t, q, first) // the second is let go on
		requireSettled(t, q)
		require.NoError(t, q.Close())

		q = openForRun(t, opts)
		requireSettled(t, q)
		l := claimNow(t, q, "a")
		require.Equal(t, "2", string(l.Payload))
		require.Nil(t, claimNow(t, q, "a"))
		time.Sleep(time.Minute) // it expires
		requireSettled(t, q)
		requireNext(t, q, "a", "2", "3", "4")
		requireSettled(t, q)
	})
}

// timesOfClaims makes as many claims at a time, and returns when they were served,
// counted from the beginning. It completes what they get.
func timesOfClaims(t *testing.T, q *Queue, queue string, claims int) []time.Duration {
	begin := time.Now()
	got := make(chan time.Duration, claims)
	for range claims {
		go func() {
			l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{queue}})
			if err == nil {
				got <- time.Since(begin)
				_ = q.Complete(context.Background(), l.Receipt, nil)
			}
		}()
	}
	times := make([]time.Duration, claims)
	for i := range times {
		times[i] = <-got
	}
	return times
}

// every returns n times, of which the first burst are 0 and the others follow
// at intervals.
func every(interval time.Duration, burst, n int) []time.Duration {
	times := make([]time.Duration, n)
	for i := burst; i < n; i++ {
		times[i] = time.Duration(i-burst+1) * interval
	}
	return times
}

// TestRate: claims that wait are served on time, in one shard or several.
func TestRate(t *testing.T) {
	forShards(t, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.Rate, s.Burst = 10, 3 })
		for range 60 {
			produce(t, q, Task{Queue: "a"})
		}
		require.Equal(t, every(100*time.Millisecond, 3, 10), timesOfClaims(t, q, "a", 10))
		requireSettled(t, q)

		time.Sleep(10 * time.Second) // no more than the burst gathers
		require.Equal(t, every(100*time.Millisecond, 3, 10), timesOfClaims(t, q, "a", 10))

		configure(t, q, "a", func(s *Settings) { s.Rate, s.Burst = 2.5, 1 })
		require.Equal(t, every(400*time.Millisecond, 0, 5), timesOfClaims(t, q, "a", 5))
		time.Sleep(10 * time.Second)
		require.Equal(t, every(400*time.Millisecond, 1, 5), timesOfClaims(t, q, "a", 5), "the lower burst")
		requireSettled(t, q)
	})
}

// TestRateNoWait: a claim that does not wait gets ErrEmpty while there is no
// token, and a batch as many tasks as there are tokens.
func TestRateNoWait(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.Rate = 3.5 }) // and so a burst of 4
		for range 20 {
			produce(t, q, Task{Queue: "a"})
		}
		batch, err := q.ClaimBatch(t.Context(), ClaimRequest{Queues: []string{"a"}, Max: 20})
		require.NoError(t, err)
		require.Len(t, batch, 4)
		require.Nil(t, claimNow(t, q, "a"))
		time.Sleep(285 * time.Millisecond)
		require.Nil(t, claimNow(t, q, "a"))
		time.Sleep(time.Millisecond)
		require.NotNil(t, claimNow(t, q, "a"))
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
	})
}

// countedGate counts how often claims come to a gate.
type countedGate struct {
	dispatch.Gateway
	looks *atomic.Int64
}

func (g countedGate) Look(d *dispatch.Dispatcher, now time.Time) (bool, time.Duration) {
	g.looks.Add(1)
	return g.Gateway.Look(d, now)
}

// TestRatesOfManyQueues: when the rate of one queue lets a claim pass, nobody looks at those of the others.
func TestRatesOfManyQueues(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		const queues = 100
		var looks atomic.Int64
		name := func(i int) string { return fmt.Sprint("q", i) }
		for i := range queues {
			configure(t, q, name(i), func(s *Settings) { s.Rate, s.Burst = 1/float64(i+1), 1 })
			require.NoError(t, q.led()[0].probe(func(s *shard) error {
				s.setGate(name(i), countedGate{s.claims.Of(s.Queues[name(i)]).Gateway(), &looks})
				return nil
			}))
			produce(t, q, Task{Queue: name(i)}, Task{Queue: name(i)})
			require.NotNil(t, claimNow(t, q, name(i)))
		}
		served := make(chan *Lease, queues)
		for i := range queues {
			go func() {
				l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{name(i)}})
				if err == nil {
					served <- l
				}
			}()
		}
		synctest.Wait()
		before := looks.Load()
		time.Sleep(2 * queues * time.Second)
		require.Len(t, served, queues)
		require.LessOrEqual(t, looks.Load()-before, int64(4*queues))
	})
}

// TestRateOfNearlyNothing: a wait that is longer than any time there is does not
// become a short one.
func TestRateOfNearlyNothing(t *testing.T) {
	for _, rate := range []float64{1e-9, 1e-12, math.SmallestNonzeroFloat64} {
		bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
			configure(t, q, "a", func(s *Settings) { s.Rate = rate })
			produce(t, q, Task{Queue: "a"}, Task{Queue: "a"})
			require.NotNil(t, claimNow(t, q, "a"), "the burst")
			got := waitingClaim(t, q, "a")
			requireSettled(t, q)
			time.Sleep(2 * maxLease)
			require.Empty(t, got)
			configure(t, q, "a", func(s *Settings) { s.Rate = 0 })
			synctest.Wait()
			require.Len(t, got, 1)
		})
	}
}

// TestRateChanged: claims that wait go by the new rate at once.
func TestRateChanged(t *testing.T) {
	forShards(t, func(t *testing.T, q *Queue) {
		for range 20 {
			produce(t, q, Task{Queue: "a"})
		}
		rate := func(r float64) { configure(t, q, "a", func(s *Settings) { s.Rate, s.Burst = r, 1 }) }
		rate(0.001)
		require.NotNil(t, claimNow(t, q, "a"))
		first, second, third := waitingClaim(t, q, "a"), waitingClaim(t, q, "a"), waitingClaim(t, q, "a")
		rate(10)
		begin := time.Now()
		<-first
		require.Equal(t, 100*time.Millisecond, time.Since(begin))
		rate(0.5)
		<-second
		require.Equal(t, 2100*time.Millisecond, time.Since(begin))
		require.Empty(t, third)
		rate(0)
		synctest.Wait()
		require.Len(t, third, 1, "no rate any more")
		for range 10 {
			require.NotNil(t, claimNow(t, q, "a"))
		}
		requireSettled(t, q)
	})
}

// TestRateRestart: the bucket is empty after Open, so that restarts do not add up
// to more than the rate.
func TestRateRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := Options{Shards: 2, fs: vfs.NewMem()}
		q := openForRun(t, opts)
		configure(t, q, "a", func(s *Settings) { s.Rate, s.Burst = 4, 4 })
		for range 20 {
			produce(t, q, Task{Queue: "a"})
		}
		require.NoError(t, q.Close())
		for range 3 {
			q = openForRun(t, opts)
			require.Nil(t, claimNow(t, q, "a"))
			require.Equal(t, every(250*time.Millisecond, 0, 3), timesOfClaims(t, q, "a", 3))
			requireSettled(t, q)
			require.NoError(t, q.Close())
		}
	})
}

// TestRateAndConcurrency: a place that is refused for want of a token, or a
// token for want of a place, is not spent.
func TestRateAndConcurrency(t *testing.T) {
	forShards(t, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.Rate, s.Burst, s.Concurrency = 1, 2, 1 })
		for range 10 {
			produce(t, q, Task{Queue: "a"})
		}
		l := claimNow(t, q, "a")
		for range 5 {
			require.Nil(t, claimNow(t, q, "a"), "no place")
		}
		complete(t, q, l)
		l = claimNow(t, q, "a")
		require.NotNil(t, l, "the second token")
		complete(t, q, l)
		for range 5 {
			require.Nil(t, claimNow(t, q, "a"), "no token")
		}
		time.Sleep(time.Second)
		require.NotNil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
	})
}

// TestPausedTakesNoRoom: who waits for a paused queue is served when it resumes.
func TestPausedTakesNoRoom(t *testing.T) {
	forShards(t, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.Concurrency, s.Rate, s.Burst = 1, 1, 1 })
		produce(t, q, Task{Queue: "a"})
		require.NoError(t, q.Pause(t.Context(), "a"))
		got := waitingClaim(t, q, "a")
		requireSettled(t, q)
		require.NoError(t, q.Resume(t.Context(), "a"))
		synctest.Wait()
		require.Len(t, got, 1)
		requireSettled(t, q)
	})
}

// TestClosedGateRefillsNothing: claims that wait at a limit of concurrency leave
// the shard asleep, also when the windows of the lanes evict each other.
func TestClosedGateRefillsNothing(t *testing.T) {
	bubble(t, Options{Shards: 1, WindowTasks: 2, WindowBytes: 1}, func(t *testing.T, q *Queue) {
		for _, tenant := range []string{"x", "y"} {
			for range 6 {
				produce(t, q, Task{Queue: "a", Tenant: tenant})
			}
		}
		configure(t, q, "a", func(s *Settings) { s.Concurrency = 2 })
		claimNow(t, q, "a")
		l := claimNow(t, q, "a")
		got := make(chan *Lease, 1)
		go func() {
			l, err := q.Claim(context.Background(), ClaimRequest{Queues: []string{"a"}})
			if err == nil {
				got <- l
			}
		}()
		require.True(t, fallsAsleep(q.shard(0)), "the shard never sleeps")
		require.NoError(t, q.Complete(context.Background(), l.Receipt, nil))
		next := <-got
		require.True(t, fallsAsleep(q.shard(0)))
		require.NoError(t, q.Complete(context.Background(), next.Receipt, nil))
		requireSettled(t, q)
	})
}

// fallsAsleep reports whether a shard comes to rest, and stays there while others
// have their turn: synctest.Wait would not return if it did not.
func fallsAsleep(s *shard) bool {
	asleep := 0
	for range 200_000 {
		runtime.Gosched()
		s.inbox.mu.Lock()
		if s.inbox.sleeping && len(s.inbox.ops) == 0 {
			asleep++
		} else {
			asleep = 0
		}
		s.inbox.mu.Unlock()
		if asleep == 100 {
			return true
		}
	}
	return false
}

// TestLimitIsForgotten: nothing is held for a key without leases when the last
// task that waited for room is canceled.
func TestLimitIsForgotten(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 1 })
		ids := produce(t, q, Task{Queue: "a", LimitKey: "k"}, Task{Queue: "a", LimitKey: "k"}, Task{Queue: "a", LimitKey: "k"})
		l := claimNow(t, q, "a")
		require.Nil(t, claimNow(t, q, "a"), "the others wait for room")
		complete(t, q, l)
		requireSettled(t, q) // the second is ready, the third waits
		require.NoError(t, q.Cancel(t.Context(), ids[2]))
		requireSettled(t, q)
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			require.Zero(t, s.Probe().Usage().Limits)
			return nil
		}))
	})
}
