package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/simtest"
)

// text is an ID, or a state.
type text string

func (s text) String() string { return string(s) }

const (
	callTime = 10 * time.Millisecond // the time of each call of a story
	leaseFor = 10 * time.Second
)

// story tells a history, call by call, in a bubble.
type story struct {
	*simtest.History[text]
	clock time.Duration // the error of the node's clock
}

// taskOf is a ready task.
func taskOf(id text, serial, attempts int) simtest.Task[text] {
	return simtest.Task[text]{ID: id, Serial: serial, State: text("ready"), Attempts: attempts}
}

func idOf(serial int) text { return text(fmt.Sprint("id ", serial)) }

// call makes a call that returns err.
func (s *story) call(verb simtest.Verb, err error) *simtest.Call {
	c := s.Begin(verb, 1, "n1")
	time.Sleep(callTime)
	s.Finish(c, err, true)
	return c
}

// produce produces a task.
func (s *story) produce(err error) (serial int) {
	serials, _ := s.Payloads(1)
	s.Produced(s.call(simtest.Produce, err), serials, []text{idOf(serials[0])})
	return serials[0]
}

// claim gets a lease with a token and an attempt, granted at the return of the claim.
func (s *story) claim(serial int, token uint64, attempt int) {
	c := s.call(simtest.Claim, nil)
	s.Claimed(c, simtest.Lease[text]{ID: idOf(serial), Serial: serial, Token: token, Attempt: attempt, Deadline: time.Now().Add(leaseFor + s.clock)}, leaseFor)
}

// claimed produces a task, and claims it by token 1.
func (s *story) claimed() (serial int) {
	serial = s.produce(nil)
	s.claim(serial, 1, 1)
	return serial
}

// end makes a call with a lease.
func (s *story) end(verb simtest.Verb, serial int, token uint64, attempt int, err error) {
	s.extend(verb, serial, token, attempt, 0, err)
}

func (s *story) extend(verb simtest.Verb, serial int, token uint64, attempt int, d time.Duration, err error) {
	c := s.call(verb, err)
	c.Serial, c.Token, c.Attempt, c.Duration = serial, token, attempt, d
	if c.Outcome != simtest.Never {
		s.Add(*c)
	}
}

// read shows a task after that many attempts; -1: it is not there.
func (s *story) read(serial, attempts int) { s.saw(s.call(simtest.Read, nil), serial, attempts) }

func (s *story) saw(c *simtest.Call, serial, attempts int) {
	if attempts < 0 {
		s.Saw(c, serial, nil)
		return
	}
	t := taskOf(idOf(serial), serial, attempts)
	s.Saw(c, serial, &t)
}

// stored records that exactly these tasks are there.
func (s *story) stored(serials ...int) {
	var tasks []simtest.Task[text]
	for _, serial := range serials {
		tasks = append(tasks, taskOf(idOf(serial), serial, 9))
	}
	s.Stored(s.call(simtest.Read, nil), tasks)
}

// amid makes a call, and others during it.
func (s *story) amid(verb simtest.Verb, err error, others func()) *simtest.Call {
	c := s.Begin(verb, 2, "n2")
	others()
	s.Finish(c, err, true)
	return c
}

// requireProblems runs stories; Check must find the problem in each; "": no problem.
func requireProblems(t *testing.T, problem string, stories map[string]func(s *story)) {
	for name, tell := range stories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &story{History: simtest.NewHistory[text]()}
			synctest.Test(t, func(*testing.T) { tell(s) })
			if problems := s.Check(); problem == "" {
				require.Empty(t, problems)
			} else {
				require.Contains(t, strings.Join(problems, "\n"), problem)
			}
		})
	}
}

// TestHistoryIsAccepted: the check accepts every correct history.
func TestHistoryIsAccepted(t *testing.T) {
	t.Parallel()
	requireProblems(t, "", map[string]func(s *story){
		"a task is completed": func(s *story) {
			a := s.produce(nil)
			s.read(a, 0)
			s.claim(a, 1, 1)
			s.extend(simtest.Extend, a, 1, 1, leaseFor, nil)
			s.end(simtest.Complete, a, 1, 1, nil)
			s.read(a, -1)
			s.stored()
		},
		"given back": func(s *story) {
			a := s.claimed()
			s.end(simtest.Retry, a, 1, 1, nil)
			s.claim(a, 2, 2)
			s.end(simtest.Release, a, 2, 2, nil)
			s.claim(a, 3, 2) // a release counts no attempt
			s.stored(a)
		},
		"a lease expires": func(s *story) {
			a := s.claimed()
			time.Sleep(leaseFor)
			s.claim(a, 2, 2)
			s.end(simtest.Complete, a, 1, 1, base.ErrLeaseLost)
			s.end(simtest.Complete, a, 2, 2, nil)
			s.stored()
		},
		"leases that nobody has seen": func(s *story) {
			a := s.produce(nil)
			s.claim(a, 7, 4)
		},
		"a complete of unknown outcome was done": func(s *story) {
			a := s.claimed()
			s.end(simtest.Complete, a, 1, 1, base.ErrUncertain)
			s.stored()
		},
		"a complete of unknown outcome was not done": func(s *story) {
			a := s.claimed()
			s.end(simtest.Complete, a, 1, 1, base.ErrUncertain)
			time.Sleep(leaseFor)
			s.claim(a, 2, 2)
			s.end(simtest.Complete, a, 2, 2, nil)
			s.stored()
		},
		"a complete of unknown outcome was done later": func(s *story) {
			a := s.claimed()
			s.end(simtest.Complete, a, 1, 1, base.ErrUncertain)
			s.read(a, 1)
			s.stored()
		},
		"a produce of unknown outcome": func(s *story) {
			s.produce(base.ErrUncertain)
			a := s.produce(base.ErrUncertain)
			s.claim(a, 1, 1)
		},
		"a produce of a node that died": func(s *story) {
			serials, _ := s.Payloads(1)
			c := s.Begin(simtest.Produce, 1, "n1")
			s.Finish(c, nil, false)
			s.Produced(c, serials, []text{idOf(serials[0])})
			s.stored()
		},
		"a produce is refused": func(s *story) {
			for _, err := range []error{base.ErrNotLeader, base.ErrClosed, context.DeadlineExceeded} {
				s.produce(err)
			}
			s.call(simtest.Claim, base.ErrEmpty)
			s.stored()
		},
		"a node is removed": func(s *story) {
			s.Leaves("n1")
			s.produce(base.ErrNotMember)
		},
		"a disk is full or fails": func(s *story) {
			s.Breaks()
			s.produce(base.ErrDiskFull)
			s.produce(base.ErrFailed)
		},
		"reads amid changes": func(s *story) {
			var a int
			c := s.amid(simtest.Read, nil, func() { a = s.produce(nil) })
			s.saw(c, a, -1)
			s.claim(a, 1, 1)
			c = s.amid(simtest.Read, nil, func() { s.end(simtest.Complete, a, 1, 1, nil) })
			s.saw(c, a, 1)
		},
		"a claim amid the complete before it": func(s *story) {
			a := s.claimed()
			c := s.amid(simtest.Retry, nil, func() { s.claim(a, 2, 2) })
			c.Serial, c.Token, c.Attempt = a, 1, 1
			s.Add(*c)
		},
		"an extension shortens a lease": func(s *story) {
			a := s.claimed()
			s.extend(simtest.Extend, a, 1, 1, time.Second, nil)
			time.Sleep(time.Second)
			s.claim(a, 2, 2)
		},
		"an extension may have shortened a lease": func(s *story) {
			a := s.claimed()
			s.extend(simtest.Extend, a, 1, 1, time.Second, base.ErrUncertain)
			time.Sleep(time.Second)
			s.claim(a, 2, 2)
		},
		"an extension made again has shortened a lease": func(s *story) {
			a := s.claimed()
			c := s.amid(simtest.Extend, base.ErrLeaseLost, func() { time.Sleep(time.Second) })
			c.Serial, c.Token, c.Attempt, c.Duration = a, 1, 1, time.Second
			s.Add(*c)
		},
		"a clock is set": func(s *story) {
			a := s.produce(nil)
			for i, clock := range []time.Duration{-3 * simtest.ClockStep, 0, 5 * simtest.ClockStep} {
				s.clock = clock
				s.claim(a, uint64(i+1), i+1)
				time.Sleep(leaseFor)
			}
		},
		"monotonic clocks at other rates": func(s *story) {
			s.Rates = true
			a := s.claimed()
			time.Sleep(leaseFor * 91 / 100)
			s.claim(a, 2, 2)
		},
		"no deadline tells": func(s *story) {
			s.Drifting = true
			s.clock = 7 * time.Second
			a := s.claimed()
			time.Sleep(time.Second)
			s.claim(a, 2, 2)
		},
		"counts": func(s *story) {
			s.Counted(s.call(simtest.Read, nil), 0)
			a, b := s.produce(nil), 0
			s.produce(base.ErrNotLeader)
			s.Counted(s.call(simtest.Read, nil), 1)
			for _, n := range []uint64{1, 2} {
				c := s.amid(simtest.Read, nil, func() {
					if b == 0 {
						b = s.produce(nil)
					}
				})
				s.Counted(c, n)
			}
			s.claim(a, 1, 1)
			s.Counted(s.call(simtest.Read, nil), 2)
			c := s.amid(simtest.Read, nil, func() { s.end(simtest.Complete, a, 1, 1, nil) })
			s.Counted(c, 2)
			s.Counted(s.call(simtest.Read, nil), 1)
		},
		"all are silent": func(s *story) {
			s.produce(nil)
			var now int64
			s.amid(simtest.Claim, base.ErrEmpty, func() {
				now = s.Now()
				s.produce(base.ErrNotLeader)
				s.produce(base.ErrUncertain)
			})
			s.RequireSilence(now)
		},
	})
}

// TestHistoryIsRefused: the check finds every wrong history.
func TestHistoryIsRefused(t *testing.T) {
	t.Parallel()
	requireProblems(t, "its history is not that of one task", map[string]func(s *story){
		"completed twice": func(s *story) {
			a := s.claimed()
			s.end(simtest.Complete, a, 1, 1, nil)
			s.end(simtest.Complete, a, 1, 1, nil)
		},
		"completed by two leases": func(s *story) {
			a := s.claimed()
			time.Sleep(leaseFor)
			s.claim(a, 2, 2)
			s.end(simtest.Complete, a, 1, 1, nil)
			s.end(simtest.Complete, a, 2, 2, nil)
		},
		"claimed after its end": func(s *story) {
			a := s.claimed()
			s.end(simtest.Complete, a, 1, 1, nil)
			s.claim(a, 2, 2)
		},
		"given back and completed": func(s *story) {
			a := s.claimed()
			s.end(simtest.Retry, a, 1, 1, nil)
			s.end(simtest.Complete, a, 1, 1, nil)
		},
		"extended by an old lease": func(s *story) {
			a := s.claimed()
			time.Sleep(leaseFor)
			s.claim(a, 2, 2)
			s.extend(simtest.Extend, a, 1, 1, leaseFor, nil)
		},
		"a token goes back": func(s *story) {
			a := s.produce(nil)
			s.claim(a, 2, 1)
			time.Sleep(leaseFor)
			s.claim(a, 1, 2)
		},
		"an attempt is not counted": func(s *story) {
			a := s.claimed()
			s.end(simtest.Retry, a, 1, 1, nil)
			s.claim(a, 2, 1)
		},
		"an acknowledged task is lost": func(s *story) {
			s.produce(nil)
			s.stored()
		},
		"a task that was given back is lost": func(s *story) {
			a := s.claimed()
			s.end(simtest.Release, a, 1, 1, nil)
			s.stored()
		},
		"a read misses a produce": func(s *story) {
			a := s.produce(nil)
			s.read(a, -1)
			s.read(a, 0)
		},
		"a read misses a complete": func(s *story) {
			a := s.claimed()
			s.end(simtest.Complete, a, 1, 1, nil)
			s.read(a, 1)
		},
		"a read misses an attempt": func(s *story) {
			a := s.claimed()
			s.read(a, 0)
		},
		"a completed task is back": func(s *story) {
			a := s.claimed()
			s.end(simtest.Complete, a, 1, 1, nil)
			s.stored(a)
		},
		"a produce of unknown outcome is seen, and gone": func(s *story) {
			a := s.produce(base.ErrUncertain)
			s.read(a, 0)
			s.stored()
		},
	})
	requireProblems(t, "but the lease before was valid until", map[string]func(s *story){
		"claimed while it is leased": func(s *story) {
			a := s.claimed()
			time.Sleep(leaseFor / 2)
			s.claim(a, 2, 2)
		},
		"claimed in spite of an extension": func(s *story) {
			a := s.claimed()
			s.extend(simtest.Extend, a, 1, 1, 2*leaseFor, nil)
			time.Sleep(leaseFor)
			s.claim(a, 2, 2)
		},
		"claimed too early for the rates of clocks": func(s *story) {
			s.Rates = true
			a := s.claimed()
			time.Sleep(leaseFor * 90 / 100)
			s.claim(a, 2, 2)
		},
		"claimed while it is leased, on a node whose clock is set": func(s *story) {
			a := s.claimed()
			s.clock = 2 * simtest.ClockStep
			time.Sleep(leaseFor / 2)
			s.claim(a, 2, 2)
		},
	})
	requireProblems(t, "but the lease was valid until", map[string]func(s *story){
		"a lease is lost too early": func(s *story) {
			a := s.claimed()
			time.Sleep(leaseFor / 2)
			s.end(simtest.Complete, a, 1, 1, base.ErrLeaseLost)
		},
		"an extended lease is lost too early": func(s *story) {
			a := s.claimed()
			s.extend(simtest.Extend, a, 1, 1, 2*leaseFor, nil)
			time.Sleep(leaseFor)
			s.extend(simtest.Extend, a, 1, 1, 3*leaseFor, base.ErrLeaseLost)
		},
	})
	requireProblems(t, "is that of two tasks, id 1 and another", map[string]func(s *story){
		"produced twice": func(s *story) {
			a := s.produce(nil)
			t := taskOf("another", a, 0)
			s.Saw(s.call(simtest.Read, nil), a, &t)
		},
		"produced twice, and recovered": func(s *story) {
			s.History = s.Next([]simtest.Task[text]{taskOf(idOf(1), 1, 0), taskOf("another", 1, 0)})
		},
	})
	requireProblems(t, "was stored as id 1, and refused with codeq: shard has no leader", map[string]func(s *story){
		"a refused task is there": func(s *story) {
			s.claim(s.produce(base.ErrNotLeader), 1, 1)
		},
	})
	requireProblems(t, "tasks are counted, there were at least 1 and at most 1", map[string]func(s *story){
		"too few": func(s *story) {
			s.produce(nil)
			s.Counted(s.call(simtest.Read, nil), 0)
		},
		"too many": func(s *story) {
			a := s.produce(nil)
			s.produce(nil)
			s.claim(a, 1, 1)
			s.end(simtest.Complete, a, 1, 1, nil)
			s.Counted(s.call(simtest.Read, nil), 2)
		},
	})
	requireProblems(t, "unexpected", map[string]func(s *story){
		"an error that nothing explains":                  func(s *story) { s.produce(errors.New("boom")) },
		"no member, but for a removal":                    func(s *story) { s.Leaves("n2"); s.produce(base.ErrNotMember) },
		"the disk is full, but for a fault":               func(s *story) { s.produce(base.ErrDiskFull) },
		"a shard has failed, but for a fault of its disk": func(s *story) { s.produce(base.ErrFailed) },
	})
	requireProblems(t, "answered after all have lost power", map[string]func(s *story){
		"a produce": func(s *story) {
			now := s.Now()
			s.produce(nil)
			s.RequireSilence(now)
		},
		"a claim that finds nothing": func(s *story) {
			now := s.Now()
			s.call(simtest.Claim, base.ErrEmpty)
			s.RequireSilence(now)
		},
	})
	requireProblems(t, "WaitIdle has returned", map[string]func(s *story){
		"a client has seen it": func(s *story) { s.Fail("%s has returned", "WaitIdle") },
	})
}

// TestHistoryGoesOn: after a loss, a new history begins with the remaining tasks, and its check is
// as strict.
func TestHistoryGoesOn(t *testing.T) {
	t.Parallel()
	for _, again := range []bool{false, true} {
		t.Run(fmt.Sprint("lost again ", again), func(t *testing.T) {
			t.Parallel()
			var first, next *story
			synctest.Test(t, func(t *testing.T) {
				first = &story{History: simtest.NewHistory[text]()}
				first.Leaves("n1")
				first.Breaks()
				a, b, c := first.produce(nil), first.produce(nil), first.produce(nil)
				first.claim(b, 1, 1)
				first.end(simtest.Complete, b, 1, 1, base.ErrUncertain)
				kept := first.Begin(simtest.Read, 0, "recovered")
				kept.Whenever()
				first.Finish(kept, nil, true)
				left := []simtest.Task[text]{taskOf(idOf(a), a, 0), taskOf("another", c, 0)}
				first.Stored(kept, first.Decided(left))

				next = &story{History: first.Next(left)}
				next.produce(base.ErrNotMember)
				next.produce(base.ErrDiskFull)
				require.Equal(t, 6, next.produce(nil), "payloads are not used again")
				next.Counted(next.call(simtest.Read, nil), 3)
				next.claim(a, 3, 2)
				if again {
					next.stored(6)
				}
			})
			require.Empty(t, first.Check())
			require.Equal(t, again, len(next.Check()) > 0)
		})
	}
}

// TestHistoryLooksBack: a history draws tasks that were seen and payloads that were not, and counts
// all calls.
func TestHistoryLooksBack(t *testing.T) {
	t.Parallel()
	s := &story{History: simtest.NewHistory[text]()}
	rng := rand.New(rand.NewPCG(1, 1))
	serial, id := s.AnyTask(rng)
	require.Zero(t, serial)
	require.Empty(t, id)
	synctest.Test(t, func(*testing.T) {
		a := s.produce(nil)
		s.produce(base.ErrNotLeader)
		s.claim(a, 1, 1)
		s.end(simtest.Complete, a, 1, 1, base.ErrUncertain)
		s.end(simtest.Complete, a, 1, 1, base.ErrLeaseLost)
	})
	drawn := make(map[int]text)
	for range 100 {
		serial, id := s.AnyTask(rng)
		drawn[serial] = id
	}
	require.Equal(t, map[int]text{1: "id 1", 2: ""}, drawn)
	require.Equal(t, simtest.Totals{Calls: 4, Tasks: 1, Unknown: 1, Lost: 1}, s.Totals())
	require.Equal(t, leaseFor, s.Shortest(leaseFor))
	require.Equal(t, leaseFor, s.Longest(leaseFor))
	s.Rates = true
	require.Less(t, s.Shortest(leaseFor), leaseFor)
	require.Greater(t, s.Longest(leaseFor), leaseFor)
}
