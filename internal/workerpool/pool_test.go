package workerpool_test

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/workerpool"
)

// job is both a claimed job and its task.
type job struct {
	workerpool.Context
	done chan struct{} // closes when the handler may end; nil: at once
}

type pool = workerpool.Pool[*job, *job]

// host has jobs, and notes their outcomes.
type host struct {
	pool       *pool
	jobs       chan *job
	untilEmpty bool

	most, running, done, left, taken, hurries atomic.Int64
}

func newHost(c workerpool.Config) *host {
	h := &host{jobs: make(chan *job, 100)}
	c.Log = slog.New(slog.DiscardHandler)
	h.pool = workerpool.New(c, h)
	return h
}

func (h *host) Claim(ctx context.Context, most int) (int, error) {
	h.most.Store(max(h.most.Load(), int64(most)))
	var got []*job
	select {
	case j := <-h.jobs:
		got = append(got, j)
	default:
		if h.untilEmpty {
			return 0, nil
		}
		select {
		case j := <-h.jobs:
			got = append(got, j)
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	for more := true; more && len(got) < most; {
		select {
		case j := <-h.jobs:
			got = append(got, j)
		default: // another claim may have taken the last one
			more = false
		}
	}
	h.pool.Add(got)
	return len(got), nil
}

func (h *host) Do(w *workerpool.Worker[*job, *job], t *job) {
	if !w.Own(t) {
		h.left.Add(1)
		return
	}
	h.running.Add(1)
	if t.done != nil {
		<-t.done
	}
	h.running.Add(-1)
	if ours, _ := w.Disown(); ours {
		h.done.Add(1)
	}
}

func (h *host) GiveBack(jobs []*job) { h.left.Add(int64(len(jobs))) }
func (h *host) TakeBack(*job)        { h.taken.Add(1) }
func (h *host) Hurry()               { h.hurries.Add(1) }

// run runs the pool until a call of stop; stop returns the number of handlers that have not ended.
func (h *host) run(t *testing.T) (stop func() int) {
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() {
		h.pool.Run(ctx, 2, func(err error) { t.Error(err) })
		close(over)
	}()
	return func() int {
		cancel()
		<-over
		return h.pool.Drain(context.Cause(ctx))
	}
}

// TestPlaces: the pool claims no more jobs than it has workers, and no more than a batch at once.
// Each job ends once.
func TestPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(workerpool.Config{Workers: 8, Batch: 3, Grace: time.Second})
		gate := make(chan struct{})
		for range 20 {
			h.jobs <- &job{done: gate}
		}
		stop := h.run(t)
		synctest.Wait()
		require.EqualValues(t, 8, h.running.Load())
		require.EqualValues(t, 3, h.most.Load())
		require.Len(t, h.jobs, 12)
		close(gate)
		synctest.Wait()
		require.Zero(t, stop())
		require.EqualValues(t, 20, h.done.Load())
		require.Equal(t, 20, h.pool.Claimed())
	})
}

// TestUntilEmpty: a pool ends by itself when there is nothing to claim and no job runs: a running
// job may add other jobs.
func TestUntilEmpty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(workerpool.Config{Workers: 4, Batch: 4, Grace: time.Second})
		h.untilEmpty = true
		slow := &job{done: make(chan struct{})}
		h.jobs <- slow
		over := make(chan struct{})
		go func() {
			h.pool.Run(t.Context(), 1, func(err error) { t.Error(err) })
			close(over)
		}()
		synctest.Wait()
		h.jobs <- new(job)
		close(slow.done)
		<-over
		require.Zero(t, h.pool.Drain(nil))
		require.EqualValues(t, 2, h.done.Load())
	})
}

// TestDrain: handlers may go on for the grace period. Then the pool ends their contexts and takes
// their tasks away. It counts the handlers that have not ended after a second grace period.
func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(workerpool.Config{Workers: 3, Batch: 3, Grace: 10 * time.Second})
		soon, never := &job{done: make(chan struct{})}, &job{done: make(chan struct{})}
		h.jobs <- soon
		h.jobs <- never
		for _, j := range []*job{soon, never} {
			j.Begin(0)
		}
		stop := h.run(t)
		synctest.Wait()
		begun := time.Now()
		time.AfterFunc(5*time.Second, func() { close(soon.done) })
		require.Equal(t, 1, stop())
		require.Equal(t, 20*time.Second, time.Since(begun))
		require.NoError(t, soon.Err())
		require.ErrorIs(t, never.Err(), context.Canceled)
		require.EqualValues(t, 1, h.done.Load())
		require.EqualValues(t, 1, h.taken.Load())
		require.EqualValues(t, 1, h.hurries.Load())
		close(never.done)
	})
}

// TestDrainGivesBackWhatWaits: the pool gives back jobs that no worker has begun, and a stopped
// worker begins no other job.
func TestDrainGivesBackWhatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(workerpool.Config{Workers: 1, Batch: 2})
		held := &job{done: make(chan struct{})}
		h.pool.Add([]*job{held, new(job), new(job)})
		synctest.Wait()
		require.Equal(t, 1, h.pool.Drain(context.Canceled))
		require.EqualValues(t, 2, h.left.Load())
		close(held.done)
		synctest.Wait()
		require.False(t, h.pool.Workers()[0].Own(new(job)))
	})
}

// TestWorkersBegin: a worker begins when there is a job and no other worker is idle. Therefore a
// large bound of workers costs nothing.
func TestWorkersBegin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(workerpool.Config{Workers: math.MaxInt, Batch: 10})
		stop := h.run(t)
		require.Empty(t, h.pool.Workers())
		gate := make(chan struct{})
		for range 20 {
			h.jobs <- &job{done: gate}
		}
		synctest.Wait()
		require.EqualValues(t, 20, h.running.Load())
		require.Len(t, h.pool.Workers(), 20)
		close(gate)
		synctest.Wait() // all are idle
		for range 20 {
			h.jobs <- new(job)
			synctest.Wait()
		}
		require.EqualValues(t, 40, h.done.Load())
		require.Len(t, h.pool.Workers(), 20)
		require.Zero(t, stop())
	})
}

// TestDrainAwaitsOutcomes: the writes of outcomes have the grace period; then the pool hurries
// them.
func TestDrainAwaitsOutcomes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(workerpool.Config{Workers: 1, Batch: 1, Grace: 10 * time.Second})
		h.pool.Outcomes.Go(func() {
			for h.hurries.Load() == 0 {
				time.Sleep(time.Second)
			}
		})
		begun := time.Now()
		require.Zero(t, h.pool.Drain(context.Canceled))
		require.InDelta(t, 10*time.Second, time.Since(begun), float64(time.Second))
		require.EqualValues(t, 1, h.hurries.Load())
	})
}

// TestTaskIsTakenAway: a task has one outcome, no matter which side takes it.
func TestTaskIsTakenAway(t *testing.T) {
	h := newHost(workerpool.Config{Workers: 1, Grace: time.Minute})
	h.pool.Add([]*job{new(job)})
	require.Zero(t, h.pool.Drain(nil)) // its goroutine has ended
	w, j := h.pool.Workers()[0], new(job)
	require.True(t, w.Own(j))
	got, ok := w.Task()
	require.True(t, ok)
	require.Same(t, j, got)
	_, lost := w.TakeAway(func(*job) error { return nil })
	require.NoError(t, lost)
	reason := errors.New("the lease is lost")
	got, lost = w.TakeAway(func(of *job) error {
		require.Same(t, j, of)
		return reason
	})
	require.Same(t, j, got)
	require.Equal(t, reason, lost)
	_, ok = w.Task()
	require.False(t, ok)
	ours, lost := w.Disown()
	require.False(t, ours)
	require.Equal(t, reason, lost)
	require.True(t, w.Own(j), "the next task")
	ours, lost = w.Disown()
	require.True(t, ours)
	require.NoError(t, lost)
	require.True(t, w.Own(j))
	_, ok = w.Stop(reason)
	require.True(t, ok)
	ours, lost = w.Disown()
	require.False(t, ours)
	require.NoError(t, lost, "the end of Run is no loss")
}

// TestFailedClaim: the first error of a claim ends the pool.
func TestFailedClaim(t *testing.T) {
	h := &failing{}
	p := workerpool.New[*job, *job](workerpool.Config{Workers: 2, Batch: 2, Log: slog.New(slog.DiscardHandler)}, h)
	ctx, cancel := context.WithCancelCause(t.Context())
	p.Run(ctx, 2, cancel)
	require.ErrorIs(t, context.Cause(ctx), errClaim)
	require.Zero(t, p.Drain(errClaim))
}

var errClaim = errors.New("claim")

type failing struct{ host }

func (*failing) Claim(context.Context, int) (int, error) { return 0, errClaim }

// TestQuiet: a quiet pool ends the waiting claims, and claims nothing; running jobs go on. The pool
// is still when no claim is under way, and has the jobs that the last claims added. After Resume it
// goes on.
func TestQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(workerpool.Config{Workers: 4, Batch: 4, Grace: time.Second})
		gate := make(chan struct{})
		<-h.pool.Quiet() // before it runs
		h.jobs <- &job{done: gate}
		stop := h.run(t)
		synctest.Wait()
		busy, quiet := h.pool.State()
		require.Zero(t, busy)
		require.True(t, quiet)
		h.pool.Resume()
		synctest.Wait()
		busy, quiet = h.pool.State()
		require.Equal(t, 1, busy)
		require.False(t, quiet)
		for range 2 {
			<-h.pool.Quiet()
		}
		h.jobs <- &job{done: gate}
		synctest.Wait()
		require.Len(t, h.jobs, 1)
		close(gate)
		synctest.Wait()
		require.EqualValues(t, 1, h.done.Load())
		require.Len(t, h.jobs, 1)
		h.pool.Resume()
		synctest.Wait()
		require.EqualValues(t, 2, h.done.Load())
		<-h.pool.Quiet()
		require.Zero(t, stop())
	})
}

// lateHost has a job that comes after the pool has given up the claim for it.
type lateHost struct {
	host
	claimed chan struct{}
}

func (h *lateHost) Claim(ctx context.Context, _ int) (int, error) {
	<-ctx.Done()
	<-h.claimed
	h.pool.Add([]*job{{}})
	return 1, nil
}

// TestStill: the pool is not still before the end of each claim under way. Resume ends the wait for
// it.
func TestStill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &lateHost{claimed: make(chan struct{})}
		h.pool = workerpool.New[*job, *job](workerpool.Config{Workers: 4, Batch: 1, Log: slog.New(slog.DiscardHandler)}, h)
		ctx, cancel := context.WithCancelCause(t.Context())
		over := make(chan struct{})
		go func() { h.pool.Run(ctx, 2, cancel); close(over) }()
		synctest.Wait()
		isOpen := func(still <-chan struct{}) bool {
			select {
			case <-still:
				return false
			default:
				return true
			}
		}
		still := h.pool.Quiet()
		h.claimed <- struct{}{}
		synctest.Wait()
		require.True(t, isOpen(still), "of two claims one is under way")
		require.EqualValues(t, 1, h.done.Load())
		h.pool.Resume()
		require.False(t, isOpen(still))
		synctest.Wait()
		still = h.pool.Quiet() // an old claim, and a new one
		for range 2 {
			require.True(t, isOpen(still))
			h.claimed <- struct{}{}
			synctest.Wait()
		}
		require.False(t, isOpen(still))
		require.EqualValues(t, 3, h.done.Load())
		cancel(nil)
		<-over
		require.Zero(t, h.pool.Drain(nil))
	})
}

// brokenHost fails when the pool gives up a claim.
type brokenHost struct{ host }

func (h *brokenHost) Claim(ctx context.Context, _ int) (int, error) {
	<-ctx.Done()
	return 0, errors.New("broken")
}

// TestQuietIsNoFailure: a given-up claim does not end the pool.
func TestQuietIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := new(brokenHost)
		p := workerpool.New[*job, *job](workerpool.Config{Workers: 1, Batch: 1, Log: slog.New(slog.DiscardHandler)}, h)
		ctx, cancel := context.WithCancelCause(t.Context())
		over := make(chan struct{})
		go func() { p.Run(ctx, 1, cancel); close(over) }()
		synctest.Wait()
		<-p.Quiet()
		synctest.Wait()
		require.NoError(t, ctx.Err())
		cancel(nil)
		<-over
		require.Zero(t, p.Drain(nil))
	})
}

// TestSharedPlaces: a worker claims more jobs in the place of its own. Those that need a place wait
// for one, and until then nothing else is claimed. A quiet pool begins no such claim, and one that
// has ended takes no jobs of it.
func TestSharedPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(workerpool.Config{Workers: 2, Batch: 2, Grace: time.Second})
		gate := make(chan struct{})
		h.jobs <- &job{done: gate}
		stop := h.run(t)
		synctest.Wait()
		ctx := t.Context()
		require.NotNil(t, h.pool.BeginClaim(ctx))
		require.True(t, h.pool.EndClaim([]*job{{done: gate}, {done: gate}, {done: gate}}, 7))
		synctest.Wait()
		require.EqualValues(t, 2, h.running.Load())
		require.Equal(t, 1+3+7, h.pool.Claimed())
		h.jobs <- &job{}
		close(gate)
		synctest.Wait()
		require.EqualValues(t, 5, h.done.Load(), "all places are free again")
		h.jobs <- &job{}
		h.jobs <- &job{}
		synctest.Wait()
		require.EqualValues(t, 7, h.done.Load())

		claiming := h.pool.BeginClaim(ctx)
		still := h.pool.Quiet()
		require.Error(t, claiming.Err())
		require.Nil(t, h.pool.BeginClaim(ctx))
		synctest.Wait()
		select {
		case <-still:
			t.Fatal("a claim is under way")
		default:
		}
		require.True(t, h.pool.EndClaim(nil, 0))
		<-still
		h.pool.Resume()
		require.NotNil(t, h.pool.BeginClaim(ctx))
		require.Zero(t, stop())
		require.False(t, h.pool.EndClaim([]*job{{}}, 0))
		require.Nil(t, h.pool.BeginClaim(ctx))
	})
}

// TestReplace: the place of a worker whose handler goes on is given to another one, as often as
// allowed. When the handler ends, or its goroutine does, there are as many places as before.
func TestReplace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(workerpool.Config{Workers: 1, Batch: 1, Replace: 1, Grace: time.Second})
		first, second, third := &job{done: make(chan struct{})}, &job{done: make(chan struct{})}, &job{done: make(chan struct{})}
		for _, j := range []*job{first, second, third} {
			h.jobs <- j
		}
		stop := h.run(t)
		synctest.Wait()
		replace := func(of *job) (replaced bool) {
			for _, w := range h.pool.Workers() {
				replaced = replaced || w.Replace(of)
			}
			synctest.Wait()
			return replaced
		}
		require.False(t, replace(second), "it has not begun")
		require.True(t, replace(first))
		require.EqualValues(t, 2, h.running.Load())
		require.False(t, replace(first), "once")
		require.False(t, replace(second), "too many")
		require.EqualValues(t, 2, h.running.Load())
		close(first.done)
		synctest.Wait()
		require.EqualValues(t, 2, h.running.Load(), "its place was given away, and the second one's then")
		require.Len(t, h.pool.Workers(), 2)
		require.False(t, replace(second), "once")
		close(third.done)
		close(second.done)
		synctest.Wait()
		next := &job{done: make(chan struct{})}
		h.jobs <- next
		h.jobs <- &job{}
		synctest.Wait()
		require.EqualValues(t, 1, h.running.Load(), "there is one place")
		require.Zero(t, h.left.Load())
		close(next.done)
		synctest.Wait()
		require.EqualValues(t, 5, h.done.Load())
		require.Zero(t, stop())
		require.False(t, replace(next))
	})
}
