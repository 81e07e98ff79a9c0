package simtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"codeq/internal/base"
)

// History is every call of the clients of a simulation, and what came of it. A task is known by the
// serial number in its payload, which no other has; an ID is what the queue calls it. Any goroutine
// may call its methods.
type History[ID TaskID] struct {
	// Set before the first call.
	Drifting bool // wall clocks of nodes run at other rates
	Rates    bool // monotonic clocks do

	mu       sync.Mutex // guards the fields below
	clock    int64      // orders the beginnings and ends of calls
	calls    []*Call
	serials  int
	ids      map[int]ID      // under which a payload was seen
	refused  map[int]error   // payloads that certainly were not stored
	leaving  map[string]bool // nodes that are being removed, or were
	counts   []count
	broken   bool // the directory of a node has failed, was full, or was an older copy
	failures []string
	answered *Call // by a shard: of these calls the one that began last
}

// TaskID is what a queue calls a task.
type TaskID interface {
	comparable
	fmt.Stringer
}

func NewHistory[ID TaskID]() *History[ID] {
	return &History[ID]{ids: make(map[int]ID), refused: make(map[int]error), leaving: make(map[string]bool)}
}

// Verb is what a call is to do.
type Verb int

const (
	Produce Verb = iota
	Claim
	Extend
	Complete
	Retry
	Release
	Read // what is stored, as a read shows it, or at the end, or in a copy
)

var verbs = [...]string{"produce", "claim", "extend", "complete", "retry", "release", "stored"}

// Outcome is what came of a call.
type Outcome int

const (
	Done    Outcome = iota
	Lost            // ErrLeaseLost
	Never           // certainly not applied, for another reason
	Unknown         // it may have been applied, or still be
)

var outcomes = [...]string{"ok", "lost", "refused", "unknown"}

// Call is a call about one task.
type Call struct {
	Verb     Verb
	Client   int
	Node     string
	Serial   int // of the task
	Outcome  Outcome
	Err      error
	Token    uint64 // of the lease
	Attempt  int
	Duration time.Duration // of a claim or an extension

	call, ret  int64        // by History.clock
	begin, end time.Time    // of the bubble
	granted    time.Time    // of a claim, at the earliest
	latest     time.Time    // of a claim, when it was granted at the latest
	state      fmt.Stringer // that was read; nil: there is no such task
}

// Whenever makes what a call reads be of any moment before its end.
func (c *Call) Whenever() { c.call = 0 }

func (c *Call) String() string {
	s := fmt.Sprintf("[%d,%d] %s-%s client %d on %s: %s", c.call, c.ret,
		c.begin.Format("04:05.000"), c.end.Format("04:05.000"), c.Client, c.Node, verbs[c.Verb])
	if c.Token != 0 {
		s += fmt.Sprintf(" token %x attempt %d", c.Token, c.Attempt)
	}
	if c.Duration != 0 {
		s += fmt.Sprintf(" for %v", c.Duration)
	}
	if !c.granted.IsZero() {
		s += " granted " + c.granted.Format("04:05.000")
	}
	if c.Verb == Read {
		if c.state == nil {
			return s + " nothing"
		}
		return s + fmt.Sprintf(" %v", c.state)
	}
	s += " " + outcomes[c.Outcome]
	if c.Err != nil {
		s += ": " + c.Err.Error()
	}
	return s
}

// Begin notes that a call begins.
func (h *History[ID]) Begin(verb Verb, client int, node string) *Call {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock++
	return &Call{Verb: verb, Client: client, Node: node, call: h.clock, begin: time.Now()}
}

// Finish says what came of a call. alive is false if the caller died with the node.
func (h *History[ID]) Finish(c *Call, err error, alive bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock++
	c.ret, c.end, c.Err = h.clock, time.Now(), err
	byShard := err == nil || errors.Is(err, base.ErrLeaseLost) || errors.Is(err, base.ErrEmpty)
	if alive && byShard && (h.answered == nil || h.answered.call < c.call) {
		h.answered = c
	}
	switch {
	case !alive, errors.Is(err, base.ErrUncertain):
		c.Outcome = Unknown
	case err == nil:
	case errors.Is(err, base.ErrLeaseLost):
		c.Outcome = Lost
	default:
		c.Outcome = Never
		if !h.mayRefuse(c) {
			h.fail("unexpected: %v", c)
		}
	}
}

// mayRefuse reports whether a call may end with its error. REQUIRES: mu is held.
func (h *History[ID]) mayRefuse(c *Call) bool {
	for _, may := range []error{base.ErrNotLeader, base.ErrClosed, base.ErrEmpty, context.DeadlineExceeded} {
		if errors.Is(c.Err, may) {
			return true
		}
	}
	left := errors.Is(c.Err, base.ErrNotMember) && h.leaving[c.Node]
	disk := h.broken && (errors.Is(c.Err, base.ErrFailed) || errors.Is(c.Err, base.ErrDiskFull))
	return left || disk
}

// Fail notes what must not be.
func (h *History[ID]) Fail(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fail(format, args...)
}

// fail is Fail. REQUIRES: mu is held.
func (h *History[ID]) fail(format string, args ...any) {
	h.failures = append(h.failures, fmt.Sprintf(format, args...))
}

// Leaves notes that a node is about to be removed.
func (h *History[ID]) Leaves(node string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.leaving[node] = true
}

// Breaks notes that a disk fails or is full, or that a directory is an older copy.
func (h *History[ID]) Breaks() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.broken = true
}

// Now is a moment of the history.
func (h *History[ID]) Now() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock++
	return h.clock
}

// RequireSilence makes sure that no call was answered by a shard that has begun after a moment.
func (h *History[ID]) RequireSilence(from int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if c := h.answered; c != nil && c.call > from {
		h.fail("answered after all have lost power: %v", c)
	}
}

// Add notes a call of a verb that takes a lease, with its task and lease.
func (h *History[ID]) Add(c Call) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls = append(h.calls, &c)
}

// Payloads are those of n tasks that are about to be produced.
func (h *History[ID]) Payloads(n int) (serials []int, payloads [][]byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for range n {
		h.serials++
		serials = append(serials, h.serials)
		payloads = append(payloads, fmt.Appendf(nil, "%d ", h.serials))
	}
	return serials, payloads
}

// Produced notes a call that was to store some tasks, all or none. It has ids if it is Done.
func (h *History[ID]) Produced(c *Call, serials []int, ids []ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, serial := range serials {
		one := *c
		one.Serial = serial
		switch c.Outcome {
		case Done:
			h.seen(serial, ids[i])
		case Never:
			h.refused[serial] = c.Err
			continue
		case Lost, Unknown:
		}
		h.calls = append(h.calls, &one)
	}
}

// seen notes that a payload exists under an ID. REQUIRES: mu is held.
func (h *History[ID]) seen(serial int, id ID) {
	if old, ok := h.ids[serial]; ok && old != id {
		h.fail("payload %d is that of two tasks, %s and %s", serial, old, id)
	}
	h.ids[serial] = id
	if err := h.refused[serial]; err != nil {
		h.fail("payload %d was stored as %s, and refused with %v", serial, id, err)
	}
}

// ClockStep is of what the steps of simulated wall clocks are multiples: so a deadline of any of
// them tells when the lease was granted.
const ClockStep = 10 * time.Minute

// underWay is how long a lease may be under way to whoever claims it. It may have been granted for
// another claim of the same node, before this one began.
const underWay = 10 * time.Second

// Granted is when a lease was granted, between a time and another one, to a claim that began and
// ended at the given times, as the deadline of the lease tells.
func (h *History[ID]) Granted(begin, end, deadline time.Time, duration time.Duration) (earliest, latest time.Time) {
	if h.Drifting { // no deadline tells
		return begin.Add(-underWay), end
	}
	// The last moment before the return that the deadline may stand for.
	late := end.Add(duration).Sub(deadline) % ClockStep
	if late < 0 {
		late += ClockStep
	}
	return end.Add(-late), end.Add(-late)
}

// Lease is what a claim has got.
type Lease[ID TaskID] struct {
	ID       ID
	Serial   int
	Token    uint64
	Attempt  int
	Deadline time.Time
}

// Claimed notes a claim that is Done, and for how long it wanted the lease.
func (h *History[ID]) Claimed(c *Call, l Lease[ID], duration time.Duration) {
	one := *c
	one.Serial, one.Token, one.Attempt, one.Duration = l.Serial, l.Token, l.Attempt, duration
	one.granted, one.latest = h.Granted(c.begin, c.end, l.Deadline, duration)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.seen(one.Serial, l.ID)
	h.calls = append(h.calls, &one)
}

// Task is a task as a read shows it.
type Task[ID TaskID] struct {
	ID       ID
	Serial   int
	State    fmt.Stringer
	Attempts int
}

// Stored notes all that was stored at some moment of a call, which has returned: there is no other
// task.
func (h *History[ID]) Stored(c *Call, tasks []Task[ID]) {
	h.mu.Lock()
	defer h.mu.Unlock()
	stored := make(map[ID]Task[ID])
	for _, task := range tasks {
		h.seen(task.Serial, task.ID)
		stored[task.ID] = task
	}
	for serial, id := range h.ids {
		one := *c
		one.Serial = serial
		if task, ok := stored[id]; ok {
			one.state, one.Attempt = task.State, task.Attempts
		}
		h.calls = append(h.calls, &one)
	}
}

// Decided leaves out the tasks of which the clients know that they were stored as others. The log
// of a node that goes on alone, with what it alone knows, may have the produce as a leader that was
// deposed has decided it, whereas the next leader has decided, and the node has lost, another try.
func (h *History[ID]) Decided(tasks []Task[ID]) []Task[ID] {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(tasks), func(task Task[ID]) bool {
		id, known := h.ids[task.Serial]
		return known && id != task.ID
	})
}

// Saw notes what a read has shown of a task; nil: that it is not there, though it was seen before.
func (h *History[ID]) Saw(c *Call, serial int, task *Task[ID]) {
	one := *c
	one.Serial = serial
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, known := h.ids[serial]; task == nil && !known {
		h.fail("payload %d was not found by the ID of a task that nobody has seen", serial)
	}
	if task != nil {
		h.seen(serial, task.ID)
		one.state, one.Attempt = task.State, task.Attempts
	}
	h.calls = append(h.calls, &one)
}

// Counted notes how many tasks a call has counted.
func (h *History[ID]) Counted(c *Call, tasks uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.counts = append(h.counts, count{c, tasks})
}

// AnyTask draws a task that was seen, or else a payload without one, whose ID is zero: its task may
// be stored, and nobody has seen the ID yet.
func (h *History[ID]) AnyTask(rng *rand.Rand) (serial int, id ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.serials == 0 {
		return 0, id
	}
	serial = h.serials - min(rng.IntN(h.serials), rng.IntN(h.serials)) // late ones more often
	return serial, h.ids[serial]
}

// Next is a history that begins with what is stored.
func (h *History[ID]) Next(tasks []Task[ID]) *History[ID] {
	h.mu.Lock()
	defer h.mu.Unlock()
	next := NewHistory[ID]()
	next.serials, next.leaving, next.Drifting, next.Rates, next.broken = h.serials, h.leaving, h.Drifting, h.Rates, h.broken
	for _, task := range tasks {
		c := &Call{Verb: Produce, Node: "recovered", Serial: task.Serial, begin: time.Now(), end: time.Now()}
		next.seen(c.Serial, task.ID)
		next.clock += 2
		c.call, c.ret = next.clock-1, next.clock
		next.calls = append(next.calls, c)
	}
	return next
}

// Totals is how much a history has.
type Totals struct{ Calls, Tasks, Unknown, Lost int }

func (h *History[ID]) Totals() Totals {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := Totals{Calls: len(h.calls), Tasks: len(h.ids)}
	for _, c := range h.calls {
		switch c.Outcome {
		case Unknown:
			t.Unknown++
		case Lost:
			t.Lost++
		case Done, Never:
		}
	}
	return t
}

// Check returns what in the history must not be. REQUIRES: it is not called in a bubble, where its
// time limit would never pass.
func (h *History[ID]) Check() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	tasks := make(map[int][]*Call)
	for _, c := range h.calls {
		tasks[c.Serial] = append(tasks[c.Serial], c)
	}
	for _, c := range h.counts {
		if problem := c.check(tasks); problem != "" {
			h.fail("%s", problem)
		}
	}
	for serial, calls := range tasks {
		slices.SortFunc(calls, func(a, b *Call) int { return cmp.Compare(a.call, b.call) })
		if problem := checkTask(calls, h.Shortest); problem != "" {
			var b strings.Builder
			for _, c := range calls {
				fmt.Fprintf(&b, "\n\t%v", c)
			}
			h.fail("task %d (%s): %s%s", serial, h.ids[serial], problem, b.String())
		}
	}
	return h.failures
}

// ClockEvery is how often a leader stores the clock of leases, of which the next leader may not
// know how much it has gone on since.
const ClockEvery = 5 * time.Second

// rebase is by how much the clock of leases may jump at changes of the leader, in all while a lease
// lasts, when monotonic clocks run at rates of their own: the next leader measures the time since
// the clock was stored, which may be before the lease, by its own.
const rebase = ClockEvery * 2 * MaxRate / 1_000_000

// Shortest is how long a lease lasts at least: leaders measure it by their monotonic clocks.
func (h *History[ID]) Shortest(d time.Duration) time.Duration {
	if !h.Rates {
		return d
	}
	return (d - rebase) * 1_000_000 / (1_000_000 + MaxRate)
}

// Longest is how long a lease that is not renewed lasts at most, while time passes for it.
func (h *History[ID]) Longest(d time.Duration) time.Duration {
	if !h.Rates {
		return d
	}
	return (d + rebase) * 1_000_000 / (1_000_000 - MaxRate)
}
