package codeqtest

import (
	"testing"
	"testing/synctest"
	"time"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
)

// dir is the directory of the queue in its file system.
const dir = "queue"

// Queue is a queue in memory that belongs to a test. Only the goroutine of the test may call its
// own methods and assertions, which end the test when they fail; the methods of codeq.Queue are
// safe for concurrent use.
type Queue struct {
	// Queue is the queue for the code under test. Reopen and Crash replace it.
	*codeq.Queue
	// RunOptions are the options of Run in Drain and Work. Their defaults differ from those of Run:
	// a Concurrency of 1, Queues in the order of their names, and an OnError that logs to the test.
	// Grace is ignored.
	RunOptions codeq.RunOptions

	t      testing.TB
	opts   codeq.Options
	fs     *crashfs.Disk
	bubble bool // the queue was opened in a bubble
}

// Test calls test in a bubble of testing/synctest with a queue from [Open], and closes the queue at
// the end. It must not be called in a bubble.
func Test(t *testing.T, opts *codeq.Options, test func(t *testing.T, q *Queue)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(t, Open(t, opts)) })
}

// Open opens a new queue in memory, and closes it in a cleanup of t. Nil opts mean all defaults.
// Three defaults differ from those of codeq.Open:
//
//	Shards          1
//	Retention       codeq.Forever, so that completed tasks are found by assertions
//	Backoff.Jitter  none
//
// In a bubble the queue has the bubble's clock, elsewhere the real one. An error ends the test; so
// does Options.Cluster, as a queue in memory cannot be a node.
func Open(t testing.TB, opts *codeq.Options) *Queue {
	t.Helper()
	if opts != nil && opts.Cluster != nil {
		t.Fatalf("codeqtest: open the queue: Options.Cluster is set, but a queue in memory cannot be a node: " +
			"leave Cluster nil, or open a node with codeq.Open")
	}
	q := &Queue{t: t, fs: crashfs.New(), bubble: inBubble()}
	if opts != nil {
		q.opts = *opts
	}
	if q.opts.Shards == 0 {
		q.opts.Shards = 1
	}
	if q.opts.Retention == 0 {
		q.opts.Retention = codeq.Forever
	}
	if q.opts.Backoff.Jitter == 0 {
		q.opts.Backoff.Jitter = -1
	}
	q.open()
	t.Cleanup(q.close)
	return q
}

// Reopen closes the queue and opens it again, like a restart of the program. Calls of Run end as in
// codeq.Queue.Close. q.Queue is a new Queue afterwards: pass it to the code under test.
func (q *Queue) Reopen() {
	q.t.Helper()
	q.close()
	q.open()
}

// Crash is like Reopen for a killed program: the new queue has the state that was acknowledged and
// persisted before the call. Tasks of running handlers of Run have one more crash, and are
// suspects, Blocked until a claim starts them, as after any crash ([codeq.TaskInfo].Suspect);
// leases of Claim go on until they expire. The handlers of the old queue cannot be killed: they end
// as in codeq.Queue.Close, before Crash returns, but the new queue has none of their changes.
func (q *Queue) Crash() {
	q.t.Helper()
	q.settle()
	after := q.fs.Clone() // the operating system did not crash
	q.close()
	q.fs = after
	q.open()
}

func (q *Queue) open() {
	q.t.Helper()
	opts := q.opts
	inspect.Options(&opts).FS = q.fs
	opened, err := codeq.Open(dir, &opts)
	if err != nil {
		q.t.Fatalf("codeqtest: open the queue: %v", err)
	}
	q.Queue = opened
}

func (q *Queue) close() {
	q.t.Helper()
	if err := q.Close(); err != nil {
		q.t.Errorf("codeqtest: close the queue: %v", err)
	}
}

// Advance moves the clock of the bubble by d, without real time. Outside a bubble it panics. When
// it returns, all goroutines in the bubble, such as a Run of the test, have done their work up to
// then.
func (q *Queue) Advance(d time.Duration) {
	synctest.Wait() // panics where a sleep would be real
	time.Sleep(d)
	synctest.Wait()
}

// settle waits until all goroutines of the bubble wait. Without a bubble it does nothing.
func (q *Queue) settle() {
	if q.bubble {
		synctest.Wait()
	}
}

// inBubble reports whether the caller is in a bubble: synctest.Wait panics if not.
func inBubble() (yes bool) {
	defer func() { yes = recover() == nil }()
	synctest.Wait()
	return
}
