package codeq

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/inspect"
)

// Process is a queue whose process may end at every step of a test, and whose
// clock may be set.
type Process struct {
	*Queue
	T    *testing.T
	End  string // how step ends it
	Opts Options
	Disk *crashfs.Disk
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
				p := &Process{T: t, End: end, Opts: opts, Disk: crashfs.New()}
				p.Opts.Durability = DurabilityDisk
				p.Opts.Backoff.Jitter = -1
				inspect.Options(&p.Opts).Wall = p.Now
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
	inspect.Options(&p.Opts).FS = p.Disk
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
		left := p.Disk.CrashClone(vfs.CrashCloneCfg{})
		require.NoError(p.T, p.Close())
		p.Disk = left
		p.Open()
	}
	p.Check()
}

// Ends reports whether the process ends in each step.
func (p *Process) Ends() bool { return p.End == closed || p.End == killed }

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

// Free lets a task go on that waits as one of waitingStates does.
func (p *Process) Free(name string) {
	ctx := context.Background()
	switch name {
	case "scheduled", "between two attempts":
		p.Pass(time.Hour)
	case "for a parent":
		require.NoError(p.T, p.Complete(ctx, p.Take("parents").Receipt, nil))
	case "for the turn of its group":
		require.NoError(p.T, p.Complete(ctx, p.Take("a").Receipt, nil))
	case "for room in its limit":
		require.NoError(p.T, p.Configure(ctx, "a", func(s *Settings) { s.ConcurrencyPerKey = 0 }))
	}
	p.Check()
}

// Kill makes a dead letter of the task that is next in a queue.
func (p *Process) Kill(queue string) ID {
	p.T.Helper()
	l := p.Take(queue)
	require.NoError(p.T, p.DeadLetter(context.Background(), l.Receipt, errors.New("boom")))
	return l.ID
}

// StoreDead makes n dead letters.
func (p *Process) StoreDead(n int, task Task) (ids []ID) {
	p.T.Helper()
	for range n {
		id := p.Store(task)
		require.Equal(p.T, id, p.Kill(task.Queue))
		ids = append(ids, id)
	}
	return ids
}

// EachDead does something with one dead letter.
func (p *Process) EachDead(how func(context.Context, DeadFilter) (int, error), which DeadFilter) {
	p.T.Helper()
	time.Sleep(time.Millisecond) // those of this millisecond may be left out
	n, err := how(context.Background(), which)
	require.NoError(p.T, err)
	require.Equal(p.T, 1, n)
}
