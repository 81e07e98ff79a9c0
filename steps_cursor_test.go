package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/keys"
	"codeq/test/queuetest"
)

// TestCursor: each run of a handler finds what the one before has set last, also after the task was
// a dead letter. It is gone when the task is.
func TestCursor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2, MaxAttempts: 2, Backoff: codeq.Backoff{Base: time.Second}})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			row, err := codeq.Cursor[int](ctx, "row")
			if err != nil {
				return err
			}
			for range 10 {
				if row++; row == 40 {
					return nil
				}
				if err := codeq.SetCursor(ctx, "row", row); err != nil {
					return err
				}
			}
			if row == 20 {
				return codeq.Sleep(ctx, "pause", time.Second)
			}
			return errors.New("boom")
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		for _, want := range []struct {
			state codeq.State
			row   string
		}{{codeq.Scheduled, "10"}, {codeq.Scheduled, "20"}, {codeq.Dead, "30"}} {
			synctest.Wait()
			got := queuetest.InfoOf(t, q, id)
			require.Equal(t, want.state, got.State)
			require.Equal(t, map[string][]byte{"row": []byte(want.row)}, got.Cursors)
			require.NoError(t, queuetest.CheckAll(q))
			time.Sleep(time.Second)
		}
		require.Zero(t, queuetest.Stored(t, q, keys.Step))
		require.NoError(t, q.RedriveDead(t.Context(), id))
		time.Sleep(time.Minute)
		synctest.Wait()
		_, err := q.Get(t.Context(), id)
		require.ErrorIs(t, err, codeq.ErrNotFound)
		require.Zero(t, queuetest.Stored(t, q, keys.Step))
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestCursorOnceASecond: a loop stores its cursor at once, and then once a second at most.
func TestCursorOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		stored := make(map[string]bool)
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			for n := range 10_000 {
				if err := codeq.SetCursor(ctx, "n", n); err != nil {
					return err
				}
				if n%10 == 0 {
					time.Sleep(10 * time.Millisecond)
					synctest.Wait()
					value := string(queuetest.InfoOf(t, q, j.ID).Cursors["n"])
					stored[value] = true
					at, err := strconv.Atoi(value)
					require.NoError(t, err)
					require.GreaterOrEqual(t, at+1010, n)
				}
			}
			return nil
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, id).State)
		require.Len(t, stored, 11, "the first one, and one a second")
	})
}

// TestCursorSurvivesCrashes: the next run after a crash finds a value that is at most a second old,
// and after a clean end the last one.
func TestCursorSurvivesCrashes(t *testing.T) {
	disk := crashfs.New()
	opts := *queuetest.OnDisk(disk, &codeq.Options{Shards: 2, Durability: codeq.DurabilityDisk})
	for life, clean := range []bool{false, true, false} {
		synctest.Test(t, func(t *testing.T) {
			opts := *queuetest.OnDisk(disk, &opts)
			q := queuetest.OpenForRun(t, opts)
			if life == 0 {
				queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			}
			var m codeq.Mux
			begun := make(chan int, 1)
			codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
				n, err := codeq.Cursor[int](ctx, "n")
				require.NoError(t, err)
				begun <- n
				for ctx.Err() == nil {
					n++
					require.NoError(t, codeq.SetCursor(ctx, "n", n))
					time.Sleep(100 * time.Millisecond)
				}
				return ctx.Err()
			})
			run := startRun(t, q, &m, codeq.RunOptions{Grace: -1})
			want := []int{0, 25, 51}[life]
			got := <-begun
			require.LessOrEqual(t, got, want)
			require.Greater(t, got, want-11)
			time.Sleep(2450 * time.Millisecond)
			synctest.Wait()
			if clean {
				require.NoError(t, run.End(nil))
			}
			disk = disk.CrashClone(vfs.CrashCloneCfg{})
		})
	}
}

// TestCursorRefuses: what cannot be a cursor is refused, and the value before stays.
func TestCursorRefuses(t *testing.T) {
	_, err := codeq.Cursor[int](t.Context(), "a")
	require.ErrorIs(t, err, codeq.ErrInvalid)
	require.ErrorIs(t, codeq.SetCursor(t.Context(), "a", 1), codeq.ErrInvalid)
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			for _, name := range []string{"", strings.Repeat("x", 129), "\xff"} {
				require.ErrorIs(t, codeq.SetCursor(ctx, name, 1), codeq.ErrInvalid)
				_, err := codeq.Cursor[int](ctx, name)
				require.ErrorIs(t, err, codeq.ErrInvalid)
			}
			mine := []byte("mine")
			require.NoError(t, codeq.SetCursor(ctx, "a", mine))
			copy(mine, "your")
			require.ErrorIs(t, codeq.SetCursor(ctx, "b", make([]byte, 4<<10)), codeq.ErrInvalid)
			require.Error(t, codeq.SetCursor(ctx, "b", func() {}))
			got, err := codeq.Cursor[[]byte](ctx, "a")
			require.NoError(t, err)
			require.Equal(t, "mine", string(got))
			copy(got, "your")
			var all sync.WaitGroup
			for i := range 8 {
				all.Go(func() {
					if err := codeq.SetCursor(ctx, fmt.Sprint(i), i); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			_, err = codeq.Cursor[int](ctx, "a")
			require.Error(t, err, "it is no number")
			return nil
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Done, got.State, got.LastError)
	})
}
