package queuetest

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/recurrence"
)

// CronBench is a queue in fake time; its wall clock can be set, and it can be opened again. Fake
// time begins at midnight, 2000-01-01 UTC.
type CronBench struct {
	T    *testing.T
	Opts codeq.Options
	Q    *codeq.Queue
	Skew atomic.Int64 // of the wall clock
}

func WithCronBench(t *testing.T, opts codeq.Options, test func(t *testing.T, b *CronBench)) {
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
	b.Q, err = codeq.Open("queue", &b.Opts)
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
	time.Sleep(time.Minute)
}

func (b *CronBench) Check() {
	synctest.Wait()
	require.NoError(b.T, CheckAll(b.Q))
	require.NoError(b.T, CheckMemory(b.Q))
}

func (b *CronBench) Set(s codeq.Schedule) {
	b.T.Helper()
	require.NoError(b.T, b.Q.SetSchedule(context.Background(), s))
}

// info returns a schedule as Schedules has it.
func (b *CronBench) Info(name string) codeq.ScheduleInfo {
	b.T.Helper()
	synctest.Wait() // shards may have to exchange the outcome of a tick
	all, err := b.Q.Schedules(context.Background())
	require.NoError(b.T, err)
	i := slices.IndexFunc(all, func(i codeq.ScheduleInfo) bool { return i.Name == name })
	require.GreaterOrEqual(b.T, i, 0, "no schedule %q", name)
	return all[i]
}

// ticks returns the ticks of the tasks that a schedule has produced, in order.
func (b *CronBench) Ticks(name string) []string {
	b.T.Helper()
	synctest.Wait()
	tasks, err := List(b.Q)
	require.NoError(b.T, err)
	ticks := []string{}
	for _, task := range tasks {
		if task.Headers[codeq.ScheduleHeader] == name {
			ticks = append(ticks, task.Headers[codeq.TickHeader])
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

// Plant writes a schedule past all checks.
func (b *CronBench) Plant(index int, name string, value []byte) {
	require.NoError(b.T, inspect.Of(b.Q).Owner(index, func(o *inspect.Owner) error {
		return o.Rules.Group.Batch.Set(keys.AppendSchedule(nil, name), value, nil)
	}))
}
