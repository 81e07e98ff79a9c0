// Package workerpool has the workers of a Run: how claimed tasks get to idle workers, how many
// tasks are at work, how the workers end, and the heartbeat and the reports of those at work. It
// knows neither queues nor leases.
package workerpool

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"codeq/internal/guard"
)

// Pool is the workers of one Run. Jobs go from the fetchers to the workers:
//
//	fetcher   takes free places, claims at most that many jobs, and adds them
//	worker    takes a job, hands it to the host, and frees the place
//
// A worker that ends a job takes the next one without going to sleep. One worker at a time is
// woken: it takes a job, and wakes the next worker if jobs are left. So slow handlers occupy all
// workers after some microseconds, and fast ones do not pay for waking them. If none is idle, the
// next one begins, so that there are as many workers as jobs were ever at work at once.
type Pool[J any, T Task] struct {
	config  Config
	host    Host[J, T]
	running sync.WaitGroup // workers
	// Outcomes counts the outcomes of jobs that are being stored.
	Outcomes sync.WaitGroup

	mu           sync.Mutex      // guards the fields below
	workers      []*Worker[J, T] // that have begun, and were not replaced before they ended
	replaced     int             // workers whose place another one has
	jobs         []J             // claimed, not yet started; from next on
	next         int
	claimed      int                     // number of jobs so far
	free         int                     // places that no job and no claim occupies; below 0: jobs wait for one
	fetcherWaits bool                    // a fetcher waits for free to become positive
	idle         int                     // workers that wait on wake
	waking       bool                    // a worker was woken, or begins, and is on its way to jobs
	ended        bool                    // no further jobs: workers end
	quiet        bool                    // nothing is claimed
	claims       int                     // under way
	still        chan struct{}           // non-nil while quiet waits for claims; closed when none is under way
	claiming     context.Context         // of claims; nil: none has begun since Run or Resume
	stopClaiming context.CancelCauseFunc // of claiming
	wake         sync.Cond
	room         sync.Cond
}

// Config is the configuration of a Pool.
type Config struct {
	Workers int           // at the most
	Batch   int           // jobs of a claim at the most
	Replace int           // workers that may be replaced at the same time
	Grace   time.Duration // how long workers may go on when claims are over
	Log     *slog.Logger
	// Crash is called if a goroutine of the pool panics. It ends the context of Run.
	Crash func(what string, value any, stack []byte)
}

// Host claims jobs for a pool, and does them.
type Host[J any, T Task] interface {
	// Claim adds jobs to the pool, at most max, and returns their number. It waits for jobs. If the
	// pool ends when there is nothing to do, it may return 0 instead.
	Claim(ctx context.Context, max int) (int, error)
	// Do does a job.
	Do(w *Worker[J, T], job J)
	// GiveBack gives back jobs that no worker has begun.
	GiveBack(jobs []J)
	// TakeBack gives back a task while its handler goes on.
	TakeBack(t T)
	// Hurry ends the waiting for room of outcomes that are being stored.
	Hurry()
}

// New returns a pool without jobs.
func New[J any, T Task](c Config, host Host[J, T]) *Pool[J, T] {
	p := &Pool[J, T]{config: c, host: host, free: c.Workers}
	p.wake.L, p.room.L = &p.mu, &p.mu
	return p
}

// contain calls f on one of the pool's goroutines. A panic ends the pool.
func (p *Pool[J, T]) contain(what string, f func()) {
	guard.Contain(p.config.Log, what, f, func(value any, stack []byte) {
		p.config.Crash(what, value, stack)
	})
}

// Workers returns the workers that have begun. The slice must not be changed.
func (p *Pool[J, T]) Workers() []*Worker[J, T] {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.workers
}

// Claimed returns how many jobs have been added.
func (p *Pool[J, T]) Claimed() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.claimed
}

// Run claims jobs for the workers until ctx ends, or nothing can be claimed and none is at work.
// failed is called when a claim fails; it ends ctx. Then Drain ends the workers.
func (p *Pool[J, T]) Run(ctx context.Context, fetchers int, failed func(error)) {
	// Fetchers that wait for a free place are woken to see that claims are over.
	unhook := context.AfterFunc(ctx, func() {
		guard.Contain(p.config.Log, "end of claims", p.wakeFetchers, func(any, []byte) {
			p.wakeFetchers()
		})
	})
	defer unhook()
	var fetching sync.WaitGroup
	for range fetchers {
		fetching.Go(func() {
			p.contain("fetcher", func() {
				if err := p.fetch(ctx); err != nil && ctx.Err() == nil {
					failed(err)
				}
			})
		})
	}
	fetching.Wait()
}

// fetch claims jobs for free workers until ctx ends, or until none can be claimed and none is at
// work.
func (p *Pool[J, T]) fetch(ctx context.Context) error {
	for {
		claiming, places, atWork, err := p.reserve(ctx)
		if err != nil {
			return err
		}
		n, err := p.host.Claim(claiming, places)
		p.endClaim(places - n)
		switch {
		case err != nil && claiming.Err() != nil && ctx.Err() == nil: // the pool is quiet
		case err != nil:
			return err
		case n > 0:
		case atWork == 0:
			return nil
		default:
			p.awaitFewer(ctx, atWork)
		}
	}
}

// reserve waits until the pool may claim and has free places, and takes as many as one claim may
// fill. claiming ends with ctx, or with Quiet; atWork is how many places were taken before. The
// caller ends the claim by endClaim.
func (p *Pool[J, T]) reserve(ctx context.Context) (claiming context.Context, places, atWork int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for (p.free <= 0 || p.quiet) && ctx.Err() == nil {
		p.fetcherWaits = true
		p.room.Wait()
	}
	if ctx.Err() != nil {
		return nil, 0, 0, context.Cause(ctx)
	}
	places, atWork = min(p.free, p.config.Batch), p.config.Workers-p.free
	p.free -= places
	return p.beginClaim(ctx), places, atWork, nil
}

// beginClaim returns the context of a claim. REQUIRES: mu is held, and the pool is not quiet.
func (p *Pool[J, T]) beginClaim(ctx context.Context) context.Context {
	if p.claiming == nil {
		p.claiming, p.stopClaiming = context.WithCancelCause(ctx)
	}
	p.claims++
	return p.claiming
}

// BeginClaim begins a claim of a worker, for more jobs in the place of its own. ctx is that of Run.
// The worker ends it by EndClaim. It returns nil if the pool is quiet or has ended.
func (p *Pool[J, T]) BeginClaim(ctx context.Context) (claiming context.Context) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.quiet || p.ended || ctx.Err() != nil {
		return nil
	}
	return p.beginClaim(ctx)
}

// EndClaim ends a claim of a worker. jobs of it need places of their own: they wait for some if
// none is free. The others, so many as shared, are done in the place of another. It returns false
// if the pool has ended, and takes no jobs.
func (p *Pool[J, T]) EndClaim(jobs []J, shared int) bool {
	defer p.endClaim(0)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.claimed += shared
	switch {
	case len(jobs) == 0:
		return true
	case p.ended:
		return false
	}
	p.free -= len(jobs)
	p.add(jobs)
	return true
}

// Share frees the places of claimed jobs that are done in the place of another, and are not added.
func (p *Pool[J, T]) Share(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.claimed += n
	p.releaseLocked(n)
}

// endClaim ends a claim, and frees the places that it has not filled.
func (p *Pool[J, T]) endClaim(places int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.releaseLocked(places)
	if p.claims--; p.claims == 0 {
		p.beStill()
	}
}

// beStill tells callers of Quiet that no claim is under way. REQUIRES: mu is held.
func (p *Pool[J, T]) beStill() {
	if p.still != nil {
		close(p.still)
		p.still = nil
	}
}

// Quiet stops claims until Resume, and ends those under way. The channel is closed when none is, or
// at Resume. Jobs that were added are done.
func (p *Pool[J, T]) Quiet() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.quiet = true
	if p.claiming != nil {
		p.stopClaiming(errQuiet)
		p.claiming, p.stopClaiming = nil, nil
	}
	if p.still == nil {
		p.still = make(chan struct{})
	}
	still := p.still
	if p.claims == 0 {
		p.beStill()
	}
	return still
}

var errQuiet = errors.New("the workers are quiet")

// Resume makes a quiet pool claim again.
func (p *Pool[J, T]) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.quiet = false
	p.beStill()
	p.room.Broadcast()
}

// State returns how many handlers run, and whether the pool is quiet.
func (p *Pool[J, T]) State() (busy int, quiet bool) {
	busy = p.busy()
	p.mu.Lock()
	defer p.mu.Unlock()
	return busy, p.quiet
}

// busy returns how many handlers run.
func (p *Pool[J, T]) busy() (n int) {
	for _, w := range p.Workers() {
		if w.isBusy() {
			n++
		}
	}
	return n
}

// Hung describes a handler that goes on though its context has ended.
type Hung struct {
	Since    time.Time // when the context has ended
	Replaced bool      // another worker has the place
}

// Hung yields the tasks of such handlers.
func (p *Pool[J, T]) Hung(yield func(T, Hung) bool) {
	for _, w := range p.Workers() {
		if t, replaced, ok := w.running(); ok {
			if at, ended := t.Ended(); ended && !yield(t, Hung{at, replaced}) {
				return
			}
		}
	}
}

// Add adds claimed jobs.
func (p *Pool[J, T]) Add(jobs []J) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.add(jobs)
}

// add is Add for a caller that holds mu.
func (p *Pool[J, T]) add(jobs []J) {
	if p.next == len(p.jobs) {
		p.jobs, p.next = p.jobs[:0], 0
	}
	p.jobs = append(p.jobs, jobs...)
	p.claimed += len(jobs)
	p.wakeWorker()
}

// awaitFewer waits until fewer jobs are at work, or ctx ends. REQUIRES: there is one fetcher.
func (p *Pool[J, T]) awaitFewer(ctx context.Context, atWork int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.config.Workers-p.free >= atWork && ctx.Err() == nil {
		p.fetcherWaits = true
		p.room.Wait()
	}
}

// wakeFetchers wakes the fetchers that wait for a free place, to check whether ctx has ended.
func (p *Pool[J, T]) wakeFetchers() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.room.Broadcast()
}

// wakeWorker wakes an idle worker for the jobs, or starts another one. REQUIRES: mu is held, there
// are jobs, and the pool has not ended.
func (p *Pool[J, T]) wakeWorker() {
	switch {
	case p.waking:
	case p.idle > 0:
		p.waking = true
		p.wake.Signal()
	case len(p.workers) < p.config.Workers+p.replaced:
		p.waking = true
		w := &Worker[J, T]{pool: p}
		p.workers = append(p.workers, w)
		w.start(true)
	}
}

// endReplaced ends a worker whose place another one has, and replaces the next one that wants it.
func (p *Pool[J, T]) endReplaced(w *Worker[J, T]) {
	p.mu.Lock()
	p.replaced--
	all := slices.Clone(p.workers) // others read the old ones
	p.workers = slices.DeleteFunc(all, func(o *Worker[J, T]) bool { return o == w })
	p.mu.Unlock()
	for _, o := range p.Workers() {
		if o.replaceLate() {
			return
		}
	}
}

// release frees places.
func (p *Pool[J, T]) release(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.releaseLocked(n)
}

// releaseLocked is release for a caller that holds mu.
func (p *Pool[J, T]) releaseLocked(n int) {
	if p.free += n; p.fetcherWaits {
		p.fetcherWaits = false
		p.room.Broadcast()
	}
}

// Drain waits for the handlers to end: for the grace period by themselves, then by their context,
// which ends with the given cause. It returns when their outcomes are stored, and how many handlers
// have still not ended. REQUIRES: Run has returned.
func (p *Pool[J, T]) Drain(cause error) (running int) {
	defer p.awaitOutcomes()
	p.mu.Lock()
	waiting := p.jobs[p.next:]
	p.jobs, p.next = nil, 0
	p.ended = true
	p.mu.Unlock()
	p.wake.Broadcast()
	p.Outcomes.Go(func() {
		// If it panics, the other jobs come back when their leases expire.
		guard.Contain(p.config.Log, "tasks that come back", func() { p.host.GiveBack(waiting) }, nil)
	})
	idle := make(chan struct{})
	go func() {
		defer close(idle)
		guard.Contain(p.config.Log, "wait for workers", p.running.Wait, nil)
	}()
	if within(idle, p.config.Grace) {
		return 0
	}
	var taken []T
	for _, w := range p.Workers() {
		if t, ok := w.Stop(cause); ok {
			taken = append(taken, t)
		}
	}
	for _, t := range taken { // each waits for a commit; by now every handler knows
		p.host.TakeBack(t)
	}
	if within(idle, max(p.config.Grace, time.Second)) {
		return 0
	}
	p.host.Hurry() // of workers that have no handler any more
	if running = p.busy(); running == 0 {
		<-idle
	}
	return running
}

// awaitOutcomes returns when the outcomes of all handlers are stored, or refused: they do not wait
// longer for room on the disk than Drain waits for handlers.
func (p *Pool[J, T]) awaitOutcomes() {
	done := make(chan struct{})
	go func() {
		p.Outcomes.Wait()
		close(done)
	}()
	if !within(done, max(p.config.Grace, time.Second)) {
		p.host.Hurry()
		<-done
	}
}

func within(done <-chan struct{}, d time.Duration) bool {
	if d <= 0 {
		select {
		case <-done:
			return true
		default:
			return false
		}
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}

// ProcessName is the default name of this process: its host and its number.
func ProcessName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "host"
	}
	return fmt.Sprintf("%.100s:%d", host, os.Getpid())
}
