package codeq_test

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

	"codeq"
	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/listing"
	"codeq/internal/testbase"
	"codeq/test/queuetest"
)

// bulkVerb is RedriveAllDead or PurgeDead.
type bulkVerb struct {
	name string
	call func(*codeq.Queue, context.Context, codeq.DeadFilter) (int, error)
	to   codeq.State // 0: gone
}

var bulks = []bulkVerb{
	{"RedriveAllDead", (*codeq.Queue).RedriveAllDead, codeq.Ready},
	{"PurgeDead", (*codeq.Queue).PurgeDead, 0},
}

// TestRedriveKey: a redriven task takes its key again, unless another task has
// it by now.
func TestRedriveKey(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 2}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		task := queuetest.Keyed("k")
		first := p.Store(task)
		p.Kill("a")
		second := p.Store(task)
		p.Step()
		var duplicate *codeq.DuplicateError
		require.ErrorAs(t, p.RedriveDead(ctx, first), &duplicate)
		require.Equal(t, codeq.DuplicateError{Key: "k", ID: second}, *duplicate)
		n, err := p.RedriveAllDead(ctx, codeq.DeadFilter{})
		require.NoError(t, err)
		require.Zero(t, n)
		p.Step()
		require.Equal(t, codeq.Dead, p.StateOf(first))
		p.Kill("a")
		require.NoError(t, p.RedriveDead(ctx, first))
		p.Step()
		p.Taken(task, first)
		require.ErrorIs(t, p.RedriveDead(ctx, second), codeq.ErrDuplicate)
		p.Kill("a")
		n, err = p.RedriveAllDead(ctx, codeq.DeadFilter{}) // of the two, one
		require.NoError(t, err)
		require.Equal(t, 1, n)
		p.Step()
		require.Equal(t, codeq.Counts{Ready: 1, Dead: 1}, queuetest.CountsOf(t, p.Queue, "a"))
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		require.Zero(t, p.Stored(keys.Unique))
	})
}

// TestRedriveKeyFor: a task that is redriven while its key is still taken holds
// it as long as it lives, and for the rest of For.
func TestRedriveKeyFor(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		task := queuetest.Keyed("k")
		task.Unique.For = time.Hour
		id := p.Store(task)
		p.Kill("a")
		p.Step()
		require.NoError(t, p.RedriveDead(ctx, id))
		p.Step()
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		p.Step()
		p.Pass(time.Hour - time.Millisecond)
		p.Taken(task, id)
		p.Pass(time.Millisecond)
		require.Zero(t, p.Stored(keys.Unique))

		id = p.Store(task)
		p.Kill("a")
		require.NoError(t, p.RedriveDead(ctx, id))
		p.Step()
		p.Pass(2 * time.Hour)
		p.Taken(task, id)
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		p.Step()
		require.Zero(t, p.Stored(keys.Unique))
		require.Zero(t, p.Stored(keys.Freed))

		id = p.Store(task)
		p.Kill("a")
		p.Pass(2 * time.Hour) // the key becomes free, and nobody takes it
		p.Step()
		require.NoError(t, p.RedriveDead(ctx, id))
		p.Step()
		p.Taken(task, id)
		p.Kill("a")
		p.Step()
		require.Zero(t, p.Stored(keys.Unique), "For is counted from the produce")
	})
}

// TestRedriveOfGroup: the group of a dead letter goes on without it; when it is
// redriven it waits for its turn.
func TestRedriveOfGroup(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		dead := p.Store(codeq.Task{Queue: "a", Group: "g"})
		next := p.Store(codeq.Task{Queue: "a", Group: "g"})
		p.Kill("a")
		p.Step()
		require.NoError(t, p.RedriveDead(ctx, dead))
		p.Step()
		require.Equal(t, codeq.Blocked, p.StateOf(dead))
		l := p.Take("a")
		require.Equal(t, next, l.ID)
		require.Nil(t, queuetest.ClaimNow(t, p.Queue, "a"))
		require.NoError(t, p.Complete(ctx, l.Receipt, nil))
		p.Step()
		require.Equal(t, dead, p.Kill("a"))
		require.NoError(t, p.RedriveDead(ctx, dead)) // nobody else is there
		p.Step()
		require.Equal(t, codeq.Ready, p.StateOf(dead))
	})
}

// TestRedriveParent: a task waits for a dead parent, and goes on when it was
// redriven and is completed.
func TestRedriveParent(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 3}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		require.NoError(t, p.Configure(ctx, "parents", func(s *codeq.Settings) { s.DeadRetention = time.Hour }))
		parent := p.Store(codeq.Task{Queue: "parents"})
		child := p.Store(codeq.Task{Queue: "a", After: []codeq.ID{parent}})
		p.Check()
		p.Kill("parents")
		p.Step()
		late := p.Store(codeq.Task{Queue: "a", After: []codeq.ID{parent}})
		p.Pass(2 * time.Hour) // it is kept, since others wait for it
		p.Step()
		require.Equal(t, []codeq.State{codeq.Dead, codeq.Blocked, codeq.Blocked}, []codeq.State{p.StateOf(parent), p.StateOf(child), p.StateOf(late)})
		require.NoError(t, p.RedriveDead(ctx, parent))
		p.Step()
		require.Equal(t, codeq.Blocked, p.StateOf(child))
		require.NoError(t, p.Complete(ctx, p.Take("parents").Receipt, nil))
		p.Step()
		require.Equal(t, []codeq.State{codeq.Ready, codeq.Ready}, []codeq.State{p.StateOf(child), p.StateOf(late)})
	})
}

// TestPurgeParent: what waits for a dead letter that is purged is canceled.
func TestPurgeParent(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 3, Retention: codeq.Forever}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		parent := p.Store(codeq.Task{Queue: "parents"})
		child := p.Store(codeq.Task{Queue: "a", After: []codeq.ID{parent}})
		grandchild := p.Store(codeq.Task{Queue: "a", After: []codeq.ID{child}})
		p.Check()
		p.Kill("parents")
		p.Step()
		n, err := p.PurgeDead(ctx, codeq.DeadFilter{})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		p.Step()
		require.Zero(t, p.StateOf(parent))
		require.Equal(t, []codeq.State{codeq.Canceled, codeq.Canceled}, []codeq.State{p.StateOf(child), p.StateOf(grandchild)})
	})
}

// TestPurgeKey: the key of a dead letter that is purged is taken for the rest of For.
func TestPurgeKey(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
		task := queuetest.Keyed("k")
		task.Unique.For = time.Hour
		id := p.Store(task)
		p.Kill("a")
		_, err := p.PurgeDead(context.Background(), codeq.DeadFilter{})
		require.NoError(t, err)
		p.Step()
		require.Zero(t, p.StateOf(id))
		p.Pass(time.Hour - time.Millisecond)
		p.Taken(task, id)
		p.Pass(time.Millisecond)
		p.Step()
		require.Zero(t, p.Stored(keys.Unique))
	})
}

// TestDeadLettersMatch: Match sees each dead letter once, with all that Get shows.
func TestDeadLettersMatch(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 3}, func(t *testing.T, p *queuetest.Process) {
		ids := p.StoreDead(20, codeq.Task{Queue: "a", Payload: []byte("x"), Headers: map[string]string{"h": "v"}})
		p.Step()
		seen := make(map[codeq.ID]bool)
		n, err := p.RedriveAllDead(context.Background(), codeq.DeadFilter{Match: func(i *codeq.TaskInfo) bool {
			require.False(t, seen[i.ID])
			seen[i.ID] = true
			require.Equal(t, queuetest.InfoOf(t, p.Queue, i.ID), i)
			return i.ID == ids[3]
		}})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		require.Len(t, seen, 20)
		require.Equal(t, ids[3], p.Take("a").ID)
	})
}

// TestDeadRetention: dead letters are forgotten after the time that the
// settings give, at most an eighth later, unless they are redriven before.
func TestDeadRetention(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 2}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		before := p.StoreDead(3, codeq.Task{Queue: "a"}) // kept without end
		require.NoError(t, p.Configure(ctx, "a", func(s *codeq.Settings) { s.DeadRetention = 8 * time.Hour }))
		after := p.StoreDead(3, codeq.Task{Queue: "a"})
		other := p.StoreDead(1, codeq.Task{Queue: "b"})
		p.Step()
		p.Pass(4 * time.Hour)
		require.NoError(t, p.RedriveDead(ctx, after[0]))
		p.Step()
		require.Equal(t, after[0], p.Kill("a")) // its time begins anew
		require.NoError(t, p.RedriveDead(ctx, after[1]))
		p.Pass(4*time.Hour - time.Millisecond)
		p.Step()
		require.Equal(t, codeq.Dead, p.StateOf(after[2]))
		p.Pass(time.Hour + time.Millisecond)
		p.Step()
		require.Zero(t, p.StateOf(after[2]))
		require.ErrorIs(t, p.RedriveDead(ctx, after[2]), codeq.ErrNotFound)
		require.Equal(t, codeq.Dead, p.StateOf(after[0]))
		require.Equal(t, codeq.Ready, p.StateOf(after[1]))
		p.Pass(4 * time.Hour)
		p.Step()
		require.Zero(t, p.StateOf(after[0]))
		for _, id := range append(before, other...) {
			require.Equal(t, codeq.Dead, p.StateOf(id))
		}
		require.Equal(t, codeq.Counts{Ready: 1, Dead: 3}, queuetest.CountsOf(t, p.Queue, "a"))
	})
}

// TestDeadRetentionClock: a clock that is set forward forgets dead letters
// early, one that is set back neither earlier nor later.
func TestDeadRetentionClock(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
		require.NoError(t, p.Configure(context.Background(), "a", func(s *codeq.Settings) { s.DeadRetention = 10 * time.Minute }))
		id := p.StoreDead(1, codeq.Task{Queue: "a"})[0]
		p.SetClock(-time.Hour)
		p.Step()
		p.Pass(10*time.Minute - time.Millisecond)
		require.Equal(t, codeq.Dead, p.StateOf(id))
		p.Step() // after which it is kept no longer than from the beginning
		p.Pass(12 * time.Minute)
		require.Zero(t, p.StateOf(id))
		id = p.StoreDead(1, codeq.Task{Queue: "a"})[0]
		p.SetClock(2 * time.Hour)
		p.Pass(time.Minute)
		p.Step()
		require.Zero(t, p.StateOf(id))
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, p.Queue, "a"))
	})
}

// TestRedrive: a dead letter is ready again, behind the others, with all its
// attempts before it and the error that it died of.
func TestRedrive(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1, WindowTasks: 2}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		id := p.Store(codeq.Task{Queue: "a", Payload: []byte("x"), MaxAttempts: 2, RunAt: p.Now().Add(time.Second)})
		p.Pass(time.Second)
		for range 2 {
			require.NoError(t, p.Retry(ctx, p.Take("a").Receipt, codeq.RetryOptions{After: -1, Err: errors.New("boom")}))
		}
		p.Step()
		info := queuetest.InfoOf(t, p.Queue, id)
		require.Equal(t, codeq.Dead, info.State)
		require.Equal(t, 2, info.Attempts)
		others := []codeq.ID{p.Store(codeq.Task{Queue: "a"}), p.Store(codeq.Task{Queue: "a"}), p.Store(codeq.Task{Queue: "a"})}
		p.Pass(time.Millisecond)
		require.NoError(t, p.RedriveDead(ctx, id))
		p.Step()
		info = queuetest.InfoOf(t, p.Queue, id)
		require.Equal(t, codeq.Ready, info.State)
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
			require.NoError(t, p.Retry(ctx, l.Receipt, codeq.RetryOptions{After: -1}))
		}
		p.Step()
		require.Equal(t, codeq.Dead, p.StateOf(id))
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
			queuetest.ThroughSteps(t, codeq.Options{Shards: 2, Retention: codeq.Forever}, func(t *testing.T, p *queuetest.Process) {
				id := in.reach(p, queuetest.Keyed("k"))
				p.Step()
				require.ErrorIs(t, p.RedriveDead(ctx, id), codeq.ErrNotFound)
				n, err := p.RedriveAllDead(ctx, codeq.DeadFilter{})
				require.NoError(t, err)
				require.Zero(t, n)
				n, err = p.PurgeDead(ctx, codeq.DeadFilter{})
				require.NoError(t, err)
				require.Zero(t, n)
				require.Equal(t, in.state, p.StateOf(id))
				require.NoError(t, p.Cancel(ctx, id))
				require.ErrorIs(t, p.RedriveDead(ctx, id), codeq.ErrNotFound)
				require.ErrorIs(t, p.RedriveDead(ctx, codeq.ID{}), codeq.ErrNotFound)
			})
		})
	}
}

// TestDeadLettersFilter: RedriveAllDead and PurgeDead are about what they are asked
// for, and nothing else.
func TestDeadLettersFilter(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, b := range bulks {
		t.Run(b.name, func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: 3}, func(t *testing.T, p *queuetest.Process) {
				ctx := context.Background()
				start := p.Now()
				for minute := range 4 {
					for _, queue := range []string{"a", "b"} {
						for _, tenant := range []string{"", "x", "y"} {
							p.StoreDead(2, codeq.Task{Queue: queue, Tenant: tenant, Payload: strconv.AppendInt(nil, int64(minute), 10)})
						}
					}
					p.Pass(time.Minute)
				}
				minute := func(n int) time.Time { return start.Add(time.Duration(n) * time.Minute) }
				for _, tc := range []struct {
					name  string
					which codeq.DeadFilter
					n     int
				}{
					{"of a queue that has none", codeq.DeadFilter{Queue: "c"}, 0},
					{"of a queue and a tenant", codeq.DeadFilter{Queue: "a", Tenants: []string{"x"}}, 8},
					{"of a queue and a tenant, again", codeq.DeadFilter{Queue: "a", Tenants: []string{"x"}}, 0},
					{"of tenants", codeq.DeadFilter{Tenants: []string{"x", ""}}, 24},
					{"of others", codeq.DeadFilter{Tenants: []string{"z"}}, 0},
					{"of a time", codeq.DeadFilter{From: minute(1), To: minute(2)}, 4},
					{"to a time", codeq.DeadFilter{To: minute(1)}, 4},
					{"from a time", codeq.DeadFilter{From: minute(3)}, 4},
					{"of the future", codeq.DeadFilter{From: minute(5), To: minute(100)}, 0},
					{"that match", codeq.DeadFilter{Match: func(i *codeq.TaskInfo) bool { return i.Queue == "b" && string(i.Payload) == "2" }}, 2},
					{"the rest", codeq.DeadFilter{}, 2},
				} {
					before := queuetest.CountsOf(t, p.Queue, "a").Dead + queuetest.CountsOf(t, p.Queue, "b").Dead
					n, err := b.call(p.Queue, ctx, tc.which)
					require.NoError(t, err, tc.name)
					require.Equal(t, tc.n, n, tc.name)
					p.Step()
					after := queuetest.CountsOf(t, p.Queue, "a").Dead + queuetest.CountsOf(t, p.Queue, "b").Dead
					require.Equal(t, before-uint64(n), after, tc.name)
				}
				want := codeq.Counts{}
				if b.to == codeq.Ready {
					want.Ready = 24
				}
				require.Equal(t, want, queuetest.CountsOf(t, p.Queue, "a"))
				require.Equal(t, want, queuetest.CountsOf(t, p.Queue, "b"))
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
			t.Run(fmt.Sprint(b.name, " ", perSecond), func(t *testing.T) {
				queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
					ctx := context.Background()
					const n = 100
					for range n {
						queuetest.Produce(t, q, codeq.Task{Queue: "a"})
						require.NoError(t, q.DeadLetter(ctx, queuetest.ClaimNow(t, q, "a").Receipt, nil))
					}
					start := time.Now()
					done := make(chan struct{})
					go func() {
						defer close(done)
						got, err := b.call(q, ctx, codeq.DeadFilter{Rate: perSecond})
						require.NoError(t, err)
						require.Equal(t, n, got)
					}()
					for ended := false; !ended; {
						synctest.Wait()
						gone := n - float64(queuetest.CountsOf(t, q, "a").Dead)
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
	testbase.SkipUnderRace(t)
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
		const n = listing.PageTasks + 44
		require.NoError(t, p.Configure(context.Background(), "a", func(s *codeq.Settings) { s.DeadRetention = time.Hour }))
		p.StoreDead(n, codeq.Task{Queue: "a"})
		p.Step()
		ctx, stop := context.WithCancel(context.Background())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for {
				l, err := p.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
				if err != nil {
					return
				}
				require.NoError(t, p.DeadLetter(context.Background(), l.Receipt, nil))
			}
		}()
		got, err := p.RedriveAllDead(ctx, codeq.DeadFilter{Rate: 1})
		require.NoError(t, err)
		require.Equal(t, n, got)
		synctest.Wait()
		stop()
		<-ended
		require.Equal(t, codeq.Counts{Dead: n}, queuetest.CountsOf(t, p.Queue, "a"))
	})
}

// TestDeadLettersInterrupted: what a call has done when its context ends, or its
// process, stays done; another call does the rest.
func TestDeadLettersInterrupted(t *testing.T) {
	t.Parallel()
	for _, b := range bulks {
		t.Run(b.name, func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: 2}, func(t *testing.T, p *queuetest.Process) {
				const n = 100
				p.StoreDead(n, codeq.Task{Queue: "a"})
				ctx, cancel := context.WithCancelCause(context.Background())
				type result struct {
					n   int
					err error
				}
				ended := make(chan result, 1)
				go func(q *codeq.Queue) {
					n, err := b.call(q, ctx, codeq.DeadFilter{Rate: 10})
					ended <- result{n, err}
				}(p.Queue)
				p.Pass(3 * time.Second)
				if !p.Ends() {
					cancel(errBubbleOver)
				}
				p.Step()
				first := <-ended
				cancel(nil)
				if !p.Ends() {
					require.ErrorIs(t, first.err, errBubbleOver)
				} else {
					require.ErrorIs(t, first.err, codeq.ErrClosed)
				}
				require.InDelta(t, 31, first.n, 2)
				require.EqualValues(t, n-first.n, queuetest.CountsOf(t, p.Queue, "a").Dead)
				rest, err := b.call(p.Queue, context.Background(), codeq.DeadFilter{})
				require.NoError(t, err)
				require.Equal(t, n-first.n, rest)
			})
		})
	}
}

// TestDeadLettersDeadline: a deadline that the rate cannot meet ends the call when it has passed.
func TestDeadLettersDeadline(t *testing.T) {
	for _, b := range bulks {
		queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
			for range 10 {
				queuetest.Produce(t, q, codeq.Task{Queue: "a"})
				require.NoError(t, q.DeadLetter(context.Background(), queuetest.ClaimNow(t, q, "a").Receipt, nil))
			}
			ctx, cancel := context.WithTimeout(context.Background(), 3500*time.Millisecond)
			defer cancel()
			n, err := b.call(q, ctx, codeq.DeadFilter{Rate: 1})
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Error(t, ctx.Err())
			require.Equal(t, 4, n)
			require.EqualValues(t, 6, queuetest.CountsOf(t, q, "a").Dead)
		})
	}
}

func TestDeadLettersRefused(t *testing.T) {
	q := openLimited(t)
	for _, b := range bulks {
		for _, r := range []float64{-1, 1e9 + 1, math.Inf(1)} {
			q.refused("DeadFilter.Rate", r, "0 to 1e9", func() error {
				n, err := b.call(q.Queue, context.Background(), codeq.DeadFilter{Rate: r})
				require.Zero(t, n)
				return err
			})
		}
		_, err := b.call(q.Queue, context.Background(), codeq.DeadFilter{Rate: math.NaN()})
		require.ErrorIs(t, err, codeq.ErrInvalid)
		ended, end := context.WithCancelCause(context.Background())
		end(errBubbleOver)
		_, err = b.call(q.Queue, ended, codeq.DeadFilter{})
		require.ErrorIs(t, err, errBubbleOver)
	}
}

// TestDeadLettersOfManyGroups: more than one operation, and one commit, is about.
func TestDeadLettersOfManyGroups(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for name, verb := range map[string]func(*codeq.Queue, context.Context, codeq.DeadFilter) (int, error){
		"RedriveAllDead": (*codeq.Queue).RedriveAllDead, "PurgeDead": (*codeq.Queue).PurgeDead,
	} {
		t.Run(name, func(t *testing.T) {
			queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
				ctx := context.Background()
				const n = 4*256 + 30
				_, err := queuetest.StartingAt(q, 0).ProduceBatch(ctx, slices.Repeat([]codeq.Task{{Queue: "a", Payload: make([]byte, 5<<10)}}, n-10))
				require.NoError(t, err)
				queuetest.Produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 10)...)
				for range n {
					require.NoError(t, q.DeadLetter(ctx, queuetest.ClaimNow(t, q, "a").Receipt, nil))
				}
				done, err := verb(q, ctx, codeq.DeadFilter{})
				require.NoError(t, err)
				require.Equal(t, n, done)
				require.NoError(t, queuetest.CheckMemory(q))
				want := codeq.Counts{}
				if name == "RedriveAllDead" {
					want.Ready = n
				}
				require.Equal(t, want, queuetest.CountsOf(t, q, "a"))
			})
		})
	}
}

// TestDeadLettersTwice: of operations that are decided in one group, one redrives a dead letter.
func TestDeadLettersTwice(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
		ids := p.StoreDead(3, codeq.Task{Queue: "a"})
		p.Step()
		done := 0
		require.NoError(t, inspect.Of(p.Queue).Owner(0, func(o *inspect.Owner) error {
			for range 2 {
				bulk := &call.AlterMany{BulkAlteration: engine.BulkAlteration{How: engine.AlterRedrive, States: engine.SetOf(engine.Dead)}}
				for _, id := range ids {
					bulk.IDs = append(bulk.IDs, id)
				}
				if _, err := bulk.Decide(o.Rules); err != nil {
					return err
				}
				done += bulk.N
			}
			return nil
		}))
		require.Equal(t, len(ids), done)
		p.Step()
		require.Equal(t, codeq.Counts{Ready: 3}, queuetest.CountsOf(t, p.Queue, "a"))
	})
}
