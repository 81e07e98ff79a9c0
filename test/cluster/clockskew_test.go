package cluster_test

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// wrongClocks are the nodes whose clocks are wrong.
var wrongClocks = []string{"leader", "next leader", "follower", "all"}

// setClocks sets the clocks of some nodes, by the leader and the next leader.
func (c *simCluster) setClocks(who string, leader, next *simNode, ahead time.Duration) {
	victims := map[string][]*simNode{"leader": {leader}, "next leader": {next}, "follower": {c.third(leader, next)}, "all": c.members()}
	for _, n := range victims[who] {
		n.machine.Wall.Set(ahead)
	}
}

// TestClockAheadIsReported: a clock is an hour ahead, whichever node has it. The leader logs once
// which clocks differ, and logs it again when they no longer differ. ClusterStatus has the
// difference.
func TestClockAheadIsReported(t *testing.T) {
	t.Parallel()
	for _, wrong := range []string{"leader", "next leader", "follower"} {
		t.Run(wrong, func(t *testing.T) {
			log := testkit.NewUserHandler(func(string) {})
			simCase(t, codeq.Options{Logger: slog.New(log)}, func(t *testing.T, c *simCluster) {
				ctx := context.Background()
				time.Sleep(2 * time.Minute) // the leader is at home
				leader, other := c.lead()
				q := simQueue(other)
				victim := leader
				if wrong != "leader" {
					victim = other
				}
				victim.machine.Wall.Set(time.Hour)
				if wrong == "next leader" {
					require.NoError(t, q.TransferLeadership(ctx, 0, other.name))
				}
				time.Sleep(2 * time.Minute)
				compared := []string{victim.name} // by the leader, with its own clock
				if wrong != "follower" {
					compared = slices.DeleteFunc(c.names(), func(node string) bool { return node == victim.name })
				}
				differ := log.About("wall clocks differ node=")
				for _, r := range differ {
					node, by, _ := strings.Cut(strings.TrimPrefix(r, "wall clocks differ node="), " ahead of it=")
					said, err := time.ParseDuration(by)
					require.NoError(t, err, r)
					ahead := time.Hour
					if node == victim.name { // the former leader may have logged it, too
						ahead = -ahead
					}
					require.InDelta(t, ahead.Seconds(), said.Seconds(), 0.1, r)
				}
				for _, node := range compared {
					require.Len(t, log.About("wall clocks differ node="+node), 1)
				}
				for _, r := range statusOf(t, other).Shards[0].Replicas {
					ahead := time.Duration(0)
					if r.Node == victim.name {
						ahead = time.Hour
					}
					require.InDelta(t, ahead.Seconds(), r.ClockAhead.Seconds(), 0.1, r.Node)
				}
				victim.machine.Wall.Set(0)
				time.Sleep(2 * time.Second)
				require.Equal(t, differ, log.About("wall clocks differ"))
				for _, node := range compared {
					require.Len(t, log.About("wall clocks agree again node="+node), 1)
				}
			})
		})
	}
}

// TestWrongClocksOverLeaders: kept results, dead letters, idempotency keys and retries last for at
// least their length. They end at the latest when that length has passed since a new leader took
// over. The clock of the former leader, of the next one, or of a follower is wrong, or all clocks
// were wrong and are right again. IDs do not take a time that only one clock shows.
func TestWrongClocksOverLeaders(t *testing.T) {
	t.Parallel()
	const keep = time.Minute
	clocks := []time.Duration{13 * 365 * 24 * time.Hour, -24 * time.Hour, 30 * time.Second, 24 * time.Hour}
	for _, by := range clocks[:testkit.Sized(2, 4)] {
		for _, who := range wrongClocks {
			t.Run(who+" "+by.String(), func(t *testing.T) {
				t.Parallel()
				simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
					ctx := context.Background()
					time.Sleep(2 * time.Minute) // the leader is at home
					leader, other := c.lead()
					q := simQueue(other)
					queuetest.Configure(t, q, "dead", func(s *codeq.Settings) { s.DeadRetention = keep })
					set := func(ahead time.Duration) { c.setClocks(who, leader, other, ahead) }
					claim := func(queue string) *codeq.Lease {
						l := queuetest.Claim(t, q, queue)
						return l
					}
					task := codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k", For: keep}, Retention: keep}
					for _, to := range []*simNode{other, leader} {
						set(by)
						if who == "all" {
							time.Sleep(2 * time.Second) // until the leader knows
						}
						q = simQueue(leader)
						id := queuetest.Produce(t, q, task)[0]
						require.NoError(t, q.Complete(ctx, claim("a").Receipt, []byte("result")))
						dead := queuetest.Produce(t, q, codeq.Task{Queue: "dead", MaxAttempts: 1})[0]
						require.NoError(t, q.Retry(ctx, claim("dead").Receipt, codeq.RetryOptions{}))
						waits := queuetest.Produce(t, q, codeq.Task{Queue: "waits"})[0]
						require.NoError(t, q.Retry(ctx, claim("waits").Receipt, codeq.RetryOptions{After: keep}))
						begun := time.Now()
						if who != "all" {
							require.Less(t, time.Until(id.Time()), 13*time.Second, "of the clocks that agree")
						}

						require.NoError(t, q.TransferLeadership(ctx, 0, to.name))
						_, err := q.Stats(ctx)
						require.NoError(t, err)
						if who == "all" {
							set(0)
						}
						taken := time.Now()
						lasts := func() {
							t.Helper()
							for of, state := range map[codeq.ID]codeq.State{id: codeq.Done, dead: codeq.Dead, waits: codeq.Scheduled} {
								info := queuetest.InfoOf(t, q, of)
								require.Equal(t, state, info.State)
							}
							_, err := q.Produce(ctx, task)
							require.ErrorIs(t, err, codeq.ErrDuplicate)
						}
						for time.Since(begun) < keep-time.Second {
							lasts()
							time.Sleep(time.Second)
						}
						time.Sleep(time.Until(taken.Add(keep + keep/8 + 2*time.Second)))
						for _, of := range []codeq.ID{id, dead} {
							_, err = q.Get(ctx, of)
							require.ErrorIs(t, err, codeq.ErrNotFound)
						}
						next := queuetest.Produce(t, q, task)[0]
						require.NoError(t, q.Cancel(ctx, next))
						task.Unique.Key += "k"
						info := queuetest.InfoOf(t, q, waits)
						require.Equal(t, codeq.Ready, info.State)
						require.NoError(t, q.Cancel(ctx, waits))
					}
				})
			})
		}
	}
}

// TestRateOverLeaders: the first shard and the shard of the tasks get new leaders. With each new
// leader a rate goes on from the last task that it admitted.
func TestRateOverLeaders(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		time.Sleep(2 * time.Minute) // the leader is at home
		leader, other := c.lead()
		q := simQueue(other)
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Rate, s.Burst = 1.0/360, 1 })
		for range 20 {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		}
		claimed, began := 0, time.Now()
		for i := 0; time.Since(began) < 48*time.Minute-6*time.Second; i++ {
			to := []*simNode{other, leader}[i%2]
			require.NoError(t, q.TransferLeadership(ctx, 0, to.name))
			time.Sleep(10 * time.Second)
			wait, cancel := context.WithTimeout(ctx, 5*time.Minute-10*time.Second)
			for wait.Err() == nil {
				l, err := q.Claim(wait, codeq.ClaimRequest{Queues: []string{"a"}})
				if err != nil {
					require.ErrorIs(t, err, context.DeadlineExceeded)
					break
				}
				claimed++
				require.LessOrEqual(t, claimed, 1+int(time.Since(began).Minutes()/6+0.01))
				queuetest.Complete(t, q, l)
			}
			cancel()
		}
		require.GreaterOrEqual(t, claimed, 8)
	})
}

// TestVerbsWithWrongClocks: leases, rates, schedules, ages, and calls about earlier tasks work
// while the clock of one node, or of all, is ahead or behind. They work over changes of the leader,
// and after the clocks are right again.
func TestVerbsWithWrongClocks(t *testing.T) {
	t.Parallel()
	clocks := []time.Duration{13 * 365 * 24 * time.Hour, -24 * time.Hour, time.Hour}
	for _, by := range clocks[:testkit.Sized(2, 3)] {
		for _, who := range wrongClocks {
			t.Run(who+" "+by.String(), func(t *testing.T) {
				t.Parallel()
				simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
					ctx := context.Background()
					time.Sleep(2 * time.Minute) // the leader is at home
					leader, other := c.lead()
					q := simQueue(leader)
					queuetest.Configure(t, q, "rated", func(s *codeq.Settings) { s.Rate, s.Burst = 1.0/60, 1 })
					every := codeq.Schedule{Name: "s", Every: time.Minute, Task: codeq.Task{Queue: "ticks"}, Missed: codeq.MissedSkip}
					require.NoError(t, q.SetSchedule(ctx, every))
					for range 60 {
						queuetest.Produce(t, q, codeq.Task{Queue: "rated"})
					}
					stuck := queuetest.Produce(t, q, codeq.Task{Queue: "stuck"})[0]
					began := time.Now()
					rated := 0
					work := func(q *codeq.Queue, d time.Duration) {
						t.Helper()
						for until := time.Now().Add(d); time.Now().Before(until); time.Sleep(5 * time.Second) {
							for {
								l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"rated"}, NoWait: true})
								if err != nil {
									require.ErrorIs(t, err, codeq.ErrEmpty)
									break
								}
								queuetest.Complete(t, q, l)
								rated++
							}
							require.LessOrEqual(t, rated, 1+int((time.Since(began)+time.Second)/time.Minute), "after %v", time.Since(began))
						}
					}
					set := func(ahead time.Duration) {
						c.setClocks(who, leader, other, ahead)
						time.Sleep(2 * time.Second) // until the leader knows
					}
					verbs := func(q *codeq.Queue) {
						t.Helper()
						held := queuetest.Produce(t, q, codeq.Task{Queue: "held"})[0]
						l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"held"}, LeaseFor: 30 * time.Second})
						require.NoError(t, err)
						queuetest.Produce(t, q, codeq.Task{Queue: "ready"}, codeq.Task{Queue: "ready"})
						for range 3 {
							queuetest.Produce(t, q, codeq.Task{Queue: "dead", MaxAttempts: 1})
							l := queuetest.Claim(t, q, "dead")
							require.NoError(t, q.DeadLetter(ctx, l.Receipt, nil))
						}
						time.Sleep(2 * time.Millisecond)
						once := func() func(*codeq.TaskInfo) bool {
							n := 0
							return func(*codeq.TaskInfo) bool { n++; return n == 1 }
						}
						n, err := q.RedriveAllDead(ctx, codeq.DeadFilter{Queue: "dead", Match: once()})
						require.NoError(t, err)
						require.Equal(t, 1, n)
						n, err = q.PurgeDead(ctx, codeq.DeadFilter{Queue: "dead", Match: once()})
						require.NoError(t, err)
						require.Equal(t, 1, n)
						for queue, state := range map[string]codeq.State{"dead": codeq.Dead, "ready": codeq.Ready} {
							r, err := q.Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkPurge, TaskFilter: codeq.TaskFilter{Queue: queue, States: []codeq.State{state}}})
							if state == codeq.Ready {
								r, err = q.Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkCancel, TaskFilter: codeq.TaskFilter{Queue: queue, States: []codeq.State{state}}})
							}
							require.NoError(t, err)
							require.Equal(t, map[codeq.State]int{codeq.Dead: 1, codeq.Ready: 2}[state], r.Changed, queue)
						}
						r, err := q.Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkCancel, TaskFilter: codeq.TaskFilter{Queue: "dead", States: []codeq.State{codeq.Ready}}})
						require.NoError(t, err)
						require.Equal(t, 1, r.Changed)
						work(q, 25*time.Second)
						require.NoError(t, q.Extend(ctx, l.Receipt, 30*time.Second))
						work(q, 25*time.Second)
						require.Equal(t, codeq.Leased, queuetest.InfoOf(t, q, held).State)
						work(q, 25*time.Second)
						require.Equal(t, codeq.Ready, queuetest.InfoOf(t, q, held).State)
						require.NoError(t, q.Cancel(ctx, held))
					}
					age := func(q *codeq.Queue, now time.Time) {
						t.Helper()
						infos, err := q.Info(ctx)
						require.NoError(t, err)
						for _, info := range infos {
							if info.Queue == "stuck" {
								require.InDelta(t, time.Since(began).Seconds(), now.Sub(info.OldestReady).Seconds(), 30)
							}
						}
						require.InDelta(t, time.Since(began).Seconds(), now.Sub(queuetest.InfoOf(t, q, stuck).At).Seconds(), 30)
					}
					for _, to := range []*simNode{other, leader} {
						set(by)
						verbs(q)
						require.NoError(t, q.TransferLeadership(ctx, 0, to.name))
						q = simQueue(to)
						verbs(q)
						set(0)
						verbs(q)
						age(q, time.Now())
						require.NoError(t, q.PauseSchedule(ctx, "s"))
						require.NoError(t, q.ResumeSchedule(ctx, "s"))
						require.NoError(t, q.SetSchedule(ctx, every))
						s, err := q.Schedules(ctx)
						require.NoError(t, err)
						if by != time.Hour || who == "follower" { // else it is as far ahead as the clock of the leader was
							require.WithinDuration(t, time.Now(), s[0].Next, time.Minute+time.Second)
						}
					}
					require.GreaterOrEqual(t, rated, int(time.Since(began)/time.Minute)-2)
				})
			})
		}
	}
}
