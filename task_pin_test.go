package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/simtest"
	"codeq/test/queuetest"
)

// pinTest has parents with a retention of a minute, and children that take longer.
type pinTest struct{ *queuetest.FlowTest }

// inPins runs a test with parents in shard 0 and children in the same shard and in another.
func inPins(t *testing.T, test func(f *pinTest, child int)) {
	for _, layout := range flowLayouts {
		t.Run(layout.name, func(t *testing.T) {
			opts := codeq.Options{Shards: layout.shards, Retention: time.Minute, LeaseFor: 24 * time.Hour}
			queuetest.InFlow(t, opts, func(f *queuetest.FlowTest) { test(&pinTest{f}, layout.child) })
		})
	}
}

// finish claims the next task of a queue and completes it with a result.
func (f *pinTest) finish(queue, result string) {
	f.Helper()
	require.NoError(f, f.Q.Complete(context.Background(), f.Claim(queue).Receipt, []byte(result)))
	f.Check()
}

// wait takes an hour, in steps of a minute: every retention ends several times.
func (f *pinTest) wait() {
	f.Helper()
	for range 60 {
		time.Sleep(time.Minute)
		synctest.Wait()
	}
	f.Check()
}

// requireResult requires that a parent's result can be read.
func (f *pinTest) requireResult(parent codeq.ID, want string) {
	f.Helper()
	info, err := f.Q.Get(context.Background(), parent)
	require.NoError(f, err)
	require.Equal(f, want, string(info.Result))
}

// requireForgotten requires that a task is forgotten within its retention from now on.
func (f *pinTest) requireForgotten(ids ...codeq.ID) {
	f.Helper()
	f.Check()
	time.Sleep(2 * time.Minute)
	f.RequireGone(ids...)
	f.Check()
	require.Zero(f, queuetest.Stored(f.T, f.Q, keys.Pin)+queuetest.Stored(f.T, f.Q, keys.Pinned), "pins that are left")
}

// TestPinByMany: nothing is left of a parent with more children than the commit of its end tells,
// and of a child with more parents than it unpins in one group.
func TestPinByMany(t *testing.T) {
	t.Parallel()
	inPins(t, func(f *pinTest, at int) {
		parent := f.ProduceAt(0, codeq.Task{Queue: "parent"})
		var batch []codeq.Task
		for range 2*engine.TellAtOnce + 1 {
			batch = append(batch, codeq.Task{Queue: "child", After: []codeq.ID{parent}})
		}
		children, err := queuetest.StartingAt(f.Q, at).ProduceBatch(context.Background(), batch)
		require.NoError(f, err)
		f.Check()
		f.finish("parent", "kept")
		for i := range children {
			f.requireResult(parent, "kept")
			if i%16 == 0 {
				f.wait()
			}
			f.finish("child", "")
		}
		f.requireForgotten(append(children, parent)...)

		var parents []codeq.ID
		for i := range 100 {
			parents = append(parents, f.ProduceAt(0, codeq.Task{Queue: "parent", Payload: fmt.Append(nil, i)}))
		}
		child := f.ProduceAt(at, codeq.Task{Queue: "child", After: parents})
		f.Check()
		for range parents {
			require.NoError(f, f.Q.Complete(context.Background(), f.Claim("parent").Receipt, []byte("r")))
		}
		f.wait()
		f.RequireState(codeq.Done, parents[0], parents[99])
		f.finish("child", "")
		f.requireForgotten(append(parents, child)...)
	})
}

// TestPinsAreRepaired: Verify finds and repairs a store without the counts of its pins, with wrong
// counts, or with pins of lost tasks. The parents of the remaining children are kept.
func TestPinsAreRepaired(t *testing.T) {
	remove := func(prefix byte) func(t *testing.T, db *pebble.DB) {
		return func(t *testing.T, db *pebble.DB) {
			key, _ := queuetest.First(t, db, prefix, nil)
			require.NoError(t, db.Delete(key, nil))
		}
	}
	for name, damage := range map[string]func(t *testing.T, db *pebble.DB){
		"count": remove(keys.Pinned),
		"pin":   remove(keys.Pin),
		"wrong count": func(t *testing.T, db *pebble.DB) {
			key, value := queuetest.First(t, db, keys.Pinned, nil)
			v, err := keys.ParsePinned(value)
			require.NoError(t, err)
			v.Count++
			require.NoError(t, db.Set(key, v.Append(nil), nil))
		},
		"child": remove(keys.Index), // with its record
	} {
		t.Run(name, func(t *testing.T) {
			disk := crashfs.New()
			var parent codeq.ID
			queuetest.InFlow(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 1, Retention: time.Minute}), func(f *queuetest.FlowTest) {
				parent = f.ProduceAt(0, codeq.Task{Queue: "parent"})
				for range 2 {
					f.ProduceAt(0, codeq.Task{Queue: "child", After: []codeq.ID{parent}, RunAt: time.Now().Add(time.Hour)})
				}
				f.Check()
				require.NoError(f, f.Q.Complete(context.Background(), f.Claim("parent").Receipt, []byte("kept")))
			})
			simtest.AlterStore(t, disk, func(db *pebble.DB) {
				if name == "child" {
					key, _ := queuetest.First(t, db, keys.Scheduled, nil)
					require.NoError(t, db.Delete(key, nil))
				}
				damage(t, db)
			})
			require.False(t, queuetest.VerifyImage(t, disk, false).OK())
			r := queuetest.VerifyImage(t, disk, true)
			require.True(t, r.OK(), "%v", r.Problems)
			require.True(t, queuetest.VerifyImage(t, disk, false).OK())
			queuetest.InFlow(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 1, Retention: time.Minute}), func(g *queuetest.FlowTest) {
				f := &pinTest{g}
				f.requireResult(parent, "kept")
				f.wait()
				f.wait()
				f.requireResult(parent, "kept")
				for l := range f.children() {
					f.requireResult(parent, "kept")
					require.NoError(f, f.Q.Complete(context.Background(), l.Receipt, nil))
				}
				f.Check()
				if name != "count" { // without the count, the retention is lost
					f.requireForgotten(parent)
				}
			})
		})
	}
}

// children claims all ready children.
func (f *pinTest) children() iter.Seq[*codeq.Lease] {
	return func(yield func(*codeq.Lease) bool) {
		for {
			l, err := f.Q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"child"}, NoWait: true})
			if errors.Is(err, codeq.ErrEmpty) || !yield(l) {
				return
			}
		}
	}
}
