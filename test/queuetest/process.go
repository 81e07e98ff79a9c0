package queuetest

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/testbase"
)

// Process is a queue in a process that may end at every step of a test; its clock may be set.
type Process struct {
	*codeq.Queue
	T    *testing.T
	End  string // how step ends it
	Opts codeq.Options
	Disk *crashfs.Disk
	Skew atomic.Int64
}

// The fates of a process at a step.
const (
	GoesOn  = "goes on"
	Forgets = "forgets" // the content of its caches, as when they are full
	Closed  = "is closed"
	Killed  = "loses power"
)

// ThroughSteps runs a test in fake time once for every fate of the process at its steps, and checks
// the stored state at the end. It calls one verb after the other, which is no work for the race
// detector.
func ThroughSteps(t *testing.T, opts codeq.Options, test func(t *testing.T, p *Process)) {
	testbase.SkipUnderRace(t)
	for _, end := range []string{GoesOn, Forgets, Closed, Killed} {
		t.Run(end, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &Process{T: t, End: end, Opts: opts, Disk: crashfs.New()}
				p.Opts.Durability = codeq.DurabilityDisk
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
	q, err := codeq.Open("queue", &p.Opts)
	require.NoError(p.T, err)
	p.Queue = q
}

// Step checks disk and memory, and ends the process and begins it again.
func (p *Process) Step() {
	p.T.Helper()
	p.Check()
	switch p.End {
	case GoesOn:
		return
	case Forgets:
		for shard := range Led(p.Queue) {
			require.NoError(p.T, inspect.Of(p.Queue).Owner(shard, forgetCaches))
		}
	case Closed:
		require.NoError(p.T, p.Close())
		p.Open()
	case Killed:
		left := p.Disk.CrashClone(vfs.CrashCloneCfg{})
		require.NoError(p.T, p.Close())
		p.Disk = left
		p.Open()
	}
	p.Check()
}

// Ends reports whether the process ends in each step.
func (p *Process) Ends() bool { return p.End == Closed || p.End == Killed }

func (p *Process) Check() {
	p.T.Helper()
	synctest.Wait()
	require.NoError(p.T, CheckAll(p.Queue))
	require.NoError(p.T, CheckMemory(p.Queue))
}

// SetClock moves the wall clock, without a notice to the queue.
func (p *Process) SetClock(by time.Duration) {
	synctest.Wait()
	p.Skew.Add(int64(by))
}

// Pass advances the time.
func (p *Process) Pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// Store stores a task that must be new.
func (p *Process) Store(task codeq.Task) codeq.ID {
	p.T.Helper()
	id, err := p.Produce(context.Background(), task)
	require.NoError(p.T, err)
	return id
}

// Take takes the task that is next, at once.
func (p *Process) Take(queue string) *codeq.Lease {
	p.T.Helper()
	l := ClaimNow(p.T, p.Queue, queue)
	require.NotNil(p.T, l, "nothing is ready in queue %q", queue)
	return l
}

// Taken requires that the key of a task belongs to holder.
func (p *Process) Taken(task codeq.Task, holder codeq.ID) {
	p.T.Helper()
	before, err := p.Stats(context.Background())
	require.NoError(p.T, err)
	id, err := p.Produce(context.Background(), task)
	require.ErrorIs(p.T, err, codeq.ErrDuplicate)
	var duplicate *codeq.DuplicateError
	require.ErrorAs(p.T, err, &duplicate)
	require.Equal(p.T, codeq.DuplicateError{Key: task.Unique.Key, ID: holder}, *duplicate)
	require.Equal(p.T, holder, id)
	after, err := p.Stats(context.Background())
	require.NoError(p.T, err)
	require.Equal(p.T, before, after, "a duplicate stores nothing")
}

// StateOf returns where a task is; 0 if it does not exist.
func (p *Process) StateOf(id codeq.ID) codeq.State {
	p.T.Helper()
	info, err := p.Get(context.Background(), id)
	if errors.Is(err, codeq.ErrNotFound) {
		return 0
	}
	require.NoError(p.T, err)
	return info.State
}

// Stored returns how many entries the range has in all shards.
func (p *Process) Stored(prefix byte) int { return Stored(p.T, p.Queue, prefix) }

// forgetCaches makes the next look at an entry go to disk, and lists keys again.
func forgetCaches(o *inspect.Owner) error {
	if !o.Rules.Probe().ForgetCaches() {
		return ErrBusy
	}
	return nil
}

// Kill makes a dead letter of the task that is next in a queue.
func (p *Process) Kill(queue string) codeq.ID {
	p.T.Helper()
	l := p.Take(queue)
	require.NoError(p.T, p.DeadLetter(context.Background(), l.Receipt, errors.New("boom")))
	return l.ID
}

// StoreDead makes n dead letters.
func (p *Process) StoreDead(n int, task codeq.Task) (ids []codeq.ID) {
	p.T.Helper()
	for range n {
		id := p.Store(task)
		require.Equal(p.T, id, p.Kill(task.Queue))
		ids = append(ids, id)
	}
	return ids
}

// EachDead does something with one dead letter.
func (p *Process) EachDead(how func(context.Context, codeq.DeadFilter) (int, error), which codeq.DeadFilter) {
	p.T.Helper()
	time.Sleep(time.Millisecond) // those of this millisecond may be left out
	n, err := how(context.Background(), which)
	require.NoError(p.T, err)
	require.Equal(p.T, 1, n)
}
