package codeq

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	_ "time/tzdata" // the machine may have none

	"github.com/stretchr/testify/require"

	"codeq/internal/call"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/recurrence"
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
		if inspect.Options(&b.Opts).FS == nil {
			inspect.Options(&b.Opts).FS = crashfs.New()
		}
		inspect.Options(&b.Opts).Wall = b.Wall
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
	synctest.Wait() // shards may have to tell each other what has become of a tick
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
	tasks, err := b.Q.list()
	require.NoError(b.T, err)
	ticks := []string{}
	for _, task := range tasks {
		if task.Headers[ScheduleHeader] == name {
			ticks = append(ticks, task.Headers[TickHeader])
		}
	}
	slices.Sort(ticks)
	return ticks
}

// RequireEachMinute makes sure that a schedule has had one tick at each minute after a time, until
// now.
func (b *CronBench) RequireEachMinute(name string, after time.Time) {
	b.T.Helper()
	want := []string{}
	for at := after.Truncate(time.Minute).Add(time.Minute); !at.After(b.Wall()); at = at.Add(time.Minute) {
		want = append(want, at.UTC().Format(recurrence.Format))
	}
	require.Equal(b.T, want, b.Ticks(name))
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
		s := Schedule{Name: "good", Cron: "* * * * *", Task: Task{Queue: "a"}, Missed: MissedAll}
		b.Set(s)
		s.Name = "odd"
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
		b.RequireEachMinute("odd", start)
	})
}

// TestCheckSchedules: the checker sees a schedule that cannot be read, or that
// lies in another shard than its own.
func TestCheckSchedules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &CronBench{T: t, Opts: *inspect.With(&Options{Shards: 2}, inspect.Private{FS: crashfs.New()})}
		s := Schedule{Name: "s", Cron: "* * * * *", Task: Task{Queue: "a"}}
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
			inspect.Options(&b.Opts).FS = crashfs.New()
		}
	})
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
