package codeq_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/engine"
	"codeq/internal/testkit"
)

// TestMessagesKeepTheirOrder: of one sender, what was produced first is first.
func TestMessagesKeepTheirOrder(t *testing.T) {
	inFlow(t, codeq.Options{Shards: 3}, func(f *codeq.FlowTest) {
		for range 3 {
			f.ProduceAt(0, codeq.Task{Queue: "start"})
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
	inFlow(t, codeq.Options{Shards: 3}, func(f *codeq.FlowTest) {
		for i := range 12 { // whatever shards the keys belong to
			key := fmt.Sprint(i)
			unique := codeq.Task{Queue: "unique " + key, Unique: codeq.Unique{Key: key}}
			group := codeq.Task{Queue: "group " + key, Group: key}
			f.ProduceAt(i%3, codeq.Task{Queue: "start"})
			f.Complete("start", unique, unique, group, group)
			require.Equal(f, codeq.Counts{Ready: 1}, f.Counts(unique.Queue))
			require.Equal(f, codeq.Counts{Ready: 1, Blocked: 1}, f.Counts(group.Queue))
			f.Complete(group.Queue)
			require.Equal(f, codeq.Counts{Ready: 1}, f.Counts(group.Queue))
			unique.Unique.Replace, unique.Payload = true, []byte("new")
			f.ProduceAt(i%3, codeq.Task{Queue: "start"})
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
	inFlow(t, codeq.Options{Shards: 3}, func(f *codeq.FlowTest) {
		for shard := range 3 {
			f.ProduceAt(0, codeq.Task{Queue: "start"})
			l := f.Claim("start")
			next := bound("next", shard, 1)[0]
			next.After = []codeq.ID{l.ID}
			for i := range 3 {
				next.After = append(next.After, f.ProduceAt(i, codeq.Task{Queue: "parent"}))
			}
			require.NoError(f, f.Q.Complete(context.Background(), l.Receipt, nil, next))
			f.Check()
			f.Complete("parent")
			f.Complete("parent")
			require.Equal(f, codeq.Counts{Blocked: 1}, f.Counts("next"))
			f.Complete("parent")
			f.Complete("next")
		}
	})
}

// TestFlowSurvivesPowerLoss fails the power before each sync of a flow over
// three shards. From whatever is on the disk then the flow goes on to its end,
// and no task of it exists twice.
func TestFlowSurvivesPowerLoss(t *testing.T) {
	t.Parallel()
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
	goOn := func(f *codeq.FlowTest) map[string]int {
		done := make(map[string]int)
		for {
			synctest.Wait()
			l := claimNow(f.T, f.Q, "start", "parent", "a", "join", "child")
			if l == nil {
				return done
			}
			var next []codeq.Task
			if l.Queue == "start" {
				next = slices.Concat(bound("a", 0, follow), bound("a", 1, follow), bound("a", 2, follow))
				for i := range next {
					next[i].Retention = codeq.Forever
				}
				join := bound("join", 1, 1)[0]
				join.After, join.Retention = append([]codeq.ID{l.ID}, l.After...), codeq.Forever
				next = append(next, join)
			}
			require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil, next...))
			done[string(l.Payload)]++
		}
	}
	begin := func(f *codeq.FlowTest) {
		parent := f.ProduceAt(0, codeq.Task{Queue: "parent", Payload: []byte("parent"), Retention: codeq.Forever})
		start := f.ProduceAt(1, codeq.Task{Queue: "start", Payload: []byte("start"), After: []codeq.ID{parent}, Retention: codeq.Forever})
		f.ProduceAt(2, codeq.Task{Queue: "child", Payload: []byte("child"), After: []codeq.ID{start, parent}, Retention: codeq.Forever})
		synctest.Wait()
	}
	var whole []string
	inFlow(t, *onDisk(fs, &codeq.Options{Shards: 3, Durability: codeq.DurabilityDisk, LeaseFor: time.Second}), func(f *codeq.FlowTest) {
		f.ProduceAt(0, codeq.Task{Queue: "other"}) // so that images have a queue
		begin(f)
		recording = true
		require.Len(f, goOn(f), 3+3*follow+1)
		recording = false
		whole = f.Payloads()
	})
	require.Greater(t, len(images), 20)
	for i, img := range images {
		inFlow(t, *onDisk(img, &codeq.Options{Shards: 3, Durability: codeq.DurabilityDisk, LeaseFor: time.Second}), func(f *codeq.FlowTest) {
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
