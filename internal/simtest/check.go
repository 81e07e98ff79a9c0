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
	token   uint64 // of the last lease that was seen
	attempt int    // the attempts that are counted, that of a lease included
}

type phase int

const (
	absent phase = iota
	waiting
	leased
	ended
)

// model is what may become of a task. A lease may expire at any time, and there may be attempts
// that nobody got to see, since their claim has failed; so an attempt may be any that is higher
// than the ones before. That leases last as long as they were granted for is checked apart.
var model = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{task{}} },
	Step: func(state, input, _ any) []any {
		s, c := state.(task), input.(*Call)
		var next []any
		if c.Outcome != Done { // an unknown outcome may be that nothing was done
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
			// The state says no more: a lease may be that of a claim that has failed, or be over.
			stored := s.phase == waiting || s.phase == leased
			if stored == (c.state != nil) && (c.state == nil || c.Attempt >= s.attempt) {
				next = append(next, s)
			}
		}
		return next
	},
	Equal: func(a, b any) bool { return a == b },
}).ToModel()

// timeout is how long the history of one task may take to check.
const timeout = 20 * time.Second

// checkTask returns what in the history of a task must not be; "": nothing.
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

// Slack is what rounding to milliseconds may take off a lease.
const Slack = 3 * time.Millisecond

// checkLeases makes sure that leases last as long as they were granted or extended for: until then
// nobody else gets the task, and its holder does not lose it.
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
				// An Extend is made again when its answer is lost, and may have shortened the lease
				// by then.
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

// count is a call that has counted tasks, and how many.
type count struct {
	*Call
	tasks uint64
}

// check compares what was counted with the tasks that were there all the time, and those that may
// have been there at some moment of the call. "" is that nothing is wrong.
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
