package codeq_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/call"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// settingsOf returns the settings of a queue, and requires success.
func settingsOf(t *testing.T, q *codeq.Queue, queue string) codeq.Settings {
	t.Helper()
	s, err := q.Settings(queue)
	require.NoError(t, err)
	return s
}

// TestSettingsAreCopies: changes of a caller to settings that it passed or got have no effect.
func TestSettingsAreCopies(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		mine := map[string]int{"x": 1}
		var kept *codeq.Settings
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { kept, s.TenantWeights = s, mine })
		mine["x"] = 7
		kept.TenantWeights["y"], kept.Paused = 7, true
		settingsOf(t, q, "a").TenantWeights["z"] = 7
		require.Equal(t, codeq.Settings{TenantWeights: map[string]int{"x": 1}}, settingsOf(t, q, "a"))

		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { kept = s })
		kept.TenantWeights["x"] = 7
		require.Equal(t, 1, settingsOf(t, q, "a").TenantWeights["x"])
	})
}

// TestSettingsRefused: a setting out of bounds changes nothing, and the error names it.
func TestSettingsRefused(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		ctx := t.Context()
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 3 })
		for field, change := range map[string]func(*codeq.Settings){
			"Settings.Concurrency":           func(s *codeq.Settings) { s.Concurrency = -1 },
			"Settings.ConcurrencyPerKey":     func(s *codeq.Settings) { s.ConcurrencyPerKey = -1 },
			"Settings.Burst":                 func(s *codeq.Settings) { s.Burst = testkit.Beyond31Bits },
			"Settings.Rate":                  func(s *codeq.Settings) { s.Rate = -1 },
			"Settings.TenantWeights of x":    func(s *codeq.Settings) { s.TenantWeights = map[string]int{"x": 0} },
			"Settings.TenantWeights of many": func(s *codeq.Settings) { s.TenantWeights = map[string]int{"many": 65537} },
			"Settings.TenantWeights":         func(s *codeq.Settings) { s.TenantWeights = map[string]int{"\xff": 1} },
			"Settings.Retention":             func(s *codeq.Settings) { s.Retention = -2 },
			"Settings.MaxAttempts":           func(s *codeq.Settings) { s.MaxAttempts = testkit.Beyond31Bits },
			"Settings.Backoff":               func(s *codeq.Settings) { s.Backoff.Base = -1 },
			"Settings.Backoff.Step":          func(s *codeq.Settings) { s.Backoff.Step = -1 },
			"Settings.Backoff.Factor":        func(s *codeq.Settings) { s.Backoff.Factor = 0.5 },
			"Settings.Timeout":               func(s *codeq.Settings) { s.Timeout = -1 },
			"Settings.DeadRetention":         func(s *codeq.Settings) { s.DeadRetention = -2 },
		} {
			err := q.Configure(ctx, "a", change)
			var invalid *codeq.InvalidError
			require.ErrorAs(t, err, &invalid)
			require.Equal(t, field, invalid.Field)
			require.ErrorIs(t, err, codeq.ErrInvalid)
		}
		for _, rate := range []float64{math.NaN(), math.Inf(1), 1e9 + 1} {
			require.ErrorIs(t, q.Configure(ctx, "a", func(s *codeq.Settings) { s.Rate = rate }), codeq.ErrInvalid)
		}
		for _, queue := range []string{"", strings.Repeat("x", 256)} {
			require.ErrorIs(t, q.Configure(ctx, queue, func(*codeq.Settings) { t.Error("called") }), codeq.ErrInvalid)
			require.ErrorIs(t, q.Pause(ctx, queue), codeq.ErrInvalid)
			_, err := q.Settings(queue)
			require.ErrorIs(t, err, codeq.ErrInvalid)
		}
		require.Equal(t, codeq.Settings{Concurrency: 3}, settingsOf(t, q, "a"))
		for _, most := range []codeq.Settings{
			{Concurrency: math.MaxInt32, ConcurrencyPerKey: math.MaxInt32, Rate: 1e9, Burst: math.MaxInt32},
			{Rate: math.SmallestNonzeroFloat64, Policy: codeq.Policy{MaxAttempts: math.MaxInt32, Timeout: math.MaxInt64, Retention: math.MaxInt64}, DeadRetention: math.MaxInt64},
		} {
			queuetest.Configure(t, q, "a", func(s *codeq.Settings) { *s = most })
			require.Equal(t, most, settingsOf(t, q, "a"))
		}
	})
}

// TestConfigureGivesUp: a call that waits for its turn ends with its context. When a change panics,
// the next call gets its turn.
func TestConfigureGivesUp(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		require.Panics(t, func() { _ = q.Configure(t.Context(), "a", func(*codeq.Settings) { panic("boom") }) })

		goOn, first, second := make(chan struct{}), make(chan error, 1), make(chan error, 1)
		go func() {
			first <- q.Configure(context.Background(), "a", func(s *codeq.Settings) { <-goOn; s.Concurrency = 1 })
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
		require.ErrorIs(t, q.Configure(ctx, "a", func(s *codeq.Settings) { s.Concurrency = 2 }), boom)
		require.Equal(t, codeq.Settings{Concurrency: 1}, settingsOf(t, q, "a"))
		require.Zero(t, settingsOf(t, q, "b"))
	})
}

// TestSettingsReachAllShards: settings that the first shard has taken come into force in all
// shards, whether or not their caller goes on.
func TestSettingsReachAllShards(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 3}, func(t *testing.T, q *codeq.Queue) {
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Paused = true })
		leased := make(chan *codeq.Lease, 3)
		for i := range 3 {
			queuetest.Produce(t, queuetest.StartingAt(q, i), codeq.Task{Queue: "a"})
			waiting := waitingClaim(t, q, "a")
			go func() { leased <- <-waiting }()
		}
		queuetest.TakeSettings(t, q, "a", 2, `{"Concurrency":2}`)
		synctest.Wait()
		require.Len(t, leased, 2, "as many as may be leased")
		queuetest.RequireInShards(t, q, "a", 2, codeq.Settings{Concurrency: 2})
		queuetest.RequireSettled(t, q)
		queuetest.TakeSettings(t, q, "a", 3, `{}`)
		synctest.Wait()
		require.Len(t, leased, 3)
		queuetest.RequireSettled(t, q)
	})
}

// TestSettingsAreListed: Stats names a queue with settings and without tasks, also after a restart,
// but no queue that has neither.
func TestSettingsAreListed(t *testing.T) {
	t.Parallel()
	dir, ctx := t.TempDir(), context.Background()
	for range 2 {
		q, err := codeq.Open(dir, &codeq.Options{Shards: 2})
		require.NoError(t, err)
		require.NoError(t, q.Pause(ctx, "paused"))
		_, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"unknown"}, NoWait: true})
		require.ErrorIs(t, err, codeq.ErrEmpty)
		st, err := q.Stats(ctx)
		require.NoError(t, err)
		require.Equal(t, map[string]codeq.Counts{"paused": {}}, st)
		require.NoError(t, q.Close())
	}
}

// TestSettingsKept: all fields outlive restarts and crashes. Each queue has its own settings, even
// without tasks.
func TestSettingsKept(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			disk := crashfs.New()
			opts := *queuetest.OnDisk(disk, &codeq.Options{Shards: shards, Durability: codeq.DurabilityDisk})
			q := queuetest.OpenForRun(t, opts)
			require.Zero(t, settingsOf(t, q, "a"))
			want := codeq.Settings{
				Paused: true, Concurrency: 1, ConcurrencyPerKey: 2, Rate: 0.5, Burst: 3,
				TenantWeights: map[string]int{"": 2, "x": 65536}, DeadRetention: codeq.Forever, HoldGroups: true, DeadLetterQueue: "dead", Policy: codeq.Policy{
					MaxAttempts: 3, Backoff: codeq.Backoff{Base: time.Second, Step: time.Minute}, Timeout: time.Hour,
					Retention: 2 * time.Hour, RetryFirst: true,
				},
			}
			queuetest.Configure(t, q, "a", func(s *codeq.Settings) { *s = want })
			queuetest.Configure(t, q, "b", func(s *codeq.Settings) { s.Retention = codeq.Forever })
			require.Equal(t, want, settingsOf(t, q, "a"))
			queuetest.RequireSettled(t, q)

			image := disk.CrashClone(vfs.CrashCloneCfg{})
			require.NoError(t, q.Close())
			for _, left := range []vfs.FS{disk, image} {
				queuetest.OnDisk(left, &opts)
				q := queuetest.OpenForRun(t, opts)
				require.Equal(t, want, settingsOf(t, q, "a"))
				require.Equal(t, codeq.Settings{Policy: codeq.Policy{Retention: codeq.Forever}}, settingsOf(t, q, "b"))
				require.Zero(t, settingsOf(t, q, "c"))
				queuetest.Produce(t, q, codeq.Task{Queue: "a"})
				require.Nil(t, queuetest.ClaimNow(t, q, "a"), "paused")
				require.NoError(t, q.Resume(t.Context(), "a"))
				require.False(t, settingsOf(t, q, "a").Paused)
				queuetest.RequireSettled(t, q)
				require.NoError(t, q.Close())
			}
		})
	}
}

// TestConfigureFromProcesses: several processes change settings at the same time, and no change is
// lost.
func TestConfigureFromProcesses(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		const processes, calls = 5, 10
		var all sync.WaitGroup
		for range processes {
			other := queuetest.OfAnotherProcess(q)
			for range calls {
				all.Go(func() {
					if err := other.Configure(context.Background(), "a", func(s *codeq.Settings) { s.Concurrency++ }); err != nil {
						t.Error(err)
					}
				})
			}
		}
		all.Wait()
		queuetest.RequireInShards(t, q, "a", processes*calls, codeq.Settings{Concurrency: processes * calls})
		queuetest.RequireSettled(t, q)
	})
}

// TestConfigureTriesAgain: if the settings have changed during a call, the call changes the new
// settings.
func TestConfigureTriesAgain(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		var found []codeq.Settings
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) {
			found = append(found, *s)
			if len(found) == 1 {
				done := make(chan error)
				go func() { // a call on this stack would be refused
					done <- queuetest.OfAnotherProcess(q).Configure(t.Context(), "a", func(s *codeq.Settings) { s.Concurrency = 3 })
				}()
				require.NoError(t, <-done)
			}
			s.Burst = 1
		})
		require.Equal(t, []codeq.Settings{{}, {Concurrency: 3}}, found)
		queuetest.RequireInShards(t, q, "a", 2, codeq.Settings{Concurrency: 3, Burst: 1})
		queuetest.RequireSettled(t, q)

		boom := errors.New("boom")
		ctx, cancel := context.WithCancelCause(t.Context())
		require.ErrorIs(t, q.Configure(ctx, "a", func(s *codeq.Settings) {
			s.Burst = 2
			cancel(boom)
		}), boom)
		queuetest.RequireInShards(t, q, "a", 2, codeq.Settings{Concurrency: 3, Burst: 1})
	})
}

// TestLostRemoval: after a power loss at DurabilityProcess, some shards have lost the removal of
// settings. The settings are removed in all shards, and the next settings are newer.
func TestLostRemoval(t *testing.T) {
	t.Parallel()
	for _, kept := range []int{0, 1, 2} {
		disk := crashfs.New()
		queuetest.InFlow(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 3, Durability: codeq.DurabilityProcess}), func(f *queuetest.FlowTest) {
			sync := func(shards ...int) {
				synctest.Wait()
				for _, i := range shards {
					testkit.SyncLogs(t, disk, fmt.Sprintf("queue/shard-%03d", i))
				}
			}
			queuetest.Configure(t, f.Q, "a", func(s *codeq.Settings) { s.Paused = true })
			queuetest.Configure(t, f.Q, "b", func(s *codeq.Settings) { s.Concurrency = 3 })
			sync(0, 1, 2)
			require.NoError(t, f.Q.DeleteQueue(context.Background(), "a"))
			sync(kept)

			img := f.Crash(disk)
			for i := range 3 {
				queuetest.RequireInShards(t, img.Q, "a", 0, codeq.Settings{})
				queuetest.RequireInShards(t, img.Q, "b", uint64(1+i), codeq.Settings{Concurrency: 3 + i})
				queuetest.Configure(t, img.Q, "b", func(s *codeq.Settings) { s.Concurrency++ })
			}
			queuetest.Configure(t, img.Q, "a", func(s *codeq.Settings) { s.Burst = 1 })
			queuetest.RequireInShards(t, img.Q, "a", 3, codeq.Settings{Burst: 1})
			img.Reopen()
			queuetest.RequireInShards(t, img.Q, "a", 3, codeq.Settings{Burst: 1})
			require.NoError(f, img.Q.Close())
		})
	}
}

// TestDeleteQueue: a queue in any kind of use is not deleted, and the error names the use. An
// unused queue is in no list afterwards.
func TestDeleteQueue(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 3}, func(t *testing.T, q *codeq.Queue) {
		ctx := t.Context()
		set := codeq.Settings{Concurrency: 2, Rate: 100, DeadRetention: time.Hour}
		refused := func(want codeq.NotEmptyError) {
			t.Helper()
			want.Queue = "a"
			var got *codeq.NotEmptyError
			err := q.DeleteQueue(ctx, "a")
			require.ErrorIs(t, err, codeq.ErrNotEmpty)
			require.ErrorAs(t, err, &got)
			require.Equal(t, want, *got)
			require.ErrorContains(t, err, fmt.Sprintf("%d tasks, %d idempotency keys, %d schedules, %d waiting claims",
				want.Counts.Total(), want.Keys, want.Schedules, want.Claims))
			require.Equal(t, set, settingsOf(t, q, "a"))
		}
		shownNow := func() bool {
			infos, err := q.Info(ctx)
			require.NoError(t, err)
			counts, err := q.Stats(ctx)
			require.NoError(t, err)
			_, counted := counts["a"]
			return counted || slices.ContainsFunc(infos, func(i codeq.QueueInfo) bool { return i.Queue == "a" })
		}
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { *s = set })
		for _, task := range []codeq.Task{{}, {RunAt: time.Now().Add(time.Hour)}, {Group: "g"}, {Group: "g"}} {
			task.Queue = "a"
			queuetest.Produce(t, q, task)
		}
		refused(codeq.NotEmptyError{Counts: codeq.Counts{Ready: 2, Scheduled: 1, Blocked: 1}})
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.NoError(t, q.DeadLetter(ctx, l.Receipt, nil))
		_, err = q.Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkCancel, TaskFilter: codeq.TaskFilter{Queue: "a", States: []codeq.State{codeq.Ready, codeq.Scheduled, codeq.Blocked}}})
		require.NoError(t, err)
		require.NoError(t, q.SetSchedule(ctx, codeq.Schedule{Name: "s", Cron: "@yearly", Task: codeq.Task{Queue: "a"}}))
		synctest.Wait()
		require.True(t, shownNow())
		require.NoError(t, q.DeleteSchedule(ctx, "s"))

		queuetest.Produce(t, q, codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k", For: time.Hour}})
		queuetest.Produce(t, q, codeq.Task{Queue: "other", Unique: codeq.Unique{Key: "k", For: time.Hour}})
		time.Sleep(2 * time.Hour)
		for range 2 {
			if l, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true}); err == nil {
				require.NoError(t, q.Complete(ctx, l.Receipt, nil))
			}
		}
		require.NoError(t, q.DeleteQueue(ctx, "a"))
		require.Zero(t, settingsOf(t, q, "a"))
		require.False(t, shownNow())
		queuetest.RequireSettled(t, q)
		queuetest.RequireInShards(t, q, "a", 0, codeq.Settings{})

		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { *s = set })
		require.NoError(t, q.Cancel(ctx, id[0]))
		claiming, stop := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() {
			_, err := q.Claim(claiming, codeq.ClaimRequest{Queues: []string{"a"}})
			ended <- err
		}()
		synctest.Wait()
		refused(codeq.NotEmptyError{Claims: 1})
		stop()
		require.ErrorIs(t, <-ended, context.Canceled)
		id = queuetest.Produce(t, q, codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k", For: time.Hour}})
		require.NoError(t, q.Cancel(ctx, id[0]))
		require.NoError(t, q.SetSchedule(ctx, codeq.Schedule{Name: "s", Cron: "@yearly", Task: codeq.Task{Queue: "a"}}))
		refused(codeq.NotEmptyError{Keys: 1, Schedules: 1})
		require.NoError(t, q.DeleteSchedule(ctx, "s"))
		require.NoError(t, q.ReleaseKey(ctx, codeq.UniqueKey{Queue: "a", Key: "k"}))
		require.NoError(t, q.DeleteQueue(ctx, "a"))
		require.NoError(t, q.DeleteQueue(ctx, "a"), "again")
		require.NoError(t, q.DeleteQueue(ctx, "never"))
		require.ErrorIs(t, q.DeleteQueue(ctx, ""), codeq.ErrInvalid)
		queuetest.RequireSettled(t, q)
	})
}

// settingsIn returns the settings of a queue, as the first shard has them.
func settingsIn(t *testing.T, q *codeq.Queue, queue string) (value []byte) {
	t.Helper()
	require.NoError(t, inspect.Of(q).Owner(0, func(o *inspect.Owner) error {
		value = bytes.Clone(o.Rules.Names.QueueNamed(queue).Value)
		return nil
	}))
	return value
}

// adoptSettings makes all shards but the first one take settings, as Configure does.
func adoptSettings(t *testing.T, q *codeq.Queue, queue string, value []byte) {
	t.Helper()
	for shard := 1; shard < inspect.Of(q).Shards(); shard++ {
		require.NoError(t, inspect.Of(q).Owner(shard, func(o *inspect.Owner) error {
			_, err := (&call.Adopt{Queue: queue, Value: value}).Decide(o.Rules)
			return err
		}))
	}
}

// TestConfigureWithFailedShard: the other shards follow the settings at once, and the failed shard
// after the next Open.
func TestConfigureWithFailedShard(t *testing.T) {
	queuetest.InFlow(t, codeq.Options{Shards: 3}, func(f *queuetest.FlowTest) {
		f.ProduceAt(0, codeq.Task{Queue: "a"})
		queuetest.FailShard(t, f.Q, 1)
		require.ErrorIs(f, f.Q.Configure(context.Background(), "a", func(s *codeq.Settings) { s.Rate = 5 }), codeq.ErrUncertain)
		err := f.Q.Pause(context.Background(), "a") // only the working shards adopt them
		require.ErrorIs(f, err, codeq.ErrUncertain)
		require.ErrorIs(f, err, codeq.ErrFailed)
		set, err := f.Q.Settings("a")
		require.NoError(f, err)
		require.True(f, set.Paused)
		require.NoError(f, inspect.Of(f.Q).Owner(2, func(s *inspect.Owner) error {
			require.True(f, s.Rules.Names.QueueNamed("a").Settings.Paused)
			return nil
		}))
		require.ErrorIs(f, f.Q.Close(), codeq.ErrFailed)
		f.Open()
		require.Nil(f, queuetest.ClaimNow(t, f.Q, "a"))
		f.Check()
		queuetest.RequireInShards(t, f.Q, "a", 2, codeq.Settings{Paused: true, Rate: 5})
	})
}

// TestRemovedSettingsStayRemoved: a late message or caller does not bring removed settings back in
// any shard, not even after Open. The next settings are newer.
func TestRemovedSettingsStayRemoved(t *testing.T) {
	queuetest.InFlow(t, codeq.Options{Shards: 3}, func(f *queuetest.FlowTest) {
		ctx := context.Background()
		queuetest.Configure(t, f.Q, "b", func(s *codeq.Settings) { s.Rate = 9 })
		queuetest.Configure(t, f.Q, "a", func(s *codeq.Settings) { s.Concurrency = 1 })
		old := settingsIn(t, f.Q, "a")
		queuetest.Configure(t, f.Q, "a", func(s *codeq.Settings) { s.Paused = true })
		late := settingsIn(t, f.Q, "a")
		require.NoError(t, f.Q.DeleteQueue(ctx, "a"))
		none := keys.SettingsValue{Version: 3, JSON: []byte("{}")}.Append(nil)
		for range 2 {
			for _, value := range [][]byte{old, late, none} {
				adoptSettings(t, f.Q, "a", value)
				require.NoError(t, inspect.Of(f.Q).Owner(0, func(s *inspect.Owner) error {
					s.Rules.Probe().Send(1, &keys.Message{Kind: keys.MsgSettings, Queue: "a", Settings: value})
					return nil
				}))
				c := &call.Configure{Queue: "a", Value: value}
				require.NoError(t, inspect.Of(f.Q).Owner(0, func(o *inspect.Owner) error { _, err := c.Decide(o.Rules); return err }))
				require.True(t, c.Late)
			}
			queuetest.RequireSettled(t, f.Q)
			for i := range inspect.Of(f.Q).Shards() {
				require.NoError(t, inspect.Of(f.Q).Owner(i, func(s *inspect.Owner) error {
					require.Nil(t, s.Rules.Names.Queues["a"])
					require.EqualValues(t, 3, s.Rules.Names.Given)
					return nil
				}))
			}
			f.Reopen()
		}
		queuetest.RequireInShards(t, f.Q, "b", 1, codeq.Settings{Rate: 9})

		// A caller announces the end of settings to a shard before the message does. The shard
		// keeps its record of them until the message comes.
		queuetest.Configure(t, f.Q, "a", func(s *codeq.Settings) { s.Paused = true })
		queuetest.RequireInShards(t, f.Q, "a", 4, codeq.Settings{Paused: true})
		adoptSettings(t, f.Q, "a", keys.SettingsValue{Version: 5, JSON: []byte("{}")}.Append(nil))
		require.NoError(t, inspect.Of(f.Q).Owner(1, func(s *inspect.Owner) error {
			require.EqualValues(t, 5, s.Rules.Names.Queues["a"].Version)
			require.EqualValues(t, 3, s.Rules.Names.Given, "other settings, which are older, may be on their way")
			return nil
		}))
		queuetest.TakeSettings(t, f.Q, "a", 5, "{}")
		queuetest.RequireSettled(t, f.Q)
		require.NoError(t, inspect.Of(f.Q).Owner(1, func(s *inspect.Owner) error {
			require.Nil(t, s.Rules.Names.Queues["a"])
			return nil
		}))
	})
}

// TestDeleteQueueOfSuspects: tasks that wait because their process died belong to the queue.
func TestDeleteQueueOfSuspects(t *testing.T) {
	disk := crashfs.New()
	queuetest.InFlow(t, *inspect.With(&codeq.Options{Shards: 2, Durability: codeq.DurabilityDisk}, inspect.Private{FS: disk}), func(f *queuetest.FlowTest) {
		ctx, release := context.Background(), make(chan struct{})
		queuetest.Produce(t, f.Q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		m := new(codeq.Mux)
		codeq.Handle(m, "a", func(context.Context, *codeq.Job[[]byte]) error {
			<-release
			return nil
		})
		running, stop := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- f.Q.Run(running, m, &codeq.RunOptions{Concurrency: 2}) }()
		synctest.Wait()
		img := f.Crash(disk)
		close(release)
		stop()
		require.NoError(t, <-ended)
		var used *codeq.NotEmptyError
		require.ErrorAs(t, img.Q.DeleteQueue(ctx, "a"), &used)
		require.EqualValues(t, 2, used.Counts.Total())
		require.NoError(t, img.Q.Close())
	})
}
