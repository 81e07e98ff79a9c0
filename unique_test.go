package codeq

import (
	"context"
	"errors"
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

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/schema"
)

// process is a queue whose process may end at every step of a test, and whose
// clock may be set.
type process struct {
	*Queue
	t    *testing.T
	end  string // how step ends it
	opts Options
	disk *vfs.MemFS
	skew atomic.Int64
}

// The ways in which a process goes through a step.
const (
	goesOn  = "goes on"
	forgets = "forgets" // what its caches hold, as when there is more than they may hold
	closed  = "is closed"
	killed  = "loses power"
)

// throughSteps runs a test in fake time once for every way in which the
// process may go through its steps, and checks what is stored at the end.
func throughSteps(t *testing.T, opts Options, test func(t *testing.T, p *process)) {
	for _, end := range []string{goesOn, forgets, closed, killed} {
		t.Run(end, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &process{t: t, end: end, opts: opts, disk: vfs.NewCrashableMem()}
				p.opts.Durability = DurabilityDisk
				p.opts.Backoff.Jitter = -1
				p.opts.wall = func() time.Time { return time.Now().Add(time.Duration(p.skew.Load())) }
				p.open()
				defer func() { require.NoError(t, p.Close()) }()
				test(t, p)
				p.step()
			})
		})
	}
}

func (p *process) open() {
	p.t.Helper()
	p.opts.fs = p.disk
	q, err := Open("queue", &p.opts)
	require.NoError(p.t, err)
	p.Queue = q
}

// step checks disk and memory, and has the process end and begin again.
func (p *process) step() {
	p.t.Helper()
	p.check()
	switch p.end {
	case goesOn:
		return
	case forgets:
		for _, s := range p.led() {
			require.NoError(p.t, s.probe(forgetMirrors))
		}
	case closed:
		require.NoError(p.t, p.Close())
		p.open()
	case killed:
		left := p.disk.CrashClone(vfs.CrashCloneCfg{RNG: rand.New(rand.NewPCG(0, 0))})
		require.NoError(p.t, p.Close())
		p.disk = left
		p.open()
	}
	p.check()
}

func (p *process) check() {
	p.t.Helper()
	synctest.Wait()
	require.NoError(p.t, p.checkAll())
	require.NoError(p.t, p.checkMemory())
}

// setClock moves the wall clock, which nobody is told of.
func (p *process) setClock(by time.Duration) {
	synctest.Wait()
	p.skew.Add(int64(by))
}

// pass lets time go by.
func (p *process) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// produce stores a task that must be new.
func (p *process) produce(task Task) ID {
	p.t.Helper()
	id, err := p.Produce(context.Background(), task)
	require.NoError(p.t, err)
	return id
}

// claim takes the task that is next, at once.
func (p *process) claim(queue string) *Lease {
	p.t.Helper()
	l := claimNow(p.t, p.Queue, queue)
	require.NotNil(p.t, l, "nothing is ready in queue %q", queue)
	return l
}

// taken requires that the key of a task belongs to holder.
func (p *process) taken(task Task, holder ID) {
	p.t.Helper()
	before, err := p.Stats(context.Background())
	require.NoError(p.t, err)
	id, err := p.Produce(context.Background(), task)
	require.ErrorIs(p.t, err, ErrDuplicate)
	var duplicate *DuplicateError
	require.ErrorAs(p.t, err, &duplicate)
	require.Equal(p.t, DuplicateError{Key: task.Unique.Key, ID: holder}, *duplicate)
	require.Equal(p.t, holder, id)
	after, err := p.Stats(context.Background())
	require.NoError(p.t, err)
	require.Equal(p.t, before, after, "a duplicate stores nothing")
}

// state returns where a task is; 0 if it does not exist.
func (p *process) state(id ID) State {
	p.t.Helper()
	info, err := p.Get(context.Background(), id)
	if errors.Is(err, ErrNotFound) {
		return 0
	}
	require.NoError(p.t, err)
	return info.State
}

// stored returns how many entries the range has in all shards.
func (p *process) stored(prefix byte) (n int) {
	p.t.Helper()
	for _, s := range p.led() {
		require.NoError(p.t, schema.Scan(s.Store.DB(), prefix, func([]byte, []byte) error {
			n++
			return nil
		}))
	}
	return n
}

// forgetMirrors has the next look at an entry go to disk, and keys listed again.
func forgetMirrors(s *shard) error {
	if !s.Probe().ForgetCaches() {
		return errBusy
	}
	return nil
}

// duplicates returns the holders of the keys that an error says are taken, by
// the index of the task. Any other error ends the test.
func duplicates(t *testing.T, err error) map[int]ID {
	t.Helper()
	found := make(map[int]ID)
	var visit func(error)
	visit = func(err error) {
		if joined, ok := err.(interface{ Unwrap() []error }); ok {
			for _, e := range joined.Unwrap() {
				visit(e)
			}
			return
		}
		var duplicate *DuplicateError
		require.ErrorAs(t, err, &duplicate)
		require.NotContains(t, found, duplicate.Index)
		found[duplicate.Index] = duplicate.ID
	}
	if err != nil {
		require.ErrorIs(t, err, ErrDuplicate)
		visit(err)
	}
	return found
}

func keyed(key string) Task { return Task{Queue: "a", Unique: Unique{Key: key}} }

// TestUniqueScope: queue, tenant, group and limit key have keys of their own.
func TestUniqueScope(t *testing.T) {
	throughSteps(t, Options{Shards: 3}, func(t *testing.T, p *process) {
		scopes := []Task{
			keyed("k"),
			keyed("other"),
			{Queue: "b", Unique: Unique{Key: "k"}},
			{Queue: "a", Tenant: "x", Unique: Unique{Key: "k"}},
			{Queue: "a", Group: "x", Unique: Unique{Key: "k"}},
			{Queue: "a", LimitKey: "x", Unique: Unique{Key: "k"}},
			{Queue: "a", LimitKey: "x", Group: "x", Unique: Unique{Key: "k"}},
		}
		var ids []ID
		for _, task := range scopes {
			ids = append(ids, p.produce(task))
		}
		p.step()
		for i, task := range scopes {
			task.Priority, task.Payload, task.RunAt = 9, []byte("another"), time.Now().Add(time.Hour) // of no matter
			p.taken(task, ids[i])
		}
	})
}

// TestUniqueIsKept: Get shows what was produced.
func TestUniqueIsKept(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		for i, u := range []Unique{
			{Key: "1"},
			{Key: "2", For: time.Hour, Replace: true},
			{Key: "3", ReleaseOnComplete: true},
			{Key: "4", For: math.MaxInt64, ReleaseOnDead: true},
		} {
			id := p.produce(Task{Queue: "a", Unique: u})
			p.step()
			info, err := p.Get(context.Background(), id)
			require.NoError(t, err)
			require.Equal(t, u, info.Unique, i)
		}
	})
}

// TestUniqueBatch: tasks of a batch may have the keys of stored ones, and of
// each other; the rest is stored.
func TestUniqueBatch(t *testing.T) {
	for _, shards := range []int{1, 4} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			throughSteps(t, Options{Shards: shards}, func(t *testing.T, p *process) {
				ctx := context.Background()
				stored := p.produce(keyed("stored"))
				p.step()
				batch := []Task{
					keyed("stored"), keyed("new"), {Queue: "a"}, keyed("new"), keyed("newer"), keyed("stored"), keyed("new"), {Queue: "a"},
				}
				for i := range batch {
					batch[i].Payload = strconv.AppendInt(nil, int64(i), 10)
				}
				ids, err := p.ProduceBatch(ctx, batch)
				require.Equal(t, map[int]ID{0: stored, 3: ids[1], 5: stored, 6: ids[1]}, duplicates(t, err))
				require.Len(t, ids, len(batch))
				require.Equal(t, stored, ids[0])
				require.Equal(t, Counts{Ready: 5}, countsOf(t, p.Queue, "a"))
				p.step()
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
				require.Equal(t, Counts{Ready: 7}, countsOf(t, p.Queue, "a"))
			})
		})
	}
}

// TestUniqueBatchOfSeveralShards: each task goes to where its key lies. When a
// shard fails, the batch may be produced again: nothing is stored twice.
func TestUniqueBatchOfSeveralShards(t *testing.T) {
	throughSteps(t, Options{Shards: 4}, func(t *testing.T, p *process) {
		ctx := context.Background()
		const n = 64
		var batch []Task
		for i := range n {
			batch = append(batch, keyed(fmt.Sprint(i)))
			batch[i].Payload = strconv.AppendInt(nil, int64(i), 10)
		}
		home := func(i int) int {
			h, bound := prepare(&batch[i], nil).Tied.Ties.Home(4)
			require.True(t, bound)
			return h
		}
		failShard(t, p.shard(2))
		ids, err := p.ProduceBatch(ctx, batch)
		require.ErrorIs(t, err, errDisk)
		require.NotErrorIs(t, err, ErrDuplicate)
		count := 0
		for i, id := range ids {
			if id != (ID{}) {
				count++
				require.Equal(t, home(i), id.shard(4))
				require.NotEqual(t, 2, home(i))
				require.Equal(t, strconv.Itoa(i), string(infoOf(t, p.Queue, id).Payload))
			}
		}
		require.Positive(t, count, "the shards before the one that fails have stored theirs")
		require.Less(t, count, n)
		require.NoError(t, p.Close())
		p.open()
		p.step()

		again, err := p.ProduceBatch(ctx, batch)
		require.Len(t, duplicates(t, err), count)
		for i, id := range again {
			require.Equal(t, home(i), id.shard(4))
			if ids[i] != (ID{}) {
				require.Equal(t, ids[i], id)
			}
			require.Equal(t, strconv.Itoa(i), string(infoOf(t, p.Queue, id).Payload))
		}
		require.Equal(t, Counts{Ready: n}, countsOf(t, p.Queue, "a"))
		p.step()
		require.Equal(t, Counts{Ready: n}, countsOf(t, p.Queue, "a"))
	})
}

// TestReplace: a task that waits is replaced, whatever it waits for. It keeps
// its ID, and what it waits for.
func TestReplace(t *testing.T) {
	ctx := context.Background()
	for _, tc := range []struct {
		name string
		task Task
		wait func(p *process, task Task) ID // has the task wait
		from State
		to   State                       // when the new one has no RunAt
		free func(p *process, parent ID) // lets it go on; nil: nothing holds it
	}{
		{
			name: "ready", task: keyed("k"), from: Ready, to: Ready,
			wait: func(p *process, task Task) ID { return p.produce(task) },
		},
		{
			name: "scheduled", task: keyed("k"), from: Scheduled, to: Ready,
			wait: func(p *process, task Task) ID {
				task.RunAt = p.opts.wall().Add(time.Hour)
				return p.produce(task)
			},
		},
		{
			name: "between two attempts", task: keyed("k"), from: Scheduled, to: Ready,
			wait: func(p *process, task Task) ID {
				id := p.produce(task)
				require.NoError(t, p.Retry(ctx, p.claim("a").Receipt, RetryOptions{After: time.Hour, Err: errors.New("boom")}))
				return id
			},
		},
		{
			name: "given back", task: keyed("k"), from: Ready, to: Ready,
			wait: func(p *process, task Task) ID {
				id := p.produce(task)
				require.NoError(t, p.Release(ctx, p.claim("a").Receipt, 0))
				return id
			},
		},
		{
			name: "turn of its group", task: Task{Queue: "a", Group: "g", Unique: Unique{Key: "k"}}, from: Blocked, to: Blocked,
			wait: func(p *process, task Task) ID {
				p.produce(Task{Queue: "a", Group: "g"})
				return p.produce(task)
			},
		},
		{
			name: "room in its limit", task: Task{Queue: "a", LimitKey: "l", Unique: Unique{Key: "k"}}, from: Blocked, to: Ready,
			wait: func(p *process, task Task) ID {
				require.NoError(t, p.Configure(ctx, "a", func(s *Settings) { s.ConcurrencyPerKey = 1 }))
				p.produce(Task{Queue: "a", LimitKey: "l"})
				p.claim("a")
				id := p.produce(task)
				require.Nil(t, claimNow(t, p.Queue, "a"))
				return id
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *process) {
				id := tc.wait(p, tc.task)
				p.step()
				require.Equal(t, tc.from, p.state(id))
				p.taken(tc.task, id)

				next := tc.task
				next.Unique.Replace, next.Payload, next.Priority = true, []byte("second"), 3
				next.Headers = map[string]string{"h": "v"}
				require.Equal(t, id, p.produce(next))
				p.step()
				info := infoOf(t, p.Queue, id)
				require.Equal(t, tc.to, info.State)
				require.Equal(t, next, info.Task)
				require.Zero(t, info.Attempts)
				require.Empty(t, info.LastError)

				next.RunAt = time.UnixMilli(p.opts.wall().Add(time.Hour).UnixMilli())
				require.Equal(t, id, p.produce(next))
				p.step()
				require.Equal(t, Scheduled, p.state(id))
				require.Equal(t, next.RunAt, infoOf(t, p.Queue, id).At)

				next.RunAt = time.Time{}
				require.Equal(t, id, p.produce(next))
				p.step()
				require.Equal(t, tc.to, p.state(id))
				if tc.name == "turn of its group" { // let the first of them end
					l := p.claim("a")
					require.NotEqual(t, id, l.ID)
					require.NoError(t, p.Complete(ctx, l.Receipt, nil))
					p.step()
				}
				if tc.name == "room in its limit" {
					require.NoError(t, p.Configure(ctx, "a", func(s *Settings) { s.ConcurrencyPerKey = 2 }))
					p.step()
				}
				l := p.claim("a")
				require.Equal(t, id, l.ID)
				require.Equal(t, "second", string(l.Payload))
				require.Equal(t, 1, l.Attempt)

				p.step()
				p.taken(next, id) // in a worker's hands it is not replaced
				require.NoError(t, p.Complete(ctx, l.Receipt, nil))
				p.step()
				require.Zero(t, p.state(id))
				require.NotEqual(t, id, p.produce(next))
			})
		})
	}
}

// TestReplaceChild: a task that is replaced waits for the same parents as
// before, and for its new RunAt.
func TestReplaceChild(t *testing.T) {
	throughSteps(t, Options{Shards: 2, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *process) {
		ctx := context.Background()
		parents := []ID{p.produce(Task{Queue: "parents"}), p.produce(Task{Queue: "parents"})}
		task := keyed("k")
		task.After = parents
		task.Unique.Replace = true
		id := p.produce(task)
		p.step()
		require.Equal(t, Blocked, p.state(id))
		require.NoError(t, p.Complete(ctx, p.claim("parents").Receipt, nil))
		p.step()
		task.Payload, task.After = []byte("second"), nil
		task.RunAt = p.opts.wall().Add(time.Hour)
		require.Equal(t, id, p.produce(task))
		p.step()
		require.Equal(t, Blocked, p.state(id))
		require.Equal(t, parents, infoOf(t, p.Queue, id).After)
		require.NoError(t, p.Complete(ctx, p.claim("parents").Receipt, nil))
		p.step()
		require.Equal(t, Scheduled, p.state(id))
		p.pass(time.Hour)
		require.Equal(t, "second", string(p.claim("a").Payload))
	})
}

// TestReplaceGoesBehind: what is replaced waits anew.
func TestReplaceGoesBehind(t *testing.T) {
	throughSteps(t, Options{Shards: 1, WindowTasks: 2}, func(t *testing.T, p *process) {
		task := keyed("k")
		task.Unique.Replace = true
		first := p.produce(task)
		var others []ID
		for range 6 {
			others = append(others, p.produce(Task{Queue: "a"}))
			p.pass(time.Millisecond)
		}
		require.Equal(t, first, p.produce(task))
		p.step()
		for _, id := range others {
			require.Equal(t, id, p.claim("a").ID)
		}
		require.Equal(t, first, p.claim("a").ID)
	})
}

// TestReplaceInOneGroup: what replaces a task that the same group has changed
// finds it changed.
func TestReplaceInOneGroup(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		ctx := context.Background()
		task := keyed("k")
		task.Unique.Replace = true
		first := produce(t, q, task)[0]
		gate := shut(t, q.shard(0))
		var wg sync.WaitGroup
		ids := make([]ID, 4)
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
		require.Equal(t, []ID{first, first, first}, ids[:3])
		synctest.Wait()
		require.NoError(t, q.checkAll())
		require.NoError(t, q.checkMemory())
		require.Equal(t, Counts{Ready: 1}, countsOf(t, q, "a"))

		gate = shut(t, q.shard(0))
		wg.Go(func() { require.NoError(t, q.Cancel(ctx, first)) })
		synctest.Wait()
		replace(3)
		close(gate)
		wg.Wait()
		require.NotEqual(t, first, ids[3])
		require.Equal(t, Counts{Ready: 1}, countsOf(t, q, "a"))
		require.NoError(t, q.checkMemory())
	})
}

// TestReplaceKeepsLeases: a task that is replaced is not mistaken for one that
// an old lease is about, which is still stored beside another one.
func TestReplaceKeepsLeases(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		ctx := context.Background()
		task := keyed("k")
		task.Unique.Replace = true
		id := p.produce(task)
		require.NoError(t, p.Release(ctx, p.claim("a").Receipt, 0))
		p.produce(Task{Queue: "a", RunAt: p.opts.wall().Add(-time.Hour)})
		leases, err := p.ClaimBatch(ctx, ClaimRequest{Queues: []string{"a"}, Max: 2})
		require.NoError(t, err)
		require.Len(t, leases, 2)
		for _, l := range leases {
			if l.ID == id {
				require.NoError(t, p.Release(ctx, l.Receipt, 0))
			}
		}
		require.Equal(t, id, p.produce(task)) // still in the same millisecond
		require.NoError(t, p.Release(ctx, p.claim("a").Receipt, 0))
		p.step()
		require.Equal(t, Ready, p.state(id))
		require.Equal(t, id, p.claim("a").ID)
	})
}

// TestReplaceCorrupt: a task that cannot be read is no duplicate; its shard stops.
func TestReplaceCorrupt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := Open("queue", &Options{Shards: 1, fs: vfs.NewMem()})
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		task := keyed("k")
		task.Unique.Replace = true
		id := produce(t, q, task)[0]
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			s.Probe().Plant(keys.AppendByID(nil, keys.Index, id), []byte{0xff})
			return nil
		}))
		_, err = q.Produce(context.Background(), task)
		require.ErrorIs(t, err, ErrUncertain)
		require.ErrorIs(t, err, ErrCorrupt)
		_, err = q.Produce(context.Background(), task)
		require.ErrorIs(t, err, ErrFailed)
	})
}

// TestDebounce: of a burst one task runs, the last, when it is quiet.
func TestDebounce(t *testing.T) {
	throughSteps(t, Options{Shards: 2}, func(t *testing.T, p *process) {
		var id ID
		for i := range 10 {
			task := keyed("document 7")
			task.Unique.Replace = true
			task.RunAt = p.opts.wall().Add(5 * time.Second)
			task.Payload = strconv.AppendInt(nil, int64(i), 10)
			next := p.produce(task)
			if i > 0 {
				require.Equal(t, id, next)
			}
			id = next
			p.step()
			p.pass(4 * time.Second)
			require.Nil(t, claimNow(t, p.Queue, "a"))
		}
		p.pass(time.Second)
		l := p.claim("a")
		require.Equal(t, id, l.ID)
		require.Equal(t, "9", string(l.Payload))
		require.Equal(t, Counts{Leased: 1}, countsOf(t, p.Queue, "a"))
	})
}

// endings are the ways in which a task with a key ends.
var endings = map[State]func(p *process, id ID){
	Done: func(p *process, id ID) {
		require.NoError(p.t, p.Complete(context.Background(), p.claim("a").Receipt, nil))
	},
	Canceled: func(p *process, id ID) { require.NoError(p.t, p.Cancel(context.Background(), id)) },
	Dead: func(p *process, id ID) {
		require.NoError(p.t, p.DeadLetter(context.Background(), p.claim("a").Receipt, nil))
	},
}

// TestUniqueEnds: when a key is free after its task has ended.
func TestUniqueEnds(t *testing.T) {
	for _, tc := range []struct {
		name   string
		unique Unique
		kept   map[State]bool // until an hour after the produce
	}{
		{"until the end", Unique{}, nil},
		{"for an hour", Unique{For: time.Hour}, map[State]bool{Done: true, Canceled: true, Dead: true}},
		{"unless completed", Unique{For: time.Hour, ReleaseOnComplete: true}, map[State]bool{Canceled: true, Dead: true}},
		{"unless dead", Unique{For: time.Hour, ReleaseOnDead: true}, map[State]bool{Done: true, Canceled: true}},
		{"unless either", Unique{For: time.Hour, ReleaseOnComplete: true, ReleaseOnDead: true}, map[State]bool{Canceled: true}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for state, end := range endings {
				t.Run(state.String(), func(t *testing.T) {
					throughSteps(t, Options{Shards: 2, Retention: Forever}, func(t *testing.T, p *process) {
						task := keyed("k")
						task.Unique.For = tc.unique.For
						task.Unique.ReleaseOnComplete = tc.unique.ReleaseOnComplete
						task.Unique.ReleaseOnDead = tc.unique.ReleaseOnDead
						id := p.produce(task)
						p.step()
						p.pass(20 * time.Minute)
						end(p, id)
						p.step()
						require.Equal(t, state, p.state(id))
						if tc.kept[state] {
							p.taken(task, id)
							p.pass(40*time.Minute - time.Millisecond)
							p.step()
							p.taken(task, id)
							p.pass(time.Millisecond)
							p.step()
						}
						require.Zero(t, p.stored(keys.Unique))
						require.Zero(t, p.stored(keys.Freed))
						next := p.produce(task)
						require.NotEqual(t, id, next)
						p.taken(task, next)
					})
				})
			}
		})
	}
}

// TestUniqueOfLivingTask: a task that has not ended keeps its key, however long
// For is over: when it is ready, blocked, leased, and between two attempts.
func TestUniqueOfLivingTask(t *testing.T) {
	throughSteps(t, Options{Shards: 2, LeaseFor: time.Minute, MaxAttempts: 3}, func(t *testing.T, p *process) {
		ctx := context.Background()
		task := keyed("k")
		task.Unique.For = time.Second
		id := p.produce(task)
		holds := func(state State) {
			t.Helper()
			p.step()
			p.pass(2 * time.Second)
			require.Equal(t, state, p.state(id))
			p.taken(task, id)
		}
		holds(Ready)
		l := p.claim("a")
		holds(Leased)
		require.NoError(t, p.Retry(ctx, l.Receipt, RetryOptions{After: time.Hour}))
		holds(Scheduled)
		p.pass(time.Hour)
		holds(Ready)
		p.claim("a")
		p.pass(time.Minute) // the lease expires
		holds(Ready)
		l = p.claim("a")
		require.Equal(t, 3, l.Attempt)
		require.NoError(t, p.Release(ctx, l.Receipt, time.Minute))
		holds(Scheduled)
		p.pass(time.Minute)
		require.NoError(t, p.Retry(ctx, p.claim("a").Receipt, RetryOptions{})) // the last attempt
		p.step()
		require.Equal(t, Dead, p.state(id))
		require.NotEqual(t, id, p.produce(task))
	})
}

// TestReleaseKey: a key that is released goes to the next task, whatever has
// become of the first one, whose end does not touch the key any more.
func TestReleaseKey(t *testing.T) {
	ctx := context.Background()
	for _, tc := range []struct {
		name  string
		reach func(p *process, id ID)
		ended bool
		taken time.Duration
	}{
		{"waiting", func(*process, ID) {}, false, 0},
		{"waiting, for an hour", func(*process, ID) {}, false, time.Hour},
		{"leased", func(p *process, _ ID) { p.claim("a") }, false, 0},
		{"leased, for an hour", func(p *process, _ ID) { p.claim("a") }, false, time.Hour},
		{"done, for an hour", endings[Done], true, time.Hour},
		{"dead, for an hour", endings[Dead], true, time.Hour},
	} {
		t.Run(tc.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 2, LeaseFor: time.Hour, Retention: Forever}, func(t *testing.T, p *process) {
				task := keyed("k")
				task.Unique.For = tc.taken
				first := p.produce(task)
				tc.reach(p, first)
				p.step()
				p.taken(task, first)
				require.NoError(t, p.ReleaseKey(ctx, UniqueKey{Queue: "a", Key: "k"}))
				p.step()
				require.ErrorIs(t, p.ReleaseKey(ctx, task.uniqueKey()), ErrNotFound)
				p.pass(10 * time.Minute)
				second := p.produce(task)
				require.NotEqual(t, first, second)
				if !tc.ended {
					require.NoError(t, p.Cancel(ctx, first))
				}
				p.step()
				p.taken(task, second)
				require.NoError(t, p.Cancel(ctx, second))
				if tc.taken > 0 {
					p.pass(tc.taken - time.Millisecond) // of the second, not of the first
					p.taken(task, second)
					p.pass(time.Millisecond)
				}
				p.step()
				require.ErrorIs(t, p.ReleaseKey(ctx, task.uniqueKey()), ErrNotFound)
				require.Zero(t, p.stored(keys.Unique))
				require.Zero(t, p.stored(keys.Freed))
			})
		})
	}
}

// TestReleaseKeyAtOnce: a key is released in the group that produces its task, or completes it, and the end of the
// task does not touch it afterwards.
func TestReleaseKeyAtOnce(t *testing.T) {
	for _, taken := range []time.Duration{0, time.Hour} {
		bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
			ctx := t.Context()
			task := keyed("k")
			task.Unique.For = taken
			together := func(calls ...func() error) {
				t.Helper()
				held, errs := make(chan struct{}), make([]error, len(calls))
				go func() { _ = q.shard(0).probe(func(*shard) error { <-held; return nil }) }()
				synctest.Wait()
				for i, call := range calls {
					go func() { errs[i] = call() }()
					synctest.Wait()
				}
				close(held)
				synctest.Wait()
				for _, err := range errs {
					require.NoError(t, err)
				}
			}
			release := func() error { return q.ReleaseKey(ctx, task.uniqueKey()) }
			var first ID
			together(func() (err error) { first, err = q.Produce(ctx, task); return err }, release)
			require.NoError(t, q.checkAll())
			second := produce(t, q, task)[0]
			l := claimNow(t, q, "a")
			require.Equal(t, first, l.ID)
			complete(t, q, l)
			_, err := q.Produce(ctx, task)
			require.Equal(t, second, duplicates(t, err)[0])

			l = claimNow(t, q, "a")
			require.Equal(t, second, l.ID)
			if taken == 0 {
				together(release, func() error { return q.Complete(ctx, l.Receipt, nil) })
			} else {
				together(func() error { return q.Complete(ctx, l.Receipt, nil) }, release)
			}
			produce(t, q, task)
			require.Equal(t, Counts{Ready: 1}, countsOf(t, q, "a"))
		})
	}
}

// TestReleaseKeyOfScope: ReleaseKey finds the key by the fields that Produce does.
func TestReleaseKeyOfScope(t *testing.T) {
	throughSteps(t, Options{Shards: 4}, func(t *testing.T, p *process) {
		ctx := context.Background()
		task := Task{Queue: "a", Tenant: "t", Group: "g", LimitKey: "l", Unique: Unique{Key: "k"}}
		id := p.produce(task)
		p.step()
		for _, other := range []UniqueKey{
			{Queue: "b", Tenant: "t", Group: "g", LimitKey: "l", Key: "k"},
			{Queue: "a", Group: "g", LimitKey: "l", Key: "k"},
			{Queue: "a", Tenant: "t", LimitKey: "l", Key: "k"},
			{Queue: "a", Tenant: "t", Group: "g", Key: "k"},
			{Queue: "a", Tenant: "t", Group: "g", LimitKey: "l", Key: "K"},
		} {
			require.ErrorIs(t, p.ReleaseKey(ctx, other), ErrNotFound)
		}
		p.taken(task, id)
		require.NoError(t, p.ReleaseKey(ctx, UniqueKey{
			Queue: "a", Tenant: "t", Group: "g", LimitKey: "l", Key: "k",
		}))
		require.NotEqual(t, id, p.produce(task))
	})
}

// TestUniqueFollowUps: follow-ups whose key is taken are left out, also by one
// before them; the key of the task itself is free when it ends, unless For
// goes on.
func TestUniqueFollowUps(t *testing.T) {
	for _, shards := range []int{1, 4} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			throughSteps(t, Options{Shards: shards}, func(t *testing.T, p *process) {
				ctx := context.Background()
				stored := p.produce(Task{Queue: "b", Unique: Unique{Key: "stored"}})
				task := keyed("k")
				id := p.produce(task)
				p.step()
				next := []Task{{Queue: "b", Unique: Unique{Key: "stored"}}, task, {Queue: "b"}}
				for i := range 10 {
					next = append(next, Task{Queue: "c", Unique: Unique{Key: fmt.Sprint(i % 5)}})
				}
				require.NoError(t, p.Complete(ctx, p.claim("a").Receipt, nil, next...))
				p.step()
				require.Equal(t, Counts{Ready: 2}, countsOf(t, p.Queue, "b"))
				require.Equal(t, Counts{Ready: 5}, countsOf(t, p.Queue, "c"))
				require.Equal(t, Counts{Ready: 1}, countsOf(t, p.Queue, "a"))
				p.taken(Task{Queue: "b", Unique: Unique{Key: "stored"}}, stored)
				l := p.claim("a")
				require.NotEqual(t, id, l.ID)
				p.taken(task, l.ID)
			})
		})
	}
}

// TestFollowUpOfOwnKey: as long as its For goes on, a task that has just been
// completed is not replaced by its own follow-up.
func TestFollowUpOfOwnKey(t *testing.T) {
	for _, replace := range []bool{false, true} {
		t.Run(fmt.Sprint("replace ", replace), func(t *testing.T) {
			throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
				ctx := context.Background()
				task := keyed("k")
				task.Unique.For, task.Unique.Replace = time.Hour, replace
				id := p.produce(task)
				p.step()
				require.NoError(t, p.Complete(ctx, p.claim("a").Receipt, nil, task))
				p.step()
				require.Equal(t, Counts{}, countsOf(t, p.Queue, "a"))
				p.taken(task, id)

				p.pass(time.Hour)
				task.Unique.ReleaseOnComplete = true
				id = p.produce(task)
				p.step()
				require.NoError(t, p.Complete(ctx, p.claim("a").Receipt, nil, task))
				p.step()
				require.Equal(t, Counts{Ready: 1}, countsOf(t, p.Queue, "a"))
				require.NotEqual(t, id, p.claim("a").ID)
			})
		})
	}
}

// TestUniqueRace: of many that produce the same key at the same time one
// stores it, and the others learn its ID.
func TestUniqueRace(t *testing.T) {
	for _, shards := range []int{1, 3} {
		for _, batch := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d shards, batch %t", shards, batch), func(t *testing.T) {
				throughSteps(t, Options{Shards: shards, GroupCap: 7}, func(t *testing.T, p *process) {
					const callers, rounds = 64, 10
					for round := range rounds {
						task := keyed(fmt.Sprint(round))
						var wg sync.WaitGroup
						var new atomic.Int64
						ids := make([]ID, callers)
						for i := range callers {
							wg.Go(func() {
								var err error
								if batch {
									var both []ID
									both, err = p.ProduceBatch(context.Background(), []Task{{Queue: "others"}, task})
									ids[i] = both[1]
								} else {
									ids[i], err = p.Produce(context.Background(), task)
								}
								if err == nil {
									new.Add(1)
								} else {
									require.ErrorIs(t, err, ErrDuplicate)
								}
							})
						}
						wg.Wait()
						require.EqualValues(t, 1, new.Load())
						for _, id := range ids {
							require.Equal(t, ids[0], id)
						}
					}
					require.Equal(t, Counts{Ready: rounds}, countsOf(t, p.Queue, "a"))
				})
			})
		}
	}
}

// TestReplaceRace: tasks that replace each other while workers take them: none
// is lost, none is worked on twice, and the last one is worked on.
func TestReplaceRace(t *testing.T) {
	throughSteps(t, Options{Shards: 2, GroupCap: 5}, func(t *testing.T, p *process) {
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
					l, err := p.Claim(claims, ClaimRequest{Queues: []string{"a"}})
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
						require.ErrorIs(t, err, ErrDuplicate)
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
		require.Equal(t, Counts{}, countsOf(t, p.Queue, "a"))
		require.Zero(t, p.stored(keys.Unique))
	})
}

// TestUniquePowerLoss: whatever a power loss leaves of producers, workers and
// cancels that contend for some keys, each task that has not ended has its key.
func TestUniquePowerLoss(t *testing.T) {
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
		fs := &hookFS{FS: disk, before: func(op, _ string) error {
			mu.Lock()
			defer mu.Unlock()
			if loaded && (op == "write" || op == "sync") && len(images) < 30 && rng.IntN(30) == 0 {
				images = append(images, disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(101), RNG: rng}))
			}
			return nil
		}}
		opts := Options{Shards: 3, Durability: DurabilityDisk, GroupCap: 4, fs: fs}
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		mu.Lock()
		loaded = true
		mu.Unlock()
		task := func(key int) Task {
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
						require.ErrorIs(t, err, ErrDuplicate)
					}
					if chance(5) == 0 {
						if err := q.Cancel(ctx, id); err != nil {
							require.ErrorIs(t, err, ErrNotFound)
						}
					}
					time.Sleep(time.Duration(chance(2)) * time.Millisecond)
				}
			})
			wg.Go(func() {
				for range 60 {
					l, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}, NoWait: true})
					if err != nil {
						require.ErrorIs(t, err, ErrEmpty)
						time.Sleep(time.Millisecond)
						continue
					}
					switch chance(3) {
					case 0:
						err = q.Retry(ctx, l.Receipt, RetryOptions{After: time.Millisecond})
					case 1:
						err = q.Complete(ctx, l.Receipt, nil, task(chance(8)))
					default:
						err = q.Complete(ctx, l.Receipt, nil)
					}
					if err != nil {
						require.ErrorIs(t, err, ErrCanceled)
					}
				}
			})
		}
		wg.Wait()
		require.NoError(t, q.Close())
		require.NotEmpty(t, images)
		living := 0
		for i, image := range images {
			opts.fs = image
			q, err := Open("queue", &opts)
			require.NoError(t, err, i)
			synctest.Wait()
			require.NoError(t, q.checkAll(), i)
			require.NoError(t, q.checkMemory(), i)
			require.NoError(t, q.checkMemory(), i)
			tasks, err := q.list()
			require.NoError(t, err)
			for id, info := range tasks {
				info.Unique.Replace = false
				_, err := q.Produce(ctx, info.Task)
				var duplicate *DuplicateError
				require.ErrorAs(t, err, &duplicate, i)
				require.Equal(t, id, duplicate.ID, i)
				living++
			}
			require.NoError(t, q.Close())
		}
		require.Positive(t, living)
	})
}

// TestManyKeys: more keys than memory holds.
func TestManyKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		most := engine.MostUniques()
		p := &process{t: t, end: closed, opts: Options{Shards: 1, Limits: Limits{Batch: most}}, disk: vfs.NewCrashableMem()}
		p.opts.wall = time.Now
		p.open()
		defer func() { require.NoError(t, p.Close()) }()
		ctx := context.Background()
		const size = 1 << 14
		n := most + 3000
		batchFrom := func(from int) (batch []Task) {
			for i := from; i < min(from+size, n); i++ {
				batch = append(batch, keyed(strconv.Itoa(i)))
			}
			return batch
		}
		ids := make([]ID, 0, n)
		for len(ids) < n {
			more, err := p.ProduceBatch(ctx, batchFrom(len(ids)))
			require.NoError(t, err)
			ids = append(ids, more...)
		}
		requireTaken := func() {
			t.Helper()
			require.NoError(t, p.checkMemory())
			for _, i := range []int{0, 1, n / 2, most - 1, most, n - 1} {
				p.taken(keyed(strconv.Itoa(i)), ids[i])
			}
			last, err := p.ProduceBatch(ctx, batchFrom(n/size*size))
			require.Len(t, duplicates(t, err), n%size)
			require.Equal(t, ids[n/size*size:], last)
			require.NoError(t, p.checkMemory())
		}
		requireTaken()
		require.NoError(t, p.Close())
		p.open()
		requireTaken()
		for _, i := range []int{2, n - 2} { // one that is held since Open, perhaps, and one that is not
			require.NoError(t, p.Cancel(ctx, ids[i]))
			fresh := p.produce(keyed(strconv.Itoa(i)))
			require.NotEqual(t, ids[i], fresh)
			p.taken(keyed(strconv.Itoa(i)), fresh)
		}
	})
}

// TestNewKeysReadNothing: that a key is new is known without a look at the disk, however many there are,
// also after Open, when all are listed; until then the others are looked up.
func TestNewKeysReadNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := Options{Shards: 1, fs: vfs.NewMem()}
		q := openForRun(t, opts)
		const batch = 5000
		n := (engine.MostUniques()/batch + 2) * batch
		next := 0
		produceNew := func() (reads int) {
			tasks := make([]Task, batch)
			for i := range tasks {
				tasks[i] = keyed(strconv.Itoa(next))
				next++
			}
			before := q.readsOf(t)
			_, err := q.ProduceBatch(t.Context(), tasks)
			require.NoError(t, err)
			return q.readsOf(t) - before
		}
		const chance = 20 // keys with the fingerprint of another: one is to be expected
		for next < n {
			require.Less(t, produceNew(), chance)
		}
		require.NoError(t, q.checkMemory())
		require.NoError(t, q.Close())

		q = openForRun(t, opts)
		listed := func() (all bool, n int) {
			require.NoError(t, q.shard(0).probe(func(s *shard) error {
				u := s.Probe().Usage().Uniques
				all, n = u.Listed, u.Prints
				return nil
			}))
			return all, n
		}
		require.NoError(t, q.checkMemory())
		id := produce(t, q, keyed("while they are listed"))[0] // perhaps
		_, err := q.Produce(t.Context(), keyed("while they are listed"))
		require.Equal(t, id, duplicates(t, err)[0])
		synctest.Wait()
		all, now := listed()
		require.True(t, all)
		require.Equal(t, n+1, now)
		require.Less(t, produceNew(), chance)
		_, err = q.Produce(t.Context(), keyed("0"))
		require.ErrorIs(t, err, ErrDuplicate)
		requireSettled(t, q)
		require.NoError(t, q.Close())
	})
}

// TestTooManyFingerprints: beyond their bound there are none, and keys are looked up.
func TestTooManyFingerprints(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		ids := produce(t, q, keyed("first"))
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			s.Probe().TooManyUniques()
			return nil
		}))
		for _, key := range []string{"second", "third"} {
			ids = append(ids, produce(t, q, keyed(key))...)
		}
		for i, key := range []string{"first", "second", "third"} {
			_, err := q.Produce(t.Context(), keyed(key))
			require.Equal(t, ids[i], duplicates(t, err)[0])
		}
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			require.True(t, s.Probe().Usage().Uniques.TooMany)
			require.Zero(t, s.Probe().Usage().Uniques.Prints)
			return nil
		}))
		requireSettled(t, q)
	})
}

// TestUniqueClock: a clock that is set back keeps a key taken for longer, one
// that is set forward frees it early; never while its task lives.
func TestUniqueClock(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		ctx := context.Background()
		task := keyed("k")
		task.Unique.For = 10 * time.Minute
		id := p.produce(task)
		p.step()
		p.setClock(time.Hour)
		p.taken(task, id) // the task has not ended
		p.setClock(-time.Hour)
		p.step()
		p.taken(task, id)
		require.NoError(t, p.Complete(ctx, p.claim("a").Receipt, nil))
		p.step()
		require.Zero(t, p.stored(keys.Unique), "its time had come once")

		p.pass(time.Hour) // until the clock in the IDs, which does not go back, is right again
		id = p.produce(task)
		require.NoError(t, p.Complete(ctx, p.claim("a").Receipt, nil))
		p.step()
		p.taken(task, id)
		p.setClock(-time.Hour)
		p.step()
		p.pass(70*time.Minute - time.Millisecond)
		p.taken(task, id)
		p.pass(time.Minute) // by then it has looked at the clock
		require.Zero(t, p.stored(keys.Unique))

		id = p.produce(task)
		require.NoError(t, p.Cancel(ctx, id))
		p.taken(task, id)
		p.setClock(time.Hour)
		next := p.produce(task) // at once, also before it is cleared away
		require.NotEqual(t, id, next)
		p.step()
		p.pass(2 * time.Minute)
		p.taken(task, next)
		require.Equal(t, 1, p.stored(keys.Freed), "that of the second")

		require.NoError(t, p.Cancel(ctx, next))
		p.taken(task, next)
		p.setClock(time.Hour)
		p.pass(time.Minute)
		require.Zero(t, p.stored(keys.Unique))
		require.Zero(t, p.stored(keys.Freed))
	})
}

// TestManyKeysBecomeFree: more at the same time than one group frees.
func TestManyKeysBecomeFree(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		n := engine.UpkeepBudget.Records + 10 // each is read, and its time and hash are deleted
		var batch []Task
		for i := range n {
			batch = append(batch, keyed(strconv.Itoa(i)))
			batch[i].Unique.For = time.Minute + time.Duration(i%3)*time.Millisecond
		}
		ids, err := p.ProduceBatch(context.Background(), batch)
		require.NoError(t, err)
		for _, id := range ids {
			require.NoError(t, p.Cancel(context.Background(), id))
		}
		p.step()
		require.Equal(t, n, p.stored(keys.Unique))
		p.pass(time.Minute + 2*time.Millisecond)
		require.Zero(t, p.stored(keys.Unique))
		require.Zero(t, p.stored(keys.Freed))
	})
}

// TestKeyOfCanceledChild: the key of a task that is canceled with its parent is
// freed in time, also if another key becomes free in the same group.
func TestKeyOfCanceledChild(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		parent := p.produce(Task{Queue: "parents"})
		early, child := keyed("early"), keyed("child")
		early.Unique.For, child.Unique.For = time.Minute, time.Hour
		child.After = []ID{parent}
		p.produce(child)
		require.NoError(t, p.Cancel(context.Background(), p.produce(early)))
		p.step()
		p.pass(time.Minute - time.Millisecond)
		require.NoError(t, p.shard(0).probe(func(s *shard) error {
			err := s.Probe().Cancel(parent)
			p.skew.Add(int64(time.Millisecond)) // for the next group, which cancels the child
			return err
		}))
		p.check()
		require.Equal(t, 1, p.stored(keys.Freed))
		p.pass(time.Hour)
		require.Zero(t, p.stored(keys.Unique))
		require.Zero(t, p.stored(keys.Freed))
	})
}

// TestChildIsScheduled: a task whose parents have ended waits for its time, also
// if the time of another one comes in the same group.
func TestChildIsScheduled(t *testing.T) {
	throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *process) {
		start := p.opts.wall()
		parent := p.produce(Task{Queue: "parents"})
		child := p.produce(Task{Queue: "a", After: []ID{parent}, RunAt: start.Add(time.Hour)})
		p.produce(Task{Queue: "others", RunAt: start.Add(time.Minute)})
		l := p.claim("parents")
		p.step()
		p.pass(time.Minute - time.Millisecond)
		require.NoError(t, p.shard(0).probe(func(s *shard) error {
			p.skew.Add(int64(time.Millisecond)) // for the next group, which lets the child go on
			_, err := s.Complete(l.Receipt.inner(), nil, nil)
			return err
		}))
		p.check()
		require.Equal(t, Scheduled, p.state(child))
		require.Equal(t, Counts{Ready: 1}, countsOf(t, p.Queue, "others"))
		p.pass(time.Hour)
		require.Equal(t, Ready, p.state(child))
	})
}

// TestUniqueRefused: what Produce, ProduceBatch, Complete and ReleaseKey do not accept.
func TestUniqueRefused(t *testing.T) {
	q := openLimited(t)
	ctx := context.Background()
	for _, tc := range []struct {
		unique Unique
		field  string
		value  any
		limit  string
	}{
		{Unique{Key: text(11)}, "Task.Unique.Key", "11 bytes", "at most 10 bytes"},
		{Unique{Key: "k", For: -1}, "Task.Unique.For", time.Duration(-1), "0 or more"},
		{Unique{For: 1}, "Task.Unique.Key", `""`, "a key, if other fields of Unique are set"},
		{Unique{Replace: true}, "Task.Unique.Key", `""`, "a key, if other fields of Unique are set"},
		{Unique{ReleaseOnDead: true}, "Task.Unique.Key", `""`, "a key, if other fields of Unique are set"},
		{Unique{ReleaseOnComplete: true}, "Task.Unique.Key", `""`, "a key, if other fields of Unique are set"},
	} {
		bad := Task{Queue: "a", Unique: tc.unique}
		l := q.lease()
		for _, verb := range []func() error{
			func() error { _, err := q.Produce(ctx, bad); return err },
			func() error { _, err := q.ProduceBatch(ctx, []Task{keyed("fine"), bad}); return err },
			func() error { return q.Complete(ctx, l.Receipt, nil, keyed("fine"), bad) },
		} {
			q.refused(tc.field, tc.value, tc.limit, verb)
		}
	}
	for _, tc := range []struct {
		key   UniqueKey
		field string
		value any
		limit string
	}{
		{UniqueKey{Queue: "a"}, "UniqueKey.Key", `""`, "not empty"},
		{UniqueKey{Key: "k"}, "UniqueKey.Queue", `""`, "not empty"},
		{UniqueKey{Queue: text(11), Key: "k"}, "UniqueKey.Queue", "11 bytes", "at most 10 bytes"},
		{UniqueKey{Queue: "a", Tenant: text(11), Key: "k"}, "UniqueKey.Tenant", "11 bytes", "at most 10 bytes"},
		{UniqueKey{Queue: "a", Group: text(11), Key: "k"}, "UniqueKey.Group", "11 bytes", "at most 10 bytes"},
		{UniqueKey{Queue: "a", LimitKey: text(11), Key: "k"}, "UniqueKey.LimitKey", "11 bytes", "at most 10 bytes"},
		{UniqueKey{Queue: "a", Key: text(11)}, "UniqueKey.Key", "11 bytes", "at most 10 bytes"},
	} {
		q.refused(tc.field, tc.value, tc.limit, func() error { return q.ReleaseKey(ctx, tc.key) })
	}

	replacing := keyed("twin")
	replacing.Unique.Replace = true
	q.refused("Task.Unique.Key", "twin", "one task of a batch with the same key and Replace", func() error {
		_, err := q.ProduceBatch(ctx, []Task{keyed("twin"), {Queue: "a"}, replacing})
		require.ErrorContains(t, err, "task 2")
		return err
	})
	accepted, err := q.ProduceBatch(ctx, []Task{replacing, keyed(text(10)), keyed("twin")})
	require.Equal(t, map[int]ID{2: accepted[0]}, duplicates(t, err))
	require.NoError(t, q.checkAll())
}

func TestDuplicateError(t *testing.T) {
	id := ID{1, 2, 3}
	err := error(&DuplicateError{Key: "order 17", ID: id, Index: 3})
	require.ErrorIs(t, err, ErrDuplicate)
	require.NotErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, `"order 17"`)
	require.ErrorContains(t, err, id.String())
}
