package codeq

import (
	"context"
	"errors"
	"fmt"
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
	"codeq/internal/hook"
	"codeq/internal/keys"
)

// Process is a queue whose process may end at every step of a test, and whose
// clock may be set.
type Process struct {
	*Queue
	T    *testing.T
	End  string // how step ends it
	Opts Options
	Disk *vfs.MemFS
	Skew atomic.Int64
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
func throughSteps(t *testing.T, opts Options, test func(t *testing.T, p *Process)) {
	for _, end := range []string{goesOn, forgets, closed, killed} {
		t.Run(end, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &Process{T: t, End: end, Opts: opts, Disk: vfs.NewCrashableMem()}
				p.Opts.Durability = DurabilityDisk
				p.Opts.Backoff.Jitter = -1
				hook.SetWall(&p.Opts, p.Now)
				p.Open()
				defer func() { require.NoError(t, p.Close()) }()
				test(t, p)
				p.Step()
			})
		})
	}
}

// Now is the wall clock.
func (p *Process) Now() time.Time { return time.Now().Add(time.Duration(p.Skew.Load())) }

func (p *Process) Open() {
	p.T.Helper()
	hook.SetFS(&p.Opts, p.Disk)
	q, err := Open("queue", &p.Opts)
	require.NoError(p.T, err)
	p.Queue = q
}

// Step checks disk and memory, and ends the process and begins it again.
func (p *Process) Step() {
	p.T.Helper()
	p.Check()
	switch p.End {
	case goesOn:
		return
	case forgets:
		for _, s := range p.led() {
			require.NoError(p.T, s.probe(forgetCaches))
		}
	case closed:
		require.NoError(p.T, p.Close())
		p.Open()
	case killed:
		left := p.Disk.CrashClone(vfs.CrashCloneCfg{RNG: rand.New(rand.NewPCG(0, 0))})
		require.NoError(p.T, p.Close())
		p.Disk = left
		p.Open()
	}
	p.Check()
}

func (p *Process) Check() {
	p.T.Helper()
	synctest.Wait()
	require.NoError(p.T, p.checkAll())
	require.NoError(p.T, p.checkMemory())
}

// SetClock moves the wall clock, which nobody is told of.
func (p *Process) SetClock(by time.Duration) {
	synctest.Wait()
	p.Skew.Add(int64(by))
}

// Pass lets time go by.
func (p *Process) Pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// Store stores a task that must be new.
func (p *Process) Store(task Task) ID {
	p.T.Helper()
	id, err := p.Produce(context.Background(), task)
	require.NoError(p.T, err)
	return id
}

// Take takes the task that is next, at once.
func (p *Process) Take(queue string) *Lease {
	p.T.Helper()
	l := claimNow(p.T, p.Queue, queue)
	require.NotNil(p.T, l, "nothing is ready in queue %q", queue)
	return l
}

// Taken requires that the key of a task belongs to holder.
func (p *Process) Taken(task Task, holder ID) {
	p.T.Helper()
	before, err := p.Stats(context.Background())
	require.NoError(p.T, err)
	id, err := p.Produce(context.Background(), task)
	require.ErrorIs(p.T, err, ErrDuplicate)
	var duplicate *DuplicateError
	require.ErrorAs(p.T, err, &duplicate)
	require.Equal(p.T, DuplicateError{Key: task.Unique.Key, ID: holder}, *duplicate)
	require.Equal(p.T, holder, id)
	after, err := p.Stats(context.Background())
	require.NoError(p.T, err)
	require.Equal(p.T, before, after, "a duplicate stores nothing")
}

// StateOf returns where a task is; 0 if it does not exist.
func (p *Process) StateOf(id ID) State {
	p.T.Helper()
	info, err := p.Get(context.Background(), id)
	if errors.Is(err, ErrNotFound) {
		return 0
	}
	require.NoError(p.T, err)
	return info.State
}

// Stored returns how many entries the range has in all shards.
func (p *Process) Stored(prefix byte) int { return stored(p.T, p.Queue, prefix) }

// forgetCaches makes the next look at an entry go to disk, and lists keys again.
func forgetCaches(s *shard) error {
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

// keyFor names the key of a task.
func keyFor(t Task) UniqueKey {
	return UniqueKey{Queue: t.Queue, Tenant: t.Tenant, Group: t.Group, LimitKey: t.LimitKey, Key: t.Unique.Key}
}

func keyed(key string) Task { return Task{Queue: "a", Unique: Unique{Key: key}} }

// TestUniqueBatchOfSeveralShards: each task goes to where its key lies. When a
// shard fails, the batch may be produced again: nothing is stored twice.
func TestUniqueBatchOfSeveralShards(t *testing.T) {
	t.Parallel()
	throughSteps(t, Options{Shards: 4}, func(t *testing.T, p *Process) {
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
		failShard(t, p.Queue, 2)
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
		p.Open()
		p.Step()

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
		p.Step()
		require.Equal(t, Counts{Ready: n}, countsOf(t, p.Queue, "a"))
	})
}

// TestReplace: a task that waits is replaced, whatever it waits for. It keeps
// its ID, and what it waits for.
func TestReplace(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, tc := range []struct {
		name string
		task Task
		wait func(p *Process, task Task) ID // makes the task wait
		from State
		to   State                       // when the new one has no RunAt
		free func(p *Process, parent ID) // lets it go on; nil: nothing holds it
	}{
		{
			name: "ready", task: keyed("k"), from: Ready, to: Ready,
			wait: func(p *Process, task Task) ID { return p.Store(task) },
		},
		{
			name: "scheduled", task: keyed("k"), from: Scheduled, to: Ready,
			wait: func(p *Process, task Task) ID {
				task.RunAt = p.Now().Add(time.Hour)
				return p.Store(task)
			},
		},
		{
			name: "between two attempts", task: keyed("k"), from: Scheduled, to: Ready,
			wait: func(p *Process, task Task) ID {
				id := p.Store(task)
				require.NoError(t, p.Retry(ctx, p.Take("a").Receipt, RetryOptions{After: time.Hour, Err: errors.New("boom")}))
				return id
			},
		},
		{
			name: "given back", task: keyed("k"), from: Ready, to: Ready,
			wait: func(p *Process, task Task) ID {
				id := p.Store(task)
				require.NoError(t, p.Release(ctx, p.Take("a").Receipt, 0))
				return id
			},
		},
		{
			name: "turn of its group", task: Task{Queue: "a", Group: "g", Unique: Unique{Key: "k"}}, from: Blocked, to: Blocked,
			wait: func(p *Process, task Task) ID {
				p.Store(Task{Queue: "a", Group: "g"})
				return p.Store(task)
			},
		},
		{
			name: "room in its limit", task: Task{Queue: "a", LimitKey: "l", Unique: Unique{Key: "k"}}, from: Blocked, to: Ready,
			wait: func(p *Process, task Task) ID {
				require.NoError(t, p.Configure(ctx, "a", func(s *Settings) { s.ConcurrencyPerKey = 1 }))
				p.Store(Task{Queue: "a", LimitKey: "l"})
				p.Take("a")
				id := p.Store(task)
				require.Nil(t, claimNow(t, p.Queue, "a"))
				return id
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *Process) {
				id := tc.wait(p, tc.task)
				p.Step()
				require.Equal(t, tc.from, p.StateOf(id))
				p.Taken(tc.task, id)

				next := tc.task
				next.Unique.Replace, next.Payload, next.Priority = true, []byte("second"), 3
				next.Headers = map[string]string{"h": "v"}
				require.Equal(t, id, p.Store(next))
				p.Step()
				info := infoOf(t, p.Queue, id)
				require.Equal(t, tc.to, info.State)
				require.Equal(t, next, info.Task)
				require.Zero(t, info.Attempts)
				require.Empty(t, info.LastError)

				next.RunAt = time.UnixMilli(p.Now().Add(time.Hour).UnixMilli())
				require.Equal(t, id, p.Store(next))
				p.Step()
				require.Equal(t, Scheduled, p.StateOf(id))
				require.Equal(t, next.RunAt, infoOf(t, p.Queue, id).At)

				next.RunAt = time.Time{}
				require.Equal(t, id, p.Store(next))
				p.Step()
				require.Equal(t, tc.to, p.StateOf(id))
				if tc.name == "turn of its group" { // let the first of them end
					l := p.Take("a")
					require.NotEqual(t, id, l.ID)
					require.NoError(t, p.Complete(ctx, l.Receipt, nil))
					p.Step()
				}
				if tc.name == "room in its limit" {
					require.NoError(t, p.Configure(ctx, "a", func(s *Settings) { s.ConcurrencyPerKey = 2 }))
					p.Step()
				}
				l := p.Take("a")
				require.Equal(t, id, l.ID)
				require.Equal(t, "second", string(l.Payload))
				require.Equal(t, 1, l.Attempt)

				p.Step()
				p.Taken(next, id) // in a worker's hands it is not replaced
				require.NoError(t, p.Complete(ctx, l.Receipt, nil))
				p.Step()
				require.Zero(t, p.StateOf(id))
				require.NotEqual(t, id, p.Store(next))
			})
		})
	}
}

// TestReplaceChild: a task that is replaced waits for the same parents as
// before, and for its new RunAt.
func TestReplaceChild(t *testing.T) {
	t.Parallel()
	throughSteps(t, Options{Shards: 2, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *Process) {
		ctx := context.Background()
		parents := []ID{p.Store(Task{Queue: "parents"}), p.Store(Task{Queue: "parents"})}
		task := keyed("k")
		task.After = parents
		task.Unique.Replace = true
		id := p.Store(task)
		p.Step()
		require.Equal(t, Blocked, p.StateOf(id))
		require.NoError(t, p.Complete(ctx, p.Take("parents").Receipt, nil))
		p.Step()
		task.Payload, task.After = []byte("second"), nil
		task.RunAt = p.Now().Add(time.Hour)
		require.Equal(t, id, p.Store(task))
		p.Step()
		require.Equal(t, Blocked, p.StateOf(id))
		require.Equal(t, parents, infoOf(t, p.Queue, id).After)
		require.NoError(t, p.Complete(ctx, p.Take("parents").Receipt, nil))
		p.Step()
		require.Equal(t, Scheduled, p.StateOf(id))
		p.Pass(time.Hour)
		require.Equal(t, "second", string(p.Take("a").Payload))
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
		gate := shut(t, q, 0)
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

		gate = shut(t, q, 0)
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
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *Process) {
		ctx := context.Background()
		task := keyed("k")
		task.Unique.Replace = true
		id := p.Store(task)
		require.NoError(t, p.Release(ctx, p.Take("a").Receipt, 0))
		p.Store(Task{Queue: "a", RunAt: p.Now().Add(-time.Hour)})
		leases, err := p.ClaimBatch(ctx, ClaimRequest{Queues: []string{"a"}, Max: 2})
		require.NoError(t, err)
		require.Len(t, leases, 2)
		for _, l := range leases {
			if l.ID == id {
				require.NoError(t, p.Release(ctx, l.Receipt, 0))
			}
		}
		require.Equal(t, id, p.Store(task)) // still in the same millisecond
		require.NoError(t, p.Release(ctx, p.Take("a").Receipt, 0))
		p.Step()
		require.Equal(t, Ready, p.StateOf(id))
		require.Equal(t, id, p.Take("a").ID)
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
			return s.Group.Batch.Set(keys.AppendByID(nil, keys.Index, id), []byte{0xff}, nil)
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
	t.Parallel()
	throughSteps(t, Options{Shards: 2}, func(t *testing.T, p *Process) {
		var id ID
		for i := range 10 {
			task := keyed("document 7")
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
			require.Nil(t, claimNow(t, p.Queue, "a"))
		}
		p.Pass(time.Second)
		l := p.Take("a")
		require.Equal(t, id, l.ID)
		require.Equal(t, "9", string(l.Payload))
		require.Equal(t, Counts{Leased: 1}, countsOf(t, p.Queue, "a"))
	})
}

// endings are the ways in which a task with a key ends.
var endings = map[State]func(p *Process, id ID){
	Done: func(p *Process, id ID) {
		require.NoError(p.T, p.Complete(context.Background(), p.Take("a").Receipt, nil))
	},
	Canceled: func(p *Process, id ID) { require.NoError(p.T, p.Cancel(context.Background(), id)) },
	Dead: func(p *Process, id ID) {
		require.NoError(p.T, p.DeadLetter(context.Background(), p.Take("a").Receipt, nil))
	},
}

// TestReleaseKey: a key that is released goes to the next task, whatever has
// become of the first one, whose end does not touch the key any more.
func TestReleaseKey(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, tc := range []struct {
		name  string
		reach func(p *Process, id ID)
		ended bool
		taken time.Duration
	}{
		{"waiting", func(*Process, ID) {}, false, 0},
		{"waiting, for an hour", func(*Process, ID) {}, false, time.Hour},
		{"leased", func(p *Process, _ ID) { p.Take("a") }, false, 0},
		{"leased, for an hour", func(p *Process, _ ID) { p.Take("a") }, false, time.Hour},
		{"done, for an hour", endings[Done], true, time.Hour},
		{"dead, for an hour", endings[Dead], true, time.Hour},
	} {
		t.Run(tc.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 2, LeaseFor: time.Hour, Retention: Forever}, func(t *testing.T, p *Process) {
				task := keyed("k")
				task.Unique.For = tc.taken
				first := p.Store(task)
				tc.reach(p, first)
				p.Step()
				p.Taken(task, first)
				require.NoError(t, p.ReleaseKey(ctx, UniqueKey{Queue: "a", Key: "k"}))
				p.Step()
				require.ErrorIs(t, p.ReleaseKey(ctx, keyFor(task)), ErrNotFound)
				p.Pass(10 * time.Minute)
				second := p.Store(task)
				require.NotEqual(t, first, second)
				if !tc.ended {
					require.NoError(t, p.Cancel(ctx, first))
				}
				p.Step()
				p.Taken(task, second)
				require.NoError(t, p.Cancel(ctx, second))
				if tc.taken > 0 {
					p.Pass(tc.taken - time.Millisecond) // of the second, not of the first
					p.Taken(task, second)
					p.Pass(time.Millisecond)
				}
				p.Step()
				require.ErrorIs(t, p.ReleaseKey(ctx, keyFor(task)), ErrNotFound)
				require.Zero(t, p.Stored(keys.Unique))
				require.Zero(t, p.Stored(keys.Freed))
			})
		})
	}
}

// TestReleaseKeyAtOnce: a key is released in the group that produces its task, or completes it, and
// the end of the task does not touch it afterwards.
func TestReleaseKeyAtOnce(t *testing.T) {
	for _, taken := range []time.Duration{0, time.Hour} {
		bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
			ctx := t.Context()
			task := keyed("k")
			task.Unique.For = taken
			together := func(calls ...func() error) {
				t.Helper()
				goOn, errs := hold(q, 0), make([]error, len(calls))
				synctest.Wait()
				for i, call := range calls {
					go func() { errs[i] = call() }()
					synctest.Wait()
				}
				goOn()
				synctest.Wait()
				for _, err := range errs {
					require.NoError(t, err)
				}
			}
			release := func() error { return q.ReleaseKey(ctx, keyFor(task)) }
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

// TestManyKeys: more keys than memory holds.
func TestManyKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		most := engine.MostUniques()
		p := &Process{T: t, End: closed, Opts: Options{Shards: 1, Limits: Limits{Batch: most}}, Disk: vfs.NewCrashableMem()}
		p.Open()
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
				p.Taken(keyed(strconv.Itoa(i)), ids[i])
			}
			last, err := p.ProduceBatch(ctx, batchFrom(n/size*size))
			require.Len(t, duplicates(t, err), n%size)
			require.Equal(t, ids[n/size*size:], last)
			require.NoError(t, p.checkMemory())
		}
		requireTaken()
		require.NoError(t, p.Close())
		p.Open()
		requireTaken()
		for _, i := range []int{2, n - 2} { // one that is held since Open, perhaps, and one that is not
			require.NoError(t, p.Cancel(ctx, ids[i]))
			fresh := p.Store(keyed(strconv.Itoa(i)))
			require.NotEqual(t, ids[i], fresh)
			p.Taken(keyed(strconv.Itoa(i)), fresh)
		}
	})
}

// TestNewKeysReadNothing: that a key is new is known without a look at the disk, however many there
// are, also after Open, when all are listed; until then the others are looked up.
func TestNewKeysReadNothing(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
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

// TestKeyOfCanceledChild: the key of a task that is canceled with its parent is
// freed in time, also if another key becomes free in the same group.
func TestKeyOfCanceledChild(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *Process) {
		parent := p.Store(Task{Queue: "parents"})
		early, child := keyed("early"), keyed("child")
		early.Unique.For, child.Unique.For = time.Minute, time.Hour
		child.After = []ID{parent}
		p.Store(child)
		require.NoError(t, p.Cancel(context.Background(), p.Store(early)))
		p.Step()
		p.Pass(time.Minute - time.Millisecond)
		require.NoError(t, p.shard(0).probe(func(s *shard) error {
			_, err := s.Alter(keys.ID(parent), engine.AlterCancel, 0)
			p.Skew.Add(int64(time.Millisecond)) // for the next group, which cancels the child
			return err
		}))
		p.Check()
		require.Equal(t, 1, p.Stored(keys.Freed))
		p.Pass(time.Hour)
		require.Zero(t, p.Stored(keys.Unique))
		require.Zero(t, p.Stored(keys.Freed))
	})
}

// TestChildIsScheduled: a task whose parents have ended waits for its time, also
// if the time of another one comes in the same group.
func TestChildIsScheduled(t *testing.T) {
	throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *Process) {
		start := p.Now()
		parent := p.Store(Task{Queue: "parents"})
		child := p.Store(Task{Queue: "a", After: []ID{parent}, RunAt: start.Add(time.Hour)})
		p.Store(Task{Queue: "others", RunAt: start.Add(time.Minute)})
		l := p.Take("parents")
		p.Step()
		p.Pass(time.Minute - time.Millisecond)
		require.NoError(t, p.shard(0).probe(func(s *shard) error {
			p.Skew.Add(int64(time.Millisecond)) // for the next group, which lets the child go on
			_, err := s.Complete(l.Receipt.inner(), nil, nil)
			return err
		}))
		p.Check()
		require.Equal(t, Scheduled, p.StateOf(child))
		require.Equal(t, Counts{Ready: 1}, countsOf(t, p.Queue, "others"))
		p.Pass(time.Hour)
		require.Equal(t, Ready, p.StateOf(child))
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

// readsOf is how many entries the owner of the only shard has read.
func (q *Queue) readsOf(t *testing.T) (n int) {
	require.NoError(t, q.shard(0).probe(func(s *shard) error { n = s.Probe().Usage().Read; return nil }))
	return n
}
