package codeq

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/schema"
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
				TenantWeights: map[string]int{"": 2, "x": 65536}, Retention: time.Hour, DeadRetention: Forever, HoldGroups: true,
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
			"Settings.Burst":                 func(s *Settings) { s.Burst = beyond31Bits },
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
		_, err := q.Settings("a")
		require.ErrorIs(t, err, ErrClosed)
		q = openForRun(t, opts)
		require.Zero(t, settingsOf(t, q, "a"))
	})
}

// ofAnotherProcess returns q as a process has it that shares nothing with this
// one but the shards.
func (q *Queue) ofAnotherProcess() *Queue {
	return &Queue{opts: q.opts, replicas: q.replicas, configuring: make(chan struct{}, 1)}
}

// inShards returns what each shard goes by.
func inShards(t *testing.T, q *Queue, queue string) []engine.Configured {
	t.Helper()
	all := make([]engine.Configured, len(q.replicas))
	for i := range all {
		require.NoError(t, q.shard(i).probe(func(s *shard) error {
			all[i] = s.QueueNamed(queue).Configured
			return nil
		}))
	}
	return all
}

// requireInShards makes sure that all shards go by the same settings.
func requireInShards(t *testing.T, q *Queue, queue string, version uint64, want Settings) {
	t.Helper()
	for i, c := range inShards(t, q, queue) {
		require.Equal(t, want, Settings(*c.Settings), "shard %d", i)
		require.Equal(t, version, c.Version, "shard %d", i)
	}
}

// TestConfigureFromProcesses: of changes by several processes at a time none is
// lost.
func TestConfigureFromProcesses(t *testing.T) {
	forShards(t, func(t *testing.T, q *Queue) {
		const processes, calls = 5, 10
		var all sync.WaitGroup
		for range processes {
			other := q.ofAnotherProcess()
			for range calls {
				all.Go(func() {
					if err := other.Configure(context.Background(), "a", func(s *Settings) { s.Concurrency++ }); err != nil {
						t.Error(err)
					}
				})
			}
		}
		all.Wait()
		requireInShards(t, q, "a", processes*calls, Settings{Concurrency: processes * calls})
		requireSettled(t, q)
	})
}

// TestConfigureTriesAgain: who finds that the settings have changed meanwhile
// changes the new ones.
func TestConfigureTriesAgain(t *testing.T) {
	forShards(t, func(t *testing.T, q *Queue) {
		var found []Settings
		configure(t, q, "a", func(s *Settings) {
			found = append(found, *s)
			if len(found) == 1 {
				done := make(chan error)
				go func() { // a call on this stack would be refused
					done <- q.ofAnotherProcess().Configure(t.Context(), "a", func(s *Settings) { s.Concurrency = 3 })
				}()
				require.NoError(t, <-done)
			}
			s.Burst = 1
		})
		require.Equal(t, []Settings{{}, {Concurrency: 3}}, found)
		requireInShards(t, q, "a", 2, Settings{Concurrency: 3, Burst: 1})
		requireSettled(t, q)

		boom := errors.New("boom")
		ctx, cancel := context.WithCancelCause(t.Context())
		require.ErrorIs(t, q.Configure(ctx, "a", func(s *Settings) {
			s.Burst = 2
			cancel(boom)
		}), boom)
		requireInShards(t, q, "a", 2, Settings{Concurrency: 3, Burst: 1})
	})
}

// takeSettings has the first shard take settings, as a Configure does whose caller is
// then gone.
func takeSettings(t *testing.T, q *Queue, queue string, version uint64, set string) {
	t.Helper()
	value := keys.SettingsValue{Version: version, JSON: []byte(set)}.Append(nil)
	op := &configureOp{completion: newCompletion(), queue: queue, value: value}
	_, err := q.do(context.Background(), 0, op)
	require.NoError(t, err)
	require.False(t, op.late)
}

// TestSettingsReachAllShards: what the first shard has taken comes to be in force
// everywhere, whatever happens to the caller.
func TestSettingsReachAllShards(t *testing.T) {
	bubble(t, Options{Shards: 3}, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.Paused = true })
		leased := make(chan *Lease, 3)
		for i := range 3 {
			produce(t, q.startingAt(i), Task{Queue: "a"})
			waiting := waitingClaim(t, q, "a")
			go func() { leased <- <-waiting }()
		}
		takeSettings(t, q, "a", 2, `{"Concurrency":2}`)
		synctest.Wait()
		require.Len(t, leased, 2, "as many as may be leased")
		requireInShards(t, q, "a", 2, Settings{Concurrency: 2})
		requireSettled(t, q)
		takeSettings(t, q, "a", 3, `{}`)
		synctest.Wait()
		require.Len(t, leased, 3)
		requireSettled(t, q)
	})
}

// TestOldSettingsAreIgnored: what arrives late, by a message or from a caller,
// does not replace newer settings; nor does the first shard take what does not
// follow its own.
func TestOldSettingsAreIgnored(t *testing.T) {
	bubble(t, Options{Shards: 3}, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.Concurrency = 1 })
		old := inShards(t, q, "a")[0]
		configure(t, q, "a", func(s *Settings) { s.Concurrency = 2 })
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			s.Probe().Send(1, &keys.Message{Kind: keys.MsgSettings, Queue: "a", Settings: old.Value})
			return nil
		}))
		require.NoError(t, q.enforce(t.Context(), "a", old.Value))
		for _, version := range []uint64{1, 2, 4} {
			value := keys.SettingsValue{Version: version, JSON: []byte("{}")}.Append(nil)
			op := &configureOp{completion: newCompletion(), queue: "a", value: value}
			_, err := q.do(t.Context(), 0, op)
			require.NoError(t, err)
			require.True(t, op.late, "version %d", version)
		}
		requireSettled(t, q)
		requireInShards(t, q, "a", 2, Settings{Concurrency: 2})
	})
}

// TestPowerLossInConfigure: settings that the first shard has stored when the
// power fails, and no other, are in force in all shards after it; its messages
// are on the disk and arrive.
func TestPowerLossInConfigure(t *testing.T) {
	disk := vfs.NewCrashableMem()
	inFlow(t, Options{Shards: 3, Durability: DurabilityDisk, fs: disk}, func(f *flowTest) {
		configure(t, f.q, "a", func(s *Settings) { s.Concurrency = 1 })
		f.check()
		one, two := shut(t, f.q.shard(1)), shut(t, f.q.shard(2))
		configured := make(chan error, 1)
		go func() {
			configured <- f.q.Configure(context.Background(), "a", func(s *Settings) { s.Paused = true })
		}()
		synctest.Wait()
		require.Empty(f, configured)
		require.EqualValues(f, 2, f.underWay(0))
		for i, paused := range []bool{true, false, false} {
			v := f.q.peek(f.q.shard(i))
			value, err := schema.Lookup(v.snap, engine.SettingsKey("a"))
			v.close()
			require.NoError(f, err)
			c, err := engine.ParseSettings(value)
			require.NoError(f, err)
			require.Equal(f, paused, c.Settings.Paused, "shard %d", i)
		}

		img := f.crash(disk)
		require.Zero(f, img.underWay(0))
		for _, to := range []int{1, 2} {
			require.NoError(f, img.q.shard(to).probe(func(s *shard) error {
				require.EqualValues(f, 2, s.Probe().Usage().Inbound[0], "messages that shard %d has taken", to)
				return nil
			}))
		}
		requireInShards(t, img.q, "a", 2, Settings{Concurrency: 1, Paused: true})
		configure(t, img.q, "a", func(s *Settings) { s.Paused = false })
		requireInShards(t, img.q, "a", 3, Settings{Concurrency: 1})
		img.check()
		require.NoError(f, img.q.Close())

		close(one)
		close(two)
		require.NoError(f, <-configured)
		f.reopen()
		requireInShards(t, f.q, "a", 2, Settings{Concurrency: 1, Paused: true})
	})
}

// TestConfigureWithFailedShard: the other shards go by the settings at once, the
// failed one when the queue is opened again.
func TestConfigureWithFailedShard(t *testing.T) {
	inFlow(t, Options{Shards: 3}, func(f *flowTest) {
		f.produceAt(0, Task{Queue: "a"})
		failShard(t, f.q.shard(1))
		require.ErrorIs(f, f.q.Configure(context.Background(), "a", func(s *Settings) { s.Paused = true }), ErrUncertain)
		require.True(f, settingsOf(t, f.q, "a").Paused)
		require.NoError(f, f.q.shard(2).probe(func(s *shard) error {
			require.True(f, s.QueueNamed("a").Settings.Paused)
			return nil
		}))
		require.NoError(f, f.q.Close())
		f.open()
		require.Nil(f, claimNow(t, f.q, "a"))
		f.check()
		requireInShards(t, f.q, "a", 1, Settings{Paused: true})
	})
}

// TestLostSettings: at DurabilityProcess a power loss may take the last settings
// from some shards only. Then all go by those that are left, and newer ones
// are newer than these.
func TestLostSettings(t *testing.T) {
	for _, kept := range []string{"queue/shard-000", "queue/shard-001"} {
		disk := vfs.NewCrashableMem()
		inFlow(t, Options{Shards: 3, fs: disk}, func(f *flowTest) {
			configure(t, f.q, "a", func(s *Settings) { s.Concurrency = 1 })
			synctest.Wait()
			for i := range 3 {
				syncLogs(t, disk, fmt.Sprintf("queue/shard-%03d", i))
			}
			configure(t, f.q, "a", func(s *Settings) { s.Concurrency = 2 })
			configure(t, f.q, "b", func(s *Settings) { s.Concurrency = 3 })
			synctest.Wait()
			syncLogs(t, disk, kept)

			img := f.crash(disk)
			requireInShards(t, img.q, "a", 2, Settings{Concurrency: 2})
			requireInShards(t, img.q, "b", 1, Settings{Concurrency: 3})
			configure(t, img.q, "a", func(s *Settings) { s.Burst = 1 })
			requireInShards(t, img.q, "a", 3, Settings{Concurrency: 2, Burst: 1})
			img.reopen()
			requireInShards(t, img.q, "a", 3, Settings{Concurrency: 2, Burst: 1})
			require.NoError(f, img.q.Close())
		})
	}
}

// TestSettingsOfTheFirstShardOnly: a directory whose first shard alone has
// settings, and these without a version, is read.
func TestSettingsOfTheFirstShardOnly(t *testing.T) {
	inFlow(t, Options{Shards: 3}, func(f *flowTest) {
		for i := range 3 {
			f.produceAt(i, Task{Queue: "a"})
		}
		require.NoError(f, f.q.shard(0).Store.DB().Set(engine.SettingsKey("a"), []byte(`{"Paused":true,"Rate":2}`), pebble.Sync))
		require.NoError(f, f.q.Close())
		f.open()
		require.Nil(f, claimNow(t, f.q, "a"))
		f.check()
		requireInShards(t, f.q, "a", 1, Settings{Paused: true, Rate: 2})
		require.NoError(f, f.q.Resume(context.Background(), "a"))
		f.reopen()
		requireInShards(t, f.q, "a", 2, Settings{Rate: 2})
	})
}

// TestSettingsAreListed: Stats has a queue with settings and no tasks, after a restart as
// well, and none without both.
func TestSettingsAreListed(t *testing.T) {
	dir, ctx := t.TempDir(), context.Background()
	for range 2 {
		q, err := Open(dir, &Options{Shards: 2})
		require.NoError(t, err)
		require.NoError(t, q.Pause(ctx, "paused"))
		_, err = q.Claim(ctx, ClaimRequest{Queues: []string{"unknown"}, NoWait: true})
		require.ErrorIs(t, err, ErrEmpty)
		st, err := q.Stats(ctx)
		require.NoError(t, err)
		require.Equal(t, map[string]Counts{"paused": {}}, st)
		require.NoError(t, q.Close())
	}
}

// TestRefusedSettings: settings that another process or node has stored, and this one does not allow, are
// refused by an error that callers know.
func TestRefusedSettings(t *testing.T) {
	inFlow(t, Options{Shards: 1}, func(f *flowTest) {
		value := keys.SettingsValue{Version: 1, JSON: []byte(`{"Concurrency":-1}`)}.Append(nil)
		for _, op := range []request{
			&adoptOp{completion: newCompletion(), queue: "a", value: value},
			&configureOp{completion: newCompletion(), queue: "a", value: value},
		} {
			_, err := f.q.do(context.Background(), 0, op)
			var invalid *InvalidError
			require.ErrorAs(f, err, &invalid)
			require.ErrorIs(f, err, ErrInvalid)
			require.Equal(f, "Settings.Concurrency", invalid.Field)
		}
		_, err := f.q.do(context.Background(), 0, &adoptOp{completion: newCompletion(), queue: "a", value: value})
		require.ErrorContains(f, err, `queue "a"`)
	})
}
