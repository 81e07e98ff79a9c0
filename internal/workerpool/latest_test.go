package workerpool

import (
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestValue: the first value is reported at once, then the latest value after each interval, and
// never during another report.
func TestValue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var telling sync.WaitGroup
		begin := time.Now()
		var told []int
		var at []time.Duration
		slow := time.Duration(0)
		v := NewLatest(0, time.Second, slog.Default(), &telling, func(n *int) {
			told, at = append(told, *n), append(at, time.Since(begin))
			time.Sleep(slow)
		})
		set := func(n int) { require.NoError(t, v.Change(func(int) (int, error) { return n, nil })) }
		for n := range 100 { // in 2.6 seconds
			set(n + 1)
			synctest.Wait()
			time.Sleep(26 * time.Millisecond)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Equal(t, []int{1, 39, 77, 100}, told)
		require.Equal(t, []time.Duration{0, time.Second, 2 * time.Second, 3 * time.Second}, at)

		told, at, slow = nil, nil, 5*time.Second
		begin = time.Now()
		set(101)
		synctest.Wait()
		set(102)
		set(103)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		require.Equal(t, []int{101, 103}, told, "it is told late, as it took long to tell the one before")
		set(104)
		refused := errors.New("refused")
		require.ErrorIs(t, v.Change(func(now int) (int, error) { return now + 1, refused }), refused)
		require.Equal(t, 104, *v.Get())
		v.Close()
		set(105)
		telling.Wait()
		require.Equal(t, 10*time.Second, time.Since(begin), "what is being told is waited for")
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, []int{101, 103}, told)
		require.Equal(t, 105, *v.Get())
	})
}

// TestCloseBeforeTheNext: after Close, no caller waits for a report that does not come any more.
func TestCloseBeforeTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var telling sync.WaitGroup
		told := 0
		v := NewLatest("", time.Hour, slog.Default(), &telling, func(*string) { told++ })
		v.Close()
		telling.Wait()
		v = NewLatest("", time.Hour, slog.Default(), &telling, func(*string) { told++ })
		for range 2 {
			require.NoError(t, v.Change(func(now string) (string, error) { return now + "x", nil }))
			synctest.Wait()
		}
		begin := time.Now()
		v.Close()
		v.Close()
		telling.Wait()
		require.Zero(t, time.Since(begin))
		require.Equal(t, 1, told)
		require.Equal(t, "xx", *v.Get())
	})
}

// TestPanic: after a panic in a report, a caller that waits for it goes on, and the next value is
// reported.
func TestPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var telling sync.WaitGroup
		var told []int
		v := NewLatest(0, time.Second, slog.New(slog.DiscardHandler), &telling, func(n *int) {
			if told = append(told, *n); *n == 1 {
				panic("of the test")
			}
		})
		for n := range 2 {
			require.NoError(t, v.Change(func(int) (int, error) { return n + 1, nil }))
			synctest.Wait()
		}
		time.Sleep(time.Second)
		telling.Wait()
		require.Equal(t, []int{1, 2}, told)
	})
}
