package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/call"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/store"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// catalogueSize is the numbers of lanes, queues and counters of a shard on disk, of its lanes and
// queues in memory, and of its finished sweeps.
type catalogueSize struct{ lanes, queues, counters, lanesInMemory, queuesInMemory, sweeps int }

func sizeOfCatalogue(t *testing.T, q *codeq.Queue, shard int) (size catalogueSize) {
	t.Helper()
	require.NoError(t, inspect.Of(q).Owner(shard, func(s *inspect.Owner) error {
		u := s.Rules.Probe().Usage()
		size.lanesInMemory, size.queuesInMemory, size.sweeps = u.Lanes, len(s.Rules.Names.Queues), int(u.LaneSweeps)
		return nil
	}))
	for prefix, n := range map[byte]*int{keys.Lane: &size.lanes, keys.Queue: &size.queues, keys.Counters: &size.counters} {
		*n = queuetest.StoredIn(t, q, shard, prefix)
	}
	return size
}

// TestForgottenQueuesLeaveNothing: a new queue that takes the place of a forgotten one in memory
// has its own settings and claims, even if the last change of the forgotten queue was a cancel.
func TestForgottenQueuesLeaveNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := codeq.Open("queue", inspect.With(&codeq.Options{Shards: 2}, inspect.Private{FS: crashfs.New(), IdleLanes: 1}))
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		ctx := t.Context()
		for i := range 16 {
			require.NoError(t, q.Cancel(ctx, queuetest.Produce(t, q, codeq.Task{Queue: fmt.Sprint("canceled ", i)})[0]))
			for range 4 { // groups
				_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"never"}, NoWait: true})
				require.ErrorIs(t, err, codeq.ErrEmpty)
			}
		}
		synctest.Wait()
		require.NoError(t, queuetest.CheckMemory(q))
		for i := range 8 {
			name := fmt.Sprint("limited ", i)
			require.NoError(t, q.Configure(ctx, name, func(s *codeq.Settings) { s.Concurrency = 1 }))
			leased := make(chan error)
			for range 2 {
				go func() {
					_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{name}})
					leased <- err
				}()
			}
			synctest.Wait() // both of them wait
			queuetest.Produce(t, q, codeq.Task{Queue: name}, codeq.Task{Queue: name}, codeq.Task{Queue: name})
			require.NoError(t, <-leased, name)
			synctest.Wait()
			select {
			case err := <-leased:
				t.Fatal("more leases than the queue allows at once", name, err)
			default:
			}
			require.NoError(t, q.Configure(ctx, name, func(s *codeq.Settings) { s.Concurrency = 2 }))
			require.NoError(t, <-leased, name)
			synctest.Wait()
			require.NoError(t, queuetest.CheckMemory(q))
		}
	})
}

// TestQueuesComeAndGo: queues and tenants that are used once leave memory and disk with all of
// their entries, and the other queues keep theirs.
func TestQueuesComeAndGo(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		opts := *inspect.With(&codeq.Options{Shards: 1}, inspect.Private{FS: crashfs.New(), IdleLanes: 8, SweepLanes: 64})
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		ctx := context.Background()

		// The tasks that stay, in every kind of storage.
		kept := queuetest.Produce(t, q, codeq.Task{Queue: "kept", Tenant: "t", Retention: codeq.Forever, Payload: []byte("kept")})[0]
		require.NoError(t, q.Complete(ctx, queuetest.ClaimNow(t, q, "kept").Receipt, []byte("result")))
		later := queuetest.Produce(t, q, codeq.Task{Queue: "later", Tenant: "t", Payload: []byte("later"), RunAt: time.Now().Add(time.Hour)})[0]
		parent := queuetest.Produce(t, q, codeq.Task{Queue: "parent", RunAt: time.Now().Add(time.Hour)})[0]
		child := queuetest.Produce(t, q, codeq.Task{Queue: "child", After: []codeq.ID{parent}})[0]
		held := codeq.Task{Queue: "unique", Unique: codeq.Unique{Key: "k", For: 24 * time.Hour}}
		holder := queuetest.Produce(t, q, held)[0]
		require.NoError(t, q.Complete(ctx, queuetest.ClaimNow(t, q, "unique").Receipt, nil))
		dead := queuetest.Produce(t, q, codeq.Task{Queue: "dead", MaxAttempts: 1})[0]
		require.NoError(t, q.Retry(ctx, queuetest.ClaimNow(t, q, "dead").Receipt, codeq.RetryOptions{}))
		require.NoError(t, q.Pause(ctx, "paused"))

		const rounds = 3000
		var gone []codeq.ID
		for i := range rounds {
			task := codeq.Task{Queue: fmt.Sprint("brief ", i), Tenant: fmt.Sprint(i % 3), Priority: i % 2}
			gone = append(gone, queuetest.Produce(t, q, task)...)
			l := queuetest.ClaimNow(t, q, task.Queue)
			require.Equal(t, gone[i], l.ID)
			require.NoError(t, q.Complete(ctx, l.Receipt, nil))
			if i%16 == 15 {
				synctest.Wait() // for a sweep, which no call waits for, however many queues come and go
			}
			if i%500 == 499 {
				synctest.Wait()
				require.NoError(t, queuetest.CheckAll(q))
				require.NoError(t, queuetest.CheckMemory(q))
			}
			if i == rounds/2 {
				require.NoError(t, q.Close())
				q, err = codeq.Open("queue", &opts)
				require.NoError(t, err)
			}
		}
		synctest.Wait()
		size := sizeOfCatalogue(t, q, 0)
		t.Logf("%+v", size)
		require.LessOrEqual(t, size.lanesInMemory, inspect.Options(&opts).IdleLanes+8)
		require.LessOrEqual(t, size.queuesInMemory, inspect.Options(&opts).IdleLanes+8)
		require.Greater(t, size.sweeps, rounds/1000)
		for _, n := range []int{size.lanes, size.queues, size.counters} {
			require.LessOrEqual(t, n, 3*inspect.Options(&opts).SweepLanes)
		}

		for _, id := range gone {
			_, err := q.Get(ctx, id)
			require.ErrorIs(t, err, codeq.ErrNotFound)
		}
		for _, id := range gone[:200] { // other lanes have had the numbers of their lanes since
			require.ErrorIs(t, q.Cancel(ctx, id), codeq.ErrNotFound)
			require.ErrorIs(t, q.Complete(ctx, codeq.Receipt{ID: id, Token: 1}, nil), codeq.ErrLeaseLost)
		}
		info, err := q.Get(ctx, kept)
		require.NoError(t, err)
		require.Equal(t, "kept|t|kept|result", fmt.Sprintf("%s|%s|%s|%s", info.Queue, info.Tenant, info.Payload, info.Result))
		for id, state := range map[codeq.ID]codeq.State{later: codeq.Scheduled, child: codeq.Blocked, dead: codeq.Dead} {
			info, err = q.Get(ctx, id)
			require.NoError(t, err)
			require.Equal(t, state, info.State)
		}
		id, err := q.Produce(ctx, held)
		require.ErrorIs(t, err, codeq.ErrDuplicate)
		require.Equal(t, holder, id)
		stats, err := q.Stats(ctx)
		require.NoError(t, err)
		require.Equal(t, map[string]codeq.Counts{
			"kept": {Done: 1}, "later": {Scheduled: 1}, "parent": {Scheduled: 1}, "child": {Blocked: 1}, "dead": {Dead: 1}, "paused": {},
		}, stats)

		// A waiting task comes under the present number of its lane, in order.
		now := queuetest.Produce(t, q, codeq.Task{Queue: "later", Tenant: "t"})[0]
		time.Sleep(2 * time.Hour)
		require.Equal(t, now, queuetest.ClaimNow(t, q, "later").ID)
		l := queuetest.ClaimNow(t, q, "later")
		require.Equal(t, later, l.ID)
		require.Equal(t, "later|t|later", fmt.Sprintf("%s|%s|%s", l.Queue, l.Tenant, l.Payload))
		require.NoError(t, q.Complete(ctx, queuetest.ClaimNow(t, q, "parent").Receipt, nil))
		require.Equal(t, child, queuetest.ClaimNow(t, q, "child").ID)
		synctest.Wait()
		require.NoError(t, queuetest.CheckAll(q))
		require.NoError(t, queuetest.CheckMemory(q))
	})
}

// TestClockOutlivesItsQueue: when the counters with the clock of a shard are removed, the shard
// keeps the clock in another place.
func TestClockOutlivesItsQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ahead := time.Hour
		opts := *inspect.With(&codeq.Options{Shards: 1}, inspect.Private{FS: crashfs.New(), IdleLanes: 1, SweepLanes: 1})
		inspect.Options(&opts).Wall = func() time.Time { return time.Now().Add(ahead) }
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		var last codeq.ID
		for i := range 100 {
			last = queuetest.Produce(t, q, codeq.Task{Queue: fmt.Sprint(i)})[0]
			require.NoError(t, q.Complete(t.Context(), queuetest.ClaimNow(t, q, fmt.Sprint(i)).Receipt, nil))
			synctest.Wait()
		}
		require.Less(t, sizeOfCatalogue(t, q, 0).counters, 10)
		require.NoError(t, q.Close())
		ahead = 0
		q, err = codeq.Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		next := queuetest.Produce(t, q, codeq.Task{Queue: "next"})[0]
		require.Greater(t, next.String(), last.String())
	})
}

// TestQueuesWithWakeupsAreForgotten: queues with wakeups stay until the last wakeup is applied, and
// then leave memory. This holds even if their tasks end before, if wakeups are on disk only, and if
// a load finds one of their lanes under two numbers.
func TestQueuesWithWakeupsAreForgotten(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const children = 10_000
		opts := *inspect.With(&codeq.Options{Shards: 1}, inspect.Private{FS: crashfs.New(), IdleLanes: 1})
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		parent := queuetest.Produce(t, q, codeq.Task{Queue: "parent", MaxAttempts: 1})[0]
		var ids []codeq.ID
		for len(ids) < children {
			batch := make([]codeq.Task, 1000)
			for i := range batch {
				batch[i] = codeq.Task{Queue: fmt.Sprint("child ", len(ids)+i), After: []codeq.ID{parent}, OnDead: codeq.CancelOnDead}
			}
			ids = append(ids, queuetest.Produce(t, q, batch...)...)
		}
		queues := make(map[codeq.ID]string)
		for i, id := range ids {
			if queues[id] = fmt.Sprint("child ", i); i%8 == 0 {
				queuetest.Produce(t, q, codeq.Task{Queue: queues[id]}) // its lane comes back under another number
			}
		}
		require.NoError(t, q.Retry(t.Context(), queuetest.ClaimNow(t, q, "parent").Receipt, codeq.RetryOptions{}))
		doubtful := 0
		for n := range 80 {
			if n%4 == 3 {
				require.NoError(t, q.Close())
				q, err = codeq.Open("queue", &opts)
				require.NoError(t, err)
			}
			var woken []codeq.ID
			require.NoError(t, store.Scan(queuetest.StoreOf(q, 0).DB(), keys.Wake, func(key, _ []byte) error {
				_, _, id, err := keys.ParseGrouped(key)
				woken = append(woken, id)
				return err
			}))
			var calls sync.WaitGroup
			for _, id := range woken[max(0, len(woken)-16):] { // the last to be applied
				calls.Go(func() {
					if err := q.Cancel(t.Context(), id); !errors.Is(err, codeq.ErrNotFound) { // its wakeup has come first
						assert.NoError(t, err)
					}
					if l := queuetest.ClaimNow(t, q, queues[id]); l != nil {
						assert.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
					}
				})
			}
			calls.Wait()
			require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
				doubtful = max(doubtful, s.Rules.Probe().Usage().Doubtful)
				return nil
			}))
		}
		require.Positive(t, doubtful, "queues that may have wakeups on disk")
		synctest.Wait()
		stats, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.LessOrEqual(t, sizeOfCatalogue(t, q, 0).queuesInMemory, len(stats)+inspect.Options(&opts).IdleLanes+8)
		queuetest.RequireSettled(t, q)
	})
}

// TestStatsInParts: the counts of many queues are copied in parts. While queues come and go, none
// is counted twice, and the counts of the others are exact.
func TestStatsInParts(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		opts := *inspect.With(&codeq.Options{Shards: 2}, inspect.Private{FS: crashfs.New(), IdleLanes: 1, SweepLanes: 16})
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		const stay, rounds = 2*call.StatsStep + 100, 20
		want := make(map[string]codeq.Counts)
		var tasks []codeq.Task
		for i := range stay {
			name := fmt.Sprint("stays ", i)
			tasks = append(tasks, codeq.Task{Queue: name})
			want[name] = codeq.Counts{Ready: 1}
		}
		for i := 0; i < stay; i += 1000 {
			_, err := q.ProduceBatch(t.Context(), tasks[i:min(i+1000, stay)])
			require.NoError(t, err)
		}
		want["settings only"] = codeq.Counts{}
		require.NoError(t, q.Pause(t.Context(), "settings only"))
		stop := make(chan struct{})
		done := make(chan error)
		go func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					close(done)
					return
				default:
				}
				name := fmt.Sprint("goes ", i%50)
				if _, err := q.Produce(context.Background(), codeq.Task{Queue: name}); err != nil {
					done <- err
					return
				}
				l, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{name}})
				if err == nil {
					err = q.Complete(context.Background(), l.Receipt, nil)
				}
				if err != nil {
					done <- err
					return
				}
			}
		}()
		for range rounds {
			got, err := q.Stats(t.Context())
			require.NoError(t, err)
			for name, c := range got {
				if _, ok := want[name]; !ok {
					require.LessOrEqual(t, c.Total(), uint64(1), name)
					delete(got, name)
				}
			}
			require.Equal(t, want, got)
		}
		close(stop)
		require.NoError(t, <-done)
	})
}

// TestNumberOfAnotherLaneComesBack: a shard has found a lane under an old number. Once no task has
// this number any more, it can go to another lane, and its tasks then belong to that lane.
func TestNumberOfAnotherLaneComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := codeq.Open("queue", inspect.With(&codeq.Options{Shards: 1}, inspect.Private{FS: crashfs.New(), IdleLanes: 1, SweepLanes: 1}))
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		ctx, others := t.Context(), 0
		visit := func() { // other lanes push idle lanes out of memory, and cause sweeps
			for range 8 {
				others++
				name := fmt.Sprint("other ", others)
				queuetest.Produce(t, q, codeq.Task{Queue: name})
				require.NoError(t, q.Complete(ctx, queuetest.ClaimNow(t, q, name).Receipt, nil))
				synctest.Wait()
			}
		}
		old := queuetest.Produce(t, q, codeq.Task{Queue: "a", Tenant: "a", RunAt: time.Now().Add(time.Hour)})[0]
		n := keys.LaneOf(old)
		visit()
		queuetest.Produce(t, q, codeq.Task{Queue: "a", Tenant: "a"}) // its lane, under another number, stays
		held := queuetest.ClaimNow(t, q, "a")
		require.NotEqual(t, n, keys.LaneOf(held.ID))
		time.Sleep(2 * time.Hour)
		held = queuetest.ClaimNow(t, q, "a") // the lease has expired
		l := queuetest.ClaimNow(t, q, "a")   // found by its old number
		require.ElementsMatch(t, []codeq.ID{held.ID, old}, []codeq.ID{held.ID, l.ID})
		if held.ID == old {
			held, l = l, held
		}
		require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		require.NoError(t, q.Extend(ctx, held.Receipt, 24*time.Hour))
		visit() // nothing names the number, which is free
		var again []codeq.ID
		for range 8 {
			again = append(again, queuetest.Produce(t, q, codeq.Task{Queue: "b", Tenant: "b", RunAt: time.Now().Add(time.Hour)})[0])
			visit()
		}
		require.Contains(t, lanesOf(again), n)
		time.Sleep(2 * time.Hour)
		var got []codeq.ID
		for range again {
			l := queuetest.ClaimNow(t, q, "b")
			require.NotNil(t, l)
			require.Equal(t, "b", l.Tenant)
			got = append(got, l.ID)
		}
		require.Equal(t, again, got)
		require.Nil(t, queuetest.ClaimNow(t, q, "a"))
		require.NoError(t, queuetest.CheckAll(q))
	})
}

func lanesOf(ids []codeq.ID) (lanes []uint32) {
	for _, id := range ids {
		lanes = append(lanes, keys.LaneOf(id))
	}
	return lanes
}

// TestOpensLeaveNothing: a program opens a queue, works with it for a moment, and closes it or is
// killed. After many times it leaves no more lanes, queues and tables than after some.
func TestOpensLeaveNothing(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, c := range []struct {
		shards int
		level  codeq.Durability
		opens  int
	}{{1, codeq.DurabilityProcess, testkit.Sized(130, 300)}, {3, codeq.DurabilityDisk, testkit.Sized(70, 100)}} {
		t.Run(fmt.Sprint(c.shards, " shards, ", c.level), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { openOften(t, c.opens, c.shards, c.level) })
		})
	}
}

func openOften(t *testing.T, opens, shards int, level codeq.Durability) {
	disk, ctx, most := crashfs.New(), t.Context(), int64(0)
	options := func() *codeq.Options {
		return inspect.With(&codeq.Options{Shards: shards, Durability: level}, inspect.Private{FS: disk, IdleLanes: 16, SweepLanes: 32})
	}
	q, err := codeq.Open("queue", options())
	require.NoError(t, err)
	stays := queuetest.Produce(t, q, codeq.Task{Queue: "stays", Payload: []byte("stays")})[0]
	require.NoError(t, q.Close())
	work := func(q *codeq.Queue, i int) {
		var tasks []codeq.Task
		for range shards {
			tasks = append(tasks, codeq.Task{Queue: "mail"}, codeq.Task{Queue: "kept", Retention: time.Hour}, codeq.Task{Queue: fmt.Sprint("once ", i)},
				codeq.Task{Queue: "tenants", Tenant: fmt.Sprint(i)}, codeq.Task{Queue: "mail", RunAt: time.Now().Add(time.Minute)})
		}
		for used := make(map[int]bool); len(used) < shards; { // a batch takes a shard at random
			ids, err := q.ProduceBatch(ctx, tasks)
			require.NoError(t, err)
			for _, id := range ids {
				used[queuetest.ShardOf(id, shards)] = true
			}
		}
		queuetest.Produce(t, q, codeq.Task{Queue: "mail", Unique: codeq.Unique{Key: fmt.Sprint("key ", i)}}, codeq.Task{Queue: "mail", Group: fmt.Sprint("group ", i)})
		require.NoError(t, q.SetSchedule(ctx, codeq.Schedule{Name: "often", Every: time.Second, Task: codeq.Task{Queue: "ticks"}}))
		sub, err := q.Subscribe(codeq.SubscribeOptions{})
		require.NoError(t, err)
		sub.Close()
		for {
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail", "kept", fmt.Sprint("once ", i), "tenants", "ticks"}, NoWait: true})
			if errors.Is(err, codeq.ErrEmpty) {
				return
			}
			require.NoError(t, err)
			require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		}
	}
	for i := range opens {
		q, err := codeq.Open("queue", options())
		require.NoError(t, err)
		work(q, i)
		synctest.Wait()
		for shard := range inspect.Of(q).Shards() {
			size := sizeOfCatalogue(t, q, shard)
			tables := queuetest.StoreOf(q, shard).DB().Metrics().Total().TablesCount
			most = max(most, tables)
			require.LessOrEqual(t, tables, int64(64), "open %d, shard %d: %+v", i, shard, size)
			require.LessOrEqual(t, max(size.lanes, size.queues), 128, "open %d, shard %d", i, shard)
		}
		time.Sleep(time.Minute)
		if i%3 == 0 {
			disk = disk.Clone() // the process is killed
		}
		require.NoError(t, q.Close())
		switch i % 5 {
		case 0:
			q, err := codeq.Open("queue", inspect.With(&codeq.Options{Tool: true}, inspect.Private{FS: disk}))
			require.NoError(t, err)
			require.NoError(t, q.Pause(ctx, "paused"))
			require.NoError(t, q.Resume(ctx, "paused"))
			require.NoError(t, q.Close())
		case 1:
			r, err := codeq.OpenReadOnly("queue", inspect.With(&codeq.ReaderOptions{}, inspect.Private{FS: disk}))
			require.NoError(t, err)
			require.NoError(t, r.Close())
		}
	}
	q, err = codeq.Open("queue", options())
	require.NoError(t, err)
	require.NoError(t, queuetest.CheckAll(q))
	require.Equal(t, stays, queuetest.ClaimNow(t, q, "stays").ID)
	t.Logf("at most %d tables; %+v", most, sizeOfCatalogue(t, q, 0))
	for shard := range inspect.Of(q).Shards() { // a queue that is used each time has one number
		names := make(map[string]int)
		require.NoError(t, store.Scan(queuetest.StoreOf(q, shard).DB(), keys.Queue, func(_, name []byte) error {
			names[string(name)]++
			return nil
		}))
		require.Equal(t, 1, names["mail"], "shard %d", shard)
		require.Equal(t, 1, names["kept"], "shard %d", shard)
	}
	require.NoError(t, q.Close())
}
