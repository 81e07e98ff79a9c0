package codeq_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	_ "time/tzdata" // the machine may have none

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/store"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

func minutely(name string) codeq.Schedule {
	return codeq.Schedule{Name: name, Cron: "* * * * *", Task: codeq.Task{Queue: "a"}, Missed: codeq.MissedAll}
}

func TestScheduleProduces(t *testing.T) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			queuetest.WithCronBench(t, codeq.Options{Shards: shards}, func(t *testing.T, b *queuetest.CronBench) {
				ctx := context.Background()
				template := codeq.Task{
					Queue: "reports", Tenant: "acme", Priority: 7, Payload: []byte("daily"), MaxAttempts: 3,
					LeaseFor: time.Hour, Timeout: time.Minute, Retention: codeq.Forever, Headers: map[string]string{"trace": "1"},
				}
				b.Set(codeq.Schedule{Name: "report", Cron: "30 6 * * *", TimeZone: "Asia/Kolkata", Task: template})
				require.Equal(t, "2000-01-01T01:00:00Z", b.Info("report").Next.UTC().Format(time.RFC3339))
				require.Zero(t, b.Info("report").Last)

				l, err := b.Q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"reports"}})
				require.NoError(t, err)
				require.Equal(t, "2000-01-01T01:00:00Z", time.Now().UTC().Format(time.RFC3339Nano), "to the moment")
				template.Headers = map[string]string{"trace": "1", codeq.TickHeader: "2000-01-01T01:00:00Z", codeq.ScheduleHeader: "report"}
				require.Equal(t, template, l.Task)
				require.Equal(t, time.Hour, time.Until(l.Deadline))

				got := b.Info("report")
				require.Equal(t, "2000-01-02T01:00:00Z", got.Next.UTC().Format(time.RFC3339))
				require.Equal(t, "2000-01-01T01:00:00Z", got.Last.UTC().Format(time.RFC3339))
				require.Empty(t, got.LastError)
				template.Headers = map[string]string{"trace": "1"}
				require.Equal(t, codeq.Schedule{Name: "report", Cron: "30 6 * * *", TimeZone: "Asia/Kolkata", Task: template}, got.Schedule)
			})
		})
	}
}

// TestScheduleOverCrashes: after a power loss at a tick or between two ticks, with any state of the
// disk, each tick has one task once the queue is open again.
func TestScheduleOverCrashes(t *testing.T) {
	t.Parallel()
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk} {
		t.Run(level.String(), func(t *testing.T) {
			disk := crashfs.New()
			var mu sync.Mutex // guards the variables below
			var images []*crashfs.Disk
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
			queuetest.WithCronBench(t, *queuetest.OnDisk(fs, &codeq.Options{Shards: 1, Durability: level}), func(t *testing.T, b *queuetest.CronBench) {
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
					t.Logf("image %d", i)
					left := &queuetest.CronBench{T: t, Opts: *queuetest.OnDisk(img, &codeq.Options{Durability: level})}
					left.Open()
					for _, name := range []string{"x", "y"} {
						left.RequireEachMinute(name, start)
					}
					require.NoError(t, queuetest.CheckAll(left.Q))
					require.NoError(t, left.Q.Close())
				}
			})
		})
	}
}

// TestScheduleKeepsItsTask: later changes to the caller's template, or to the results of Schedules,
// have no effect.
func TestScheduleKeepsItsTask(t *testing.T) {
	queuetest.WithCronBench(t, codeq.Options{}, func(t *testing.T, b *queuetest.CronBench) {
		s := minutely("s")
		s.Task.Payload, s.Task.Headers = []byte("payload"), map[string]string{"k": "v"}
		b.Set(s)
		for _, task := range []codeq.Task{s.Task, b.Info("s").Task} {
			task.Payload[0] = 'X'
			task.Headers["k"] = "X"
		}
		for range 2 {
			l, err := b.Q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, "payload", string(l.Payload))
			require.Equal(t, "v", l.Headers["k"])
		}
	})
}

func TestDeleteSchedule(t *testing.T) {
	queuetest.WithCronBench(t, codeq.Options{Shards: 3}, func(t *testing.T, b *queuetest.CronBench) {
		ctx := context.Background()
		require.ErrorIs(t, b.Q.DeleteSchedule(ctx, "s"), codeq.ErrNotFound)
		require.ErrorIs(t, b.Q.DeleteSchedule(ctx, ""), codeq.ErrNotFound)
		b.Set(minutely("s"))
		b.Set(minutely("other"))
		time.Sleep(2 * time.Minute)
		require.NoError(t, b.Q.DeleteSchedule(ctx, "s"))
		require.ErrorIs(t, b.Q.DeleteSchedule(ctx, "s"), codeq.ErrNotFound)
		time.Sleep(2 * time.Minute)
		b.Down(2 * time.Minute)
		require.Len(t, b.Ticks("s"), 2)
		require.Len(t, b.Ticks("other"), 6)
		all, err := b.Q.Schedules(ctx)
		require.NoError(t, err)
		require.Len(t, all, 1)
	})
}

// TestMissed: each policy for ticks that came while the queue was closed, or while the clock was
// set forward.
func TestMissed(t *testing.T) {
	hour := func(h int) string { return fmt.Sprintf("2000-01-01T%02d:00:00Z", h) }
	for _, c := range []struct {
		policy codeq.MissedPolicy
		late   time.Duration // the last of the ticks at 1, 2 and 3 o'clock
		want   []string
	}{
		{codeq.MissedSkip, 10 * time.Minute, []string{}},
		{codeq.MissedOnce, 10 * time.Minute, []string{hour(3)}},
		{codeq.MissedAll, 10 * time.Minute, []string{hour(1), hour(2), hour(3)}},
		{codeq.MissedSkip, time.Minute, []string{hour(3)}}, // a delay of a minute is in time
		{codeq.MissedSkip, time.Minute + time.Millisecond, []string{}},
		{codeq.MissedOnce, time.Minute, []string{hour(2), hour(3)}}, // one for the missed ticks, and one in time
		{codeq.MissedAll, time.Minute, []string{hour(1), hour(2), hour(3)}},
	} {
		for _, way := range []string{"closed", "clock set"} {
			t.Run(fmt.Sprint(c.policy, " ", c.late, " ", way), func(t *testing.T) {
				queuetest.WithCronBench(t, codeq.Options{}, func(t *testing.T, b *queuetest.CronBench) {
					b.Set(codeq.Schedule{Name: "s", Cron: "@hourly", Task: codeq.Task{Queue: "a"}, Missed: c.policy})
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

// TestMissedSeconds: the ticks of the last minute are never missed, even after many others.
func TestMissedSeconds(t *testing.T) {
	for policy, missed := range map[codeq.MissedPolicy]int{codeq.MissedSkip: 0, codeq.MissedOnce: 1, codeq.MissedAll: 60} {
		for away, want := range map[time.Duration]int{59 * time.Second: 59, 61 * time.Second: 61 - 1 + min(missed, 1), 2 * time.Minute: 60 + missed} {
			t.Run(fmt.Sprint(policy, away), func(t *testing.T) {
				queuetest.WithCronBench(t, codeq.Options{Shards: 1}, func(t *testing.T, b *queuetest.CronBench) {
					b.Set(codeq.Schedule{Name: "s", Every: time.Second, Task: codeq.Task{Queue: "a"}, Missed: policy})
					b.Down(away + time.Millisecond)
					require.Len(t, b.Ticks("s"), want)
					require.Equal(t, time.Unix(0, 0).Add(b.Wall().Sub(time.Unix(0, 0)).Truncate(time.Second)).Unix(), b.Info("s").Last.Unix())
				})
			})
		}
	}
}

// TestLastOfRefusedTick: if the task of a tick is refused because the idempotency key is taken,
// Last does not name this tick.
func TestLastOfRefusedTick(t *testing.T) {
	for i := range 8 { // for any shards of the key and the schedule
		t.Run(fmt.Sprint("key ", i), func(t *testing.T) { lastOfRefusedTick(t, fmt.Sprint(i)) })
	}
}

func lastOfRefusedTick(t *testing.T, key string) {
	queuetest.WithCronBench(t, codeq.Options{Shards: 3}, func(t *testing.T, b *queuetest.CronBench) {
		s := minutely("s")
		s.Task.Unique.Key = key
		b.Set(s)
		time.Sleep(time.Minute)
		first := b.Info("s").Last
		require.Len(t, b.Ticks("s"), 1)
		require.Equal(t, time.Now().UTC(), first)
		time.Sleep(3 * time.Minute)
		require.Len(t, b.Ticks("s"), 1)
		require.Equal(t, first, b.Info("s").Last)
		b.Down(time.Second)
		require.Equal(t, first, b.Info("s").Last)
		queuetest.Complete(t, b.Q, queuetest.ClaimNow(t, b.Q, "a"))
		time.Sleep(time.Minute)
		require.Greater(t, b.Info("s").Last, first)

		// A schedule that begins anew does not have the ticks of the earlier one.
		queuetest.Complete(t, b.Q, queuetest.ClaimNow(t, b.Q, "a"))
		b.Set(codeq.Schedule{Name: "s", Every: time.Hour, Task: s.Task})
		require.Zero(t, b.Info("s").Last)
	})
}

// TestClockSetForward: the clock goes forward by an hour and back again. The ticks of that hour
// come once.
func TestClockSetForward(t *testing.T) {
	queuetest.WithCronBench(t, codeq.Options{Shards: 1}, func(t *testing.T, b *queuetest.CronBench) {
		start := b.Wall()
		b.Set(minutely("s"))
		b.Jump(time.Hour)
		b.RequireEachMinute("s", start)
		b.Jump(-time.Hour)
		time.Sleep(time.Hour)
		b.RequireEachMinute("s", start)
	})
}

func TestScheduleRefusals(t *testing.T) {
	queuetest.WithCronBench(t, codeq.Options{Limits: codeq.Limits{Headers: 100, Name: 30, Payload: 10}}, func(t *testing.T, b *queuetest.CronBench) {
		good := minutely("s")
		b.Set(good)
		for _, c := range []struct {
			field  string
			change func(*codeq.Schedule)
		}{
			{"Schedule.Name", func(s *codeq.Schedule) { s.Name = "" }},
			{"Schedule.Name", func(s *codeq.Schedule) { s.Name = strings.Repeat("n", 31) }},
			{"Schedule", func(s *codeq.Schedule) { s.Cron = "" }},
			{"Schedule", func(s *codeq.Schedule) { s.Every = time.Minute }},
			{"Schedule.Every", func(s *codeq.Schedule) { s.Cron, s.Every = "", 10*time.Millisecond-1 }},
			{"Schedule.Jitter", func(s *codeq.Schedule) { s.Jitter = -1 }},
			{"Schedule.Jitter", func(s *codeq.Schedule) { s.Jitter = 24*time.Hour + 1 }},
			{"Schedule.Every", func(s *codeq.Schedule) { s.Cron, s.Every = "", -time.Hour }},
			{"Schedule.TimeZone", func(s *codeq.Schedule) { s.Cron, s.Every, s.TimeZone = "", time.Minute, "UTC" }},
			{"Schedule.TimeZone", func(s *codeq.Schedule) { s.TimeZone = "Local" }},
			{"Schedule.TimeZone", func(s *codeq.Schedule) { s.TimeZone = "Europe/Atlantis" }},
			{"Schedule.Cron", func(s *codeq.Schedule) { s.Cron = "* * * *" }},
			{"Schedule.Cron", func(s *codeq.Schedule) { s.Cron = "* * * * * *" }},
			{"Schedule.Cron", func(s *codeq.Schedule) { s.Cron = "@every 1h" }},
			{"Schedule.Cron", func(s *codeq.Schedule) { s.Cron = "TZ=UTC * * * * *" }},
			{"Schedule.Cron", func(s *codeq.Schedule) { s.Cron = "0 0 31 2 *" }},
			{"Schedule.Cron", func(s *codeq.Schedule) { s.Cron = strings.Repeat("0,", 600) + "0 * * * *" }},
			{"Schedule.Missed", func(s *codeq.Schedule) { s.Missed = codeq.MissedAll + 1 }},
			{"Schedule.Task.RunAt", func(s *codeq.Schedule) { s.Task.RunAt = time.Now() }},
			{"Schedule.Task.Headers", func(s *codeq.Schedule) { s.Task.Headers = map[string]string{codeq.TickHeader: ""} }},
			{"Schedule.Task.Headers", func(s *codeq.Schedule) { s.Task.Headers = map[string]string{codeq.ScheduleHeader: ""} }},
			{"Task.Headers", func(s *codeq.Schedule) { s.Task.Headers = map[string]string{"k": strings.Repeat("v", 60)} }},
			{"Task.Queue", func(s *codeq.Schedule) { s.Task.Queue = "" }},
			{"Task.Payload", func(s *codeq.Schedule) { s.Task.Payload = make([]byte, 11) }},
			{"Task.Priority", func(s *codeq.Schedule) { s.Task.Priority = 10 }},
		} {
			s := good
			c.change(&s)
			err := b.Q.SetSchedule(context.Background(), s)
			require.ErrorIs(t, err, codeq.ErrInvalid, "%+v", s)
			var invalid *codeq.InvalidError
			require.ErrorAs(t, err, &invalid)
			require.Equal(t, c.field, invalid.Field, "%+v: %v", s, err)
		}
		all, err := b.Q.Schedules(context.Background())
		require.NoError(t, err)
		require.Len(t, all, 1)
		good.Task.Payload = []byte{}
		require.Equal(t, good, all[0].Schedule)
		good.Cron = "0 0 31 2 *"
		require.EqualError(t, b.Q.SetSchedule(context.Background(), good), "codeq: invalid Schedule.Cron: 0 0 31 2 * (allowed: "+
			"a cron expression: none of its months has a day 31: name a day up to 29, or a longer month)")
	})
}

// TestUpcoming: Upcoming returns the ticks that Next returns one after the other.
func TestUpcoming(t *testing.T) {
	queuetest.WithCronBench(t, codeq.Options{}, func(t *testing.T, b *queuetest.CronBench) {
		for _, s := range []codeq.Schedule{
			{Name: "cron", Cron: "*/20 * * * *", TimeZone: "Asia/Kolkata", Task: codeq.Task{Queue: "a"}},
			{Name: "every", Every: 90 * time.Second, Task: codeq.Task{Queue: "a"}},
		} {
			b.Set(s)
			first := b.Info(s.Name)
			require.Len(t, first.Upcoming(5), 5)
			for _, at := range first.Upcoming(5) {
				now := b.Info(s.Name)
				require.Equal(t, at, now.Next, s.Name)
				time.Sleep(time.Until(at) + time.Millisecond)
			}
		}
		require.Empty(t, (&codeq.ScheduleInfo{}).Upcoming(5))
		require.Empty(t, new(codeq.ScheduleInfo{Next: time.Now(), Schedule: codeq.Schedule{Cron: "nonsense"}}).Upcoming(5))
	})
}

// TestUpcomingYears: the ticks of rare dates go on after the last day of a leap year, where the
// table of a zone ends, and after a year that is no leap year.
func TestUpcomingYears(t *testing.T) {
	for _, zone := range []string{"Europe/Berlin", "Pacific/Chatham"} {
		for cron, years := range map[string]int{"0 0 1 1 *": 1, "0 0 29 2 *": 4} {
			s := codeq.Schedule{Cron: cron, TimeZone: zone}
			place, err := time.LoadLocation(zone)
			require.NoError(t, err)
			month, day := time.January, 1
			if years == 4 {
				month, day = time.February, 29
			}
			want := time.Date(2024, month, day, 0, 0, 0, 0, place)
			got := (&codeq.ScheduleInfo{Schedule: s, Next: want}).Upcoming(1 << 20)
			for year := 2024; ; year += years {
				want := time.Date(year, month, day, 0, 0, 0, 0, place)
				if want.UTC().Year() > 9999 {
					break
				}
				if want.Day() == day { // not every fourth year is a leap year
					require.Equal(t, want.Unix(), got[0].Unix(), "%s in %s", cron, zone)
					got = got[1:]
				}
			}
			require.Empty(t, got)
		}
	}
}

// TestLastDayOfLeapYear: a queue opens, works and ticks on 31 December of leap years, within the
// table of the zone and after its end.
func TestLastDayOfLeapYear(t *testing.T) {
	queuetest.WithCronBench(t, codeq.Options{Shards: 1}, func(t *testing.T, b *queuetest.CronBench) {
		b.Set(codeq.Schedule{Name: "s", Cron: "0 0 1 1 *", TimeZone: "Europe/Berlin", Task: codeq.Task{Queue: "a"}})
		for _, year := range []int{2028, 2040, 2096} {
			b.Down(time.Until(time.Date(year, 12, 31, 12, 0, 0, 0, time.UTC)))
			want := fmt.Sprintf("%d-12-31T23:00:00Z", year)
			require.NotContains(t, b.Ticks("s"), want)
			require.Equal(t, want, b.Info("s").Next.UTC().Format(time.RFC3339))
			time.Sleep(12 * time.Hour)
			require.Contains(t, b.Ticks("s"), want)
		}
	})
}

// TestPauseSchedule: a paused schedule does not tick, even if it is set again, and over restarts.
// After Resume it goes on with the next tick, and the ticks of the pause do not count as missed.
func TestPauseSchedule(t *testing.T) {
	queuetest.WithCronBench(t, codeq.Options{Shards: 3}, func(t *testing.T, b *queuetest.CronBench) {
		ctx := context.Background()
		require.ErrorIs(t, b.Q.PauseSchedule(ctx, "s"), codeq.ErrNotFound)
		require.ErrorIs(t, b.Q.ResumeSchedule(ctx, "s"), codeq.ErrNotFound)
		b.Set(minutely("s"))
		b.Set(minutely("other"))
		time.Sleep(2*time.Minute + time.Second)
		for range 2 {
			require.NoError(t, b.Q.PauseSchedule(ctx, "s"))
		}
		paused := b.Info("s")
		require.True(t, paused.Paused)
		require.Zero(t, paused.Next)
		require.Empty(t, paused.Upcoming(5))
		require.False(t, b.Info("other").Paused)
		time.Sleep(2 * time.Minute)
		b.Down(2 * time.Minute)
		b.Set(minutely("s"))
		changed := minutely("s")
		changed.Cron, changed.Task.Tenant = "*/2 * * * *", "acme"
		b.Set(changed)
		require.True(t, b.Info("s").Paused)
		time.Sleep(2 * time.Minute)
		require.Len(t, b.Ticks("s"), 2)
		for range 2 {
			require.NoError(t, b.Q.ResumeSchedule(ctx, "s"))
		}
		resumed := b.Info("s")
		require.False(t, resumed.Paused)
		require.Equal(t, time.Now().Truncate(2*time.Minute).Add(2*time.Minute).UTC(), resumed.Next.UTC())
		time.Sleep(4 * time.Minute)
		require.Len(t, b.Ticks("s"), 2+2)
		require.Greater(t, len(b.Ticks("other")), 10)
		require.NoError(t, b.Q.PauseSchedule(ctx, "s"))
		require.NoError(t, b.Q.DeleteSchedule(ctx, "s"))
		b.Set(minutely("s"))
		require.False(t, b.Info("s").Paused, "it is another one")
	})
}

// storedSchedule returns a schedule as a shard has it on disk.
func storedSchedule(t *testing.T, q *codeq.Queue, shard int, name string) keys.ScheduleValue {
	t.Helper()
	value, err := store.Lookup(queuetest.StoreOf(q, shard).DB(), keys.AppendSchedule(nil, name))
	require.NoError(t, err)
	v, err := keys.ParseScheduleValue(value)
	require.NoError(t, err)
	return v
}

// TestScheduleRests: a schedule that this process cannot interpret does not stop Open. It goes on
// when a process can interpret it.
func TestScheduleRests(t *testing.T) {
	queuetest.WithCronBench(t, codeq.Options{Shards: 1}, func(t *testing.T, b *queuetest.CronBench) {
		start := b.Wall()
		s := codeq.Schedule{Name: "good", Cron: "* * * * *", Task: codeq.Task{Queue: "a"}, Missed: codeq.MissedAll}
		b.Set(s)
		v := storedSchedule(t, b.Q, 0, "good")
		v.Start, v.After = uint64(start.UnixMilli()), uint64(start.UnixMilli())
		plant := func(change func(v *keys.ScheduleValue)) {
			v := v
			change(&v)
			b.Plant(0, "odd", v.Append(nil))
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
		b.RequireEachMinute("odd", start)
	})
}

// TestCheckSchedules: the checker finds a schedule that cannot be read, or that is in the wrong
// shard.
func TestCheckSchedules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &queuetest.CronBench{T: t, Opts: *inspect.With(&codeq.Options{Shards: 2}, inspect.Private{FS: crashfs.New()})}
		s := codeq.Schedule{Name: "s", Cron: "* * * * *", Task: codeq.Task{Queue: "a"}}
		b.Open()
		require.NoError(t, b.Q.SetSchedule(t.Context(), s))
		v := storedSchedule(t, b.Q, keys.ShardOfSchedule("s", 2), "s")
		require.NoError(t, b.Q.Close())
		inspect.Options(&b.Opts).FS = crashfs.New()
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
			require.NoError(t, queuetest.CheckAll(b.Q))
			b.Plant(c.shard, "s", c.value)
			synctest.Wait()
			require.ErrorIs(t, queuetest.CheckAll(b.Q), codeq.ErrCorrupt, c.name)
			require.NoError(t, b.Q.Close())
			inspect.Options(&b.Opts).FS = crashfs.New()
		}
	})
}

// TestTicksOfManySchedules: a tick looks at due schedules only, not at every one.
func TestTicksOfManySchedules(t *testing.T) {
	t.Parallel()
	const schedules = 10_000
	queuetest.WithCronBench(t, codeq.Options{Shards: 1}, func(t *testing.T, b *queuetest.CronBench) {
		for i := range schedules {
			b.Set(codeq.Schedule{Name: fmt.Sprint("daily", i), Every: 24 * time.Hour, Task: codeq.Task{Queue: "a"}})
		}
		b.Set(codeq.Schedule{Name: "each second", Every: time.Second, Task: codeq.Task{Queue: "a"}})
		time.Sleep(10 * time.Second)
		require.GreaterOrEqual(t, len(b.Ticks("each second")), 10)
		looked := uint64(0)
		require.NoError(t, inspect.Of(b.Q).Owner(0, func(s *inspect.Owner) error { looked = s.Rules.Probe().Usage().Schedules; return nil }))
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

// TestFastSchedule: a schedule ticks each 10 ms, once, over restarts.
func TestFastSchedule(t *testing.T) {
	queuetest.WithCronBench(t, codeq.Options{Shards: 1}, func(t *testing.T, b *queuetest.CronBench) {
		start := b.Wall()
		b.Set(codeq.Schedule{Name: "s", Every: 10 * time.Millisecond, Task: codeq.Task{Queue: "a"}})
		time.Sleep(500 * time.Millisecond)
		b.Down(115 * time.Millisecond)
		time.Sleep(385 * time.Millisecond)
		want := []string{}
		for n := range 100 {
			want = append(want, start.Add(time.Duration(n+1)*10*time.Millisecond).UTC().Format("2006-01-02T15:04:05.999Z07:00"))
		}
		require.ElementsMatch(t, want, b.Ticks("s"))
	})
}

// TestJitter: the tasks of schedules of one moment become ready at different times within Jitter,
// which do not depend on the process. The ticks stay.
func TestJitter(t *testing.T) {
	queuetest.WithCronBench(t, codeq.Options{Shards: 3}, func(t *testing.T, b *queuetest.CronBench) {
		const schedules, jitter = 20, 30 * time.Second
		start := b.Wall()
		for n := range schedules {
			s := minutely(fmt.Sprint(n))
			s.Jitter = jitter
			s.Task.LimitKey = fmt.Sprint(n) // in any shard
			b.Set(s)
			require.Equal(t, jitter, b.Info(s.Name).Jitter)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		tasks, err := queuetest.List(b.Q)
		require.NoError(t, err)
		require.Len(t, tasks, schedules)
		at := make(map[time.Time]bool)
		for _, task := range tasks {
			tick, err := time.Parse(time.RFC3339, task.Headers[codeq.TickHeader])
			require.NoError(t, err)
			require.False(t, task.RunAt.Before(tick))
			require.Less(t, task.RunAt.Sub(tick), jitter)
			require.Equal(t, task.RunAt.After(b.Wall()), task.State == codeq.Scheduled)
			at[task.RunAt] = true
		}
		require.Greater(t, len(at), schedules/2)
		b.Down(time.Second)
		time.Sleep(4*time.Minute - time.Second)
		for n := range schedules {
			b.RequireEachMinute(fmt.Sprint(n), start)
			require.Equal(t, jitter, b.Info(fmt.Sprint(n)).Jitter)
		}
		s := minutely("0")
		b.Set(s)
		require.Equal(t, 5*time.Minute, b.Info("0").Last.Sub(start.Truncate(time.Minute)), "the position stays")
	})
}

// TestJitterBeyondPeriod: the task of a tick becomes ready before the next tick, however long
// Jitter is: two tasks keep their order, and do not meet at an idempotency key.
func TestJitterBeyondPeriod(t *testing.T) {
	queuetest.WithCronBench(t, codeq.Options{Shards: 1}, func(t *testing.T, b *queuetest.CronBench) {
		s := minutely("s")
		s.Jitter = 24 * time.Hour
		b.Set(s)
		time.Sleep(time.Hour)
		synctest.Wait()
		tasks, err := queuetest.List(b.Q)
		require.NoError(t, err)
		require.Len(t, tasks, 60)
		for _, task := range tasks {
			tick, err := time.Parse(time.RFC3339, task.Headers[codeq.TickHeader])
			require.NoError(t, err)
			require.Less(t, task.RunAt.Sub(tick), time.Minute)
		}
	})
}

// TestTriggerSchedule: the task of a schedule is produced now, and its ticks come as without that.
func TestTriggerSchedule(t *testing.T) {
	queuetest.WithCronBench(t, codeq.Options{Shards: 3}, func(t *testing.T, b *queuetest.CronBench) {
		start := b.Wall()
		s := minutely("s")
		s.Jitter, s.Task.Payload, s.Task.LimitKey = 30*time.Second, []byte("x"), "k"
		b.Set(s)
		time.Sleep(90 * time.Second)
		before := b.Info("s")
		id, err := b.Q.TriggerSchedule(t.Context(), "s")
		require.NoError(t, err)
		require.Equal(t, before, b.Info("s"))
		task := queuetest.InfoOf(t, b.Q, id)
		require.Equal(t, codeq.Ready, task.State)
		require.Equal(t, "x", string(task.Payload))
		require.Equal(t, map[string]string{
			codeq.ScheduleHeader: "s", codeq.TickHeader: b.Wall().UTC().Format("2006-01-02T15:04:05.999Z07:00"),
		}, task.Headers)
		require.NoError(t, b.Q.Cancel(t.Context(), id))
		time.Sleep(time.Minute)
		b.RequireEachMinute("s", start)

		require.NoError(t, b.Q.PauseSchedule(t.Context(), "s"))
		_, err = b.Q.TriggerSchedule(t.Context(), "s")
		require.NoError(t, err)
		s.Task.Unique.Key = "k"
		b.Set(s)
		_, err = b.Q.TriggerSchedule(t.Context(), "s")
		require.NoError(t, err)
		_, err = b.Q.TriggerSchedule(t.Context(), "s")
		require.ErrorIs(t, err, codeq.ErrDuplicate)
		_, err = b.Q.TriggerSchedule(t.Context(), "none")
		require.ErrorIs(t, err, codeq.ErrNotFound)
	})
}
