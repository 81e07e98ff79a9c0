package simtest

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// task is the state of a task in the model.
type task struct {
	phase   phase
	token   uint64 // of the last known lease
	attempt int    // counted attempts, that of a lease included
}

type phase int

const (
	absent phase = iota
	waiting
	leased
	ended
)

// model describes the possible histories of a task. A lease may expire at any time. Failed claims
// may have made attempts that no client has seen, so an attempt may have any higher number than the
// previous ones. checkLeases checks the durations of leases.
var model = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{task{}} },
	Step: func(state, input, _ any) []any {
		s, c := state.(task), input.(*Call)
		var next []any
		if c.Outcome != Done { // an unknown call may have done nothing
			next = append(next, s)
			if c.Outcome != Unknown {
				return next
			}
		}
		holds := s.phase == leased && s.token == c.Token
		switch c.Verb {
		case Produce:
			if s.phase == absent {
				next = append(next, task{phase: waiting})
			}
		case Claim:
			if (s.phase == waiting || s.phase == leased) && c.Token > s.token && c.Attempt > s.attempt {
				next = append(next, task{leased, c.Token, c.Attempt})
			}
		case Extend:
			if holds {
				next = append(next, s)
			}
		case Complete:
			if holds {
				next = append(next, task{ended, s.token, s.attempt})
			}
		case Retry:
			if holds {
				next = append(next, task{waiting, s.token, s.attempt})
			}
		case Release:
			if holds {
				next = append(next, task{waiting, s.token, s.attempt - 1})
			}
		case Read:
			// The state proves no more: a lease may be over, or that of a failed claim.
			stored := s.phase == waiting || s.phase == leased
			if stored == (c.state != nil) && (c.state == nil || c.Attempt >= s.attempt) {
				next = append(next, s)
			}
		}
		return next
	},
	Equal: func(a, b any) bool { return a == b },
}).ToModel()

// timeout bounds the check of one task's history.
const timeout = 20 * time.Second

// checkTask returns the error in the history of a task; "": none.
func checkTask(calls []*Call, shortest func(time.Duration) time.Duration) string {
	var ops []porcupine.Operation
	for _, c := range calls {
		op := porcupine.Operation{ClientId: c.Client, Input: c, Call: c.call, Return: c.ret}
		if c.Outcome == Unknown {
			op.Return = math.MaxInt64
		}
		ops = append(ops, op)
	}
	switch porcupine.CheckOperationsTimeout(model, ops, timeout) {
	case porcupine.Illegal:
		return "its history is not that of one task"
	case porcupine.Unknown:
		return fmt.Sprintf("its history was not checked within %v", timeout)
	default:
		return checkLeases(calls, shortest)
	}
}

// Slack is the maximum that rounding to milliseconds shortens a lease.
const Slack = 3 * time.Millisecond

// checkLeases checks that leases last for their granted or extended duration: until then no other
// claim gets the task, and its holder does not lose it.
func checkLeases(calls []*Call, shortest func(time.Duration) time.Duration) string {
	var claims []*Call
	for _, c := range calls {
		if c.Verb == Claim {
			claims = append(claims, c)
		}
	}
	slices.SortFunc(claims, func(a, b *Call) int { return cmp.Compare(a.Token, b.Token) })
	for i, claim := range claims {
		until := claim.granted.Add(shortest(claim.Duration))
		finished := false
		for _, c := range calls {
			if c.Token != claim.Token || c == claim {
				continue
			}
			if c.Outcome == Lost && !finished {
				// An Extend is repeated if its answer is lost, and may then have shortened the
				// lease.
				if next := c.begin.Add(shortest(c.Duration)); c.Verb == Extend && next.Before(until) {
					until = next
				}
				if c.end.Before(until.Add(-Slack)) {
					return fmt.Sprintf("%v; but the lease was valid until %s", c, until.Format("04:05.000"))
				}
			}
			if c.Outcome != Done && c.Outcome != Unknown {
				continue
			}
			switch c.Verb {
			case Extend:
				if next := c.begin.Add(shortest(c.Duration)); c.Outcome == Done || next.Before(until) {
					until = next
				}
			default:
				finished = true
			}
		}
		if i+1 < len(claims) && !finished && claims[i+1].latest.Before(until.Add(-Slack)) {
			return fmt.Sprintf("%v; but the lease before was valid until %s", claims[i+1], until.Format("04:05.000"))
		}
	}
	return ""
}

// count is a call that counts tasks, with its result.
type count struct {
	*Call
	tasks uint64
}

// check compares the result with the number of tasks that certainly existed during the whole call,
// and of those that may have existed during it. It returns "" if the result is possible.
func (n count) check(tasks map[int][]*Call) string {
	var least, most uint64
	for _, calls := range tasks {
		stored, mayBe, left, mayHaveLeft := false, false, false, false
		for _, c := range calls {
			switch c.Verb {
			case Produce:
				stored = c.Outcome == Done && c.ret < n.call
				mayBe = c.call < n.ret
			case Complete:
				left = left || c.Outcome == Done && c.ret < n.call
				mayHaveLeft = mayHaveLeft || (c.Outcome == Done || c.Outcome == Unknown) && c.call < n.ret
			default: // the count stays
			}
		}
		if stored && !mayHaveLeft {
			least++
		}
		if mayBe && !left {
			most++
		}
	}
	if n.tasks < least || n.tasks > most {
		return fmt.Sprintf("%v: %d tasks are counted, there were at least %d and at most %d", n.Call, n.tasks, least, most)
	}
	return ""
}
