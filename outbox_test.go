package codeq

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/schema"
	"codeq/internal/testkit"
)

// Payloads returns those of the tasks that are stored, in order.
func (f *FlowTest) Payloads() (all []string) {
	f.Helper()
	tasks, err := f.Q.list()
	require.NoError(f, err)
	for _, t := range tasks {
		all = append(all, string(t.Payload))
	}
	slices.SortFunc(all, byLength)
	return all
}

// bound returns n tasks of a queue that belong to a shard, of three, with
// payloads that tell them apart.
func bound(queue string, shard, n int) []Task {
	tasks := make([]Task, n)
	key := keyOf(queue, shard, 3)
	for i := range tasks {
		tasks[i] = Task{Queue: queue, LimitKey: key, Payload: fmt.Appendf(nil, "%s %d.%d", queue, shard, i)}
	}
	return tasks
}

// payloadsOf returns the payloads of tasks, in the order of flowTest.payloads.
func payloadsOf(tasks ...[]Task) (all []string) {
	for _, t := range slices.Concat(tasks...) {
		all = append(all, string(t.Payload))
	}
	slices.SortFunc(all, byLength)
	return all
}

func byLength(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b)) }

// UnderWay is how many messages of a shard are not confirmed.
func (f *FlowTest) UnderWay(from int) (n uint64) {
	f.Helper()
	require.NoError(f, f.Q.shard(from).probe(func(s *shard) error {
		for _, waiting := range s.Probe().Usage().OutWaiting {
			n += waiting
		}
		return nil
	}))
	return n
}

// TestFollowUpsReachTheirShards: follow-ups that belong to other shards arrive
// there once each, more of them than are under way at a time.
func TestFollowUpsReachTheirShards(t *testing.T) {
	inFlow(t, Options{Shards: 3}, func(f *FlowTest) {
		const n = 2*engine.BatchCap + 100
		f.ProduceAt(0, Task{Queue: "start"})
		next := slices.Concat(bound("a", 0, 1), bound("a", 1, n), bound("a", 2, n))
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
		v := f.Q.peek(f.Q.shard(0))
		require.NoError(f, schema.Scan(v.snap, keys.Outbound, func(key, _ []byte) error {
			return fmt.Errorf("message %x is not forgotten", key)
		}))
		v.close()
		f.Reopen()
		require.Equal(f, payloadsOf(next), f.Payloads())
		require.NoError(f, f.Q.Complete(context.Background(), f.Claim("a").Receipt, nil, bound("b", 2, 1)...))
		f.Check()
		require.EqualValues(f, 1, f.Counts("b").Ready, "the numbers of messages go on")
	})
}

// TestMessagesKeepTheirOrder: of one sender, what was produced first is first.
func TestMessagesKeepTheirOrder(t *testing.T) {
	inFlow(t, Options{Shards: 3}, func(f *FlowTest) {
		for range 3 {
			f.ProduceAt(0, Task{Queue: "start"})
		}
		tasks := bound("a", 1, 3*engine.BatchCap)
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

// TestFollowUpsWithKeys: a follow-up that belongs to another shard is held back
// there by what it has in common with others.
func TestFollowUpsWithKeys(t *testing.T) {
	ctx := context.Background()
	inFlow(t, Options{Shards: 3}, func(f *FlowTest) {
		for i := range 12 { // whatever shards the keys belong to
			key := fmt.Sprint(i)
			unique := Task{Queue: "unique " + key, Unique: Unique{Key: key}}
			group := Task{Queue: "group " + key, Group: key}
			f.ProduceAt(i%3, Task{Queue: "start"})
			f.Complete("start", unique, unique, group, group)
			require.Equal(f, Counts{Ready: 1}, f.Counts(unique.Queue))
			require.Equal(f, Counts{Ready: 1, Blocked: 1}, f.Counts(group.Queue))
			f.Complete(group.Queue)
			require.Equal(f, Counts{Ready: 1}, f.Counts(group.Queue))
			unique.Unique.Replace, unique.Payload = true, []byte("new")
			f.ProduceAt(i%3, Task{Queue: "start"})
			f.Complete("start", unique)
			l := f.Claim(unique.Queue)
			require.Equal(f, "new", string(l.Payload))
			require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil))
			f.Complete(group.Queue)
		}
	})
}

// TestFollowUpWithParents: a follow-up that belongs to another shard waits for
// parents in any shard, and for the task that it follows.
func TestFollowUpWithParents(t *testing.T) {
	inFlow(t, Options{Shards: 3}, func(f *FlowTest) {
		for shard := range 3 {
			f.ProduceAt(0, Task{Queue: "start"})
			l := f.Claim("start")
			next := bound("next", shard, 1)[0]
			next.After = []ID{l.ID}
			for i := range 3 {
				next.After = append(next.After, f.ProduceAt(i, Task{Queue: "parent"}))
			}
			require.NoError(f, f.Q.Complete(context.Background(), l.Receipt, nil, next))
			f.Check()
			f.Complete("parent")
			f.Complete("parent")
			require.Equal(f, Counts{Blocked: 1}, f.Counts("next"))
			f.Complete("parent")
			f.Complete("next")
		}
	})
}

// Crash goes on with what is on the disk at this moment if its power fails.
func (f *FlowTest) Crash(disk *vfs.MemFS) *FlowTest {
	f.Helper()
	img := &FlowTest{T: f.T, Opts: f.Opts}
	img.Opts.fs = disk.CrashClone(vfs.CrashCloneCfg{})
	img.Open()
	img.Check()
	return img
}

// TestPowerLossBetweenShards: a follow-up that belongs to another shard arrives
// there once, whether the power fails before the receiver has stored it, or
// before the sender has learnt of that.
func TestPowerLossBetweenShards(t *testing.T) {
	disk := vfs.NewCrashableMem()
	inFlow(t, Options{Shards: 3, Durability: DurabilityDisk, fs: disk}, func(f *FlowTest) {
		for round := range 3 {
			f.ProduceAt(0, Task{Queue: "start"})
			l := f.Claim("start")
			sent := bound("a", 1, engine.BatchCap+10)
			before := f.Payloads()[1:] // without start
			atReceiver := shut(t, f.Q.shard(1))
			require.NoError(f, f.Q.Complete(context.Background(), l.Receipt, nil, sent...))
			synctest.Wait()
			require.EqualValues(f, len(sent), f.UnderWay(0))

			img := f.Crash(disk)
			require.Equal(f, payloadsOf(sent), img.Payloads()[:len(sent)])
			require.Len(f, img.Payloads(), len(before)+len(sent), "round %d, before the receiver's commit", round)
			require.NoError(f, img.Q.Close())

			atSender := shut(t, f.Q.shard(0))
			close(atReceiver)
			synctest.Wait() // the receiver has stored the first ones, the sender cannot forget them
			img = f.Crash(disk)
			require.Len(f, img.Payloads(), len(before)+len(sent), "round %d, before the confirmation", round)
			require.Equal(f, slices.Compact(img.Payloads()), img.Payloads())
			img.ProduceAt(0, Task{Queue: "start"}) // further messages are not taken for those
			img.Complete("start", bound("b", 1, 5)...)
			require.EqualValues(f, 5, img.Counts("b").Ready)
			require.NoError(f, img.Q.Close())

			close(atSender)
			f.Check()
			require.Len(f, f.Payloads(), len(before)+len(sent))
			n := len(sent)
			for n > 0 {
				leases, err := f.Q.ClaimBatch(context.Background(), ClaimRequest{Queues: []string{"a"}, Max: n})
				require.NoError(f, err)
				for _, l := range leases {
					require.NoError(f, f.Q.Complete(context.Background(), l.Receipt, nil))
				}
				n -= len(leases)
			}
			f.Reopen()
		}
	})
}

// TestFlowSurvivesPowerLoss fails the power before each sync of a flow over
// three shards. From whatever is on the disk then the flow goes on to its end,
// and no task of it exists twice.
func TestFlowSurvivesPowerLoss(t *testing.T) {
	ctx := context.Background()
	disk := vfs.NewCrashableMem()
	var images []*vfs.MemFS
	recording := false
	fs := &testkit.HookFS{FS: disk, Before: func(op, name string) error {
		if op == "sync" && recording {
			images = append(images, disk.CrashClone(vfs.CrashCloneCfg{}))
		}
		return nil
	}}
	const follow = 5
	// goOn works until nothing is left, and returns how often each task was completed.
	goOn := func(f *FlowTest) map[string]int {
		done := make(map[string]int)
		for {
			synctest.Wait()
			l := claimNow(f.T, f.Q, "start", "parent", "a", "join", "child")
			if l == nil {
				return done
			}
			var next []Task
			if l.Queue == "start" {
				next = slices.Concat(bound("a", 0, follow), bound("a", 1, follow), bound("a", 2, follow))
				for i := range next {
					next[i].Retention = Forever
				}
				join := bound("join", 1, 1)[0]
				join.After, join.Retention = append([]ID{l.ID}, l.After...), Forever
				next = append(next, join)
			}
			require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil, next...))
			done[string(l.Payload)]++
		}
	}
	begin := func(f *FlowTest) {
		parent := f.ProduceAt(0, Task{Queue: "parent", Payload: []byte("parent"), Retention: Forever})
		start := f.ProduceAt(1, Task{Queue: "start", Payload: []byte("start"), After: []ID{parent}, Retention: Forever})
		f.ProduceAt(2, Task{Queue: "child", Payload: []byte("child"), After: []ID{start, parent}, Retention: Forever})
		synctest.Wait()
	}
	var whole []string
	inFlow(t, Options{Shards: 3, Durability: DurabilityDisk, LeaseFor: time.Second, fs: fs}, func(f *FlowTest) {
		f.ProduceAt(0, Task{Queue: "other"}) // so that images have a queue
		begin(f)
		recording = true
		require.Len(f, goOn(f), 3+3*follow+1)
		recording = false
		whole = f.Payloads()
	})
	require.Greater(t, len(images), 20)
	for i, img := range images {
		inFlow(t, Options{Shards: 3, Durability: DurabilityDisk, LeaseFor: time.Second, fs: img}, func(f *FlowTest) {
			f.Check()
			for range 2 {
				for payload, n := range goOn(f) {
					require.Equal(f, 1, n, "image %d: %s", i, payload)
				}
				time.Sleep(2 * time.Second) // leases from before the power loss expire
				f.Check()
			}
			require.Empty(f, goOn(f))
			require.Equal(f, whole, f.Payloads(), "image %d", i)
			for _, q := range []string{"start", "parent", "a", "join", "child"} {
				c := f.Counts(q)
				require.Equal(f, c.Total(), c.Done, "image %d: %s", i, q)
			}
		})
	}
}

// TestMessagesToFailedShard: messages to a shard that has failed wait for the
// next Open; their sender goes on meanwhile.
func TestMessagesToFailedShard(t *testing.T) {
	ctx := context.Background()
	for _, level := range []Durability{DurabilityProcess, DurabilityDisk} {
		inFlow(t, Options{Shards: 3, Durability: level}, func(f *FlowTest) {
			parent := f.ProduceAt(0, Task{Queue: "parent"})
			child := f.ProduceAt(1, Task{Queue: "child", After: []ID{parent}})
			f.ProduceAt(0, Task{Queue: "start"})
			f.ProduceAt(0, Task{Queue: "start"})
			synctest.Wait()
			zero := f.Q.startingAt(0)
			finish := func(queue string, next ...Task) {
				f.Helper()
				l, err := zero.Claim(ctx, ClaimRequest{Queues: []string{queue}})
				require.NoError(f, err)
				require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil, next...))
				synctest.Wait()
			}
			failShard(t, f.Q.shard(1))
			finish("start", slices.Concat(bound("a", 1, 3), bound("a", 2, 3))...)
			finish("parent")
			finish("start", bound("b", 1, 3)...)
			require.EqualValues(f, 3+1+3, f.UnderWay(0))
			require.NoError(f, f.Q.Close())

			f.Open()
			f.Check()
			require.Zero(f, f.UnderWay(0))
			require.Equal(f, Counts{Ready: 6}, f.Counts("a"))
			require.Equal(f, Counts{Ready: 3}, f.Counts("b"))
			f.RequireState(Ready, child)
		})
	}
}

// TestWaitIdleWaitsForMessages: a task on its way to another shard is not done.
func TestWaitIdleWaitsForMessages(t *testing.T) {
	ctx := context.Background()
	for sender := range 3 {
		inFlow(t, Options{Shards: 3}, func(f *FlowTest) {
			f.ProduceAt(sender, Task{Queue: "start"})
			receiver := (sender + 1) % 3
			l := f.Claim("start")
			open := shut(t, f.Q.shard(receiver))
			require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil, bound("a", receiver, 1)...))
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

// TestWaitIdleWaitsForWhatIsToBeSent: a task that its sender has stored in the
// very commit in which it is asked is not done.
func TestWaitIdleWaitsForWhatIsToBeSent(t *testing.T) {
	ctx := context.Background()
	inFlow(t, Options{Shards: 3}, func(f *FlowTest) {
		f.ProduceAt(2, Task{Queue: "a"})
		l := f.Claim("a")
		open := shut(t, f.Q.shard(2))
		go func() { _, _ = f.Q.startingAt(2).Produce(ctx, Task{Queue: "z"}) }()
		synctest.Wait()
		go func() { _ = f.Q.Complete(ctx, l.Receipt, nil, bound("a", 0, 1)...) }()
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

// TestWaitIdleSeesWhatHasMoved: a task that reaches a shard after that was
// found idle, from one that is asked later, is not missed.
func TestWaitIdleSeesWhatHasMoved(t *testing.T) {
	ctx := context.Background()
	inFlow(t, Options{Shards: 3}, func(f *FlowTest) {
		f.ProduceAt(2, Task{Queue: "a"})
		l := f.Claim("a")
		open := shut(t, f.Q.shard(1))
		go func() { _, _ = f.Q.startingAt(1).Produce(ctx, Task{Queue: "z"}) }()
		synctest.Wait() // shard 1 is in a commit
		idle := make(chan error, 1)
		go func() { idle <- f.Q.WaitIdle(ctx, "a") }()
		synctest.Wait() // shard 0 is idle; shard 1 is being asked
		require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil, bound("a", 0, 1)...))
		synctest.Wait() // now shard 0 has the task, and shard 2 has none
		close(open)
		synctest.Wait()
		require.Empty(f, idle)
		f.Complete("a")
		require.NoError(f, <-idle)
	})
}

// TestLostTailOfMessages: at DurabilityProcess a power loss may take the last
// messages from their sender and leave what they did to their receiver. Sender
// and receiver then go on, and come to rest.
func TestLostTailOfMessages(t *testing.T) {
	ctx := context.Background()
	disk := vfs.NewCrashableMem()
	inFlow(t, Options{Shards: 3, fs: disk}, func(f *FlowTest) {
		f.ProduceAt(0, Task{Queue: "start"})
		f.ProduceAt(0, Task{Queue: "start"})
		first, second := f.Claim("start"), f.Claim("start")
		atReceiver := shut(t, f.Q.shard(1))
		require.NoError(f, f.Q.Complete(ctx, first.Receipt, nil, bound("a", 1, 2)...))
		synctest.Wait()
		syncLogs(t, disk, "queue/shard-000")
		require.NoError(f, f.Q.Complete(ctx, second.Receipt, nil, bound("b", 1, 2)...))
		synctest.Wait()
		close(atReceiver)
		synctest.Wait()
		syncLogs(t, disk, "queue/shard-001")
		require.Equal(f, Counts{Ready: 2}, f.Counts("b"))

		img := f.Crash(disk) // comes to rest, or the bubble would not
		require.EqualValues(f, 1, img.Counts("start").Total(), "the second completion is lost")
		require.Equal(f, Counts{Ready: 2}, img.Counts("a"))
		require.Equal(f, Counts{Ready: 2}, img.Counts("b"), "and what it did elsewhere is not")
		require.Zero(f, img.UnderWay(0))
		img.ProduceAt(0, Task{Queue: "again"})
		img.Complete("again", bound("c", 1, 3)...)
		require.Equal(f, Counts{Ready: 3}, img.Counts("c"))
		require.NoError(f, img.Q.WaitIdle(ctx, "again"))
		img.Reopen()
		require.Equal(f, Counts{Ready: 3}, img.Counts("c"))
		require.NoError(f, img.Q.Close())
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
			f.Complete("start", slices.Concat(bound("a", 1, 4), bound("a", 2, 2))...)
			own(1, 4*(round+1)+1, 2*(round+1)+1)
		}
		require.Equal(f, 3, c.commits)
		require.Equal(f, 3*2, c.numbers)
		f.ProduceAt(0, Task{Queue: "start"})
		l := f.Claim("start")
		open := shut(t, f.Q.shard(1))
		require.NoError(f, f.Q.Complete(context.Background(), l.Receipt, nil, bound("a", 1, 3)...))
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
	disk := vfs.NewCrashableMem()
	inFlow(t, Options{Shards: 3, Durability: DurabilityDisk, fs: disk}, func(f *FlowTest) {
		f.ProduceAt(0, Task{Queue: "start"})
		f.ProduceAt(0, Task{Queue: "start"})
		f.Complete("start", slices.Concat(bound("a", 1, 4), bound("a", 2, 2))...)
		first := f.Claim("start")
		open := shut(t, f.Q.shard(1))
		require.NoError(f, f.Q.Complete(context.Background(), first.Receipt, nil, bound("b", 1, 3)...))
		synctest.Wait()
		lower, upper := keys.Range(keys.Sent)
		require.NoError(f, f.Q.shard(0).Store.DB().DeleteRange(lower, upper, pebble.Sync))

		img := &FlowTest{T: t, Opts: f.Opts}
		img.Opts.fs = disk.CrashClone(vfs.CrashCloneCfg{})
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
