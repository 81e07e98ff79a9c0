package codeq

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	_ "time/tzdata" // the machine may have none

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/testkit"
)

// cronBench is a queue in fake time whose wall clock can be set, and which can
// be opened again. Fake time begins at midnight, 2000-01-01 UTC.
type CronBench struct {
	T    *testing.T
	Opts Options
	Q    *Queue
	Skew atomic.Int64 // of the wall clock
}

func withCronBench(t *testing.T, opts Options, test func(t *testing.T, b *CronBench)) {
	synctest.Test(t, func(t *testing.T) {
		b := &CronBench{T: t, Opts: opts}
		if b.Opts.fs == nil {
			b.Opts.fs = vfs.NewMem()
		}
		b.Opts.wall = b.Wall
		b.Open()
		defer func() { require.NoError(t, b.Q.Close()) }()
		test(t, b)
		b.Check()
	})
}

func (b *CronBench) Wall() time.Time { return time.Now().Add(time.Duration(b.Skew.Load())) }

func (b *CronBench) Open() {
	var err error
	b.Q, err = Open("queue", &b.Opts)
	require.NoError(b.T, err)
}

// down closes the queue for a while.
func (b *CronBench) Down(d time.Duration) {
	b.Check()
	require.NoError(b.T, b.Q.Close())
	time.Sleep(d)
	b.Open()
}

// jump sets the wall clock, and waits until the queue has noticed.
func (b *CronBench) Jump(d time.Duration) {
	b.Skew.Add(int64(d))
	time.Sleep(time.Duration(wallCheck) * time.Millisecond)
}

func (b *CronBench) Check() {
	synctest.Wait()
	require.NoError(b.T, b.Q.checkAll())
	require.NoError(b.T, b.Q.checkMemory())
}

func (b *CronBench) Set(s Schedule) {
	b.T.Helper()
	require.NoError(b.T, b.Q.SetSchedule(context.Background(), s))
}

// info returns a schedule as Schedules has it.
func (b *CronBench) Info(name string) ScheduleInfo {
	b.T.Helper()
	all, err := b.Q.Schedules(context.Background())
	require.NoError(b.T, err)
	i := slices.IndexFunc(all, func(i ScheduleInfo) bool { return i.Name == name })
	require.GreaterOrEqual(b.T, i, 0, "no schedule %q", name)
	return all[i]
}

// ticks returns the ticks of the tasks that a schedule has produced, in order.
func (b *CronBench) Ticks(name string) []string {
	b.T.Helper()
	synctest.Wait()
	return ticksOn(b.T, b.Q, name)
}

func ticksOn(t *testing.T, q *Queue, name string) []string {
	t.Helper()
	tasks, err := q.list()
	require.NoError(t, err)
	ticks := []string{}
	for _, task := range tasks {
		if task.Headers[ScheduleHeader] == name {
			ticks = append(ticks, task.Headers[TickHeader])
		}
	}
	slices.Sort(ticks)
	return ticks
}

// ticksUntil returns the multiples of step later than after and not later than until.
func ticksUntil(after, until time.Time, step time.Duration) []string {
	ticks := []string{}
	for at := after.Truncate(step).Add(step); !at.After(until); at = at.Add(step) {
		ticks = append(ticks, at.UTC().Format(engine.TickFormat))
	}
	return ticks
}

func minutely(name string) Schedule {
	return Schedule{Name: name, Cron: "* * * * *", Task: Task{Queue: "a"}, Missed: MissedAll}
}

func TestScheduleProduces(t *testing.T) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			withCronBench(t, Options{Shards: shards}, func(t *testing.T, b *CronBench) {
				ctx := context.Background()
				template := Task{
					Queue: "reports", Tenant: "acme", Priority: 7, Payload: []byte("daily"), MaxAttempts: 3,
					LeaseFor: time.Hour, Timeout: time.Minute, Retention: Forever, Headers: map[string]string{"trace": "1"},
				}
				b.Set(Schedule{Name: "report", Cron: "30 6 * * *", TimeZone: "Asia/Kolkata", Task: template})
				require.Equal(t, "2000-01-01T01:00:00Z", b.Info("report").Next.UTC().Format(time.RFC3339))
				require.Zero(t, b.Info("report").Last)

				l, err := b.Q.Claim(ctx, ClaimRequest{Queues: []string{"reports"}})
				require.NoError(t, err)
				require.Equal(t, "2000-01-01T01:00:00Z", time.Now().UTC().Format(time.RFC3339Nano), "to the moment")
				template.Headers = map[string]string{"trace": "1", TickHeader: "2000-01-01T01:00:00Z", ScheduleHeader: "report"}
				require.Equal(t, template, l.Task)
				require.Equal(t, time.Hour, time.Until(l.Deadline))

				got := b.Info("report")
				require.Equal(t, "2000-01-02T01:00:00Z", got.Next.UTC().Format(time.RFC3339))
				require.Equal(t, "2000-01-01T01:00:00Z", got.Last.UTC().Format(time.RFC3339))
				require.Empty(t, got.LastError)
				template.Headers = map[string]string{"trace": "1"}
				require.Equal(t, Schedule{Name: "report", Cron: "30 6 * * *", TimeZone: "Asia/Kolkata", Task: template}, got.Schedule)
			})
		})
	}
}

func TestScheduleEvery(t *testing.T) {
	withCronBench(t, Options{}, func(t *testing.T, b *CronBench) {
		time.Sleep(1250 * time.Millisecond)
		start := time.Now()
		b.Set(Schedule{Name: "often", Every: 90 * time.Second, Task: Task{Queue: "a"}})
		time.Sleep(100 * time.Second)
		b.Down(time.Second)
		b.Set(Schedule{Name: "often", Every: 90 * time.Second, Task: Task{Queue: "a"}})
		time.Sleep(200 * time.Second)
		require.Equal(t, []string{"2000-01-01T00:01:31.25Z", "2000-01-01T00:03:01.25Z", "2000-01-01T00:04:31.25Z"}, b.Ticks("often"))
		require.WithinDuration(t, start.Add(4*90*time.Second), b.Info("often").Next, 0)
	})
}

// TestScheduleOverRestarts: closing and opening again, at any moment and for
// any time, neither loses nor repeats a tick.
func TestScheduleOverRestarts(t *testing.T) {
	t.Parallel()
	withCronBench(t, Options{Shards: 3}, func(t *testing.T, b *CronBench) {
		start := time.Now()
		names := []string{"x", "y", "z"}
		rng := rand.New(rand.NewPCG(1, 2))
		for range 30 {
			for _, name := range names {
				b.Set(minutely(name)) // as a program does that starts
			}
			time.Sleep(time.Duration(rng.IntN(200)) * time.Second)
			b.Down(time.Duration(rng.IntN(200)) * time.Second)
		}
		time.Sleep(30 * time.Second)
		for _, name := range names {
			require.Equal(t, ticksUntil(start, time.Now(), time.Minute), b.Ticks(name))
		}
	})
}

// TestScheduleOverCrashes: whatever a power loss leaves, at a tick or between
// two of them, each tick has one task when the queue has been opened again.
func TestScheduleOverCrashes(t *testing.T) {
	t.Parallel()
	for _, level := range []Durability{DurabilityProcess, DurabilityDisk} {
		t.Run(level.String(), func(t *testing.T) {
			disk := vfs.NewCrashableMem()
			var mu sync.Mutex // guards what follows
			var images []*vfs.MemFS
			begun := false
			rng := rand.New(rand.NewPCG(3, 4))
			image := func() {
				mu.Lock()
				defer mu.Unlock()
				if begun {
					images = append(images, disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(101), RNG: rng}))
				}
			}
			fs := &testkit.HookFS{FS: disk, Before: func(op, name string) error {
				if strings.HasSuffix(name, ".log") {
					image()
				}
				return nil
			}}
			withCronBench(t, Options{Shards: 1, Durability: level, fs: fs}, func(t *testing.T, b *CronBench) {
				start := time.Now()
				b.Set(minutely("x"))
				b.Set(minutely("y"))
				b.Down(0) // so that the schedules are on disk at any level
				mu.Lock()
				begun = true
				mu.Unlock()
				for range 6 {
					time.Sleep(40 * time.Second)
					image()
				}
				mu.Lock()
				begun = false
				mu.Unlock()
				time.Sleep(95 * time.Second)
				require.GreaterOrEqual(t, len(images), 6+3, "between two ticks, and at each")
				for i, img := range images {
					opts := b.Opts
					opts.fs = img
					q, err := Open("queue", &opts)
					require.NoError(t, err)
					synctest.Wait()
					for _, name := range []string{"x", "y"} {
						require.Equal(t, ticksUntil(start, time.Now(), time.Minute), ticksOn(t, q, name), "image %d", i)
					}
					require.NoError(t, q.checkAll())
					require.NoError(t, q.Close())
				}
			})
		})
	}
}

func TestSetScheduleConcurrently(t *testing.T) {
	withCronBench(t, Options{Shards: 3}, func(t *testing.T, b *CronBench) {
		start := time.Now()
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				for round := range 20 {
					b.Set(minutely(fmt.Sprint("s", (i+round)%10)))
					time.Sleep(11 * time.Second)
				}
			})
		}
		wg.Wait()
		all, err := b.Q.Schedules(context.Background())
		require.NoError(t, err)
		require.Len(t, all, 10)
		for i := range 10 {
			name := fmt.Sprint("s", i)
			require.Equal(t, name, all[i].Name, "in the order of names")
			// A schedule that came later than the first tick has no task for it.
			got := b.Ticks(name)
			require.Equal(t, ticksUntil(start, time.Now(), time.Minute), got)
		}
	})
}

func TestReplaceSchedule(t *testing.T) {
	withCronBench(t, Options{Shards: 1}, func(t *testing.T, b *CronBench) {
		counting := &countingCommitter{committer: b.Q.shard(0).commit}
		require.NoError(t, b.Q.shard(0).probe(func(s *shard) error {
			s.commit = counting
			return nil
		}))
		s := Schedule{Name: "s", Every: 10 * time.Minute, Task: Task{Queue: "a", Headers: map[string]string{"k": "1", "l": "2"}}}
		b.Set(s)
		synctest.Wait()
		commits := counting.commits
		time.Sleep(4 * time.Minute)
		again := s
		again.Task.Headers = maps.Clone(s.Task.Headers)
		again.Task.Payload = []byte{}
		b.Set(again)
		synctest.Wait()
		require.Equal(t, commits, counting.commits, "an equal schedule is not written")

		// Another task or policy: the place is kept.
		s.Task.Queue, s.Task.Payload, s.Missed = "b", []byte("new"), MissedAll
		b.Set(s)
		time.Sleep(6 * time.Minute)
		require.Equal(t, []string{"2000-01-01T00:10:00Z"}, b.Ticks("s"))
		l := claimNow(t, b.Q, "b")
		require.Equal(t, "new", string(l.Payload))
		require.Equal(t, MissedAll, b.Info("s").Missed)

		// Another time: it begins anew.
		time.Sleep(5 * time.Minute)
		s.Every = 20 * time.Minute
		b.Set(s)
		time.Sleep(20 * time.Minute)
		require.Equal(t, []string{"2000-01-01T00:10:00Z", "2000-01-01T00:35:00Z"}, b.Ticks("s"))
		s.Every, s.Cron = 0, "@hourly"
		b.Set(s)
		time.Sleep(25 * time.Minute)
		s.TimeZone = "Asia/Kolkata"
		b.Set(s)
		time.Sleep(30 * time.Minute)
		require.Equal(t, []string{
			"2000-01-01T00:10:00Z", "2000-01-01T00:35:00Z", "2000-01-01T01:00:00Z", "2000-01-01T01:30:00Z",
		}, b.Ticks("s"))
	})
}

// TestScheduleKeepsItsTask: what the caller does with its template afterwards,
// or with what Schedules returns, is of no consequence.
func TestScheduleKeepsItsTask(t *testing.T) {
	withCronBench(t, Options{}, func(t *testing.T, b *CronBench) {
		s := minutely("s")
		s.Task.Payload, s.Task.Headers = []byte("payload"), map[string]string{"k": "v"}
		b.Set(s)
		for _, task := range []Task{s.Task, b.Info("s").Task} {
			task.Payload[0] = 'X'
			task.Headers["k"] = "X"
		}
		for range 2 {
			l, err := b.Q.Claim(context.Background(), ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, "payload", string(l.Payload))
			require.Equal(t, "v", l.Headers["k"])
		}
	})
}

func TestDeleteSchedule(t *testing.T) {
	withCronBench(t, Options{Shards: 3}, func(t *testing.T, b *CronBench) {
		ctx := context.Background()
		require.ErrorIs(t, b.Q.DeleteSchedule(ctx, "s"), ErrNotFound)
		require.ErrorIs(t, b.Q.DeleteSchedule(ctx, ""), ErrNotFound)
		b.Set(minutely("s"))
		b.Set(minutely("other"))
		time.Sleep(2 * time.Minute)
		require.NoError(t, b.Q.DeleteSchedule(ctx, "s"))
		require.ErrorIs(t, b.Q.DeleteSchedule(ctx, "s"), ErrNotFound)
		time.Sleep(2 * time.Minute)
		b.Down(2 * time.Minute)
		require.Len(t, b.Ticks("s"), 2)
		require.Len(t, b.Ticks("other"), 6)
		all, err := b.Q.Schedules(ctx)
		require.NoError(t, err)
		require.Len(t, all, 1)
	})
}

// TestMissed: what the policies make of ticks that came while the queue was
// closed, or the clock was set forward.
func TestMissed(t *testing.T) {
	hour := func(h int) string { return fmt.Sprintf("2000-01-01T%02d:00:00Z", h) }
	for _, c := range []struct {
		policy MissedPolicy
		late   time.Duration // the last of the ticks at 1, 2 and 3 o'clock
		want   []string
	}{
		{MissedSkip, 10 * time.Minute, []string{}},
		{MissedOnce, 10 * time.Minute, []string{hour(3)}},
		{MissedAll, 10 * time.Minute, []string{hour(1), hour(2), hour(3)}},
		{MissedSkip, time.Minute, []string{hour(3)}}, // a minute late is in time
		{MissedSkip, time.Minute + time.Millisecond, []string{}},
		{MissedOnce, time.Minute, []string{hour(3)}},
		{MissedAll, time.Minute, []string{hour(1), hour(2), hour(3)}},
	} {
		for _, way := range []string{"closed", "clock set"} {
			t.Run(fmt.Sprint(c.policy, " ", c.late, " ", way), func(t *testing.T) {
				withCronBench(t, Options{}, func(t *testing.T, b *CronBench) {
					b.Set(Schedule{Name: "s", Cron: "@hourly", Task: Task{Queue: "a"}, Missed: c.policy})
					if away := 3*time.Hour + c.late; way == "closed" {
						b.Down(away)
					} else {
						b.Skew.Add(int64(away))
						_, err := b.Q.Stats(context.Background()) // the shards have something to do
						require.NoError(t, err)
					}
					require.Equal(t, c.want, b.Ticks("s"))
					require.WithinDuration(t, time.Date(2000, 1, 1, 4, 0, 0, 0, time.UTC), b.Info("s").Next, 0)
					time.Sleep(time.Hour)
					require.Equal(t, append(c.want, hour(4)), b.Ticks("s"))
				})
			})
		}
	}
}

// TestClockSetBack: no tick comes twice; the schedule goes on where it was when
// the clock has caught up, also over a restart.
func TestClockSetBack(t *testing.T) {
	for _, policy := range []MissedPolicy{MissedOnce, MissedSkip, MissedAll} {
		t.Run(policy.String(), func(t *testing.T) {
			withCronBench(t, Options{Shards: 1}, func(t *testing.T, b *CronBench) {
				start := b.Wall()
				s := minutely("s")
				s.Missed = policy
				b.Set(s)
				time.Sleep(2*time.Hour + 30*time.Second)
				b.Jump(-time.Hour)
				b.Set(s)
				time.Sleep(20 * time.Minute)
				b.Down(30 * time.Second)
				require.Len(t, b.Ticks("s"), 120)
				time.Sleep(40 * time.Minute)
				require.Greater(t, b.Wall(), start.Add(2*time.Hour))
				require.Equal(t, ticksUntil(start, b.Wall(), time.Minute), b.Ticks("s"))
			})
		})
	}
}

// TestClockSetForward: an hour forward and back again; the ticks of that hour
// come once.
func TestClockSetForward(t *testing.T) {
	withCronBench(t, Options{Shards: 1}, func(t *testing.T, b *CronBench) {
		start := b.Wall()
		b.Set(minutely("s"))
		b.Jump(time.Hour)
		require.Equal(t, ticksUntil(start, b.Wall(), time.Minute), b.Ticks("s"))
		b.Jump(-time.Hour)
		time.Sleep(time.Hour)
		require.Equal(t, ticksUntil(start, b.Wall(), time.Minute), b.Ticks("s"))
	})
}

// TestYearOfTicks: what was missed is made up for in small groups, and a
// schedule that is due does not wait for the one that has much to make up for.
func TestYearOfTicks(t *testing.T) {
	seconds := 5 * engine.UpkeepBudget.Records
	withCronBench(t, Options{Shards: 1}, func(t *testing.T, b *CronBench) {
		s := Schedule{Name: "a backlog", Every: time.Second, Task: Task{Queue: "a"}, Missed: MissedAll}
		b.Set(s)
		s.Name, s.Cron, s.Every, s.Missed = "the others", "@hourly", 0, MissedOnce
		b.Set(s)
		counting := &countingCommitter{committer: b.Q.shard(0).commit}
		require.NoError(t, b.Q.shard(0).probe(func(s *shard) error {
			s.commit = counting
			return nil
		}))
		b.Skew.Add(int64(time.Duration(seconds) * time.Second))
		_, err := b.Q.Stats(context.Background())
		require.NoError(t, err)
		synctest.Wait()
		require.Len(t, b.Ticks("a backlog"), seconds)
		require.GreaterOrEqual(t, counting.commits, 5)
		require.LessOrEqual(t, counting.largest, uint32(engine.UpkeepBudget.Records+2+1), "keys in one commit: tasks, two schedules, counters")

		before := 0
		for l := claimNow(t, b.Q, "a"); l.Headers[ScheduleHeader] != "the others"; l = claimNow(t, b.Q, "a") {
			before++
		}
		require.LessOrEqual(t, before, engine.UpkeepBudget.Records)
	})
}

// TestScheduleInBerlin: the days on which clocks are set.
func TestScheduleInBerlin(t *testing.T) {
	withCronBench(t, Options{}, func(t *testing.T, b *CronBench) {
		zone := "Europe/Berlin"
		from := func(at string) {
			day, err := time.Parse(time.RFC3339, at)
			require.NoError(t, err)
			b.Jump(day.Sub(b.Wall()))
		}
		from("2026-03-28T12:00:00Z")
		b.Set(Schedule{Name: "spring, 2:30", Cron: "30 2 * * *", TimeZone: zone, Task: Task{Queue: "a"}})
		b.Set(Schedule{Name: "spring, 9:00", Cron: "0 9 * * *", TimeZone: zone, Task: Task{Queue: "a"}})
		b.Set(Schedule{Name: "spring, daily", Every: 24 * time.Hour, Task: Task{Queue: "a"}})
		time.Sleep(48 * time.Hour)
		require.Equal(t, []string{"2026-03-30T00:30:00Z"}, b.Ticks("spring, 2:30"), "skipped on the 29th")
		require.Equal(t, []string{"2026-03-29T07:00:00Z", "2026-03-30T07:00:00Z"}, b.Ticks("spring, 9:00"))
		require.Len(t, b.Ticks("spring, daily"), 2, "an interval knows of no clocks")

		from("2026-10-24T12:00:00Z")
		b.Set(Schedule{Name: "autumn, 2:30", Cron: "30 2 * * *", TimeZone: zone, Task: Task{Queue: "a"}})
		time.Sleep(48 * time.Hour)
		require.Equal(t, []string{"2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z", "2026-10-26T01:30:00Z"}, b.Ticks("autumn, 2:30"), "twice on the 25th")
	})
}

func TestScheduleRefusals(t *testing.T) {
	withCronBench(t, Options{Limits: Limits{Headers: 100, Name: 30, Payload: 10}}, func(t *testing.T, b *CronBench) {
		good := minutely("s")
		b.Set(good)
		for _, c := range []struct {
			field  string
			change func(*Schedule)
		}{
			{"Schedule.Name", func(s *Schedule) { s.Name = "" }},
			{"Schedule.Name", func(s *Schedule) { s.Name = strings.Repeat("n", 31) }},
			{"Schedule", func(s *Schedule) { s.Cron = "" }},
			{"Schedule", func(s *Schedule) { s.Every = time.Minute }},
			{"Schedule.Every", func(s *Schedule) { s.Cron, s.Every = "", time.Second-1 }},
			{"Schedule.Every", func(s *Schedule) { s.Cron, s.Every = "", -time.Hour }},
			{"Schedule.TimeZone", func(s *Schedule) { s.Cron, s.Every, s.TimeZone = "", time.Minute, "UTC" }},
			{"Schedule.TimeZone", func(s *Schedule) { s.TimeZone = "Local" }},
			{"Schedule.TimeZone", func(s *Schedule) { s.TimeZone = "Europe/Atlantis" }},
			{"Schedule.Cron", func(s *Schedule) { s.Cron = "* * * *" }},
			{"Schedule.Cron", func(s *Schedule) { s.Cron = "* * * * * *" }},
			{"Schedule.Cron", func(s *Schedule) { s.Cron = "@every 1h" }},
			{"Schedule.Cron", func(s *Schedule) { s.Cron = "TZ=UTC * * * * *" }},
			{"Schedule.Cron", func(s *Schedule) { s.Cron = "0 0 31 2 *" }},
			{"Schedule.Cron", func(s *Schedule) { s.Cron = strings.Repeat("0,", 600) + "0 * * * *" }},
			{"Schedule.Missed", func(s *Schedule) { s.Missed = MissedAll + 1 }},
			{"Schedule.Task.RunAt", func(s *Schedule) { s.Task.RunAt = time.Now() }},
			{"Schedule.Task.Headers", func(s *Schedule) { s.Task.Headers = map[string]string{TickHeader: ""} }},
			{"Schedule.Task.Headers", func(s *Schedule) { s.Task.Headers = map[string]string{ScheduleHeader: ""} }},
			{"Task.Headers", func(s *Schedule) { s.Task.Headers = map[string]string{"k": strings.Repeat("v", 60)} }},
			{"Task.Queue", func(s *Schedule) { s.Task.Queue = "" }},
			{"Task.Payload", func(s *Schedule) { s.Task.Payload = make([]byte, 11) }},
			{"Task.Priority", func(s *Schedule) { s.Task.Priority = 10 }},
		} {
			s := good
			c.change(&s)
			err := b.Q.SetSchedule(context.Background(), s)
			require.ErrorIs(t, err, ErrInvalid, "%+v", s)
			var invalid *InvalidError
			require.ErrorAs(t, err, &invalid)
			require.Equal(t, c.field, invalid.Field, "%+v: %v", s, err)
		}
		all, err := b.Q.Schedules(context.Background())
		require.NoError(t, err)
		require.Len(t, all, 1)
		good.Task.Payload = []byte{}
		require.Equal(t, good, all[0].Schedule)
	})
}

func TestSchedulesOfClosedQueue(t *testing.T) {
	withCronBench(t, Options{}, func(t *testing.T, b *CronBench) {
		ctx := context.Background()
		require.NoError(t, b.Q.Close())
		require.ErrorIs(t, b.Q.SetSchedule(ctx, minutely("s")), ErrClosed)
		require.ErrorIs(t, b.Q.DeleteSchedule(ctx, "s"), ErrClosed)
		_, err := b.Q.Schedules(ctx)
		require.ErrorIs(t, err, ErrClosed)
		b.Open()
		cause := fmt.Errorf("enough")
		ended, end := context.WithCancelCause(ctx)
		end(cause)
		require.ErrorIs(t, b.Q.SetSchedule(ended, minutely("s")), cause)
		require.ErrorIs(t, b.Q.DeleteSchedule(ended, "s"), cause)
		_, err = b.Q.Schedules(ended)
		require.ErrorIs(t, err, cause)
	})
}

// plant writes a schedule past all checks.
func (b *CronBench) plant(index int, name string, value []byte) {
	require.NoError(b.T, b.Q.shard(index).probe(func(s *shard) error {
		return s.Group.Batch.Set(keys.AppendSchedule(nil, name), value, nil)
	}))
}

// TestScheduleRests: one that this process does not understand does not keep
// the queue from opening, and goes on once it is understood.
func TestScheduleRests(t *testing.T) {
	withCronBench(t, Options{Shards: 1}, func(t *testing.T, b *CronBench) {
		start := b.Wall()
		b.Set(minutely("good"))
		s := minutely("odd")
		v := s.value()
		v.Start, v.After = uint64(start.UnixMilli()), uint64(start.UnixMilli())
		plant := func(change func(v *keys.ScheduleValue)) {
			v := v
			change(&v)
			b.plant(0, "odd", v.Append(nil))
			require.NoError(t, b.Q.Close())
			b.Open()
		}
		plant(func(v *keys.ScheduleValue) { v.Cron = "@fullmoon" })
		time.Sleep(3 * time.Minute)
		got := b.Info("odd")
		require.Contains(t, got.LastError, "codeq: invalid Schedule.Cron")
		require.Zero(t, got.Next)
		require.Empty(t, b.Ticks("odd"))
		require.Len(t, b.Ticks("good"), 3)

		plant(func(v *keys.ScheduleValue) { v.TimeZone = "Europe/Atlantis" })
		require.Contains(t, b.Info("odd").LastError, "codeq: invalid Schedule.TimeZone")
		require.Zero(t, b.Info("odd").Next)

		plant(func(*keys.ScheduleValue) {})
		require.Empty(t, b.Info("odd").LastError)
		require.Equal(t, ticksUntil(start, b.Wall(), time.Minute), b.Ticks("odd"))
	})
}

// TestCheckSchedules: the checker sees a schedule that cannot be read, or that
// lies in another shard than its own.
func TestCheckSchedules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &CronBench{T: t, Opts: Options{Shards: 2, fs: vfs.NewMem()}}
		s := minutely("s")
		v := s.value()
		for _, c := range []struct {
			name  string
			shard int
			value []byte
		}{
			{"in the wrong shard", 1 - keys.ShardOfSchedule("s", 2), v.Append(nil)},
			{"malformed", keys.ShardOfSchedule("s", 2), []byte{1, 2, 3}},
			{"without a record", keys.ShardOfSchedule("s", 2), (&keys.ScheduleValue{Cron: "@daily"}).Append(nil)},
		} {
			b.Open()
			require.NoError(t, b.Q.checkAll())
			b.plant(c.shard, "s", c.value)
			synctest.Wait()
			require.ErrorIs(t, b.Q.checkAll(), ErrCorrupt, c.name)
			require.NoError(t, b.Q.Close())
			b.Opts.fs = vfs.NewMem()
		}
	})
}

// TestScheduleShard: the shard of a name is part of the format.
func TestScheduleShard(t *testing.T) {
	require.Zero(t, keys.ShardOfSchedule("nightly", 1))
	require.Equal(t, []int{2, 1, 1}, []int{keys.ShardOfSchedule("nightly", 3), keys.ShardOfSchedule("hourly", 3), keys.ShardOfSchedule("weekly", 3)})
}

// TestTicksOfManySchedules: a tick looks at the schedules that are due, not at all.
func TestTicksOfManySchedules(t *testing.T) {
	t.Parallel()
	const schedules = 10_000
	withCronBench(t, Options{Shards: 1}, func(t *testing.T, b *CronBench) {
		for i := range schedules {
			b.Set(Schedule{Name: fmt.Sprint("daily", i), Every: 24 * time.Hour, Task: Task{Queue: "a"}})
		}
		b.Set(Schedule{Name: "each second", Every: time.Second, Task: Task{Queue: "a"}})
		time.Sleep(10 * time.Second)
		require.GreaterOrEqual(t, len(b.Ticks("each second")), 10)
		looked := uint64(0)
		require.NoError(t, b.Q.shard(0).probe(func(s *shard) error { looked = s.Probe().Usage().Schedules; return nil }))
		require.LessOrEqual(t, looked, uint64(12), "one look at a schedule each second")

		made := len(b.Ticks("each second"))
		require.NoError(t, b.Q.DeleteSchedule(context.Background(), "each second"))
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		st, err := b.Q.Stats(context.Background())
		require.NoError(t, err)
		require.Equal(t, uint64(made+schedules), st["a"].Ready, "all that are due at once tick")
	})
}

// TestSchedulesInParts: one visit of the owner copies a part of them, bounded by
// number and by bytes.
func TestSchedulesInParts(t *testing.T) {
	t.Parallel()
	withCronBench(t, Options{Shards: 1}, func(t *testing.T, b *CronBench) {
		var names []string
		for i := range 2 * call.SchedulesStep {
			names = append(names, fmt.Sprintf("s%04d", i))
			b.Set(Schedule{Name: names[i], Every: time.Hour, Task: Task{Queue: "a"}})
		}
		for i := range 6 {
			names = append(names, fmt.Sprint("t", i))
			b.Set(Schedule{Name: fmt.Sprint("t", i), Every: time.Hour, Task: Task{Queue: "a", Payload: make([]byte, call.SchedulesBytes/2)}})
		}
		var parts []int
		part := new(schedulesPart)
		op := rule(callSchedules, part)
		for part.More = true; part.More; part.Infos = nil {
			require.NoError(t, b.Q.ask(context.Background(), 0, op))
			parts = append(parts, len(part.Infos))
		}
		require.Equal(t, []int{call.SchedulesStep, call.SchedulesStep, 2, 2, 2}, parts)
		all, err := b.Q.Schedules(context.Background())
		require.NoError(t, err)
		var got []string
		for _, s := range all {
			got = append(got, s.Name)
		}
		require.Equal(t, names, got)
	})
}
