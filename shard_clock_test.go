package codeq_test

import (
	"bytes"
	"context"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/test/queuetest"
)

// TestClockJumpsUnderRun: a clock that is set by an hour, either way, neither takes a task from a
// handler nor gives it to another one. It does not change the rate of claims and causes no busy
// loop, and the IDs keep their order, also over a restart.
func TestClockJumpsUnderRun(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1, LeaseFor: time.Minute}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		require.NoError(t, p.Configure(ctx, "rated", func(s *codeq.Settings) { s.Rate, s.Burst = 1, 1 }))
		last := p.Store(codeq.Task{Queue: "rated"})
		for _, jump := range []time.Duration{time.Hour, -time.Hour, -time.Hour, time.Hour} {
			calls, finish := 0, make(chan struct{})
			var m codeq.Mux
			codeq.Handle(&m, "held", func(context.Context, *codeq.Job[[]byte]) error {
				calls++
				<-finish
				return nil
			})
			runCtx, stop := context.WithCancel(ctx)
			run := make(chan error, 1)
			go func() { run <- p.Run(runCtx, &m, nil) }()
			held := p.Store(codeq.Task{Queue: "held"})
			synctest.Wait()

			commits := inspect.Of(p.Queue).Commits()
			p.SetClock(jump)
			p.Pass(10 * time.Minute) // ten leases
			require.Less(t, inspect.Of(p.Queue).Commits()-commits, uint64(100), "nothing spins after a jump of %v", jump)
			require.Equal(t, 1, calls, "after a jump of %v", jump)
			require.Equal(t, codeq.Leased, p.StateOf(held))

			var tasks []codeq.Task
			for range 5 {
				tasks = append(tasks, codeq.Task{Queue: "rated"})
			}
			ids, err := p.ProduceBatch(ctx, tasks)
			require.NoError(t, err)
			for _, id := range ids {
				require.Positive(t, bytes.Compare(id[:], last[:]), "after a jump of %v", jump)
				last = id
			}
			require.NotNil(t, queuetest.ClaimNow(t, p.Queue, "rated"))
			require.Nil(t, queuetest.ClaimNow(t, p.Queue, "rated"), "the burst is one")
			start := time.Now()
			for range 3 {
				l, err := p.Claim(ctx, codeq.ClaimRequest{Queues: []string{"rated"}})
				require.NoError(t, err)
				require.NoError(t, p.Complete(ctx, l.Receipt, nil))
			}
			require.InDelta(t, 3, time.Since(start).Seconds(), 0.1, "after a jump of %v", jump)

			close(finish)
			stop()
			require.NoError(t, <-run)
			require.Zero(t, p.StateOf(held), "it has been completed")
			p.Step()
		}
	})
}

// wrongBy is how far clocks are ahead, in tests of processes that begin with a wrong clock.
var wrongBy = []time.Duration{5 * time.Second, 24 * time.Hour, 13 * 365 * 24 * time.Hour}

// bounded has a task of each kind that stays in its state for a given length.
type bounded struct {
	p                                     *queuetest.Process
	key                                   codeq.Task
	holder, retried, done, dead, canceled codeq.ID
}

const boundedFor = 10 * time.Second

func newBounded(p *queuetest.Process, key string) *bounded {
	ctx := context.Background()
	require.NoError(p.T, p.Configure(ctx, "dead", func(s *codeq.Settings) { s.DeadRetention = boundedFor }))
	b := &bounded{p: p, key: codeq.Task{Queue: "keyed", Unique: codeq.Unique{Key: key, For: boundedFor}}}
	b.holder = p.Store(b.key)
	require.NoError(p.T, p.Complete(ctx, p.Take("keyed").Receipt, nil))
	b.retried = p.Store(codeq.Task{Queue: "retried"})
	require.NoError(p.T, p.Retry(ctx, p.Take("retried").Receipt, codeq.RetryOptions{After: boundedFor}))
	b.done = p.Store(codeq.Task{Queue: "done", Retention: boundedFor})
	require.NoError(p.T, p.Complete(ctx, p.Take("done").Receipt, nil))
	b.dead = p.StoreDead(1, codeq.Task{Queue: "dead"})[0]
	b.canceled = p.Store(codeq.Task{Queue: "done", Retention: boundedFor})
	require.NoError(p.T, p.Cancel(ctx, b.canceled))
	return b
}

// last requires that no length has ended.
func (b *bounded) last() {
	b.p.T.Helper()
	b.p.Taken(b.key, b.holder)
	require.Equal(b.p.T, codeq.Scheduled, b.p.StateOf(b.retried))
	require.Equal(b.p.T, codeq.Done, b.p.StateOf(b.done))
	require.Equal(b.p.T, codeq.Dead, b.p.StateOf(b.dead))
	require.Equal(b.p.T, codeq.Canceled, b.p.StateOf(b.canceled))
}

// over requires that all lengths have ended.
func (b *bounded) over() {
	b.p.T.Helper()
	require.NoError(b.p.T, b.p.Cancel(context.Background(), b.p.Store(b.key)))
	require.Equal(b.p.T, codeq.Ready, b.p.StateOf(b.retried))
	require.NoError(b.p.T, b.p.Cancel(context.Background(), b.retried))
	for _, id := range []codeq.ID{b.done, b.dead, b.canceled} {
		require.Zero(b.p.T, b.p.StateOf(id))
	}
}

// TestWrongClockAtStart: lengths are given in a process with a clock that is ahead. They end when
// they have passed since the start of the next process, which has the right clock. They also do so
// if that process ends and another one begins with a clock that is as wrong the other way. Nothing
// ends early. The RunAt of a task does not change.
func TestWrongClockAtStart(t *testing.T) {
	t.Parallel()
	for _, by := range wrongBy {
		t.Run(by.String(), func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: 2}, func(t *testing.T, p *queuetest.Process) {
				p.SetClock(by)
				p.Step()
				later := p.Store(codeq.Task{Queue: "later", RunAt: p.Now().Add(time.Hour)})
				for i, back := range []time.Duration{-by, -by, 0} {
					b := newBounded(p, strconv.Itoa(i))
					p.SetClock(back)
					p.Step()
					p.Pass(boundedFor - time.Millisecond)
					b.last()
					p.Pass(boundedFor / 4) // buckets are an eighth wide
					b.over()
					p.Step()
				}
				require.Equal(t, codeq.Scheduled, p.StateOf(later))
				p.SetClock(3*by + 2*time.Hour)
				p.Pass(time.Minute)
				require.Equal(t, codeq.Ready, p.StateOf(later))
			})
		})
	}
}

// TestBootsWithWrongClocks: one of three processes, or a part of one, has a wrong clock: ahead or
// behind, by little or much. Work goes on at once. No length ends early while the clock is not set
// forward, and each has ended when it has passed since the start of a process with the right clock.
// No call waits for ever.
func TestBootsWithWrongClocks(t *testing.T) {
	t.Parallel()
	for _, wrong := range []string{"first", "second", "middle of the first", "third"} {
		for _, ahead := range wrongBy {
			for _, by := range []time.Duration{ahead, -ahead} {
				t.Run(wrong+" "+by.String(), func(t *testing.T) {
					t.Parallel()
					queuetest.ThroughSteps(t, codeq.Options{Shards: 2}, func(t *testing.T, p *queuetest.Process) {
						ctx := context.Background()
						if wrong == "first" { // a new directory
							require.NoError(t, p.Close())
							p.Disk = crashfs.New()
							p.SetClock(by)
							p.Open()
						}
						require.NoError(t, p.Configure(ctx, "rated", func(s *codeq.Settings) { s.Rate, s.Burst = 1, 1 }))
						every := codeq.Schedule{Name: "s", Every: time.Minute, Task: codeq.Task{Queue: "ticks"}, Missed: codeq.MissedSkip}
						require.NoError(t, p.SetSchedule(ctx, every))
						for life := range 3 {
							if life == 1 && wrong == "second" || life == 2 && wrong == "third" {
								p.SetClock(by)
							}
							if life > 0 {
								p.Step()
							}
							b := newBounded(p, strconv.Itoa(life))
							held := p.Store(codeq.Task{Queue: "held"})
							lost, err := p.Claim(ctx, codeq.ClaimRequest{Queues: []string{"held"}, LeaseFor: boundedFor})
							require.NoError(t, err)
							require.WithinDuration(t, p.Now().Add(boundedFor), lost.Deadline, time.Second)
							later := p.Store(codeq.Task{Queue: "later", RunAt: p.Now().Add(boundedFor)})
							for range 3 {
								p.Store(codeq.Task{Queue: "rated"})
							}
							awaited := make(chan error, 1)
							done := p.Store(codeq.Task{Queue: "awaited"})
							go func() {
								_, err := p.Await(ctx, done)
								awaited <- err
							}()
							synctest.Wait()
							require.NoError(t, p.Complete(ctx, p.Take("awaited").Receipt, nil))
							require.NoError(t, <-awaited)
							p.Pass(boundedFor - time.Millisecond)
							b.last()
							require.Equal(t, codeq.Leased, p.StateOf(held))
							require.Equal(t, codeq.Scheduled, p.StateOf(later))
							if wrong == "middle of the first" && life == 0 {
								p.SetClock(by)
								p.Pass(boundedFor - time.Millisecond) // behind: from when the owner sees it
							}
							p.Pass(boundedFor / 4)
							b.over()
							require.Equal(t, codeq.Ready, p.StateOf(held))
							require.NoError(t, p.Cancel(ctx, held))
							if wrong != "middle of the first" || life > 0 {
								p.Pass(time.Minute) // a clock may have been set: it is read again
								require.Equal(t, codeq.Ready, p.StateOf(later))
							}
							require.NoError(t, p.Cancel(ctx, later))
							claimed := 0
							for began := time.Now(); time.Since(began) < 10*time.Second && claimed < 3; p.Pass(time.Second) {
								if l := queuetest.ClaimNow(t, p.Queue, "rated"); l != nil {
									claimed++
									require.NoError(t, p.Complete(ctx, l.Receipt, nil))
								}
							}
							require.Equal(t, 3, claimed)
							infos, err := p.Info(ctx)
							require.NoError(t, err)
							for _, info := range infos {
								require.False(t, info.OldestReady.After(p.Now()), info.Queue)
							}
							p.SetClock(-time.Duration(p.Skew.Load()))
						}
						p.Step()
						require.NoError(t, p.SetSchedule(ctx, every))
						ticks := queuetest.CountsOf(t, p.Queue, "ticks").Ready
						require.Less(t, ticks, uint64(30), "those that were missed are left out")
						p.Pass(2*time.Minute + time.Second)
						if by > 0 && by < 25*time.Hour {
							return // the next tick is at its time, which is not so far
						}
						require.Greater(t, queuetest.CountsOf(t, p.Queue, "ticks").Ready, ticks)
					})
				})
			}
		}
	}
}

// TestShortLivesWithWrongClock: after a clock was ahead, a length also ends if each process runs
// for only a part of it.
func TestShortLivesWithWrongClock(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
		p.SetClock(13 * 365 * 24 * time.Hour)
		b := newBounded(p, "k")
		p.SetClock(-13 * 365 * 24 * time.Hour)
		for range 5 {
			p.Step()
			p.Pass(boundedFor / 4)
			p.Store(codeq.Task{Queue: "else"}) // something is committed
		}
		p.Pass(time.Second)
		b.over()
	})
}

// TestWaitsBesideTimesOfDay: the clock of periods is ahead of the wall clock, and tasks wait for a
// time of day between the two. They become ready at that time, and the tasks that wait between
// attempts do not cause them to be read again.
func TestWaitsBesideTimesOfDay(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		p.Store(codeq.Task{Queue: "a"})
		p.SetClock(24 * time.Hour)
		require.NoError(t, p.Retry(ctx, p.Take("a").Receipt, codeq.RetryOptions{After: time.Minute}))
		p.SetClock(-24 * time.Hour)
		p.Step()
		var later []codeq.ID
		for i := range 30 {
			later = append(later, p.Store(codeq.Task{Queue: "b", RunAt: p.Now().Add(time.Duration(i+1) * time.Hour)}))
			p.Store(codeq.Task{Queue: "a"})
			require.NoError(t, p.Retry(ctx, p.Take("a").Receipt, codeq.RetryOptions{After: 10 * time.Minute}))
		}
		p.Step()
		p.Pass(11 * time.Minute)
		require.Equal(t, codeq.Counts{Ready: 31}, queuetest.CountsOf(t, p.Queue, "a"))
		for i, id := range later {
			p.Pass(50 * time.Minute)
			require.Equal(t, codeq.Ready, p.StateOf(id), i)
			require.EqualValues(t, len(later)-i-1, queuetest.CountsOf(t, p.Queue, "b").Scheduled)
			p.Pass(10 * time.Minute)
			if i%7 == 0 {
				p.Step()
			}
		}
	})
}

// TestBeforeTheCall: a call that alters earlier tasks finds them while the clock that stamps IDs
// and ends is ahead of the wall clock.
func TestBeforeTheCall(t *testing.T) {
	t.Parallel()
	for _, by := range wrongBy {
		t.Run(by.String(), func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: 2}, func(t *testing.T, p *queuetest.Process) {
				ctx := context.Background()
				p.SetClock(by)
				p.Store(codeq.Task{Queue: "r"})
				p.StoreDead(4, codeq.Task{Queue: "a"})
				p.SetClock(-by)
				p.Step()
				p.Store(codeq.Task{Queue: "r"})
				p.StoreDead(1, codeq.Task{Queue: "a"})
				p.EachDead(p.RedriveAllDead, codeq.DeadFilter{Match: once()})
				p.EachDead(p.PurgeDead, codeq.DeadFilter{Match: once()})
				p.Step()
				r, err := p.Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkPurge, TaskFilter: inStates("a", codeq.Dead)})
				require.NoError(t, err)
				require.Equal(t, 3, r.Changed)
				r, err = p.Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkCancel, TaskFilter: inStates("r", codeq.Ready)})
				require.NoError(t, err)
				require.Equal(t, 2, r.Changed)

				// A task that dies again is not altered again.
				p.StoreDead(3, codeq.Task{Queue: "b"})
				p.Pass(time.Millisecond)
				n, err := p.RedriveAllDead(ctx, codeq.DeadFilter{Queue: "b", Match: func(*codeq.TaskInfo) bool {
					p.Pass(time.Millisecond)
					p.StoreDead(1, codeq.Task{Queue: "b"})
					return true
				}})
				require.NoError(t, err)
				require.Equal(t, 3, n)
			})
		})
	}
}

// once returns a filter that matches one task.
func once() func(*codeq.TaskInfo) bool {
	found := false
	return func(*codeq.TaskInfo) bool {
		before := found
		found = true
		return !before
	}
}

// TestAgeWithWrongClock: tasks have waited since before the wall clock was ahead, since then, or
// since it is right again. Info and Get show the real wait of each, and a second more each second.
func TestAgeWithWrongClock(t *testing.T) {
	t.Parallel()
	for _, by := range append(wrongBy, time.Hour) {
		t.Run(by.String(), func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
				ctx := context.Background()
				tasks := make(map[string]codeq.ID)
				since := make(map[string]time.Time) // by a clock that is right
				retried := make(map[string]codeq.ID)
				store := func(queue string) {
					retried[queue] = p.Store(codeq.Task{Queue: queue})
					require.NoError(t, p.Retry(ctx, p.Take(queue).Receipt, codeq.RetryOptions{After: 20 * 365 * 24 * time.Hour}))
					tasks[queue], since[queue] = p.Store(codeq.Task{Queue: queue}), time.Now()
				}
				looks := func(but time.Duration) {
					t.Helper()
					infos, err := p.Info(ctx)
					require.NoError(t, err)
					seen := 0
					for _, info := range infos {
						if info.Queue == "x" {
							continue
						}
						id, waits := tasks[info.Queue], time.Since(since[info.Queue]).Seconds()
						require.InDelta(t, waits, p.Now().Sub(info.OldestReady).Seconds(), but.Seconds(), info.Queue)
						task, err := p.Get(ctx, id)
						require.NoError(t, err)
						require.Equal(t, info.OldestReady, task.At)
						require.Equal(t, info.OldestReady, task.FirstReady)
						task, err = p.Get(ctx, retried[info.Queue])
						require.NoError(t, err)
						for _, at := range []time.Time{task.FirstReady, task.History[0].Start, task.History[0].End} {
							require.InDelta(t, waits, p.Now().Sub(at).Seconds(), but.Seconds()+1, info.Queue)
						}
						seen++
					}
					require.Equal(t, len(tasks), seen)
				}
				store("before")
				p.Pass(time.Hour)
				looks(time.Second)
				p.SetClock(by)
				p.Step()
				store("while")
				p.Pass(10 * time.Minute)
				require.NoError(t, p.Cancel(ctx, p.Store(codeq.Task{Queue: "x"}))) // the last time that the next process finds
				p.SetClock(-by)
				p.Step()
				store("after")
				but := min(by, 20*time.Second) // as long as a Step may take
				for range 3 {
					looks(but)
					for range 5 {
						p.Pass(20 * time.Minute)
						looks(but)
					}
					p.Step()
				}
			})
		})
	}
}

// TestListsWithWrongClock: tasks were produced, died or ended by a clock that was ahead. Lists and
// bulk calls find them by their bounds, and show no past time as a future one. A wait between
// attempts is shown with its real end.
func TestListsWithWrongClock(t *testing.T) {
	t.Parallel()
	for _, by := range wrongBy {
		t.Run(by.String(), func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: 2}, func(t *testing.T, p *queuetest.Process) {
				ctx := context.Background()
				find := func(from, to time.Time) (found []codeq.ID) {
					next := ""
					for {
						page, err := p.ListPage(ctx, codeq.PageOptions{
							TaskFilter: codeq.TaskFilter{From: from, To: to}, Limit: 2, Cursor: next,
						})
						require.NoError(t, err)
						for _, info := range page.Tasks {
							found = append(found, info.ID)
							one, err := p.Get(ctx, info.ID)
							require.NoError(t, err)
							require.Equal(t, one.At, info.At)
						}
						if next = page.Next; next == "" {
							break
						}
					}
					var listed []codeq.ID
					for s := codeq.Ready; s <= codeq.Canceled; s++ {
						for info, err := range p.List(ctx, codeq.ListOptions{State: s, From: from, To: to}) {
							require.NoError(t, err)
							listed = append(listed, info.ID)
						}
					}
					require.ElementsMatch(t, found, listed)
					return found
				}
				before := p.Now()
				right := p.StoreDead(2, codeq.Task{Queue: "dead"}) // by a clock that is right
				p.Pass(20 * time.Second)
				p.SetClock(by)
				past := append(p.StoreDead(3, codeq.Task{Queue: "dead"}), right...)
				for range 3 {
					past = append(past, p.Store(codeq.Task{Queue: "ready"}))
					id := p.Store(codeq.Task{Queue: "done", Retention: codeq.Forever})
					require.NoError(t, p.Complete(ctx, p.Take("done").Receipt, nil))
					past = append(past, id, p.Store(codeq.Task{Queue: "blocked", After: []codeq.ID{past[len(past)-1]}}))
				}
				waits := p.Store(codeq.Task{Queue: "waits"})
				require.NoError(t, p.Retry(ctx, p.Take("waits").Receipt, codeq.RetryOptions{After: 2 * time.Hour}))
				leased := p.Store(codeq.Task{Queue: "leased"})
				_, err := p.Claim(ctx, codeq.ClaimRequest{Queues: []string{"leased"}, LeaseFor: 3 * time.Hour})
				require.NoError(t, err)
				ahead := p.Now()
				p.SetClock(-by)
				p.Step()
				p.Pass(time.Second)
				began := time.Now()
				for range 5 {
					now := p.Now()
					require.ElementsMatch(t, past, find(time.Time{}, now.Add(time.Millisecond)))
					require.ElementsMatch(t, past, find(before, now.Add(time.Millisecond)))
					require.Empty(t, find(now.Add(4*time.Hour), ahead.Add(24*time.Hour)))
					require.Empty(t, find(time.Time{}, before))
					for _, id := range past {
						info, err := p.Get(ctx, id)
						require.NoError(t, err)
						require.False(t, info.At.After(now), info.State)
					}
					for id, ends := range map[codeq.ID]time.Duration{waits: 2 * time.Hour, leased: 3 * time.Hour} {
						info, err := p.Get(ctx, id)
						require.NoError(t, err)
						require.WithinDuration(t, began.Add(ends), info.At, 6*time.Second, info.State) // as far as a lease is stored
						require.Equal(t, []codeq.ID{id}, find(began.Add(ends-time.Minute), began.Add(ends+time.Minute)))
					}
					p.Pass(10 * time.Minute)
				}
				if by > 24*time.Hour {
					n, err := p.PurgeDead(ctx, codeq.DeadFilter{To: p.Now().Add(-time.Hour)})
					require.NoError(t, err)
					require.Zero(t, n, "none of them has been dead for so long")
				}
				if p.Ends() {
					require.NoError(t, p.Close())
					r, err := codeq.OpenReadOnly("queue", queuetest.OnDisk(p.Disk, &codeq.ReaderOptions{}))
					require.NoError(t, err)
					for _, id := range past {
						info, err := r.Get(ctx, id)
						require.NoError(t, err)
						require.WithinRange(t, info.At, before.Add(-time.Second), p.Now().Add(time.Second), info.State)
					}
					require.NoError(t, r.Close())
					p.Open()
				}
				p.Pass(time.Second)
				n, err := p.RedriveAllDead(ctx, codeq.DeadFilter{From: before, To: p.Now().Add(time.Millisecond)})
				require.NoError(t, err)
				require.Equal(t, 5, n)
				r, err := p.Bulk(ctx, codeq.BulkOptions{
					Action:     codeq.BulkCancel,
					TaskFilter: codeq.TaskFilter{Queue: "ready", States: []codeq.State{codeq.Ready}, From: before, To: p.Now()},
				})
				require.NoError(t, err)
				require.Equal(t, 3, r.Changed)
			})
		})
	}
}

// TestScheduleAfterWrongClock: a schedule that ticked by a clock that was ahead begins again when
// it is set or resumed, if its next tick is more than a day and a period ahead.
func TestScheduleAfterWrongClock(t *testing.T) {
	t.Parallel()
	for _, by := range wrongBy {
		for name, s := range map[string]codeq.Schedule{"every": {Every: time.Minute}, "cron": {Cron: "* * * * *"}} {
			s.Name, s.Task = "s", codeq.Task{Queue: "ticks"}
			t.Run(name+" "+by.String(), func(t *testing.T) {
				queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
					ctx := context.Background()
					next := func() time.Duration {
						all, err := p.Schedules(ctx)
						require.NoError(t, err)
						return all[0].Next.Sub(p.Now())
					}
					again := map[string]func(){
						"set":    func() { require.NoError(t, p.SetSchedule(ctx, s)) },
						"resume": func() { require.NoError(t, p.ResumeSchedule(ctx, "s")) },
						"pause and resume": func() {
							require.NoError(t, p.PauseSchedule(ctx, "s"))
							require.NoError(t, p.ResumeSchedule(ctx, "s"))
						},
					}
					for how, begin := range again {
						require.NoError(t, p.SetSchedule(ctx, s))
						p.SetClock(by)
						p.Pass(2 * time.Minute)
						p.SetClock(-by)
						p.Step()
						ahead := next()
						begin()
						if by > 25*time.Hour {
							require.Greater(t, ahead, 24*time.Hour)
							require.LessOrEqual(t, next(), time.Minute, how)
						} else {
							require.Equal(t, ahead, next(), how)
						}
						require.NoError(t, p.DeleteSchedule(ctx, "s"))
					}
				})
			})
		}
	}
}

// TestRateGoesOn: at a rate of one task an hour, four tasks pass in four hours of a process that
// begins again every 50 minutes, in any shard. After a pause no more tasks pass than the burst. A
// last task in the future counts as one of now.
func TestRateGoesOn(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 3}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		require.NoError(t, p.Configure(ctx, "a", func(s *codeq.Settings) { s.Rate, s.Burst = 1.0/3600, 1 }))
		p.Step()
		p.Pass(50 * time.Minute)
		p.Step()
		for range 40 {
			p.Store(codeq.Task{Queue: "a"})
		}
		take := func() (n int) {
			for {
				l := queuetest.ClaimNow(t, p.Queue, "a")
				if l == nil {
					return n
				}
				n++
				require.NoError(t, p.Complete(ctx, l.Receipt, nil))
			}
		}
		require.Equal(t, 1, take(), "no task has been claimed since it has the rate")
		began := time.Now()
		for n := 1; n <= 4; n++ {
			for ; time.Since(began) < time.Duration(n)*time.Hour-10*time.Minute; p.Step() {
				require.Zero(t, take(), time.Since(began))
				p.Pass(10 * time.Minute)
			}
			require.Zero(t, take())
			p.Pass(10*time.Minute + time.Second)
			require.Equal(t, 1, take(), n)
			began = time.Now().Add(-time.Duration(n) * time.Hour)
		}
		p.Pass(10 * time.Hour)
		p.Step()
		require.Equal(t, 1, take(), "the burst")

		p.Pass(2 * time.Hour)
		p.SetClock(24 * time.Hour)
		p.Step()
		require.Equal(t, 1, take())
		p.SetClock(-24 * time.Hour)
		p.Step()
		require.Zero(t, take())
		p.Pass(time.Hour + time.Second)
		require.Equal(t, 1, take())

		require.NoError(t, p.Configure(ctx, "a", func(s *codeq.Settings) { s.Rate, s.Burst = 0, 0 }))
		require.Zero(t, p.Stored(keys.Granted))
		require.Equal(t, 40-8, take())
		p.Step()
		require.Zero(t, p.Stored(keys.Granted))
	})
}

// TestFastRateAfterOpen: the tasks of the last second count, although some of them are not stored.
func TestFastRateAfterOpen(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		require.NoError(t, p.Configure(ctx, "a", func(s *codeq.Settings) { s.Rate, s.Burst = 10, 10 }))
		for range 100 {
			p.Store(codeq.Task{Queue: "a"})
		}
		for claimed, began := 0, time.Now(); time.Since(began) < 3*time.Second; p.Step() {
			for l := queuetest.ClaimNow(t, p.Queue, "a"); l != nil; l = queuetest.ClaimNow(t, p.Queue, "a") {
				claimed++
				require.LessOrEqual(t, float64(claimed), 10+10*time.Since(began).Seconds()+1e-6)
			}
			p.Pass(300 * time.Millisecond)
		}
	})
}

// TestDueAtOnceClockSetBack: many tasks are due at one moment. The clock is set back when some of
// them are ready. Others, with IDs before the rest, are scheduled to that moment again, and all
// become ready when it comes.
func TestDueAtOnceClockSetBack(t *testing.T) {
	t.Parallel()
	var skew atomic.Int64
	wall := func() time.Time { return time.Now().Add(time.Duration(skew.Load())) }
	queuetest.Bubble(t, *inspect.With(&codeq.Options{Shards: 1}, inspect.Private{Wall: wall}), func(t *testing.T, q *codeq.Queue) {
		due := time.Now().Add(time.Hour)
		early := queuetest.Produce(t, q, slices.Repeat([]codeq.Task{{Queue: "early", RunAt: due.Add(time.Hour)}}, 3)...)
		late := make([]codeq.Task, 3*engine.UpkeepBudget.Records)
		for i := range late {
			late[i] = codeq.Task{Queue: "late", RunAt: due}
		}
		_, err := q.ProduceBatch(t.Context(), late)
		require.NoError(t, err)
		goOn := queuetest.Hold(q, 0)
		left := make(chan uint64, 1)
		go func() {
			_ = inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
				left <- s.Rules.Names.Queues["late"].Counts.Scheduled
				skew.Store(-int64(time.Hour))
				return nil
			})
		}()
		synctest.Wait()
		skew.Store(int64(time.Hour))
		goOn()
		n := <-left
		require.Positive(t, n, "callers are served in each group")
		require.Less(t, n, uint64(len(late)))
		for _, id := range early {
			require.NoError(t, q.SetRunAt(t.Context(), id, due))
		}
		queuetest.RequireSettled(t, q)
		skew.Store(int64(time.Hour))
		require.NoError(t, q.SetRunAt(t.Context(), early[0], due), "which wakes the owner")
		synctest.Wait()
		queuetest.RequireSettled(t, q)
		stats, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, len(late), stats["late"].Ready)
		require.EqualValues(t, len(early), stats["early"].Ready)
	})
}
