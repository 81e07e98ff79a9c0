package workerpool

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Batches collects claimed tasks in batches: each is one job of a pool, and done at once. A task
// joins the open batch of its key, or opens one, which is queued until a worker takes it.
//
// Invariant: a task that has joined, and is not over, is in one batch.
type Batches[K, J comparable, T Task] struct {
	mu      sync.Mutex               // guards the fields below, and those of the batches
	open    map[K]*Batch[K, J, T]    // that further tasks join
	queued  map[J]*Batch[K, J, T]    // that no worker has taken, by their jobs
	all     map[*Batch[K, J, T]]bool // that are not dropped
	waiting int                      // tasks of queued
}

// Batch is tasks with one key, and the context of their handler, which ends with those of all
// tasks.
type Batch[K, J comparable, T Task] struct {
	Context
	Key   K
	Since time.Time // when it was opened
	max   int
	job   J

	taken bool           // a worker has it
	shut  bool           // no task joins or leaves: its handler runs, or they are given back
	tasks []BatchTask[T] // when it is shut, only Over and Lost change
	full  func()         // ends the claim that fills it; nil: none does
}

// BatchTask is a task of a batch.
type BatchTask[T Task] struct {
	Task T
	Over bool  // it was given back or lost, or its outcome is being stored
	Lost error // why it was lost
}

// Joining is a task that joins a batch of at most Max tasks with its key. It is Job if it opens
// one.
type Joining[K, J comparable, T Task] struct {
	Key  K
	Max  int
	Job  J
	Task T
}

// NewBatches returns Batches without any.
func NewBatches[K, J comparable, T Task]() *Batches[K, J, T] {
	return &Batches[K, J, T]{open: make(map[K]*Batch[K, J, T]), queued: make(map[J]*Batch[K, J, T]), all: make(map[*Batch[K, J, T]]bool)}
}

// Join adds tasks to the open batches of their keys. opens is called for the index of each task
// that opens one.
func (bs *Batches[K, J, T]) Join(joining []Joining[K, J, T], opens func(i int)) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	var b *Batch[K, J, T] // of the last task
	for i := range joining {
		t := &joining[i]
		if b == nil || b.Key != t.Key {
			b = bs.open[t.Key]
		}
		if b == nil {
			b = &Batch[K, J, T]{Key: t.Key, Since: time.Now(), max: t.Max, job: t.Job}
			b.tasks = make([]BatchTask[T], 0, min(t.Max, len(joining)))
			bs.open[b.Key], bs.queued[b.job], bs.all[b] = b, b, true
			opens(i)
		}
		b.tasks = append(b.tasks, BatchTask[T]{Task: t.Task})
		if !b.taken {
			bs.waiting++
		}
		if len(b.tasks) >= b.max {
			if delete(bs.open, b.Key); b.full != nil {
				b.full()
			}
			b = nil
		}
	}
}

// Take returns the batch of a job, for the worker that gets it; nil: it is none of a batch.
func (bs *Batches[K, J, T]) Take(job J) *Batch[K, J, T] {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	b := bs.queued[job]
	if b != nil {
		delete(bs.queued, job)
		b.taken = true
		bs.waiting -= len(b.tasks)
	}
	return b
}

// maxWaiting is how many tasks wait for a place before no batch is filled, in batches.
const maxWaiting = 4

// Room returns how many tasks a claim may bring that fills a batch; -1: it is full. full is called
// when it is.
func (bs *Batches[K, J, T]) Room(b *Batch[K, J, T], full context.CancelFunc) int {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	b.full = full
	if bs.open[b.Key] != b {
		return -1
	}
	return max(0, min(b.max-len(b.tasks), maxWaiting*b.max-bs.waiting))
}

// Begin ends the filling of a batch, and begins its context. begin begins that of a task, and
// returns its timeout; the shortest one is that of the batch.
func (bs *Batches[K, J, T]) Begin(b *Batch[K, J, T], begin func(T) time.Duration) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	bs.close(b)
	var timeout time.Duration
	for i := range b.tasks {
		if t := begin(b.tasks[i].Task); t > 0 && (timeout == 0 || t < timeout) {
			timeout = t
		}
	}
	b.Context.Begin(timeout)
}

// close keeps tasks from joining or leaving a batch. REQUIRES: mu is held.
func (bs *Batches[K, J, T]) close(b *Batch[K, J, T]) {
	b.shut, b.full = true, nil
	if bs.open[b.Key] == b {
		delete(bs.open, b.Key)
	}
}

// End takes all tasks of a batch that are left, and returns all as they were before.
func (bs *Batches[K, J, T]) End(b *Batch[K, J, T]) []BatchTask[T] {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	bs.close(b)
	was := slices.Clone(b.tasks)
	for i := range b.tasks {
		b.tasks[i].Over = true
	}
	return was
}

// Tasks returns all tasks of a batch as they are.
func (bs *Batches[K, J, T]) Tasks(b *Batch[K, J, T]) []BatchTask[T] {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	return slices.Clone(b.tasks)
}

// Drop forgets a batch.
func (bs *Batches[K, J, T]) Drop(b *Batch[K, J, T]) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	bs.close(b)
	delete(bs.all, b)
}

// IsAtWork reports whether the i-th task of a batch is not over.
func (bs *Batches[K, J, T]) IsAtWork(b *Batch[K, J, T], i int) bool {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	return !b.tasks[i].Over
}

// AtWork calls f for all tasks that are not over. It must not call the Batches.
func (bs *Batches[K, J, T]) AtWork(f func(T)) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	for b := range bs.all {
		for i := range b.tasks {
			if !b.tasks[i].Over {
				f(b.tasks[i].Task)
			}
		}
	}
}

// Loss is a task that was lost.
type Loss[T Task] struct {
	Task  T
	Cause error
	Begun bool // its handler runs
	batch Task // in which no other task is at work; nil: one is, or it has not begun
}

// End ends the context of the task, and of the batch if no other task is at work.
func (l *Loss[T]) End() {
	l.Task.End(l.Cause)
	if l.batch != nil {
		l.batch.End(l.Cause)
	}
}

// Lose takes out the tasks with a reason to end. The caller ends them.
func (bs *Batches[K, J, T]) Lose(reason func(T) error) (losses []Loss[T]) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	for b := range bs.all {
		left, before := 0, len(losses)
		for i := range b.tasks {
			t := &b.tasks[i]
			if t.Over {
				continue
			}
			if t.Lost = reason(t.Task); t.Lost == nil {
				left++
				continue
			}
			t.Over = true
			losses = append(losses, Loss[T]{Task: t.Task, Cause: t.Lost, Begun: b.shut})
		}
		switch was := len(b.tasks); {
		case len(losses) == before:
		case b.shut && left == 0:
			losses[len(losses)-1].batch = b
		case !b.shut:
			b.tasks = slices.DeleteFunc(b.tasks, func(t BatchTask[T]) bool { return t.Over })
			if !b.taken {
				bs.waiting -= was - len(b.tasks)
			}
		}
	}
	return losses
}

// End ends the contexts of all tasks, and then that of the handler: a handler that sees its own
// ended finds the others ended. REQUIRES: the batch has begun.
func (b *Batch[K, J, T]) End(cause error) {
	for i := range b.tasks {
		b.tasks[i].Task.End(cause)
	}
	b.Context.End(cause)
}

// All yields the tasks. REQUIRES: the batch has begun.
func (b *Batch[K, J, T]) All(yield func(T) bool) {
	for i := range b.tasks {
		if !yield(b.tasks[i].Task) {
			return
		}
	}
}
