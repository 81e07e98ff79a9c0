package codeq_test

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

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestMessagesKeepTheirOrder: of the tasks of one sender, the first produced is the first served.
func TestMessagesKeepTheirOrder(t *testing.T) {
	queuetest.InFlow(t, codeq.Options{Shards: 3}, func(f *queuetest.FlowTest) {
		for range 3 {
			f.ProduceAt(0, codeq.Task{Queue: "start"})
		}
		tasks := f.Bound("a", 1, 3*engine.BatchCap)
		for i := range 3 {
			f.Complete("start", tasks[i*engine.BatchCap:(i+1)*engine.BatchCap]...)
		}
		for i := range tasks {
			l := f.Claim("a")
			require.Equal(f, string(tasks[i].Payload), string(l.Payload))
			require.NoError(f, f.Q.Complete(context.Background(), l.Receipt, nil))
		}
	})
}

// TestMessagesToFailedShard: messages to a shard that has failed wait for the
// next Open; their sender goes on meanwhile.
func TestMessagesToFailedShard(t *testing.T) {
	ctx := context.Background()
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk} {
		queuetest.InFlow(t, codeq.Options{Shards: 3, Durability: level}, func(f *queuetest.FlowTest) {
			parent := f.ProduceAt(0, codeq.Task{Queue: "parent"})
			child := f.ProduceAt(1, codeq.Task{Queue: "child", After: []codeq.ID{parent}})
			f.ProduceAt(0, codeq.Task{Queue: "start"})
			f.ProduceAt(0, codeq.Task{Queue: "start"})
			synctest.Wait()
			zero := queuetest.StartingAt(f.Q, 0)
			finish := func(queue string, next ...codeq.Task) {
				f.Helper()
				l, err := zero.Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}})
				require.NoError(f, err)
				require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil, next...))
				synctest.Wait()
			}
			queuetest.FailShard(t, f.Q, 1)
			finish("start", slices.Concat(f.Bound("a", 1, 3), f.Bound("a", 2, 3))...)
			finish("parent")
			finish("start", f.Bound("b", 1, 3)...)
			require.EqualValues(f, 3+1+3, f.UnderWay(0))
			require.ErrorIs(f, f.Q.Close(), codeq.ErrFailed)

			f.Open()
			f.Check()
			require.Zero(f, f.UnderWay(0))
			require.Equal(f, codeq.Counts{Ready: 6}, f.Counts("a"))
			require.Equal(f, codeq.Counts{Ready: 3}, f.Counts("b"))
			f.RequireState(codeq.Ready, child)
		})
	}
}

// TestWaitIdleWaitsForMessages: a task on its way to another shard does not count as done.
func TestWaitIdleWaitsForMessages(t *testing.T) {
	ctx := context.Background()
	for sender := range 3 {
		queuetest.InFlow(t, codeq.Options{Shards: 3}, func(f *queuetest.FlowTest) {
			f.ProduceAt(sender, codeq.Task{Queue: "start"})
			receiver := (sender + 1) % 3
			l := f.Claim("start")
			open := queuetest.Shut(t, f.Q, receiver)
			require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil, f.Bound("a", receiver, 1)...))
			synctest.Wait()
			idle := make(chan error, 1)
			go func() { idle <- f.Q.WaitIdle(ctx) }()
			synctest.Wait()
			require.Empty(f, idle)
			close(open)
			synctest.Wait()
			require.Empty(f, idle)
			f.Complete("a")
			require.NoError(f, <-idle)
		})
	}
}

// TestWaitIdleWaitsForWhatIsToBeSent: a sender stores a task in the same commit that answers
// WaitIdle. This task does not count as done.
func TestWaitIdleWaitsForWhatIsToBeSent(t *testing.T) {
	ctx := context.Background()
	queuetest.InFlow(t, codeq.Options{Shards: 3}, func(f *queuetest.FlowTest) {
		f.ProduceAt(2, codeq.Task{Queue: "a"})
		l := f.Claim("a")
		open := queuetest.Shut(t, f.Q, 2)
		go func() { _, _ = queuetest.StartingAt(f.Q, 2).Produce(ctx, codeq.Task{Queue: "z"}) }()
		synctest.Wait()
		go func() { _ = f.Q.Complete(ctx, l.Receipt, nil, f.Bound("a", 0, 1)...) }()
		synctest.Wait()
		idle := make(chan error, 1)
		go func() { idle <- f.Q.WaitIdle(ctx, "a") }()
		synctest.Wait()
		close(open)
		synctest.Wait()
		require.Empty(f, idle)
		f.Complete("a")
		require.NoError(f, <-idle)
	})
}

// TestWaitIdleSeesWhatHasMoved: WaitIdle finds a shard idle, and then a task arrives there from a
// shard that is asked later. This task is not missed.
func TestWaitIdleSeesWhatHasMoved(t *testing.T) {
	ctx := context.Background()
	queuetest.InFlow(t, codeq.Options{Shards: 3}, func(f *queuetest.FlowTest) {
		f.ProduceAt(2, codeq.Task{Queue: "a"})
		l := f.Claim("a")
		open := queuetest.Shut(t, f.Q, 1)
		go func() { _, _ = queuetest.StartingAt(f.Q, 1).Produce(ctx, codeq.Task{Queue: "z"}) }()
		synctest.Wait() // shard 1 is in a commit
		idle := make(chan error, 1)
		go func() { idle <- f.Q.WaitIdle(ctx, "a") }()
		synctest.Wait() // shard 0 is idle; shard 1 is being asked
		require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil, f.Bound("a", 0, 1)...))
		synctest.Wait() // now shard 0 has the task, and shard 2 has none
		close(open)
		synctest.Wait()
		require.Empty(f, idle)
		f.Complete("a")
		require.NoError(f, <-idle)
	})
}

// TestLostTailOfMessages: at DurabilityProcess a power loss may take the last messages from their
// sender and leave their effects in the receiver. Sender and receiver then go on, and come to rest.
func TestLostTailOfMessages(t *testing.T) {
	ctx := context.Background()
	disk := crashfs.New()
	queuetest.InFlow(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 3, Durability: codeq.DurabilityProcess}), func(f *queuetest.FlowTest) {
		f.ProduceAt(0, codeq.Task{Queue: "start"})
		f.ProduceAt(0, codeq.Task{Queue: "start"})
		first, second := f.Claim("start"), f.Claim("start")
		atReceiver := queuetest.Shut(t, f.Q, 1)
		require.NoError(f, f.Q.Complete(ctx, first.Receipt, nil, f.Bound("a", 1, 2)...))
		synctest.Wait()
		testkit.SyncLogs(t, disk, "queue/shard-000")
		require.NoError(f, f.Q.Complete(ctx, second.Receipt, nil, f.Bound("b", 1, 2)...))
		synctest.Wait()
		close(atReceiver)
		synctest.Wait()
		testkit.SyncLogs(t, disk, "queue/shard-001")
		require.Equal(f, codeq.Counts{Ready: 2}, f.Counts("b"))

		img := f.Crash(disk) // comes to rest, or the bubble would not
		require.EqualValues(f, 1, img.Counts("start").Total(), "the second completion is lost")
		require.Equal(f, codeq.Counts{Ready: 2}, img.Counts("a"))
		require.Equal(f, codeq.Counts{Ready: 2}, img.Counts("b"), "and what it did elsewhere is not")
		require.Zero(f, img.UnderWay(0))
		img.ProduceAt(0, codeq.Task{Queue: "again"})
		img.Complete("again", f.Bound("c", 1, 3)...)
		require.Equal(f, codeq.Counts{Ready: 3}, img.Counts("c"))
		require.NoError(f, img.Q.WaitIdle(ctx, "again"))
		img.Reopen()
		require.Equal(f, codeq.Counts{Ready: 3}, img.Counts("c"))
		require.NoError(f, img.Q.Close())
	})
}

// payloadsOf returns the payloads of tasks, in the order of FlowTest.Payloads.
func payloadsOf(tasks ...[]codeq.Task) (all []string) {
	for _, t := range slices.Concat(tasks...) {
		all = append(all, string(t.Payload))
	}
	slices.SortFunc(all, queuetest.ByLength)
	return all
}

// TestFollowUpsReachTheirShards: follow-ups that belong to other shards arrive there once each,
// even if they are more than can be under way at a time.
func TestFollowUpsReachTheirShards(t *testing.T) {
	queuetest.InFlow(t, codeq.Options{Shards: 3, Durability: codeq.DurabilityProcess}, func(f *queuetest.FlowTest) {
		const n = 2*engine.BatchCap + 100
		f.ProduceAt(0, codeq.Task{Queue: "start"})
		next := slices.Concat(f.Bound("a", 0, 1), f.Bound("a", 1, n), f.Bound("a", 2, n))
		f.Complete("start", next...)
		require.Equal(f, payloadsOf(next), f.Payloads())
		for i, want := range []uint64{1, n, n} {
			var got uint64
			require.NoError(f, inspect.Of(f.Q).Owner(i, func(s *inspect.Owner) error {
				got = s.Rules.Names.QueueNamed("a").Counts.Ready
				return nil
			}))
			require.Equal(f, want, got)
		}
		require.Zero(f, f.UnderWay(0))
		require.Equal(f, 2*n, f.Kept(0))
		time.Sleep(time.Second)
		require.Zero(f, f.Kept(0))
		f.Reopen()
		require.Equal(f, payloadsOf(next), f.Payloads())
		require.NoError(f, f.Q.Complete(context.Background(), f.Claim("a").Receipt, nil, f.Bound("b", 2, 1)...))
		f.Check()
		require.EqualValues(f, 1, f.Counts("b").Ready, "the numbers of messages go on")
	})
}

// TestNumbersThatAreNotStored: a directory without the numbers of the last messages can be opened,
// and gets them.
func TestNumbersThatAreNotStored(t *testing.T) {
	disk := crashfs.New()
	queuetest.InFlow(t, *inspect.With(&codeq.Options{Shards: 3, Durability: codeq.DurabilityDisk}, inspect.Private{FS: disk}), func(f *queuetest.FlowTest) {
		f.ProduceAt(0, codeq.Task{Queue: "start"})
		f.ProduceAt(0, codeq.Task{Queue: "start"})
		f.Complete("start", slices.Concat(f.Bound("a", 1, 4), f.Bound("a", 2, 2))...)
		first := f.Claim("start")
		open := queuetest.Shut(t, f.Q, 1)
		require.NoError(f, f.Q.Complete(context.Background(), first.Receipt, nil, f.Bound("b", 1, 3)...))
		synctest.Wait()
		lower, upper := keys.Range(keys.Sent)
		require.NoError(f, queuetest.StoreOf(f.Q, 0).DB().DeleteRange(lower, upper, pebble.Sync))

		img := &queuetest.FlowTest{T: t, Opts: f.Opts}
		inspect.Options(&img.Opts).FS = disk.CrashClone(vfs.CrashCloneCfg{})
		img.Open()
		img.Check()
		require.Equal(f, codeq.Counts{Ready: 6}, img.Counts("a"))
		require.Equal(f, codeq.Counts{Ready: 3}, img.Counts("b"))
		require.NoError(f, inspect.Of(img.Q).Owner(0, func(s *inspect.Owner) error {
			require.Equal(f, []uint64{1, 8, 3}, s.Rules.Probe().Usage().Out.Next)
			require.Equal(f, []uint64{0, 7, 2}, s.Rules.Probe().Usage().Out.Stored)
			return nil
		}))
		require.NoError(f, img.Q.Close())
		require.NoError(f, inspect.Of(f.Q).Owner(0, func(s *inspect.Owner) error {
			s.Rules.Probe().LoseNumbers() // as on the disk
			return nil
		}))
		close(open)
	})
}

// TestMessagesAreKeptUntilDurable: a receiver that has not synced its log may lose the effect of a
// message in a power loss, even if the sender has synced its own log. The receiver gets the message
// again. The next messages and WaitIdle do not wait for that. At DurabilityDisk a message is
// deleted once it is taken.
func TestMessagesAreKeptUntilDurable(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityNone, codeq.DurabilityDisk} {
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
			queuetest.InFlow(t, *inspect.With(&codeq.Options{Shards: 3, Durability: level}, inspect.Private{FS: fs}), func(f *queuetest.FlowTest) {
				const n = engine.BatchCap + 10
				f.ProduceAt(0, codeq.Task{Queue: "start"})
				l := f.Claim("start")
				require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil, f.Bound("a", 1, n)...))
				synctest.Wait()
				require.Zero(f, f.UnderWay(0), "the second batch did not wait for a sync")
				require.NoError(f, f.Q.WaitIdle(ctx, "start"))
				if level == codeq.DurabilityDisk {
					require.Zero(f, f.Kept(0))
					return
				}
				require.Equal(f, n, f.Kept(0))
				require.NoError(f, queuetest.StoreOf(f.Q, 0).DB().LogData(nil, pebble.Sync)) // to the operating system
				testkit.SyncLogs(t, disk, "queue/shard-000")
				img := f.Crash(disk)
				require.Equal(f, codeq.Counts{Ready: n}, img.Counts("a"), "they are taken again")
				require.NoError(f, img.Q.Close())

				reset()
				time.Sleep(time.Second)
				require.Zero(f, f.Kept(0))
				img = f.Crash(disk)
				require.Equal(f, codeq.Counts{Ready: n}, img.Counts("a"))
				require.NoError(f, img.Q.Close())
				require.Equal(f, map[string]int{"shard-001": 1}, counted())
				time.Sleep(time.Hour)
				require.Equal(f, map[string]int{"shard-001": 1}, counted(), "it sleeps")

				reset()
				for range 100 { // five seconds
					f.ProduceAt(0, codeq.Task{Queue: "start"})
					f.Complete("start", f.Bound("b", 1, 1)...)
					time.Sleep(50 * time.Millisecond)
				}
				time.Sleep(time.Minute)
				require.Equal(f, map[string]int{"shard-001": 5}, counted(), "once a second, and once after the last")
				require.Zero(f, f.Kept(0))
			})
		})
	}
}
