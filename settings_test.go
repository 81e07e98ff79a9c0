package codeq

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// settingsOf is Settings that has to succeed.
func settingsOf(t *testing.T, q *Queue, queue string) Settings {
	t.Helper()
	s, err := q.Settings(queue)
	require.NoError(t, err)
	return s
}

// TestSettingsKept: all fields outlive restarts and crashes, each queue has its own,
// and it needs no tasks.
func TestSettingsKept(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			disk := vfs.NewCrashableMem()
			opts := Options{Shards: shards, Durability: DurabilityDisk, fs: disk}
			q := openForRun(t, opts)
			require.Zero(t, settingsOf(t, q, "a"))
			want := Settings{
				Paused: true, Concurrency: 1, ConcurrencyPerKey: 2, Rate: 0.5, Burst: 3,
				TenantWeights: map[string]int{"": 2, "x": 65536}, Retention: time.Hour, DeadRetention: Forever,
			}
			configure(t, q, "a", func(s *Settings) { *s = want })
			configure(t, q, "b", func(s *Settings) { s.Retention = Forever })
			require.Equal(t, want, settingsOf(t, q, "a"))
			requireSettled(t, q)

			image := disk.CrashClone(vfs.CrashCloneCfg{})
			require.NoError(t, q.Close())
			for _, opts.fs = range []vfs.FS{disk, image} {
				q := openForRun(t, opts)
				require.Equal(t, want, settingsOf(t, q, "a"))
				require.Equal(t, Settings{Retention: Forever}, settingsOf(t, q, "b"))
				require.Zero(t, settingsOf(t, q, "c"))
				produce(t, q, Task{Queue: "a"})
				require.Nil(t, claimNow(t, q, "a"), "paused")
				require.NoError(t, q.Resume(t.Context(), "a"))
				require.False(t, settingsOf(t, q, "a").Paused)
				requireSettled(t, q)
				require.NoError(t, q.Close())
			}
		})
	}
}

// TestSettingsAreCopies: what callers do with the settings that they gave or got
// changes nothing.
func TestSettingsAreCopies(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		mine := map[string]int{"x": 1}
		var kept *Settings
		configure(t, q, "a", func(s *Settings) { kept, s.TenantWeights = s, mine })
		mine["x"] = 7
		kept.TenantWeights["y"], kept.Paused = 7, true
		settingsOf(t, q, "a").TenantWeights["z"] = 7
		require.Equal(t, Settings{TenantWeights: map[string]int{"x": 1}}, settingsOf(t, q, "a"))

		configure(t, q, "a", func(s *Settings) { kept = s })
		kept.TenantWeights["x"] = 7
		require.Equal(t, 1, settingsOf(t, q, "a").TenantWeights["x"])
	})
}

// TestSettingsRefused: what is out of bounds changes nothing and says what it is.
func TestSettingsRefused(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		ctx := t.Context()
		configure(t, q, "a", func(s *Settings) { s.Concurrency = 3 })
		for field, change := range map[string]func(*Settings){
			"Settings.Concurrency":           func(s *Settings) { s.Concurrency = -1 },
			"Settings.ConcurrencyPerKey":     func(s *Settings) { s.ConcurrencyPerKey = -1 },
			"Settings.Burst":                 func(s *Settings) { s.Burst = math.MaxInt32 + 1 },
			"Settings.Rate":                  func(s *Settings) { s.Rate = -1 },
			"Settings.TenantWeights of x":    func(s *Settings) { s.TenantWeights = map[string]int{"x": 0} },
			"Settings.TenantWeights of many": func(s *Settings) { s.TenantWeights = map[string]int{"many": 65537} },
			"Settings.TenantWeights":         func(s *Settings) { s.TenantWeights = map[string]int{"\xff": 1} },
			"Settings.Retention":             func(s *Settings) { s.Retention = -2 },
			"Settings.DeadRetention":         func(s *Settings) { s.DeadRetention = -2 },
		} {
			err := q.Configure(ctx, "a", change)
			var invalid *InvalidError
			require.ErrorAs(t, err, &invalid)
			require.Equal(t, field, invalid.Field)
			require.ErrorIs(t, err, ErrInvalid)
		}
		for _, rate := range []float64{math.NaN(), math.Inf(1), 1e9 + 1} {
			require.ErrorIs(t, q.Configure(ctx, "a", func(s *Settings) { s.Rate = rate }), ErrInvalid)
		}
		for _, queue := range []string{"", strings.Repeat("x", 256)} {
			require.ErrorIs(t, q.Configure(ctx, queue, func(*Settings) { t.Error("called") }), ErrInvalid)
			require.ErrorIs(t, q.Pause(ctx, queue), ErrInvalid)
			_, err := q.Settings(queue)
			require.ErrorIs(t, err, ErrInvalid)
		}
		require.Equal(t, Settings{Concurrency: 3}, settingsOf(t, q, "a"))
		for _, most := range []Settings{
			{Concurrency: math.MaxInt32, ConcurrencyPerKey: math.MaxInt32, Rate: 1e9, Burst: math.MaxInt32},
			{Rate: math.SmallestNonzeroFloat64, Retention: math.MaxInt64, DeadRetention: math.MaxInt64},
		} {
			configure(t, q, "a", func(s *Settings) { *s = most })
			require.Equal(t, most, settingsOf(t, q, "a"))
		}
	})
}

// TestConfigureTakesTurns: each of many calls at a time finds what the one before
// has left.
func TestConfigureTakesTurns(t *testing.T) {
	forShards(t, func(t *testing.T, q *Queue) {
		const calls = 50
		var all sync.WaitGroup
		for range calls {
			all.Go(func() {
				err := q.Configure(context.Background(), "a", func(s *Settings) { s.Concurrency++ })
				if err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		require.Equal(t, calls, settingsOf(t, q, "a").Concurrency)
		requireSettled(t, q)
	})
}

// TestConfigureGivesUp: a call that waits for its turn ends with its context, and
// one whose change panics lets the next have its turn.
func TestConfigureGivesUp(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		require.Panics(t, func() { _ = q.Configure(t.Context(), "a", func(*Settings) { panic("boom") }) })

		goOn, first, second := make(chan struct{}), make(chan error, 1), make(chan error, 1)
		go func() {
			first <- q.Configure(context.Background(), "a", func(s *Settings) { <-goOn; s.Concurrency = 1 })
		}()
		synctest.Wait()
		boom := errors.New("boom")
		ctx, cancel := context.WithCancelCause(t.Context())
		go func() { second <- q.Pause(ctx, "b") }() // another queue takes turns too
		synctest.Wait()
		require.Empty(t, second)
		cancel(boom)
		require.ErrorIs(t, <-second, boom)
		close(goOn)
		require.NoError(t, <-first)
		require.ErrorIs(t, q.Configure(ctx, "a", func(s *Settings) { s.Concurrency = 2 }), boom)
		require.Equal(t, Settings{Concurrency: 1}, settingsOf(t, q, "a"))
		require.Zero(t, settingsOf(t, q, "b"))
	})
}

// TestConfigureClosed: a closed queue keeps the settings it has.
func TestConfigureClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := Options{fs: vfs.NewMem()}
		q := openForRun(t, opts)
		require.NoError(t, q.Close())
		require.ErrorIs(t, q.Configure(t.Context(), "a", func(s *Settings) { s.Concurrency = 1 }), ErrClosed)
		q = openForRun(t, opts)
		require.Zero(t, settingsOf(t, q, "a"))
	})
}
