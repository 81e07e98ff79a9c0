package codeq_test

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/keys"
	"codeq/test/queuetest"
)

// bulkVerb is RedriveAllDead or PurgeDead.
type bulkVerb struct {
	name string
	call func(*codeq.Queue, context.Context, codeq.DeadFilter) (int, error)
	to   codeq.State // 0: removed
}

var bulks = []bulkVerb{
	{"RedriveAllDead", (*codeq.Queue).RedriveAllDead, codeq.Ready},
	{"PurgeDead", (*codeq.Queue).PurgeDead, 0},
}

// TestRedriveKeyFor: a task that is redriven while its key is taken holds the key as long as it
// lives, and for the rest of For.
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
		p.Pass(2 * time.Hour) // the key becomes free, and no task takes it
		p.Step()
		require.NoError(t, p.RedriveDead(ctx, id))
		p.Step()
		p.Taken(task, id)
		p.Kill("a")
		p.Step()
		require.Zero(t, p.Stored(keys.Unique), "For is counted from the produce")
	})
}

// TestPurgeParent: the purge of a dead letter cancels the tasks that wait for it.
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

// TestPurgeKey: the key of a purged dead letter stays taken for the rest of For.
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

// TestDeadRetention: a dead letter is forgotten after DeadRetention, at most one eighth later,
// unless it is redriven before.
func TestDeadRetention(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 2}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		before := p.StoreDead(3, codeq.Task{Queue: "a"}) // no retention limit
		require.NoError(t, p.Configure(ctx, "a", func(s *codeq.Settings) { s.DeadRetention = 8 * time.Hour }))
		after := p.StoreDead(3, codeq.Task{Queue: "a"})
		other := p.StoreDead(1, codeq.Task{Queue: "b"})
		p.Step()
		p.Pass(4 * time.Hour)
		require.NoError(t, p.RedriveDead(ctx, after[0]))
		p.Step()
		require.Equal(t, after[0], p.Kill("a")) // its retention begins again
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

// TestDeadRetentionClock: if the clock is set forward, dead letters are forgotten early. If the
// clock is set back, they are forgotten neither earlier nor later.
func TestDeadRetentionClock(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
		require.NoError(t, p.Configure(context.Background(), "a", func(s *codeq.Settings) { s.DeadRetention = 10 * time.Minute }))
		id := p.StoreDead(1, codeq.Task{Queue: "a"})[0]
		p.SetClock(-time.Hour)
		p.Step()
		p.Pass(10*time.Minute - time.Millisecond)
		require.Equal(t, codeq.Dead, p.StateOf(id))
		p.Step() // from here, it is kept no longer than a new dead letter
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

// TestDeadLettersFilter: RedriveAllDead and PurgeDead change the selected dead letters, and no
// others.
func TestDeadLettersFilter(t *testing.T) {
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

// TestDeadLettersRate: after a first burst of a tenth of a second, the rate limits the changes per
// second.
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
