package codeq

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/listing"
)

// Kill makes a dead letter of the task that is next in a queue.
func (p *Process) Kill(queue string) ID {
	p.T.Helper()
	l := p.Take(queue)
	require.NoError(p.T, p.DeadLetter(context.Background(), l.Receipt, errors.New("boom")))
	return l.ID
}

// StoreDead makes n dead letters.
func (p *Process) StoreDead(n int, task Task) (ids []ID) {
	p.T.Helper()
	for range n {
		id := p.Store(task)
		require.Equal(p.T, id, p.Kill(task.Queue))
		ids = append(ids, id)
	}
	return ids
}

// TestRedrive: a dead letter is ready again, behind the others, with all its
// attempts before it and the error that it died of.
func TestRedrive(t *testing.T) {
	t.Parallel()
	throughSteps(t, Options{Shards: 1, WindowTasks: 2}, func(t *testing.T, p *Process) {
		ctx := context.Background()
		id := p.Store(Task{Queue: "a", Payload: []byte("x"), MaxAttempts: 2, RunAt: p.Now().Add(time.Second)})
		p.Pass(time.Second)
		for range 2 {
			require.NoError(t, p.Retry(ctx, p.Take("a").Receipt, RetryOptions{After: -1, Err: errors.New("boom")}))
		}
		p.Step()
		info := infoOf(t, p.Queue, id)
		require.Equal(t, Dead, info.State)
		require.Equal(t, 2, info.Attempts)
		others := []ID{p.Store(Task{Queue: "a"}), p.Store(Task{Queue: "a"}), p.Store(Task{Queue: "a"})}
		p.Pass(time.Millisecond)
		require.NoError(t, p.RedriveDead(ctx, id))
		p.Step()
		info = infoOf(t, p.Queue, id)
		require.Equal(t, Ready, info.State)
		require.Zero(t, info.Attempts)
		require.Equal(t, "boom", info.LastError)
		for _, other := range others {
			require.Equal(t, other, p.Take("a").ID)
		}
		for attempt := 1; attempt <= 2; attempt++ {
			l := p.Take("a")
			require.Equal(t, id, l.ID)
			require.Equal(t, attempt, l.Attempt)
			require.Equal(t, "x", string(l.Payload))
			require.Equal(t, "boom", l.LastError)
			p.Step()
			require.NoError(t, p.Retry(ctx, l.Receipt, RetryOptions{After: -1}))
		}
		p.Step()
		require.Equal(t, Dead, p.StateOf(id))
		require.NoError(t, p.RedriveDead(ctx, id)) // again
		p.Step()
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		p.Step()
		require.Zero(t, p.StateOf(id))
	})
}

// TestRedriveNotDead: of what is no dead letter there is nothing to redrive.
func TestRedriveNotDead(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, in := range append(slices.Clone(waitingStates), busyStates[:2]...) {
		t.Run(in.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 2, Retention: Forever}, func(t *testing.T, p *Process) {
				id := in.reach(p, keyed("k"))
				p.Step()
				require.ErrorIs(t, p.RedriveDead(ctx, id), ErrNotFound)
				n, err := p.RedriveAllDead(ctx, DeadFilter{})
				require.NoError(t, err)
				require.Zero(t, n)
				n, err = p.PurgeDead(ctx, DeadFilter{})
				require.NoError(t, err)
				require.Zero(t, n)
				require.Equal(t, in.state, p.StateOf(id))
				require.NoError(t, p.Cancel(ctx, id))
				require.ErrorIs(t, p.RedriveDead(ctx, id), ErrNotFound)
				require.ErrorIs(t, p.RedriveDead(ctx, ID{}), ErrNotFound)
			})
		})
	}
}

// bulkVerb is RedriveAllDead or PurgeDead.
type bulkVerb struct {
	Name string
	Call func(*Queue, context.Context, DeadFilter) (int, error)
	To   State // 0: gone
}

var bulks = []bulkVerb{{"RedriveAllDead", (*Queue).RedriveAllDead, Ready}, {"PurgeDead", (*Queue).PurgeDead, 0}}

// TestDeadLettersFilter: RedriveAllDead and PurgeDead are about what they are asked
// for, and nothing else.
func TestDeadLettersFilter(t *testing.T) {
	t.Parallel()
	for _, b := range bulks {
		t.Run(b.Name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 3}, func(t *testing.T, p *Process) {
				ctx := context.Background()
				start := p.Now()
				for minute := range 4 {
					for _, queue := range []string{"a", "b"} {
						for _, tenant := range []string{"", "x", "y"} {
							p.StoreDead(2, Task{Queue: queue, Tenant: tenant, Payload: strconv.AppendInt(nil, int64(minute), 10)})
						}
					}
					p.Pass(time.Minute)
				}
				minute := func(n int) time.Time { return start.Add(time.Duration(n) * time.Minute) }
				for _, tc := range []struct {
					name  string
					which DeadFilter
					n     int
				}{
					{"of a queue that has none", DeadFilter{Queue: "c"}, 0},
					{"of a queue and a tenant", DeadFilter{Queue: "a", Tenants: []string{"x"}}, 8},
					{"of a queue and a tenant, again", DeadFilter{Queue: "a", Tenants: []string{"x"}}, 0},
					{"of tenants", DeadFilter{Tenants: []string{"x", ""}}, 24},
					{"of others", DeadFilter{Tenants: []string{"z"}}, 0},
					{"of a time", DeadFilter{From: minute(1), To: minute(2)}, 4},
					{"to a time", DeadFilter{To: minute(1)}, 4},
					{"from a time", DeadFilter{From: minute(3)}, 4},
					{"of the future", DeadFilter{From: minute(5), To: minute(100)}, 0},
					{"that match", DeadFilter{Match: func(i *TaskInfo) bool { return i.Queue == "b" && string(i.Payload) == "2" }}, 2},
					{"the rest", DeadFilter{}, 2},
				} {
					before := countsOf(t, p.Queue, "a").Dead + countsOf(t, p.Queue, "b").Dead
					n, err := b.Call(p.Queue, ctx, tc.which)
					require.NoError(t, err, tc.name)
					require.Equal(t, tc.n, n, tc.name)
					p.Step()
					after := countsOf(t, p.Queue, "a").Dead + countsOf(t, p.Queue, "b").Dead
					require.Equal(t, before-uint64(n), after, tc.name)
				}
				want := Counts{}
				if b.To == Ready {
					want.Ready = 24
				}
				require.Equal(t, want, countsOf(t, p.Queue, "a"))
				require.Equal(t, want, countsOf(t, p.Queue, "b"))
			})
		})
	}
}

// TestDeadLettersOfManyGroups: more than one operation, and one commit, is about.
func TestDeadLettersOfManyGroups(t *testing.T) {
	t.Parallel()
	for _, b := range bulks {
		t.Run(b.Name, func(t *testing.T) {
			bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
				ctx := context.Background()
				const n = 4*bulkCap + 30
				_, err := q.startingAt(0).ProduceBatch(ctx, slices.Repeat([]Task{{Queue: "a", Payload: make([]byte, 5<<10)}}, n-10))
				require.NoError(t, err)
				produce(t, q, slices.Repeat([]Task{{Queue: "a"}}, 10)...)
				for range n {
					require.NoError(t, q.DeadLetter(ctx, claimNow(t, q, "a").Receipt, nil))
				}
				done, err := b.Call(q, ctx, DeadFilter{})
				require.NoError(t, err)
				require.Equal(t, n, done)
				require.NoError(t, q.checkMemory())
				want := Counts{}
				if b.To == Ready {
					want.Ready = n
				}
				require.Equal(t, want, countsOf(t, q, "a"))
			})
		})
	}
}

// TestDeadLettersRate: no more a second than asked for, after a first tenth of
// a second's worth.
func TestDeadLettersRate(t *testing.T) {
	t.Parallel()
	for _, b := range bulks {
		for _, perSecond := range []float64{0.5, 10, 100} {
			t.Run(fmt.Sprint(b.Name, " ", perSecond), func(t *testing.T) {
				bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
					ctx := context.Background()
					const n = 100
					for range n {
						produce(t, q, Task{Queue: "a"})
						require.NoError(t, q.DeadLetter(ctx, claimNow(t, q, "a").Receipt, nil))
					}
					start := time.Now()
					done := make(chan struct{})
					go func() {
						defer close(done)
						got, err := b.Call(q, ctx, DeadFilter{Rate: perSecond})
						require.NoError(t, err)
						require.Equal(t, n, got)
					}()
					for ended := false; !ended; {
						synctest.Wait()
						gone := n - float64(countsOf(t, q, "a").Dead)
						most := max(1, perSecond/10) + perSecond*time.Since(start).Seconds()
						require.LessOrEqual(t, gone, most+1e-6, "after %v", time.Since(start))
						select {
						case <-done:
							ended = true
						case <-time.After(time.Duration(float64(time.Second) / perSecond / 3)):
						}
					}
					took := n / perSecond
					require.InDelta(t, took, time.Since(start).Seconds(), 0.2*took)
				})
			})
		}
	}
}

// TestDeadLettersDieAgain: tasks that die again meanwhile are not redriven twice,
// also if they then lie behind those that are still to come.
func TestDeadLettersDieAgain(t *testing.T) {
	t.Parallel()
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *Process) {
		const n = listing.PageTasks + 44
		require.NoError(t, p.Configure(context.Background(), "a", func(s *Settings) { s.DeadRetention = time.Hour }))
		p.StoreDead(n, Task{Queue: "a"})
		p.Step()
		ctx, stop := context.WithCancel(context.Background())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for {
				l, err := p.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
				if err != nil {
					return
				}
				require.NoError(t, p.DeadLetter(context.Background(), l.Receipt, nil))
			}
		}()
		got, err := p.RedriveAllDead(ctx, DeadFilter{Rate: 1})
		require.NoError(t, err)
		require.Equal(t, n, got)
		synctest.Wait()
		stop()
		<-ended
		require.Equal(t, Counts{Dead: n}, countsOf(t, p.Queue, "a"))
	})
}

// TestDeadLettersInterrupted: what a call has done when its context ends, or its
// process, stays done; another call does the rest.
func TestDeadLettersInterrupted(t *testing.T) {
	t.Parallel()
	for _, b := range bulks {
		t.Run(b.Name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 2}, func(t *testing.T, p *Process) {
				const n = 100
				p.StoreDead(n, Task{Queue: "a"})
				ctx, cancel := context.WithCancelCause(context.Background())
				type result struct {
					n   int
					err error
				}
				ended := make(chan result, 1)
				go func(q *Queue) {
					n, err := b.Call(q, ctx, DeadFilter{Rate: 10})
					ended <- result{n, err}
				}(p.Queue)
				p.Pass(3 * time.Second)
				if p.End == goesOn || p.End == forgets {
					cancel(errBubbleOver)
				}
				p.Step()
				first := <-ended
				cancel(nil)
				if p.End == goesOn || p.End == forgets {
					require.ErrorIs(t, first.err, errBubbleOver)
				} else {
					require.ErrorIs(t, first.err, ErrClosed)
				}
				require.InDelta(t, 31, first.n, 2)
				require.EqualValues(t, n-first.n, countsOf(t, p.Queue, "a").Dead)
				rest, err := b.Call(p.Queue, context.Background(), DeadFilter{})
				require.NoError(t, err)
				require.Equal(t, n-first.n, rest)
			})
		})
	}
}

// TestDeadLettersDeadline: a deadline that the rate cannot meet ends the call as
// one that has passed.
func TestDeadLettersDeadline(t *testing.T) {
	for _, b := range bulks {
		bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
			for range 10 {
				produce(t, q, Task{Queue: "a"})
				require.NoError(t, q.DeadLetter(context.Background(), claimNow(t, q, "a").Receipt, nil))
			}
			ctx, cancel := context.WithTimeout(context.Background(), 3500*time.Millisecond)
			defer cancel()
			n, err := b.Call(q, ctx, DeadFilter{Rate: 1})
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, 4, n)
			require.EqualValues(t, 6, countsOf(t, q, "a").Dead)
		})
	}
}

// TestDeadLettersTwice: of operations that are decided in one group, one redrives a dead letter.
func TestDeadLettersTwice(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *Process) {
		ids := p.StoreDead(3, Task{Queue: "a"})
		p.Step()
		done := 0
		require.NoError(t, p.shard(0).probe(func(s *shard) error {
			for range 2 {
				bulk := &call.Bulk{BulkAlteration: engine.BulkAlteration{How: engine.AlterRedrive}}
				for _, id := range ids {
					bulk.IDs = append(bulk.IDs, id)
				}
				rule(callBulk, bulk).resolve(s)
				done += bulk.N
			}
			return nil
		}))
		require.Equal(t, len(ids), done)
		p.Step()
		require.Equal(t, Counts{Ready: 3}, countsOf(t, p.Queue, "a"))
	})
}

func TestDeadLettersRefused(t *testing.T) {
	q := openLimited(t)
	for _, b := range bulks {
		for _, r := range []float64{-1, 1e9 + 1, math.Inf(1)} {
			q.refused("DeadFilter.Rate", r, "0 to 1e9", func() error {
				n, err := b.Call(q.Queue, context.Background(), DeadFilter{Rate: r})
				require.Zero(t, n)
				return err
			})
		}
		_, err := b.Call(q.Queue, context.Background(), DeadFilter{Rate: math.NaN()})
		require.ErrorIs(t, err, ErrInvalid)
		ended, end := context.WithCancelCause(context.Background())
		end(errBubbleOver)
		_, err = b.Call(q.Queue, ended, DeadFilter{})
		require.ErrorIs(t, err, errBubbleOver)
	}
}
