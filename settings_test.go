package codeq

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/call"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/store"
)

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

// takeSettings makes the first shard take settings, as a Configure does whose caller is
// then gone.
func takeSettings(t *testing.T, q *Queue, queue string, version uint64, set string) {
	t.Helper()
	value := keys.SettingsValue{Version: version, JSON: []byte(set)}.Append(nil)
	c := &call.Configure{Queue: queue, Value: value}
	_, err := q.do(context.Background(), 0, rule(callConfigure, c))
	require.NoError(t, err)
	require.False(t, c.Late)
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
			c := &call.Configure{Queue: "a", Value: value}
			_, err := q.do(t.Context(), 0, rule(callConfigure, c))
			require.NoError(t, err)
			require.True(t, c.Late, "version %d", version)
		}
		requireSettled(t, q)
		requireInShards(t, q, "a", 2, Settings{Concurrency: 2})
	})
}

// TestPowerLossInConfigure: settings that the first shard has stored when the
// power fails, and no other, are in force in all shards after it; its messages
// are on the disk and arrive.
func TestPowerLossInConfigure(t *testing.T) {
	disk := crashfs.New()
	inFlow(t, *inspect.With(&Options{Shards: 3, Durability: DurabilityDisk}, inspect.Private{FS: disk}), func(f *FlowTest) {
		configure(t, f.Q, "a", func(s *Settings) { s.Concurrency = 1 })
		f.Check()
		one, two := shut(t, f.Q, 1), shut(t, f.Q, 2)
		configured := make(chan error, 1)
		go func() {
			configured <- f.Q.Configure(context.Background(), "a", func(s *Settings) { s.Paused = true })
		}()
		synctest.Wait()
		require.Empty(f, configured)
		require.EqualValues(f, 2, f.UnderWay(0))
		for i, paused := range []bool{true, false, false} {
			v := f.Q.peek(f.Q.shard(i))
			value, err := store.Lookup(v.snap, append([]byte{keys.Settings}, "a"...))
			v.close()
			require.NoError(f, err)
			c, err := engine.ParseSettings(value)
			require.NoError(f, err)
			require.Equal(f, paused, c.Settings.Paused, "shard %d", i)
		}

		img := f.Crash(disk)
		require.Zero(f, img.UnderWay(0))
		for _, to := range []int{1, 2} {
			require.NoError(f, img.Q.shard(to).probe(func(s *shard) error {
				require.EqualValues(f, 2, s.Probe().Usage().Inbound[0], "messages that shard %d has taken", to)
				return nil
			}))
		}
		requireInShards(t, img.Q, "a", 2, Settings{Concurrency: 1, Paused: true})
		configure(t, img.Q, "a", func(s *Settings) { s.Paused = false })
		requireInShards(t, img.Q, "a", 3, Settings{Concurrency: 1})
		img.Check()
		require.NoError(f, img.Q.Close())

		close(one)
		close(two)
		require.NoError(f, <-configured)
		f.Reopen()
		requireInShards(t, f.Q, "a", 2, Settings{Concurrency: 1, Paused: true})
	})
}

// TestConfigureWithFailedShard: the other shards go by the settings at once, the
// failed one when the queue is opened again.
func TestConfigureWithFailedShard(t *testing.T) {
	inFlow(t, Options{Shards: 3}, func(f *FlowTest) {
		f.ProduceAt(0, Task{Queue: "a"})
		failShard(t, f.Q, 1)
		require.ErrorIs(f, f.Q.Configure(context.Background(), "a", func(s *Settings) { s.Rate = 5 }), ErrUncertain)
		err := f.Q.Pause(context.Background(), "a") // which only the shards that work adopt
		require.ErrorIs(f, err, ErrUncertain)
		require.ErrorIs(f, err, ErrFailed)
		set, err := f.Q.Settings("a")
		require.NoError(f, err)
		require.True(f, set.Paused)
		require.NoError(f, f.Q.shard(2).probe(func(s *shard) error {
			require.True(f, s.QueueNamed("a").Settings.Paused)
			return nil
		}))
		require.ErrorIs(f, f.Q.Close(), ErrFailed)
		f.Open()
		require.Nil(f, claimNow(t, f.Q, "a"))
		f.Check()
		requireInShards(t, f.Q, "a", 2, Settings{Paused: true, Rate: 5})
	})
}

// TestSettingsOfTheFirstShardOnly: a directory whose first shard alone has
// settings, and these without a version, is read.
func TestSettingsOfTheFirstShardOnly(t *testing.T) {
	inFlow(t, Options{Shards: 3}, func(f *FlowTest) {
		for i := range 3 {
			f.ProduceAt(i, Task{Queue: "a"})
		}
		require.NoError(f, f.Q.shard(0).Store.DB().Set(append([]byte{keys.Settings}, "a"...), []byte(`{"Paused":true,"Rate":2}`), pebble.Sync))
		require.NoError(f, f.Q.Close())
		f.Open()
		require.Nil(f, claimNow(t, f.Q, "a"))
		f.Check()
		requireInShards(t, f.Q, "a", 1, Settings{Paused: true, Rate: 2})
		require.NoError(f, f.Q.Resume(context.Background(), "a"))
		f.Reopen()
		requireInShards(t, f.Q, "a", 2, Settings{Rate: 2})
	})
}

// TestRefusedSettings: settings that another process or node has stored, and this one does not
// allow, are refused by an error that callers know.
func TestRefusedSettings(t *testing.T) {
	inFlow(t, Options{Shards: 1}, func(f *FlowTest) {
		value := keys.SettingsValue{Version: 1, JSON: []byte(`{"Concurrency":-1}`)}.Append(nil)
		for _, op := range []request{
			rule(callAdopt, &call.Adopt{Queue: "a", Value: value}),
			rule(callConfigure, &call.Configure{Queue: "a", Value: value}),
		} {
			_, err := f.Q.do(context.Background(), 0, op)
			var invalid *InvalidError
			require.ErrorAs(f, err, &invalid)
			require.ErrorIs(f, err, ErrInvalid)
			require.Equal(f, "Settings.Concurrency", invalid.Field)
		}
		_, err := f.Q.do(context.Background(), 0, rule(callAdopt, &call.Adopt{Queue: "a", Value: value}))
		require.ErrorContains(f, err, `queue "a"`)
	})
}

// TestRemovedSettingsStayRemoved: what comes late of settings that were removed, by a message or
// from a caller, brings them back in no shard, also after Open; and the next settings are newer.
func TestRemovedSettingsStayRemoved(t *testing.T) {
	inFlow(t, Options{Shards: 3}, func(f *FlowTest) {
		ctx := context.Background()
		configure(t, f.Q, "b", func(s *Settings) { s.Rate = 9 })
		configure(t, f.Q, "a", func(s *Settings) { s.Concurrency = 1 })
		old := inShards(t, f.Q, "a")[0].Value
		configure(t, f.Q, "a", func(s *Settings) { s.Paused = true })
		late := inShards(t, f.Q, "a")[0].Value
		require.NoError(t, f.Q.DeleteQueue(ctx, "a"))
		none := keys.SettingsValue{Version: 3, JSON: []byte("{}")}.Append(nil)
		for range 2 {
			for _, value := range [][]byte{old, late, none} {
				require.NoError(t, f.Q.enforce(ctx, "a", value))
				require.NoError(t, f.Q.shard(0).probe(func(s *shard) error {
					s.Probe().Send(1, &keys.Message{Kind: keys.MsgSettings, Queue: "a", Settings: value})
					return nil
				}))
				c := &call.Configure{Queue: "a", Value: value}
				_, err := f.Q.do(ctx, 0, rule(callConfigure, c))
				require.NoError(t, err)
				require.True(t, c.Late)
			}
			requireSettled(t, f.Q)
			for i := range f.Q.replicas {
				require.NoError(t, f.Q.shard(i).probe(func(s *shard) error {
					require.Nil(t, s.Queues["a"])
					require.EqualValues(t, 3, s.Given)
					return nil
				}))
			}
			f.Reopen()
		}
		requireInShards(t, f.Q, "b", 1, Settings{Rate: 9})

		// A caller tells a shard of the end of settings before the message does: they are kept
		// until then.
		configure(t, f.Q, "a", func(s *Settings) { s.Paused = true })
		requireInShards(t, f.Q, "a", 4, Settings{Paused: true})
		require.NoError(t, f.Q.enforce(ctx, "a", keys.SettingsValue{Version: 5, JSON: []byte("{}")}.Append(nil)))
		require.NoError(t, f.Q.shard(1).probe(func(s *shard) error {
			require.EqualValues(t, 5, s.Queues["a"].Version)
			require.EqualValues(t, 3, s.Given, "other settings, which are older, may be on their way")
			return nil
		}))
		takeSettings(t, f.Q, "a", 5, "{}")
		requireSettled(t, f.Q)
		require.NoError(t, f.Q.shard(1).probe(func(s *shard) error {
			require.Nil(t, s.Queues["a"])
			return nil
		}))
	})
}

// TestDeleteQueueInCluster: a queue that is used on any node is not deleted, and the error says
// how. When it is deleted while a node is down, neither that node, with its older store, nor a late
// caller brings its settings back; and it may be used again at once.
func TestDeleteQueueInCluster(t *testing.T) {
	t.Parallel()
	simCaseOf(t, Options{Shards: 2}, 0, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		leader, other := c.lead()
		down := other
		for _, n := range c.members() {
			if n != leader && n != other {
				down = n
			}
		}
		set := Settings{Concurrency: 2, Rate: 100, DeadRetention: time.Hour}
		require.NoError(t, simQueue(down).Configure(ctx, "a", func(s *Settings) { *s = set }))
		refused := func(want NotEmptyError) {
			t.Helper()
			want.Queue = "a"
			for _, n := range c.members() {
				var got *NotEmptyError
				require.ErrorAs(t, simQueue(n).DeleteQueue(ctx, "a"), &got)
				if got.Claims = min(got.Claims, 1); want.Counts.Total() > 0 { // what was claimed elsewhere
					got.Claims = 0
				}
				require.Equal(t, want, *got)
			}
		}
		deletes := func(by *simNode) {
			t.Helper()
			for began := time.Now(); ; time.Sleep(time.Second) {
				err := simQueue(by).DeleteQueue(ctx, "a")
				if err == nil {
					return
				}
				require.ErrorIs(t, err, ErrNotEmpty)
				require.Less(t, time.Since(began), 21*time.Second)
			}
		}

		id, err := simQueue(down).Produce(ctx, Task{Queue: "a", Unique: Unique{Key: "k", For: time.Hour}})
		require.NoError(t, err)
		require.NoError(t, simQueue(other).SetSchedule(ctx, Schedule{Name: "s", Cron: "@yearly", Task: Task{Queue: "a"}}))
		refused(NotEmptyError{Counts: Counts{Ready: 1}, Keys: 1, Schedules: 1})
		require.NoError(t, simQueue(leader).Cancel(ctx, id))
		refused(NotEmptyError{Keys: 1, Schedules: 1})
		require.NoError(t, simQueue(down).ReleaseKey(ctx, UniqueKey{Queue: "a", Key: "k"}))
		require.NoError(t, simQueue(down).DeleteSchedule(ctx, "s"))
		for _, n := range c.members() {
			claiming, stop := context.WithCancel(ctx)
			ended := make(chan error, 1)
			go func() {
				_, err := simQueue(n).Claim(claiming, ClaimRequest{Queues: []string{"a"}})
				ended <- err
			}()
			time.Sleep(time.Second)
			refused(NotEmptyError{Claims: 1})
			stop()
			require.ErrorIs(t, <-ended, context.Canceled)
			time.Sleep(time.Second)
		}
		deletes(other)
		require.NoError(t, simQueue(down).Configure(ctx, "a", func(s *Settings) { *s = set }))

		old, err := simQueue(other).configured(ctx, "a")
		require.NoError(t, err)
		down.crash(0)
		c.awaitLeaders()
		require.NoError(t, simQueue(other).DeleteQueue(ctx, "a"))
		for i := range 2 {
			c.snapshot(c.leader(i), i, 1)
		}
		late := func(by *simNode) {
			t.Helper()
			require.NoError(t, simQueue(by).enforce(ctx, "a", old.Value))
			first := &call.Configure{Queue: "a", Value: old.Value}
			_, err := simQueue(by).do(ctx, 0, rule(callConfigure, first))
			require.NoError(t, err)
			require.True(t, first.Late)
			set, err := simQueue(by).Settings("a")
			require.NoError(t, err)
			require.Zero(t, set)
			infos, err := simQueue(by).Info(ctx)
			require.NoError(t, err)
			require.Empty(t, infos)
		}
		late(other)
		down.start()
		c.awaitReady()
		for i := range 2 {
			if c.awaitLeaders(); c.leader(i) != down {
				c.transfer(c.leader(i), i, down)
			}
		}
		c.awaitLeaders()
		late(down)
		late(other)

		for range 3 {
			require.NoError(t, simQueue(other).Configure(ctx, "a", func(s *Settings) { *s = set }))
			id, err := simQueue(down).Produce(ctx, Task{Queue: "a"})
			require.NoError(t, err)
			refused(NotEmptyError{Counts: Counts{Ready: 1}})
			l, err := simQueue(other).Claim(ctx, ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, id, l.ID)
			refused(NotEmptyError{Counts: Counts{Leased: 1}})
			require.NoError(t, simQueue(down).Complete(ctx, l.Receipt, nil))
			deletes(other)
			infos, err := simQueue(down).Info(ctx)
			require.NoError(t, err)
			require.Empty(t, infos)
		}
	})
}

// TestDeletedQueueAfterRecovery: RecoverCluster brings back no settings of a queue that was
// deleted, and neither does a late call; the next settings are newer.
func TestDeletedQueueAfterRecovery(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		c := newSimCluster(t, 1, 3, Options{Shards: 2})
		c.awaitLeaders()
		n := c.members()[2]
		require.NoError(t, simQueue(n).Configure(ctx, "a", func(s *Settings) { s.Paused = true }))
		old, err := simQueue(n).configured(ctx, "a")
		require.NoError(t, err)
		require.NoError(t, simQueue(n).DeleteQueue(ctx, "a"))
		c.rest()
		for _, lost := range c.members() {
			lost.crash(100)
		}
		c.nodes = []*simNode{n}
		require.NoError(t, c.recover(n))
		n.start()
		c.awaitLeaders()
		q := simQueue(n)
		for range 2 {
			requireInShards(t, q, "a", 0, Settings{})
			require.NoError(t, q.enforce(ctx, "a", old.Value))
			late := &call.Configure{Queue: "a", Value: old.Value}
			_, err = q.do(ctx, 0, rule(callConfigure, late))
			require.NoError(t, err)
			require.True(t, late.Late)
		}
		require.NoError(t, q.Configure(ctx, "a", func(s *Settings) { s.Burst = 1 }))
		requireInShards(t, q, "a", 3, Settings{Burst: 1})
		c.close()
	})
}

// TestDeleteQueueOfSuspects: tasks that wait since their process has died are tasks of the queue.
func TestDeleteQueueOfSuspects(t *testing.T) {
	disk := crashfs.New()
	inFlow(t, *inspect.With(&Options{Shards: 2, Durability: DurabilityDisk}, inspect.Private{FS: disk}), func(f *FlowTest) {
		ctx, release := context.Background(), make(chan struct{})
		produce(t, f.Q, Task{Queue: "a"}, Task{Queue: "a"})
		m := new(Mux)
		Handle(m, "a", func(context.Context, *Job[[]byte]) error {
			<-release
			return nil
		})
		running, stop := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- f.Q.Run(running, m, &RunOptions{Concurrency: 2}) }()
		synctest.Wait()
		img := f.Crash(disk)
		close(release)
		stop()
		require.NoError(t, <-ended)
		var used *NotEmptyError
		require.ErrorAs(t, img.Q.DeleteQueue(ctx, "a"), &used)
		require.EqualValues(t, 2, used.Counts.Total())
		require.NoError(t, img.Q.Close())
	})
}
