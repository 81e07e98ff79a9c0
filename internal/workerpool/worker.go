package workerpool

import (
	"sync"
	"time"
)

// Task is the task of a handler.
type Task interface {
	// End ends the handler's context, if it has not ended.
	End(cause error)
	// Ended returns when it has ended; ok is false if it has not.
	Ended() (at time.Time, ok bool)
	// Mark sets a mark of the embedder, one bit, and reports whether it was set before.
	Mark(mark uint32) bool
}

// Worker runs one handler at a time.
type Worker[J any, T Task] struct {
	pool *Pool[J, T]

	mu      sync.Mutex // guards the fields below
	task    T          // of the running handler
	busy    bool       // a handler runs
	ours    bool       // the worker still has the task; false: it was given back, or its lease was lost
	lost    error      // why TakeAway has taken the task
	stopped bool       // no handler may run any more

	// replaced: another worker has the place of this one, which ends with its handler. It is set
	// while the handler runs, under mu, and the worker reads it when the handler has ended.
	replaced bool
	wants    bool // to be replaced, when another worker is no longer
}

// start starts the worker's goroutine. woken: it is the one that was woken for the jobs.
func (w *Worker[J, T]) start(woken bool) {
	w.pool.running.Go(func() { w.pool.contain("worker", func() { w.work(woken) }) })
}

// Restart is called when a handler has ended the worker's goroutine: it frees the place of the job,
// and starts another goroutine.
func (w *Worker[J, T]) Restart() {
	if w.replaced {
		w.pool.endReplaced(w)
		return
	}
	w.pool.release(1)
	w.start(false)
}

// Replace gives the place of the worker to another one while its handler goes on with a task. It
// returns false if it does not, or too many workers have been replaced: the place is given when one
// of them ends.
func (w *Worker[J, T]) Replace(t T) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.busy && any(w.task) == any(t) && w.replace()
}

// replaceLate replaces the worker if it was not because of too many others.
func (w *Worker[J, T]) replaceLate() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.wants && w.replace()
}

// replace is Replace for a caller that holds mu, of a worker whose handler goes on.
func (w *Worker[J, T]) replace() bool {
	p := w.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if w.replaced || p.ended {
		return false
	}
	if w.wants = p.replaced >= p.config.Replace; w.wants {
		return false
	}
	w.replaced = true
	p.replaced++
	p.releaseLocked(1)
	if p.next < len(p.jobs) {
		p.wakeWorker()
	}
	return true
}

// work takes jobs until there will be no more.
func (w *Worker[J, T]) work(woken bool) {
	p := w.pool
	var none J
	p.mu.Lock()
	if woken {
		p.waking = false
	}
	for {
		for p.next == len(p.jobs) && !p.ended {
			p.idle++
			p.wake.Wait()
			p.idle--
			p.waking = false
		}
		if p.ended {
			p.mu.Unlock()
			return
		}
		job := p.jobs[p.next]
		p.jobs[p.next] = none
		p.next++
		if p.next < len(p.jobs) {
			p.wakeWorker()
		}
		p.mu.Unlock()
		p.host.Do(w, job)
		if w.replaced {
			p.endReplaced(w)
			return
		}
		p.mu.Lock()
		p.releaseLocked(1)
	}
}

// Own gives the worker a task for its handler. It returns false when handlers may not run any more.
func (w *Worker[J, T]) Own(t T) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stopped {
		return false
	}
	w.task, w.busy, w.ours, w.lost, w.wants = t, true, true, nil, false
	return true
}

// Disown notes that the handler has ended. It returns false if the task was taken away meanwhile,
// so that the outcome of the handler is dropped, with the reason of TakeAway; nil if Stop has taken
// it.
func (w *Worker[J, T]) Disown() (ours bool, lost error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var none T
	ours, lost = w.ours, w.lost
	w.task, w.busy, w.ours, w.lost, w.wants = none, false, false, nil, false
	return ours, lost
}

// Task returns the task of the running handler, unless it was taken away.
func (w *Worker[J, T]) Task() (t T, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.task, w.ours
}

// running returns the task of the running handler, also if it was taken away, and whether the
// worker was replaced.
func (w *Worker[J, T]) running() (t T, replaced, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.task, w.replaced, w.busy
}

// TakeAway takes the task of the running handler away if there is a reason to. Its handler goes on:
// the caller ends its context.
func (w *Worker[J, T]) TakeAway(reason func(T) error) (t T, lost error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ours {
		return t, nil
	}
	if w.lost = reason(w.task); w.lost == nil {
		return t, nil
	}
	w.ours = false
	return w.task, w.lost
}

// Stop ends the context of the running handler and takes its task away, if there is one. The worker
// gets no other.
func (w *Worker[J, T]) Stop(cause error) (t T, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopped = true
	if w.busy {
		w.task.End(cause)
	}
	ok = w.ours
	w.ours = false
	return w.task, ok
}

func (w *Worker[J, T]) isBusy() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.busy
}
