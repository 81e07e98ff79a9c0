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

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/listing"
)

// kill makes a dead letter of the task that is next in a queue.
func (p *process) kill(queue string) ID {
	p.t.Helper()
	l := p.claim(queue)
	require.NoError(p.t, p.DeadLetter(context.Background(), l.Receipt, errors.New("boom")))
	return l.ID
}

// produceDead makes n dead letters.
func (p *process) produceDead(n int, task Task) (ids []ID) {
	p.t.Helper()
	for range n {
		id := p.produce(task)
		require.Equal(p.t, id, p.kill(task.Queue))
		ids = append(ids, id)
	}
	return ids
}

// TestRedrive: a dead letter is ready again, behind the others, with all its
// attempts before it and the error that it died of.
func TestRedrive(t *testing.T) {
	throughSteps(t, Options{Shards: 1, WindowTasks: 2}, func(t *testing.T, p *process) {
		ctx := context.Background()
		id := p.produce(Task{Queue: "a", Payload: []byte("x"), MaxAttempts: 2, RunAt: p.opts.wall().Add(time.Second)})
		p.pass(time.Second)
		for range 2 {
			require.NoError(t, p.Retry(ctx, p.claim("a").Receipt, RetryOptions{After: -1, Err: errors.New("boom")}))
		}
		p.step()
		info := infoOf(t, p.Queue, id)
		require.Equal(t, Dead, info.State)
		require.Equal(t, 2, info.Attempts)
		others := []ID{p.produce(Task{Queue: "a"}), p.produce(Task{Queue: "a"}), p.produce(Task{Queue: "a"})}
		p.pass(time.Millisecond)
		require.NoError(t, p.RedriveDead(ctx, id))
		p.step()
		info = infoOf(t, p.Queue, id)
		require.Equal(t, Ready, info.State)
		require.Zero(t, info.Attempts)
		require.Equal(t, "boom", info.LastError)
		for _, other := range others {
			require.Equal(t, other, p.claim("a").ID)
		}
		for attempt := 1; attempt <= 2; attempt++ {
			l := p.claim("a")
			require.Equal(t, id, l.ID)
			require.Equal(t, attempt, l.Attempt)
			require.Equal(t, "x", string(l.Payload))
			require.Equal(t, "boom", l.LastError)
			p.step()
			require.NoError(t, p.Retry(ctx, l.Receipt, RetryOptions{After: -1}))
		}
		p.step()
		require.Equal(t, Dead, p.state(id))
		require.NoError(t, p.RedriveDead(ctx, id)) // again
		p.step()
		require.NoError(t, p.Complete(ctx, p.claim("a").Receipt, nil))
		p.step()
		require.Zero(t, p.state(id))
	})
}

// TestRedriveNotDead: of what is no dead letter there is nothing to redrive.
func TestRedriveNotDead(t *testing.T) {
	ctx := context.Background()
	for _, in := range append(slices.Clone(waitingStates), busyStates[:2]...) {
		t.Run(in.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 2, Retention: Forever}, func(t *testing.T, p *process) {
				id := in.reach(p, keyed("k"))
				p.step()
				require.ErrorIs(t, p.RedriveDead(ctx, id), ErrNotFound)
				n, err := p.RedriveAllDead(ctx, DeadFilter{})
				require.NoError(t, err)
				require.Zero(t, n)
				n, err = p.PurgeDead(ctx, DeadFilter{})
				require.NoError(t, err)
				require.Zero(t, n)
				require.Equal(t, in.state, p.state(id))
				require.NoError(t, p.Cancel(ctx, id))
				require.ErrorIs(t, p.RedriveDead(ctx, id), ErrNotFound)
				require.ErrorIs(t, p.RedriveDead(ctx, ID{}), ErrNotFound)
			})
		})
	}
}

// TestRedriveKey: a redriven task takes its key again, unless another task has
// it by now.
func TestRedriveKey(t *testing.T) {
	throughSteps(t, Options{Shards: 2}, func(t *testing.T, p *process) {
		ctx := context.Background()
		task := keyed("k")
		first := p.produce(task)
		p.kill("a")
		second := p.produce(task)
		p.step()
		var duplicate *DuplicateError
		require.ErrorAs(t, p.RedriveDead(ctx, first), &duplicate)
		require.Equal(t, DuplicateError{Key: "k", ID: second}, *duplicate)
		n, err := p.RedriveAllDead(ctx, DeadFilter{})
		require.NoError(t, err)
		require.Zero(t, n)
		p.step()
		require.Equal(t, Dead, p.state(first))
		p.kill("a")
		require.NoError(t, p.RedriveDead(ctx, first))
		p.step()
		p.taken(task, first)
		require.ErrorIs(t, p.RedriveDead(ctx, second), ErrDuplicate)
		p.kill("a")
		n, err = p.RedriveAllDead(ctx, DeadFilter{}) // of the two, one
		require.NoError(t, err)
		require.Equal(t, 1, n)
		p.step()
		require.Equal(t, Counts{Ready: 1, Dead: 1}, countsOf(t, p.Queue, "a"))
		require.NoError(t, p.Complete(ctx, p.claim("a").Receipt, nil))
		require.Zero(t, p.stored(keys.Unique))
	})
}

// TestRedriveKeyFor: a task that is redriven while its key is still taken holds
// it as long as it lives, and for the rest of For.
func TestRedriveKeyFor(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		ctx := context.Background()
		task := keyed("k")
		task.Unique.For = time.Hour
		id := p.produce(task)
		p.kill("a")
		p.step()
		require.NoError(t, p.RedriveDead(ctx, id))
		p.step()
		require.NoError(t, p.Complete(ctx, p.claim("a").Receipt, nil))
		p.step()
		p.pass(time.Hour - time.Millisecond)
		p.taken(task, id)
		p.pass(time.Millisecond)
		require.Zero(t, p.stored(keys.Unique))

		id = p.produce(task)
		p.kill("a")
		require.NoError(t, p.RedriveDead(ctx, id))
		p.step()
		p.pass(2 * time.Hour)
		p.taken(task, id)
		require.NoError(t, p.Complete(ctx, p.claim("a").Receipt, nil))
		p.step()
		require.Zero(t, p.stored(keys.Unique))
		require.Zero(t, p.stored(keys.Freed))

		id = p.produce(task)
		p.kill("a")
		p.pass(2 * time.Hour) // the key becomes free, and nobody takes it
		p.step()
		require.NoError(t, p.RedriveDead(ctx, id))
		p.step()
		p.taken(task, id)
		p.kill("a")
		p.step()
		require.Zero(t, p.stored(keys.Unique), "For is counted from the produce")
	})
}

// TestRedriveOfGroup: the group of a dead letter goes on without it; when it is
// redriven it waits for its turn.
func TestRedriveOfGroup(t *testing.T) {
	throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *process) {
		ctx := context.Background()
		dead := p.produce(Task{Queue: "a", Group: "g"})
		next := p.produce(Task{Queue: "a", Group: "g"})
		p.kill("a")
		p.step()
		require.NoError(t, p.RedriveDead(ctx, dead))
		p.step()
		require.Equal(t, Blocked, p.state(dead))
		l := p.claim("a")
		require.Equal(t, next, l.ID)
		require.Nil(t, claimNow(t, p.Queue, "a"))
		require.NoError(t, p.Complete(ctx, l.Receipt, nil))
		p.step()
		require.Equal(t, dead, p.kill("a"))
		require.NoError(t, p.RedriveDead(ctx, dead)) // nobody else is there
		p.step()
		require.Equal(t, Ready, p.state(dead))
	})
}

// TestRedriveParent: a task waits for a dead parent, and goes on when it was
// redriven and is completed.
func TestRedriveParent(t *testing.T) {
	throughSteps(t, Options{Shards: 3}, func(t *testing.T, p *process) {
		ctx := context.Background()
		require.NoError(t, p.Configure(ctx, "parents", func(s *Settings) { s.DeadRetention = time.Hour }))
		parent := p.produce(Task{Queue: "parents"})
		child := p.produce(Task{Queue: "a", After: []ID{parent}})
		p.check()
		p.kill("parents")
		p.step()
		late := p.produce(Task{Queue: "a", After: []ID{parent}})
		p.pass(2 * time.Hour) // it is kept, since others wait for it
		p.step()
		require.Equal(t, []State{Dead, Blocked, Blocked}, []State{p.state(parent), p.state(child), p.state(late)})
		require.NoError(t, p.RedriveDead(ctx, parent))
		p.step()
		require.Equal(t, Blocked, p.state(child))
		require.NoError(t, p.Complete(ctx, p.claim("parents").Receipt, nil))
		p.step()
		require.Equal(t, []State{Ready, Ready}, []State{p.state(child), p.state(late)})
	})
}

// TestPurgeParent: what waits for a dead letter that is purged is canceled.
func TestPurgeParent(t *testing.T) {
	throughSteps(t, Options{Shards: 3, Retention: Forever}, func(t *testing.T, p *process) {
		ctx := context.Background()
		parent := p.produce(Task{Queue: "parents"})
		child := p.produce(Task{Queue: "a", After: []ID{parent}})
		grandchild := p.produce(Task{Queue: "a", After: []ID{child}})
		p.check()
		p.kill("parents")
		p.step()
		n, err := p.PurgeDead(ctx, DeadFilter{})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		p.step()
		require.Zero(t, p.state(parent))
		require.Equal(t, []State{Canceled, Canceled}, []State{p.state(child), p.state(grandchild)})
	})
}

// TestPurgeKey: the key of a dead letter that is purged is taken for the rest of For.
func TestPurgeKey(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		task := keyed("k")
		task.Unique.For = time.Hour
		id := p.produce(task)
		p.kill("a")
		_, err := p.PurgeDead(context.Background(), DeadFilter{})
		require.NoError(t, err)
		p.step()
		require.Zero(t, p.state(id))
		p.pass(time.Hour - time.Millisecond)
		p.taken(task, id)
		p.pass(time.Millisecond)
		p.step()
		require.Zero(t, p.stored(keys.Unique))
	})
}

// bulk is RedriveAllDead or PurgeDead.
type bulk struct {
	name string
	call func(*Queue, context.Context, DeadFilter) (int, error)
	to   State // 0: gone
}

var bulks = []bulk{{"RedriveAllDead", (*Queue).RedriveAllDead, Ready}, {"PurgeDead", (*Queue).PurgeDead, 0}}

// TestDeadLettersFilter: RedriveAllDead and PurgeDead are about what they are asked
// for, and nothing else.
func TestDeadLettersFilter(t *testing.T) {
	for _, b := range bulks {
		t.Run(b.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 3}, func(t *testing.T, p *process) {
				ctx := context.Background()
				start := p.opts.wall()
				for minute := range 4 {
					for _, queue := range []string{"a", "b"} {
						for _, tenant := range []string{"", "x", "y"} {
							p.produceDead(2, Task{Queue: queue, Tenant: tenant, Payload: strconv.AppendInt(nil, int64(minute), 10)})
						}
					}
					p.pass(time.Minute)
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
					n, err := b.call(p.Queue, ctx, tc.which)
					require.NoError(t, err, tc.name)
					require.Equal(t, tc.n, n, tc.name)
					p.step()
					after := countsOf(t, p.Queue, "a").Dead + countsOf(t, p.Queue, "b").Dead
					require.Equal(t, before-uint64(n), after, tc.name)
				}
				want := Counts{}
				if b.to == Ready {
					want.Ready = 24
				}
				require.Equal(t, want, countsOf(t, p.Queue, "a"))
				require.Equal(t, want, countsOf(t, p.Queue, "b"))
			})
		})
	}
}

// TestDeadLettersMatch: Match sees each dead letter once, with all that Get shows.
func TestDeadLettersMatch(t *testing.T) {
	throughSteps(t, Options{Shards: 3}, func(t *testing.T, p *process) {
		ids := p.produceDead(20, Task{Queue: "a", Payload: []byte("x"), Headers: map[string]string{"h": "v"}})
		p.step()
		seen := make(map[ID]bool)
		n, err := p.RedriveAllDead(context.Background(), DeadFilter{Match: func(i *TaskInfo) bool {
			require.False(t, seen[i.ID])
			seen[i.ID] = true
			require.Equal(t, infoOf(t, p.Queue, i.ID), i)
			return i.ID == ids[3]
		}})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		require.Len(t, seen, 20)
		require.Equal(t, ids[3], p.claim("a").ID)
	})
}

// TestDeadLettersOfManyGroups: more than one operation, and one commit, is about.
func TestDeadLettersOfManyGroups(t *testing.T) {
	for _, b := range bulks {
		t.Run(b.name, func(t *testing.T) {
			bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
				ctx := context.Background()
				const n = 4*bulkCap + 30
				_, err := q.startingAt(0).ProduceBatch(ctx, slices.Repeat([]Task{{Queue: "a", Payload: make([]byte, 5<<10)}}, n-10))
				require.NoError(t, err)
				produce(t, q, slices.Repeat([]Task{{Queue: "a"}}, 10)...)
				for range n {
					require.NoError(t, q.DeadLetter(ctx, claimNow(t, q, "a").Receipt, nil))
				}
				done, err := b.call(q, ctx, DeadFilter{})
				require.NoError(t, err)
				require.Equal(t, n, done)
				require.NoError(t, q.checkMemory())
				want := Counts{}
				if b.to == Ready {
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
	for _, b := range bulks {
		for _, perSecond := range []float64{0.5, 10, 100} {
			t.Run(fmt.Sprint(b.name, " ", perSecond), func(t *testing.T) {
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
						got, err := b.call(q, ctx, DeadFilter{Rate: perSecond})
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
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		const n = listing.PageTasks + 44
		require.NoError(t, p.Configure(context.Background(), "a", func(s *Settings) { s.DeadRetention = time.Hour }))
		p.produceDead(n, Task{Queue: "a"})
		p.step()
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
	for _, b := range bulks {
		t.Run(b.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 2}, func(t *testing.T, p *process) {
				const n = 100
				p.produceDead(n, Task{Queue: "a"})
				ctx, cancel := context.WithCancelCause(context.Background())
				type result struct {
					n   int
					err error
				}
				ended := make(chan result, 1)
				go func(q *Queue) {
					n, err := b.call(q, ctx, DeadFilter{Rate: 10})
					ended <- result{n, err}
				}(p.Queue)
				p.pass(3 * time.Second)
				if p.end == goesOn || p.end == forgets {
					cancel(errBubbleOver)
				}
				p.step()
				first := <-ended
				cancel(nil)
				if p.end == goesOn || p.end == forgets {
					require.ErrorIs(t, first.err, errBubbleOver)
				} else {
					require.ErrorIs(t, first.err, ErrClosed)
				}
				require.InDelta(t, 31, first.n, 2)
				require.EqualValues(t, n-first.n, countsOf(t, p.Queue, "a").Dead)
				rest, err := b.call(p.Queue, context.Background(), DeadFilter{})
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
			n, err := b.call(q, ctx, DeadFilter{Rate: 1})
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, 4, n)
			require.EqualValues(t, 6, countsOf(t, q, "a").Dead)
		})
	}
}

// TestDeadLettersTwice: of operations that are decided in one group, one redrives a dead letter.
func TestDeadLettersTwice(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		ids := p.produceDead(3, Task{Queue: "a"})
		p.step()
		done := 0
		require.NoError(t, p.shard(0).probe(func(s *shard) error {
			for range 2 {
				op := &bulkOp{newCompletion(), engine.BulkAlteration{How: engine.AlterRedrive}}
				for _, id := range ids {
					op.IDs = append(op.IDs, id)
				}
				op.resolve(s)
				done += op.N
			}
			return nil
		}))
		require.Equal(t, len(ids), done)
		p.step()
		require.Equal(t, Counts{Ready: 3}, countsOf(t, p.Queue, "a"))
	})
}

func TestDeadLettersRefused(t *testing.T) {
	q := openLimited(t)
	for _, b := range bulks {
		for _, r := range []float64{-1, 1e9 + 1, math.Inf(1)} {
			q.refused("DeadFilter.Rate", r, "0 to 1e9", func() error {
				n, err := b.call(q.Queue, context.Background(), DeadFilter{Rate: r})
				require.Zero(t, n)
				return err
			})
		}
		_, err := b.call(q.Queue, context.Background(), DeadFilter{Rate: math.NaN()})
		require.ErrorIs(t, err, ErrInvalid)
		ended, end := context.WithCancelCause(context.Background())
		end(errBubbleOver)
		_, err = b.call(q.Queue, ended, DeadFilter{})
		require.ErrorIs(t, err, errBubbleOver)
	}
}

// TestDeadRetention: dead letters are forgotten after the time that the
// settings give, at most an eighth later, unless they are redriven before.
func TestDeadRetention(t *testing.T) {
	throughSteps(t, Options{Shards: 2}, func(t *testing.T, p *process) {
		ctx := context.Background()
		before := p.produceDead(3, Task{Queue: "a"}) // kept without end
		require.NoError(t, p.Configure(ctx, "a", func(s *Settings) { s.DeadRetention = 8 * time.Hour }))
		after := p.produceDead(3, Task{Queue: "a"})
		other := p.produceDead(1, Task{Queue: "b"})
		p.step()
		p.pass(4 * time.Hour)
		require.NoError(t, p.RedriveDead(ctx, after[0]))
		p.step()
		require.Equal(t, after[0], p.kill("a")) // its time begins anew
		require.NoError(t, p.RedriveDead(ctx, after[1]))
		p.pass(4*time.Hour - time.Millisecond)
		p.step()
		require.Equal(t, Dead, p.state(after[2]))
		p.pass(time.Hour + time.Millisecond)
		p.step()
		require.Zero(t, p.state(after[2]))
		require.ErrorIs(t, p.RedriveDead(ctx, after[2]), ErrNotFound)
		require.Equal(t, Dead, p.state(after[0]))
		require.Equal(t, Ready, p.state(after[1]))
		p.pass(4 * time.Hour)
		p.step()
		require.Zero(t, p.state(after[0]))
		for _, id := range append(before, other...) {
			require.Equal(t, Dead, p.state(id))
		}
		require.Equal(t, Counts{Ready: 1, Dead: 3}, countsOf(t, p.Queue, "a"))
	})
}

// TestDeadRetentionClock: a clock that is set forward forgets dead letters
// early, one that is set back keeps them longer.
func TestDeadRetentionClock(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		require.NoError(t, p.Configure(context.Background(), "a", func(s *Settings) { s.DeadRetention = 10 * time.Minute }))
		id := p.produceDead(1, Task{Queue: "a"})[0]
		p.setClock(-time.Hour)
		p.step()
		p.pass(time.Hour)
		require.Equal(t, Dead, p.state(id))
		p.setClock(time.Hour)
		p.pass(time.Minute)
		p.step()
		require.Zero(t, p.state(id))
		require.Equal(t, Counts{}, countsOf(t, p.Queue, "a"))
	})
}
