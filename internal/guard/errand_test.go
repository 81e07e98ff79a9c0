package guard

import (
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestErrand: the goroutine lives while there is work; a wait ends early by Hurry, and Await when
// the work is done or grace is over.
func TestErrand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var living sync.WaitGroup
		var done []int
		work, due, block := 0, time.Time{}, make(chan struct{})
		begin := time.Now()
		e := NewErrand("test", slog.New(slog.DiscardHandler), func() (func(), time.Duration) {
			if work == 0 {
				return nil, 0
			}
			if wait := time.Until(due); wait > 0 {
				return nil, wait
			}
			n := work
			work--
			return func() {
				switch done = append(done, n); n {
				case 1:
					<-block
				case 7:
					runtime.Goexit()
				case 9:
					panic("of the test")
				}
			}, 0
		}).CountIn(&living)
		lost, failed := 0, 0
		e.OnPanic(func() { failed++ })
		give := func(n int, at time.Duration) {
			e.Mu.Lock()
			work, due = n, begin.Add(at)
			e.Wake()
			e.Mu.Unlock()
		}
		require.True(t, e.Await(0), "there is no work")
		give(2, time.Second)
		require.False(t, e.Await(time.Second/2))
		require.Empty(t, done)
		require.False(t, e.Await(time.Second), "a piece blocks")
		close(block)
		living.Wait()
		require.Equal(t, []int{2, 1}, done)
		require.True(t, e.Await(0))

		done = nil
		give(3, time.Hour)
		synctest.Wait()
		e.Mu.Lock()
		due = begin
		e.Mu.Unlock()
		e.Hurry()
		require.True(t, e.Await(time.Second))
		require.Equal(t, []int{3, 2, 1}, done)

		done = nil
		give(9, 0)
		synctest.Wait()
		require.Equal(t, []int{9}, done)
		require.Equal(t, 1, failed)
		living.Wait()
		e.lost = func() { lost++ }
		done = nil
		give(7, 0)
		require.True(t, e.Await(time.Second))
		require.Equal(t, []int{7, 6, 5, 4, 3, 2, 1}, done)
		require.Equal(t, 1, lost)
		living.Wait()
	})
}

// TestErrandAfterPanic: after a panic of one piece, the next one runs, also if it was added during
// the panic. A panic of next ends the goroutine.
func TestErrandAfterPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var living sync.WaitGroup
		left, done := 3, 0
		e := NewErrand("test", slog.New(slog.DiscardHandler), func() (func(), time.Duration) {
			switch {
			case left < 0:
				panic("of next")
			case left == 0:
				return nil, 0
			}
			left--
			return func() { done++; panic("of a piece") }, 0
		}).CountIn(&living)
		wake := func(n int) {
			e.Mu.Lock()
			left = n
			e.Wake()
			e.Mu.Unlock()
		}
		wake(3)
		require.True(t, e.Await(time.Second))
		living.Wait()
		require.Equal(t, 3, done)
		wake(-1)
		living.Wait()
		wake(1)
		living.Wait()
		require.Equal(t, 4, done)
	})
}
