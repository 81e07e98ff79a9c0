package codeq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"

	"codeq/internal/simtest"
)

// simHistory is every call of the clients of a simulation, and what came of it.
// A task is known by its payload, which no other has.
type simHistory struct {
	mu       sync.Mutex // guards what follows
	clock    int64      // orders the beginnings and ends of calls
	calls    []*simCall
	serials  int
	ids      map[int]ID    // under which a payload was seen
	refused  map[int]error // payloads that certainly were not stored
	acked    map[int]bool
	leaving  map[string]bool // nodes that are being removed, or were
	counts   []simCount
	drifting bool // wall clocks of nodes run at other rates
	rates    bool // monotonic clocks do
	broken   bool // the directory of a node has failed, was full, or was an older copy
	failures []string
	answered *simCall // by a shard: of these calls the one that began last
}

func newSimHistory() *simHistory {
	return &simHistory{ids: make(map[int]ID), refused: make(map[int]error), acked: make(map[int]bool), leaving: make(map[string]bool)}
}

type simVerb int

const (
	simProduce simVerb = iota
	simClaim
	simExtend
	simComplete
	simRetry
	simRelease
	simStored // what is stored, as a read shows it, or at the end, or in a copy
)

var simVerbs = [...]string{"produce", "claim", "extend", "complete", "retry", "release", "stored"}

type simOutcome int

const (
	simDone  simOutcome = iota
	simLost             // ErrLeaseLost
	simNever            // certainly not applied, for another reason
	simUnknown
)

var simOutcomes = [...]string{"ok", "lost", "refused", "unknown"}

// simCall is a call about one task.
type simCall struct {
	verb       simVerb
	client     int
	node       string
	serial     int
	call, ret  int64     // by simHistory.clock
	begin, end time.Time // of the bubble
	outcome    simOutcome
	err        error
	token      uint64
	attempt    int
	granted    time.Time     // of a claim, at the earliest
	latest     time.Time     // of a claim, when it was granted at the latest
	duration   time.Duration // of a claim or an extension
	state      State         // of stored; 0: there is no such task
}

func (c *simCall) String() string {
	s := fmt.Sprintf("[%d,%d] %s-%s client %d on %s: %s", c.call, c.ret,
		c.begin.Format("04:05.000"), c.end.Format("04:05.000"), c.client, c.node, simVerbs[c.verb])
	if c.token != 0 {
		s += fmt.Sprintf(" token %x attempt %d", c.token, c.attempt)
	}
	if c.duration != 0 {
		s += fmt.Sprintf(" for %v", c.duration)
	}
	if !c.granted.IsZero() {
		s += " granted " + c.granted.Format("04:05.000")
	}
	if c.verb == simStored {
		return s + fmt.Sprintf(" %v", c.state)
	}
	s += " " + simOutcomes[c.outcome]
	if c.err != nil {
		s += ": " + c.err.Error()
	}
	return s
}

func (h *simHistory) begin(verb simVerb, client int, node string) *simCall {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock++
	return &simCall{verb: verb, client: client, node: node, call: h.clock, begin: time.Now()}
}

// finish says what came of a call. alive is false if the caller died with the node.
func (h *simHistory) finish(c *simCall, err error, alive bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock++
	c.ret, c.end, c.err = h.clock, time.Now(), err
	byShard := err == nil || errors.Is(err, ErrLeaseLost) || errors.Is(err, ErrEmpty)
	if alive && byShard && (h.answered == nil || h.answered.call < c.call) {
		h.answered = c
	}
	switch {
	case !alive, errors.Is(err, ErrUncertain):
		c.outcome = simUnknown
	case err == nil:
	case errors.Is(err, ErrLeaseLost):
		c.outcome = simLost
	default:
		c.outcome = simNever
		left := errors.Is(err, ErrNotMember) && h.leaving[c.node]
		disk := h.broken && (errors.Is(err, ErrFailed) || errors.Is(err, ErrDiskFull))
		if !left && !disk && !errors.Is(err, ErrNotLeader) && !errors.Is(err, ErrClosed) && !errors.Is(err, ErrEmpty) && !errors.Is(err, context.DeadlineExceeded) {
			h.fail("unexpected: %v", c)
		}
	}
}

// fail notes what must not be. REQUIRES: mu is held.
func (h *simHistory) fail(format string, args ...any) {
	h.failures = append(h.failures, fmt.Sprintf(format, args...))
}

// leaves notes that a node is about to be removed.
func (h *simHistory) leaves(node string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.leaving[node] = true
}

// breaks notes that a disk fails or is full, or that a directory is an older copy.
func (h *simHistory) breaks() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.broken = true
}

func (h *simHistory) add(c simCall) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls = append(h.calls, &c)
}

// payloads returns the payloads of n tasks that are about to be produced.
func (h *simHistory) payloads(n int) (serials []int, payloads [][]byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for range n {
		h.serials++
		serials = append(serials, h.serials)
		payloads = append(payloads, fmt.Appendf(nil, "%d ", h.serials))
	}
	return serials, payloads
}

// produced notes a call that was to store some tasks, all or none.
func (h *simHistory) produced(c *simCall, serials []int, ids []ID) {
	for i, serial := range serials {
		one := *c
		one.serial = serial
		h.mu.Lock()
		switch c.outcome {
		case simDone:
			h.acked[serial] = true
			h.seen(serial, ids[i])
		case simNever:
			h.refused[serial] = c.err
		}
		h.mu.Unlock()
		if c.outcome != simNever {
			h.add(one)
		}
	}
}

// seen notes that a payload exists under an ID. REQUIRES: mu is held.
func (h *simHistory) seen(serial int, id ID) {
	if old, ok := h.ids[serial]; ok && old != id {
		h.fail("payload %d is that of two tasks, %s and %s", serial, old, id)
	}
	h.ids[serial] = id
	if err := h.refused[serial]; err != nil {
		h.fail("payload %d was stored as %s, and refused with %v", serial, id, err)
	}
}

// clockStep is of what the steps of simulated wall clocks are multiples: so a
// deadline of any of them tells when the lease was granted.
const clockStep = 10 * time.Minute

// simUnderWay is how long a lease may be under way to whoever claims it. It may have been granted
// for another claim of the same node, before this one began.
const simUnderWay = 10 * time.Second

// granted is when a lease was granted, between a time and another one, to a claim that began and
// ended at the given times.
func (h *simHistory) granted(begin, end time.Time, l *Lease, duration time.Duration) (earliest, latest time.Time) {
	if h.drifting { // no deadline tells
		return begin.Add(-simUnderWay), end
	}
	// The last moment before the return that the deadline may stand for.
	late := end.Add(duration).Sub(l.Deadline) % clockStep
	if late < 0 {
		late += clockStep
	}
	return end.Add(-late), end.Add(-late)
}

func (h *simHistory) claimed(c *simCall, l *Lease, duration time.Duration) {
	one := *c
	one.serial, one.token, one.attempt, one.duration = serialOf(l.Payload), l.Receipt.Token, l.Attempt, duration
	one.granted, one.latest = h.granted(c.begin, c.end, l, duration)
	h.mu.Lock()
	h.seen(one.serial, l.ID)
	h.mu.Unlock()
	h.add(one)
}

// stored notes what was stored at some moment of a call, which has returned.
func (h *simHistory) stored(c *simCall, tasks map[ID]*TaskInfo) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, info := range tasks {
		if info.Queue == "a" {
			h.seen(serialOf(info.Payload), id)
		}
	}
	for serial, id := range h.ids {
		one := *c
		one.serial = serial
		if info := tasks[id]; info != nil {
			one.state, one.attempt = info.State, info.Attempts
		}
		h.calls = append(h.calls, &one)
	}
}

// simTask is the state of a task in the model.
type simTask struct {
	phase   simPhase
	token   uint64 // of the last lease that was seen
	attempt int    // the attempts that are counted, that of a lease included
}

type simPhase int

const (
	simAbsent simPhase = iota
	simWaiting
	simLeased
	simEnded
)

// simModel is what may become of a task. A lease may expire at any time, and
// there may be attempts that nobody got to see, since their claim has failed; so
// an attempt may be any that is higher than the ones before. That leases last
// as long as they were granted for is checked apart.
var simModel = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{simTask{}} },
	Step: func(state, input, _ any) []any {
		s, c := state.(simTask), input.(*simCall)
		var next []any
		if c.outcome != simDone { // an unknown outcome may be that nothing was done
			next = append(next, s)
			if c.outcome != simUnknown {
				return next
			}
		}
		holds := s.phase == simLeased && s.token == c.token
		switch c.verb {
		case simProduce:
			if s.phase == simAbsent {
				next = append(next, simTask{phase: simWaiting})
			}
		case simClaim:
			if (s.phase == simWaiting || s.phase == simLeased) && c.token > s.token && c.attempt > s.attempt {
				next = append(next, simTask{simLeased, c.token, c.attempt})
			}
		case simExtend:
			if holds {
				next = append(next, s)
			}
		case simComplete:
			if holds {
				next = append(next, simTask{simEnded, s.token, s.attempt})
			}
		case simRetry:
			if holds {
				next = append(next, simTask{simWaiting, s.token, s.attempt})
			}
		case simRelease:
			if holds {
				next = append(next, simTask{simWaiting, s.token, s.attempt - 1})
			}
		case simStored:
			var ok bool
			switch c.state {
			case 0:
				ok = s.phase == simEnded || s.phase == simAbsent
			case Leased:
				ok = s.phase == simLeased || s.phase == simWaiting // by a claim that has failed
			default:
				ok = s.phase == simLeased || s.phase == simWaiting
			}
			if ok && (c.state == 0 || c.attempt >= s.attempt) {
				next = append(next, s)
			}
		}
		return next
	},
	Equal: func(a, b any) bool { return a == b },
}).ToModel()

// check returns what in the history must not be. REQUIRES: it is not called in a bubble.
func (h *simHistory) check() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	tasks := make(map[int][]*simCall)
	for _, c := range h.calls {
		tasks[c.serial] = append(tasks[c.serial], c)
	}
	for serial := range h.acked {
		if _, ok := h.ids[serial]; !ok {
			h.fail("payload %d was acknowledged and has no ID", serial)
		}
	}
	h.checkCounts(tasks)
	for serial, calls := range tasks {
		slices.SortFunc(calls, func(a, b *simCall) int { return cmp.Compare(a.call, b.call) })
		if problem := checkSimTask(calls, h.shortest); problem != "" {
			var b strings.Builder
			for _, c := range calls {
				fmt.Fprintf(&b, "\n\t%v", c)
			}
			h.fail("task %d (%s): %s%s", serial, h.ids[serial], problem, b.String())
		}
	}
	return h.failures
}

// porcupineTimeout is how long the history of one task may take to check. It never ends in a
// bubble.
const porcupineTimeout = 20 * time.Second

func checkSimTask(calls []*simCall, shortest func(time.Duration) time.Duration) string {
	var ops []porcupine.Operation
	for _, c := range calls {
		op := porcupine.Operation{ClientId: c.client, Input: c, Call: c.call, Return: c.ret}
		if c.outcome == simUnknown {
			op.Return = math.MaxInt64
		}
		ops = append(ops, op)
	}
	switch porcupine.CheckOperationsTimeout(simModel, ops, porcupineTimeout) {
	case porcupine.Illegal:
		return "its history is not that of one task"
	case porcupine.Unknown:
		return fmt.Sprintf("its history was not checked within %v", porcupineTimeout)
	}
	return checkSimLeases(calls, shortest)
}

// simSlack is what rounding to milliseconds may take off a lease.
const simSlack = 3 * time.Millisecond

// simRebase is by how much the clock of leases may jump at changes of the leader, in all while a
// lease lasts, when monotonic clocks run at rates of their own: the next leader measures the time
// since the clock was stored, which may be before the lease, by its own.
const simRebase = simClockEvery * 2 * simtest.MaxRate / 1_000_000

// shortest is how long a lease lasts at least: leaders measure it by their monotonic clocks.
func (h *simHistory) shortest(d time.Duration) time.Duration {
	if !h.rates {
		return d
	}
	return (d - simRebase) * 1_000_000 / (1_000_000 + simtest.MaxRate)
}

// longest is how long a lease that is not renewed lasts at most, while time passes for it.
func (h *simHistory) longest(d time.Duration) time.Duration {
	if !h.rates {
		return d
	}
	return (d + simRebase) * 1_000_000 / (1_000_000 - simtest.MaxRate)
}

// checkSimLeases makes sure that leases last as long as they were granted or
// extended for: until then nobody else gets the task, and its holder does not lose it.
func checkSimLeases(calls []*simCall, shortest func(time.Duration) time.Duration) string {
	var claims []*simCall
	for _, c := range calls {
		if c.verb == simClaim {
			claims = append(claims, c)
		}
	}
	slices.SortFunc(claims, func(a, b *simCall) int { return cmp.Compare(a.token, b.token) })
	for i, claim := range claims {
		until := claim.granted.Add(shortest(claim.duration))
		finished := false
		for _, c := range calls {
			if c.token != claim.token || c == claim {
				continue
			}
			if c.outcome == simLost && !finished {
				// An Extend is made again when its answer is lost, and may have shortened the lease
				// by then.
				if next := c.begin.Add(shortest(c.duration)); c.verb == simExtend && next.Before(until) {
					until = next
				}
				if c.end.Before(until.Add(-simSlack)) {
					return fmt.Sprintf("%v; but the lease was valid until %s", c, until.Format("04:05.000"))
				}
			}
			if c.outcome != simDone && c.outcome != simUnknown {
				continue
			}
			switch c.verb {
			case simExtend:
				if next := c.begin.Add(shortest(c.duration)); c.outcome == simDone || next.Before(until) {
					until = next
				}
			default:
				finished = true
			}
		}
		if i+1 < len(claims) && !finished && claims[i+1].latest.Before(until.Add(-simSlack)) {
			return fmt.Sprintf("%v; but the lease before was valid until %s", claims[i+1], until.Format("04:05.000"))
		}
	}
	return ""
}
