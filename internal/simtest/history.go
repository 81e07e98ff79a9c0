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

// History has every call of the clients of a simulation, with its outcome. The unique serial number
// in its payload identifies a task; the queue identifies it by an ID. The methods are safe for
// concurrent use.
type History[ID TaskID] struct {
	// Set before the first call.
	Drifting bool // wall clocks of nodes drift
	Rates    bool // monotonic clocks run at different rates

	mu       sync.Mutex // guards the fields below
	clock    int64      // orders the beginnings and ends of calls
	calls    []*Call
	serials  int
	ids      map[int]ID      // the ID of each seen payload
	refused  map[int]error   // payloads that were certainly not stored
	leaving  map[string]bool // nodes that are being removed, or have been
	counts   []count
	broken   bool // a node's directory has failed, was full, or was an older copy
	failures []string
	answered *Call // the latest call, by its beginning, that a shard has answered
}

// TaskID is the queue's ID of a task.
type TaskID interface {
	comparable
	fmt.Stringer
}

func NewHistory[ID TaskID]() *History[ID] {
	return &History[ID]{ids: make(map[int]ID), refused: make(map[int]error), leaving: make(map[string]bool)}
}

// Verb is the kind of a call.
type Verb int

const (
	Produce Verb = iota
	Claim
	Extend
	Complete
	Retry
	Release
	Read // a stored state, of a read, at the end, or in a copy
)

var verbs = [...]string{"produce", "claim", "extend", "complete", "retry", "release", "stored"}

// Outcome is the outcome of a call.
type Outcome int

const (
	Done    Outcome = iota
	Lost            // ErrLeaseLost
	Never           // certainly not applied, for another reason
	Unknown         // it may have been applied, or may be later
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
	granted    time.Time    // of a claim: earliest time of the grant
	latest     time.Time    // of a claim: latest time of the grant
	state      fmt.Stringer // that was read; nil: the task does not exist
}

// Whenever moves the beginning of a read to the beginning of the history: its result may be older
// than the call.
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

// Begin records the beginning of a call.
func (h *History[ID]) Begin(verb Verb, client int, node string) *Call {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock++
	return &Call{Verb: verb, Client: client, Node: node, call: h.clock, begin: time.Now()}
}

// Finish records the outcome of a call. alive is false if the caller died with the node.
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

// Fail records an error.
func (h *History[ID]) Fail(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fail(format, args...)
}

// fail is Fail. REQUIRES: mu is held.
func (h *History[ID]) fail(format string, args ...any) {
	h.failures = append(h.failures, fmt.Sprintf(format, args...))
}

// Leaves records that a node will be removed.
func (h *History[ID]) Leaves(node string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.leaving[node] = true
}

// Breaks records that a disk fails or is full, or that a directory is an older copy.
func (h *History[ID]) Breaks() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.broken = true
}

// Now returns the current time of the history.
func (h *History[ID]) Now() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock++
	return h.clock
}

// RequireSilence checks that no shard has answered a call that began after from.
func (h *History[ID]) RequireSilence(from int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if c := h.answered; c != nil && c.call > from {
		h.fail("answered after all have lost power: %v", c)
	}
}

// Add records a call of a verb that takes a lease, with its task and lease.
func (h *History[ID]) Add(c Call) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls = append(h.calls, &c)
}

// Payloads returns the payloads of n new tasks.
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

// Produced records a call that stores some tasks, all or none. It has ids if it is Done.
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

// seen records the ID of a stored payload. REQUIRES: mu is held.
func (h *History[ID]) seen(serial int, id ID) {
	if old, ok := h.ids[serial]; ok && old != id {
		h.fail("payload %d is that of two tasks, %s and %s", serial, old, id)
	}
	h.ids[serial] = id
	if err := h.refused[serial]; err != nil {
		h.fail("payload %d was stored as %s, and refused with %v", serial, id, err)
	}
}

// ClockStep divides all steps of simulated wall clocks: so the time of a grant follows from the
// lease's deadline by any of them.
const ClockStep = 10 * time.Minute

// underWay bounds the time from a grant to the claim's return. The lease may have been granted for
// an earlier claim of the same node.
const underWay = 10 * time.Second

// Granted returns the earliest and latest time of a lease's grant, from the times of its claim and
// its deadline.
func (h *History[ID]) Granted(begin, end, deadline time.Time, duration time.Duration) (earliest, latest time.Time) {
	if h.Drifting { // deadlines prove nothing
		return begin.Add(-underWay), end
	}
	// The latest time before the return that matches the deadline.
	late := end.Add(duration).Sub(deadline) % ClockStep
	if late < 0 {
		late += ClockStep
	}
	return end.Add(-late), end.Add(-late)
}

// Lease is the result of a claim.
type Lease[ID TaskID] struct {
	ID       ID
	Serial   int
	Token    uint64
	Attempt  int
	Deadline time.Time
}

// Claimed records a claim that is Done, with the requested duration.
func (h *History[ID]) Claimed(c *Call, l Lease[ID], duration time.Duration) {
	one := *c
	one.Serial, one.Token, one.Attempt, one.Duration = l.Serial, l.Token, l.Attempt, duration
	one.granted, one.latest = h.Granted(c.begin, c.end, l.Deadline, duration)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.seen(one.Serial, l.ID)
	h.calls = append(h.calls, &one)
}

// Task is a task in the result of a read.
type Task[ID TaskID] struct {
	ID       ID
	Serial   int
	State    fmt.Stringer
	Attempts int
}

// Stored records all tasks that were stored at some time during a finished call: no others existed.
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

// Decided leaves out tasks that clients know by other IDs. The log of a node that goes on alone may
// have the produce of a deposed leader, while clients know the repetition by the next leader, which
// this node has lost.
func (h *History[ID]) Decided(tasks []Task[ID]) []Task[ID] {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(tasks), func(task Task[ID]) bool {
		id, known := h.ids[task.Serial]
		return known && id != task.ID
	})
}

// Saw records the result of a read of one task; nil: a task that existed is missing.
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

// Counted records the result of a call that counts tasks.
func (h *History[ID]) Counted(c *Call, tasks uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.counts = append(h.counts, count{c, tasks})
}

// AnyTask draws a payload, with its ID if that is known. Otherwise the ID is zero: the task may be
// stored.
func (h *History[ID]) AnyTask(rng *rand.Rand) (serial int, id ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.serials == 0 {
		return 0, id
	}
	serial = h.serials - min(rng.IntN(h.serials), rng.IntN(h.serials)) // late ones more often
	return serial, h.ids[serial]
}

// Next returns a new history that begins with the stored tasks.
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

// Totals has the numbers of calls and tasks of a history.
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

// Check returns the errors in the history. REQUIRES: the caller is outside a bubble, where its time
// limit would never pass.
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

// ClockEvery is the interval at which a leader stores the clock of leases. The next leader may not
// know how far it has advanced since.
const ClockEvery = 5 * time.Second

// rebase bounds the jumps of the clock of leases at all changes of the leader during a lease, if
// monotonic clocks run at different rates: the next leader measures the time since the clock was
// stored by its own clock.
const rebase = ClockEvery * 2 * MaxRate / 1_000_000

// Shortest returns the minimum duration of a lease: leaders measure it by their monotonic clocks.
func (h *History[ID]) Shortest(d time.Duration) time.Duration {
	if !h.Rates {
		return d
	}
	return (d - rebase) * 1_000_000 / (1_000_000 + MaxRate)
}

// Longest returns the maximum duration of a lease that is not renewed, while its clock runs.
func (h *History[ID]) Longest(d time.Duration) time.Duration {
	if !h.Rates {
		return d
	}
	return (d + rebase) * 1_000_000 / (1_000_000 - MaxRate)
}
