package codeq

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

	"codeq/internal/call"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// catalogueSize is how many lanes, queues and counters a shard has on disk, how many
// lanes and queues in memory, and how many sweeps have ended.
type catalogueSize struct{ lanes, queues, counters, lanesInMemory, queuesInMemory, sweeps int }

func (q *Queue) catalogueSize(t *testing.T, index int) (size catalogueSize) {
	t.Helper()
	s := q.shard(index)
	require.NoError(t, s.probe(func(s *shard) error {
		u := s.Probe().Usage()
		size.lanesInMemory, size.queuesInMemory, size.sweeps = u.Lanes, len(s.Queues), int(u.LaneSweeps)
		return nil
	}))
	v := q.peek(s)
	defer v.close()
	for prefix, n := range map[byte]*int{keys.Lane: &size.lanes, keys.Queue: &size.queues, keys.Counters: &size.counters} {
		require.NoError(t, store.Scan(v.snap, prefix, func(_, _ []byte) error {
			*n++
			return nil
		}))
	}
	return size
}

// TestForgottenQueuesLeaveNothing: a queue that follows one that memory has forgotten has settings
// and claims of its own, also if the other one has changed last by a cancel.
func TestForgottenQueuesLeaveNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := Open("queue", inspect.With(&Options{Shards: 2}, inspect.Private{FS: crashfs.New(), IdleLanes: 1}))
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		ctx := t.Context()
		for i := range 16 {
			require.NoError(t, q.Cancel(ctx, produce(t, q, Task{Queue: fmt.Sprint("canceled ", i)})[0]))
			for range 4 { // groups
				_, err := q.Claim(ctx, ClaimRequest{Queues: []string{"never"}, NoWait: true})
				require.ErrorIs(t, err, ErrEmpty)
			}
		}
		synctest.Wait()
		require.NoError(t, q.checkMemory())
		for i := range 8 {
			name := fmt.Sprint("limited ", i)
			require.NoError(t, q.Configure(ctx, name, func(s *Settings) { s.Concurrency = 1 }))
			leased := make(chan error)
			for range 2 {
				go func() {
					_, err := q.Claim(ctx, ClaimRequest{Queues: []string{name}})
					leased <- err
				}()
			}
			synctest.Wait() // both of them wait
			produce(t, q, Task{Queue: name}, Task{Queue: name}, Task{Queue: name})
			require.NoError(t, <-leased, name)
			synctest.Wait()
			select {
			case err := <-leased:
				t.Fatal("more leases than the queue allows at once", name, err)
			default:
			}
			require.NoError(t, q.Configure(ctx, name, func(s *Settings) { s.Concurrency = 2 }))
			require.NoError(t, <-leased, name)
			synctest.Wait()
			require.NoError(t, q.checkMemory())
		}
	})
}

// TestQueuesComeAndGo: queues and tenants that are used once leave memory and disk, with
// all that they had, while others keep what they have.
func TestQueuesComeAndGo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		opts := *inspect.With(&Options{Shards: 1}, inspect.Private{FS: crashfs.New(), IdleLanes: 8, SweepLanes: 64})
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		ctx := context.Background()

		// What stays, in all the ways in which a task can be there.
		kept := produce(t, q, Task{Queue: "kept", Tenant: "t", Retention: Forever, Payload: []byte("kept")})[0]
		require.NoError(t, q.Complete(ctx, claimNow(t, q, "kept").Receipt, []byte("result")))
		later := produce(t, q, Task{Queue: "later", Tenant: "t", Payload: []byte("later"), RunAt: time.Now().Add(time.Hour)})[0]
		parent := produce(t, q, Task{Queue: "parent", RunAt: time.Now().Add(time.Hour)})[0]
		child := produce(t, q, Task{Queue: "child", After: []ID{parent}})[0]
		held := Task{Queue: "unique", Unique: Unique{Key: "k", For: 24 * time.Hour}}
		holder := produce(t, q, held)[0]
		require.NoError(t, q.Complete(ctx, claimNow(t, q, "unique").Receipt, nil))
		dead := produce(t, q, Task{Queue: "dead", MaxAttempts: 1})[0]
		require.NoError(t, q.Retry(ctx, claimNow(t, q, "dead").Receipt, RetryOptions{}))
		require.NoError(t, q.Pause(ctx, "paused"))

		const rounds = 3000
		var gone []ID
		for i := range rounds {
			task := Task{Queue: fmt.Sprint("brief ", i), Tenant: fmt.Sprint(i % 3), Priority: i % 2}
			gone = append(gone, produce(t, q, task)...)
			l := claimNow(t, q, task.Queue)
			require.Equal(t, gone[i], l.ID)
			require.NoError(t, q.Complete(ctx, l.Receipt, nil))
			if i%16 == 15 {
				synctest.Wait() // for a sweep: nobody waits for it else, however many come and go
			}
			if i%500 == 499 {
				synctest.Wait()
				require.NoError(t, q.checkAll())
				require.NoError(t, q.checkMemory())
			}
			if i == rounds/2 {
				require.NoError(t, q.Close())
				q, err = Open("queue", &opts)
				require.NoError(t, err)
			}
		}
		synctest.Wait()
		size := q.catalogueSize(t, 0)
		t.Logf("%+v", size)
		require.LessOrEqual(t, size.lanesInMemory, inspect.Options(&opts).IdleLanes+8)
		require.LessOrEqual(t, size.queuesInMemory, inspect.Options(&opts).IdleLanes+8)
		require.Greater(t, size.sweeps, rounds/1000)
		for _, n := range []int{size.lanes, size.queues, size.counters} {
			require.LessOrEqual(t, n, 3*inspect.Options(&opts).SweepLanes)
		}

		for _, id := range gone {
			_, err := q.Get(ctx, id)
			require.ErrorIs(t, err, ErrNotFound)
		}
		for _, id := range gone[:200] { // under whose numbers others have been since
			require.ErrorIs(t, q.Cancel(ctx, id), ErrNotFound)
			require.ErrorIs(t, q.Complete(ctx, Receipt{ID: id, Token: 1}, nil), ErrLeaseLost)
		}
		info, err := q.Get(ctx, kept)
		require.NoError(t, err)
		require.Equal(t, "kept|t|kept|result", fmt.Sprintf("%s|%s|%s|%s", info.Queue, info.Tenant, info.Payload, info.Result))
		for id, state := range map[ID]State{later: Scheduled, child: Blocked, dead: Dead} {
			info, err = q.Get(ctx, id)
			require.NoError(t, err)
			require.Equal(t, state, info.State)
		}
		id, err := q.Produce(ctx, held)
		require.ErrorIs(t, err, ErrDuplicate)
		require.Equal(t, holder, id)
		stats, err := q.Stats(ctx)
		require.NoError(t, err)
		require.Equal(t, map[string]Counts{
			"kept": {Done: 1}, "later": {Scheduled: 1}, "parent": {Scheduled: 1}, "child": {Blocked: 1}, "dead": {Dead: 1}, "paused": {},
		}, stats)

		// What waits comes under the number that its lane has now, in its order.
		now := produce(t, q, Task{Queue: "later", Tenant: "t"})[0]
		time.Sleep(2 * time.Hour)
		require.Equal(t, now, claimNow(t, q, "later").ID)
		l := claimNow(t, q, "later")
		require.Equal(t, later, l.ID)
		require.Equal(t, "later|t|later", fmt.Sprintf("%s|%s|%s", l.Queue, l.Tenant, l.Payload))
		require.NoError(t, q.Complete(ctx, claimNow(t, q, "parent").Receipt, nil))
		require.Equal(t, child, claimNow(t, q, "child").ID)
		synctest.Wait()
		require.NoError(t, q.checkAll())
		require.NoError(t, q.checkMemory())
	})
}

// TestClockOutlivesItsQueue: when the counters that have the clock of a shard go, another
// place has it.
func TestClockOutlivesItsQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ahead := time.Hour
		opts := *inspect.With(&Options{Shards: 1}, inspect.Private{FS: crashfs.New(), IdleLanes: 1, SweepLanes: 1})
		inspect.Options(&opts).Wall = func() time.Time { return time.Now().Add(ahead) }
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		var last ID
		for i := range 100 {
			last = produce(t, q, Task{Queue: fmt.Sprint(i)})[0]
			require.NoError(t, q.Complete(t.Context(), claimNow(t, q, fmt.Sprint(i)).Receipt, nil))
			synctest.Wait()
		}
		require.Less(t, q.catalogueSize(t, 0).counters, 10)
		require.NoError(t, q.Close())
		ahead = 0
		q, err = Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		next := produce(t, q, Task{Queue: "next"})[0]
		require.Greater(t, next.String(), last.String())
	})
}

// TestLanesKeepTheirOrderUnderOtherNumbers: tasks of a lane that have another number than
// the lane by now are served as one lane, over restarts.
func TestLanesKeepTheirOrderUnderOtherNumbers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		opts := *inspect.With(&Options{Shards: 1}, inspect.Private{FS: crashfs.New(), IdleLanes: 1, SweepLanes: 1 << 10})
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		visit := func(i int) { // others drive the lane out of memory
			for j := range 3 {
				name := fmt.Sprint("other ", i, " ", j)
				produce(t, q, Task{Queue: name})
				require.NoError(t, q.Complete(t.Context(), claimNow(t, q, name).Receipt, nil))
			}
		}
		const delayed = 50
		start := time.Now()
		var want []ID
		for i := range delayed {
			want = append(want, produce(t, q, Task{Queue: "a", RunAt: start.Add(time.Hour + time.Duration(i)*time.Second)})...)
			visit(i)
		}
		synctest.Wait()
		require.Greater(t, q.catalogueSize(t, 0).lanes, 2*delayed)
		for i := range 10 {
			time.Sleep(time.Until(start.Add(time.Hour + time.Duration(i*delayed/10)*time.Second)))
			visit(delayed + i)
			require.NoError(t, q.Close())
			q, err = Open("queue", &opts)
			require.NoError(t, err)
		}
		time.Sleep(time.Hour)
		for _, id := range want {
			require.Equal(t, id, claimNow(t, q, "a").ID)
		}
		require.Nil(t, claimNow(t, q, "a"))
		synctest.Wait()
		require.NoError(t, q.checkAll())
		require.NoError(t, q.checkMemory())
	})
}

// TestQueuesWithWakeupsAreForgotten: queues with wakeups stay until the last of these is applied,
// also if their tasks end before that, wakeups are on disk only, and load finds a lane of theirs
// under two numbers; then they leave memory.
func TestQueuesWithWakeupsAreForgotten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const children = 10_000
		opts := *inspect.With(&Options{Shards: 1}, inspect.Private{FS: crashfs.New(), IdleLanes: 1})
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		parent := produce(t, q, Task{Queue: "parent", MaxAttempts: 1})[0]
		var ids []ID
		for len(ids) < children {
			batch := make([]Task, 1000)
			for i := range batch {
				batch[i] = Task{Queue: fmt.Sprint("child ", len(ids)+i), After: []ID{parent}, OnDead: CancelOnDead}
			}
			ids = append(ids, produce(t, q, batch...)...)
		}
		queues := make(map[ID]string)
		for i, id := range ids {
			if queues[id] = fmt.Sprint("child ", i); i%8 == 0 {
				produce(t, q, Task{Queue: queues[id]}) // its lane comes back under another number
			}
		}
		require.NoError(t, q.Retry(t.Context(), claimNow(t, q, "parent").Receipt, RetryOptions{}))
		doubtful := 0
		for n := range 80 {
			if n%4 == 3 {
				require.NoError(t, q.Close())
				q, err = Open("queue", &opts)
				require.NoError(t, err)
			}
			v := q.peek(q.shard(0))
			var woken []ID
			require.NoError(t, store.Scan(v.snap, keys.Wake, func(key, _ []byte) error {
				_, _, id, err := keys.ParseGrouped(key)
				woken = append(woken, id)
				return err
			}))
			v.close()
			var calls sync.WaitGroup
			for _, id := range woken[max(0, len(woken)-16):] { // the last to be applied
				calls.Go(func() {
					if err := q.Cancel(t.Context(), id); !errors.Is(err, ErrNotFound) { // its wakeup has come first
						assert.NoError(t, err)
					}
					if l := claimNow(t, q, queues[id]); l != nil {
						assert.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
					}
				})
			}
			calls.Wait()
			require.NoError(t, q.shard(0).probe(func(s *shard) error {
				doubtful = max(doubtful, s.Probe().Usage().Doubtful)
				return nil
			}))
		}
		require.Positive(t, doubtful, "queues that may have wakeups on disk")
		synctest.Wait()
		stats, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.LessOrEqual(t, q.catalogueSize(t, 0).queuesInMemory, len(stats)+inspect.Options(&opts).IdleLanes+8)
		requireSettled(t, q)
	})
}

// TestStatsInParts: the counts of many queues are copied in parts; while queues come and go,
// nobody is counted twice, and those that stay are exact.
func TestStatsInParts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		opts := *inspect.With(&Options{Shards: 2}, inspect.Private{FS: crashfs.New(), IdleLanes: 1, SweepLanes: 16})
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		const stay, rounds = 2*call.StatsStep + 100, 20
		want := make(map[string]Counts)
		var tasks []Task
		for i := range stay {
			name := fmt.Sprint("stays ", i)
			tasks = append(tasks, Task{Queue: name})
			want[name] = Counts{Ready: 1}
		}
		for i := 0; i < stay; i += 1000 {
			_, err := q.ProduceBatch(t.Context(), tasks[i:min(i+1000, stay)])
			require.NoError(t, err)
		}
		want["settings only"] = Counts{}
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
				if _, err := q.Produce(context.Background(), Task{Queue: name}); err != nil {
					done <- err
					return
				}
				l, err := q.Claim(context.Background(), ClaimRequest{Queues: []string{name}})
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

// TestNumberOfAnotherLaneComesBack: a number under which the shard has found a lane that had
// another one by then is that of another lane, once nothing names it: its tasks are that lane's.
func TestNumberOfAnotherLaneComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := Open("queue", inspect.With(&Options{Shards: 1}, inspect.Private{FS: crashfs.New(), IdleLanes: 1, SweepLanes: 1}))
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		ctx, others := t.Context(), 0
		visit := func() { // others drive idle lanes out of memory, and make for sweeps
			for range 8 {
				others++
				name := fmt.Sprint("other ", others)
				produce(t, q, Task{Queue: name})
				require.NoError(t, q.Complete(ctx, claimNow(t, q, name).Receipt, nil))
				synctest.Wait()
			}
		}
		old := produce(t, q, Task{Queue: "a", Tenant: "a", RunAt: time.Now().Add(time.Hour)})[0]
		n := keys.LaneOf(old)
		visit()
		produce(t, q, Task{Queue: "a", Tenant: "a"}) // its lane, under another number, stays
		held := claimNow(t, q, "a")
		require.NotEqual(t, n, keys.LaneOf(held.ID))
		time.Sleep(2 * time.Hour)
		held = claimNow(t, q, "a") // the lease has expired
		l := claimNow(t, q, "a")   // found by its old number
		require.ElementsMatch(t, []ID{held.ID, old}, []ID{held.ID, l.ID})
		if held.ID == old {
			held, l = l, held
		}
		require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		require.NoError(t, q.Extend(ctx, held.Receipt, 24*time.Hour))
		visit() // nothing names the number, which is free
		var again []ID
		for range 8 {
			again = append(again, produce(t, q, Task{Queue: "b", Tenant: "b", RunAt: time.Now().Add(time.Hour)})[0])
			visit()
		}
		require.Contains(t, lanesOf(again), n)
		time.Sleep(2 * time.Hour)
		var got []ID
		for range again {
			l := claimNow(t, q, "b")
			require.NotNil(t, l)
			require.Equal(t, "b", l.Tenant)
			got = append(got, l.ID)
		}
		require.Equal(t, again, got)
		require.Nil(t, claimNow(t, q, "a"))
		require.NoError(t, q.checkAll())
	})
}

func lanesOf(ids []ID) (lanes []uint32) {
	for _, id := range ids {
		lanes = append(lanes, keys.LaneOf(id))
	}
	return lanes
}

// TestOpensLeaveNothing: a program that opens a queue, works with it for a moment, and closes it or
// is killed, leaves no more after hundreds of times than after some: in lanes, queues and tables.
func TestOpensLeaveNothing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		shards int
		level  Durability
		opens  int
	}{{1, DurabilityProcess, 300}, {3, DurabilityDisk, 100}} {
		t.Run(fmt.Sprint(c.shards, " shards, ", c.level), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { openOften(t, c.opens, c.shards, c.level) })
		})
	}
}

func openOften(t *testing.T, opens, shards int, level Durability) {
	disk, ctx, most := crashfs.New(), t.Context(), int64(0)
	options := func() *Options {
		return inspect.With(&Options{Shards: shards, Durability: level}, inspect.Private{FS: disk, IdleLanes: 16, SweepLanes: 32})
	}
	q, err := Open("queue", options())
	require.NoError(t, err)
	stays := produce(t, q, Task{Queue: "stays", Payload: []byte("stays")})[0]
	require.NoError(t, q.Close())
	work := func(q *Queue, i int) {
		var tasks []Task
		for range shards {
			tasks = append(tasks, Task{Queue: "mail"}, Task{Queue: "kept", Retention: time.Hour}, Task{Queue: fmt.Sprint("once ", i)},
				Task{Queue: "tenants", Tenant: fmt.Sprint(i)}, Task{Queue: "mail", RunAt: time.Now().Add(time.Minute)})
		}
		_, err := q.ProduceBatch(ctx, tasks)
		require.NoError(t, err)
		produce(t, q, Task{Queue: "mail", Unique: Unique{Key: fmt.Sprint("key ", i)}}, Task{Queue: "mail", Group: fmt.Sprint("group ", i)})
		require.NoError(t, q.SetSchedule(ctx, Schedule{Name: "often", Every: time.Second, Task: Task{Queue: "ticks"}}))
		sub, err := q.Subscribe(SubscribeOptions{})
		require.NoError(t, err)
		sub.Close()
		for {
			l, err := q.Claim(ctx, ClaimRequest{Queues: []string{"mail", "kept", fmt.Sprint("once ", i), "tenants", "ticks"}, NoWait: true})
			if errors.Is(err, ErrEmpty) {
				return
			}
			require.NoError(t, err)
			require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		}
	}
	for i := range opens {
		q, err := Open("queue", options())
		require.NoError(t, err)
		work(q, i)
		synctest.Wait()
		for shard, r := range q.replicas {
			size := q.catalogueSize(t, shard)
			tables := r.store.DB().Metrics().Total().TablesCount
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
			q, err := Open("queue", inspect.With(&Options{Tool: true}, inspect.Private{FS: disk}))
			require.NoError(t, err)
			require.NoError(t, q.Pause(ctx, "paused"))
			require.NoError(t, q.Resume(ctx, "paused"))
			require.NoError(t, q.Close())
		case 1:
			r, err := OpenReadOnly("queue", inspect.With(&ReaderOptions{}, inspect.Private{FS: disk}))
			require.NoError(t, err)
			require.NoError(t, r.Close())
		}
	}
	q, err = Open("queue", options())
	require.NoError(t, err)
	require.NoError(t, q.checkAll())
	require.Equal(t, stays, claimNow(t, q, "stays").ID)
	t.Logf("at most %d tables; %+v", most, q.catalogueSize(t, 0))
	for shard := range q.replicas { // a queue that is used each time has one number
		v := q.peek(q.shard(shard))
		names := make(map[string]int)
		require.NoError(t, store.Scan(v.snap, keys.Queue, func(_, name []byte) error {
			names[string(name)]++
			return nil
		}))
		require.Equal(t, 1, names["mail"], "shard %d", shard)
		require.Equal(t, 1, names["kept"], "shard %d", shard)
		v.close()
	}
	require.NoError(t, q.Close())
}
