package codeq

import (
	"context"
	"maps"
	"path"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/store"
	"codeq/internal/testkit"
)

// payloadsOf returns the payloads of tasks, in the order of FlowTest.Payloads.
func payloadsOf(tasks ...[]Task) (all []string) {
	for _, t := range slices.Concat(tasks...) {
		all = append(all, string(t.Payload))
	}
	slices.SortFunc(all, byLength)
	return all
}

// isSending reports whether some messages of a shard are not confirmed.
func (s *shard) isSending() bool {
	return slices.ContainsFunc(s.Probe().Usage().OutWaiting, func(n uint64) bool { return n > 0 })
}

// keptMessages is how many messages of a shard are stored.
func (f *FlowTest) keptMessages(from int) (n int) {
	f.Helper()
	synctest.Wait()
	v := f.Q.peek(f.Q.shard(from))
	defer v.close()
	require.NoError(f, store.Scan(v.snap, keys.Outbound, func(_, _ []byte) error {
		n++
		return nil
	}))
	return n
}

// TestFollowUpsReachTheirShards: follow-ups that belong to other shards arrive
// there once each, more of them than are under way at a time.
func TestFollowUpsReachTheirShards(t *testing.T) {
	inFlow(t, Options{Shards: 3, Durability: DurabilityProcess}, func(f *FlowTest) {
		const n = 2*engine.BatchCap + 100
		f.ProduceAt(0, Task{Queue: "start"})
		next := slices.Concat(f.Bound("a", 0, 1), f.Bound("a", 1, n), f.Bound("a", 2, n))
		f.Complete("start", next...)
		require.Equal(f, payloadsOf(next), f.Payloads())
		for i, want := range []uint64{1, n, n} {
			var got uint64
			require.NoError(f, f.Q.shard(i).probe(func(s *shard) error {
				got = s.QueueNamed("a").Counts.Ready
				return nil
			}))
			require.Equal(f, want, got)
		}
		require.Zero(f, f.UnderWay(0))
		require.Equal(f, 2*n, f.keptMessages(0))
		time.Sleep(time.Second)
		require.Zero(f, f.keptMessages(0))
		f.Reopen()
		require.Equal(f, payloadsOf(next), f.Payloads())
		require.NoError(f, f.Q.Complete(context.Background(), f.Claim("a").Receipt, nil, f.Bound("b", 2, 1)...))
		f.Check()
		require.EqualValues(f, 1, f.Counts("b").Ready, "the numbers of messages go on")
	})
}

// numbersCommitter counts the commits of a shard with messages, and how often
// they store a number of a last message.
type numbersCommitter struct {
	committer
	commits, numbers int
}

func (c *numbersCommitter) Commit(b *pebble.Batch) error {
	messages, numbers := 0, 0
	for r := b.Reader(); ; {
		kind, key, _, ok, err := r.Next()
		if err != nil {
			return err
		}
		if !ok {
			break
		}
		switch {
		case kind != pebble.InternalKeyKindSet:
		case key[0] == keys.Outbound:
			messages++
		case key[0] == keys.Sent:
			numbers++
		}
	}
	if messages > 0 {
		c.commits++
	}
	c.numbers += numbers
	return c.committer.Commit(b)
}

// TestNumbersAreStored: a shard knows from its own disk how its messages are
// numbered, also when all have been taken; a commit tells it once for each receiver.
func TestNumbersAreStored(t *testing.T) {
	inFlow(t, Options{Shards: 3}, func(f *FlowTest) {
		var c numbersCommitter
		require.NoError(f, f.Q.shard(0).probe(func(s *shard) error {
			c.committer, s.commit = s.commit, &c
			return nil
		}))
		own := func(want ...uint64) {
			f.Helper()
			f.Check()
			require.NoError(f, f.Q.shard(0).probe(func(s *shard) error {
				alone := newShard(0, s.opts, s.Store, dispatch.NewGates())
				defer func() { _ = alone.Group.Batch.Close() }()
				require.NoError(f, alone.Probe().ReloadOutbox(3))
				stored, held := alone.Probe().Usage(), s.Probe().Usage()
				require.Equal(f, want, stored.OutNext)
				require.Equal(f, want, held.OutNext)
				require.Equal(f, held.OutFirst, stored.OutFirst)
				require.False(f, alone.Probe().NumbersAhead())
				return nil
			}))
		}
		own(1, 1, 1)
		for round := range uint64(3) {
			f.ProduceAt(0, Task{Queue: "start"})
			f.Complete("start", slices.Concat(f.Bound("a", 1, 4), f.Bound("a", 2, 2))...)
			own(1, 4*(round+1)+1, 2*(round+1)+1)
		}
		require.Equal(f, 3, c.commits)
		require.Equal(f, 3*2, c.numbers)
		time.Sleep(time.Second) // until they are deleted
		f.ProduceAt(0, Task{Queue: "start"})
		l := f.Claim("start")
		open := shut(t, f.Q, 1)
		require.NoError(f, f.Q.Complete(context.Background(), l.Receipt, nil, f.Bound("a", 1, 3)...))
		synctest.Wait()
		require.NoError(f, f.Q.shard(0).probe(func(s *shard) error {
			alone := newShard(0, s.opts, s.Store, dispatch.NewGates())
			defer func() { _ = alone.Group.Batch.Close() }()
			require.NoError(f, alone.Probe().ReloadOutbox(3))
			require.Equal(f, []uint64{1, 13, 7}, alone.Probe().Usage().OutFirst)
			require.Equal(f, []uint64{1, 16, 7}, alone.Probe().Usage().OutNext)
			return nil
		}))
		close(open)
		own(1, 16, 7)
	})
}

// TestNumbersThatAreNotStored: a directory without the numbers of the last
// messages is read, and gets them.
func TestNumbersThatAreNotStored(t *testing.T) {
	disk := crashfs.New()
	inFlow(t, *inspect.With(&Options{Shards: 3, Durability: DurabilityDisk}, inspect.Private{FS: disk}), func(f *FlowTest) {
		f.ProduceAt(0, Task{Queue: "start"})
		f.ProduceAt(0, Task{Queue: "start"})
		f.Complete("start", slices.Concat(f.Bound("a", 1, 4), f.Bound("a", 2, 2))...)
		first := f.Claim("start")
		open := shut(t, f.Q, 1)
		require.NoError(f, f.Q.Complete(context.Background(), first.Receipt, nil, f.Bound("b", 1, 3)...))
		synctest.Wait()
		lower, upper := keys.Range(keys.Sent)
		require.NoError(f, f.Q.shard(0).Store.DB().DeleteRange(lower, upper, pebble.Sync))

		img := &FlowTest{T: t, Opts: f.Opts}
		inspect.Options(&img.Opts).FS = disk.CrashClone(vfs.CrashCloneCfg{})
		img.Open()
		img.Check()
		require.Equal(f, Counts{Ready: 6}, img.Counts("a"))
		require.Equal(f, Counts{Ready: 3}, img.Counts("b"))
		require.NoError(f, img.Q.shard(0).probe(func(s *shard) error {
			require.Equal(f, []uint64{1, 8, 3}, s.Probe().Usage().OutNext)
			require.Equal(f, []uint64{0, 7, 2}, s.Probe().Usage().OutStored)
			return nil
		}))
		require.NoError(f, img.Q.Close())
		require.NoError(f, f.Q.shard(0).probe(func(s *shard) error {
			s.Probe().LoseNumbers() // as on the disk
			return nil
		}))
		close(open)
	})
}

// TestMessagesAreKeptUntilDurable: the receiver of a message that has not synced its log may lose
// with its power what it has taken, whatever the sender has synced; it gets the message again.
// The next messages and WaitIdle do not wait for that. At DurabilityDisk a message is deleted once
// it is taken.
func TestMessagesAreKeptUntilDurable(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, level := range []Durability{DurabilityProcess, DurabilityNone, DurabilityDisk} {
		t.Run(level.String(), func(t *testing.T) {
			disk := crashfs.New()
			var mu sync.Mutex
			syncs := make(map[string]int) // of logs; guarded by mu
			counted := func() map[string]int {
				mu.Lock()
				defer mu.Unlock()
				return maps.Clone(syncs)
			}
			reset := func() {
				mu.Lock()
				defer mu.Unlock()
				clear(syncs)
			}
			fs := &testkit.HookFS{FS: disk, Before: func(op, name string) error {
				if op == "sync" && path.Ext(name) == ".log" {
					mu.Lock()
					syncs[path.Base(path.Dir(name))]++
					mu.Unlock()
				}
				return nil
			}}
			inFlow(t, *inspect.With(&Options{Shards: 3, Durability: level}, inspect.Private{FS: fs}), func(f *FlowTest) {
				const n = engine.BatchCap + 10
				f.ProduceAt(0, Task{Queue: "start"})
				l := f.Claim("start")
				require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil, f.Bound("a", 1, n)...))
				synctest.Wait()
				require.Zero(f, f.UnderWay(0), "the second batch did not wait for a sync")
				require.NoError(f, f.Q.WaitIdle(ctx, "start"))
				if level == DurabilityDisk {
					require.Zero(f, f.keptMessages(0))
					return
				}
				require.Equal(f, n, f.keptMessages(0))
				require.NoError(f, f.Q.shard(0).Store.DB().LogData(nil, pebble.Sync)) // to the operating system
				testkit.SyncLogs(t, disk, "queue/shard-000")
				img := f.Crash(disk)
				require.Equal(f, Counts{Ready: n}, img.Counts("a"), "they are taken again")
				require.NoError(f, img.Q.Close())

				reset()
				time.Sleep(time.Second)
				require.Zero(f, f.keptMessages(0))
				img = f.Crash(disk)
				require.Equal(f, Counts{Ready: n}, img.Counts("a"))
				require.NoError(f, img.Q.Close())
				require.Equal(f, map[string]int{"shard-001": 1}, counted())
				time.Sleep(time.Hour)
				require.Equal(f, map[string]int{"shard-001": 1}, counted(), "it sleeps")

				reset()
				for range 100 { // five seconds
					f.ProduceAt(0, Task{Queue: "start"})
					f.Complete("start", f.Bound("b", 1, 1)...)
					time.Sleep(50 * time.Millisecond)
				}
				time.Sleep(time.Minute)
				require.Equal(f, map[string]int{"shard-001": 5}, counted(), "once a second, and once after the last")
				require.Zero(f, f.keptMessages(0))
			})
		})
	}
}
