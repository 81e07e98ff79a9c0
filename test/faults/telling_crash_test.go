package faults_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/simtest"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// album keeps an image of a disk after each commit that leaves children without their message.
type album struct {
	disk *crashfs.Disk

	mu     sync.Mutex
	images []*crashfs.Disk
}

// albumCommitter is the committer of one shard.
type albumCommitter struct {
	inspect.Committer
	*album
	rules *engine.State
}

func (c *albumCommitter) Commit(b *pebble.Batch) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.Committer.Commit(b)
	if c.rules.Probe().Usage().Telling > 0 {
		c.images = append(c.images, c.disk.CrashClone(vfs.CrashCloneCfg{}))
	}
	return err
}

// TestCrashAmidTelling: several commits send the end of a parent to its many children, and power
// fails after any of these commits. Verify finds no fault, and each child gets the end once, also
// after a repair, or a redrive or purge of the parent. The children also wait for another parent: a
// child that got the end twice would not.
func TestCrashAmidTelling(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	const third = 800 // children with the same OnDead
	ctx := context.Background()
	ends := map[codeq.State]func(f *queuetest.FlowTest, l *codeq.Lease) error{
		codeq.Done:     func(f *queuetest.FlowTest, l *codeq.Lease) error { return f.Q.Complete(ctx, l.Receipt, nil) },
		codeq.Dead:     func(f *queuetest.FlowTest, l *codeq.Lease) error { return f.Q.DeadLetter(ctx, l.Receipt, nil) },
		codeq.Canceled: func(f *queuetest.FlowTest, l *codeq.Lease) error { return f.Q.Cancel(ctx, l.ID) },
	}
	next := map[string]struct {
		before func(f *queuetest.FlowTest, disk *crashfs.Disk) // runs before the image is opened
		after  func(f *queuetest.FlowTest, parent codeq.ID)
		only   codeq.State // of the parent; 0: any
	}{
		"reopen": {},
		"repair": {before: func(f *queuetest.FlowTest, disk *crashfs.Disk) {
			simtest.AlterStore(f.T, disk, func(db *pebble.DB) {
				lower, upper := keys.Range(keys.Counters)
				require.NoError(f, db.DeleteRange(lower, upper, nil))
			})
			require.False(f, queuetest.VerifyImage(f.T, disk, false).OK())
			r := queuetest.VerifyImage(f.T, disk, true)
			require.True(f, r.OK(), "%v", r.Problems)
		}},
		"redrive": {only: codeq.Dead, after: func(f *queuetest.FlowTest, parent codeq.ID) {
			require.NoError(f, f.Q.RedriveDead(ctx, parent))
			require.NoError(f, f.Q.Complete(ctx, f.Claim("parents").Receipt, nil))
		}},
		"purge": {only: codeq.Dead, after: func(f *queuetest.FlowTest, _ codeq.ID) {
			n, err := f.Q.PurgeDead(ctx, codeq.DeadFilter{})
			require.NoError(f, err)
			require.Equal(f, 1, n)
		}},
	}
	for end, finish := range ends {
		t.Run(end.String(), func(t *testing.T) {
			disk := crashfs.New()
			opts := *inspect.With(&codeq.Options{Shards: 2, Durability: codeq.DurabilityDisk, Limits: codeq.Limits{Parents: 1 << 20}}, inspect.Private{FS: disk})
			photos := &album{disk: disk}
			var parent, other codeq.ID
			queuetest.InFlow(t, opts, func(f *queuetest.FlowTest) {
				parent = f.ProduceAt(0, codeq.Task{Queue: "parents"})
				other = f.ProduceAt(1, codeq.Task{Queue: "others"})
				f.ProduceAt(0, codeq.Task{Queue: "bystanders"}) // reveals that counters are missing
				for i := range 3 * third / 400 {
					tasks := make([]codeq.Task, 400)
					for j := range tasks {
						onDead := codeq.OnDead((i*len(tasks) + j) % 3)
						tasks[j] = codeq.Task{Queue: fmt.Sprint("children", onDead), After: []codeq.ID{parent, other}, OnDead: onDead}
					}
					f.Batch(tasks...)
				}
				f.Check()
				l := f.Claim("parents")
				for shard := range queuetest.Led(f.Q) {
					require.NoError(t, inspect.Of(f.Q).Owner(shard, func(o *inspect.Owner) error {
						o.Commit = &albumCommitter{o.Commit, photos, o.Rules}
						return nil
					}))
				}
				require.NoError(t, finish(f, l))
				synctest.Wait()
				for shard := range queuetest.Led(f.Q) {
					queuetest.WrapCommits(t, f.Q, shard, func(c inspect.Committer) inspect.Committer { return c.(*albumCommitter).Committer })
				}
			})
			require.GreaterOrEqual(t, len(photos.images), 2, "they are told in pieces")
			rng := testkit.Seeded(t)
			for name, next := range next {
				if next.only != 0 && next.only != end {
					continue
				}
				images := photos.images
				if testkit.Sized(0, 1) == 0 {
					i := rng.IntN(len(images))
					images = images[i : i+1]
				}
				for i, image := range images {
					t.Run(fmt.Sprint(name, " ", i), func(t *testing.T) {
						disk := image.CrashClone(vfs.CrashCloneCfg{})
						r := queuetest.VerifyImage(t, disk, false)
						require.True(t, r.OK(), "%v", r.Problems)
						opts := opts
						inspect.Options(&opts).FS = disk
						if next.before != nil {
							next.before(&queuetest.FlowTest{T: t, Opts: opts}, disk)
						}
						queuetest.InFlow(t, opts, func(f *queuetest.FlowTest) {
							if next.after != nil {
								next.after(f, parent)
							}
							require.NoError(t, queuetest.CheckAll(f.Q))
							f.Check()
							want := func(onDead codeq.OnDead, free bool) codeq.Counts {
								switch {
								case end == codeq.Canceled, end == codeq.Dead && onDead == codeq.CancelOnDead:
									return codeq.Counts{}
								case name == "purge" && onDead == codeq.HoldOnDead:
									return codeq.Counts{}
								case free && (end == codeq.Done || onDead == codeq.RunOnDead || name == "redrive"):
									return codeq.Counts{Ready: third}
								}
								return codeq.Counts{Blocked: third}
							}
							for _, free := range []bool{false, true} {
								if free {
									l := f.Claim("others")
									require.Equal(t, other, l.ID)
									queuetest.Complete(t, f.Q, l)
									f.Check()
								}
								for onDead := codeq.HoldOnDead; onDead <= codeq.RunOnDead; onDead++ {
									require.Equal(t, want(onDead, free), queuetest.CountsOf(t, f.Q, fmt.Sprint("children", onDead)), onDead)
								}
							}
							for shard := range queuetest.Led(f.Q) {
								require.NoError(t, inspect.Of(f.Q).Owner(shard, func(o *inspect.Owner) error {
									require.Zero(t, o.Rules.Probe().Usage().Telling)
									return nil
								}))
							}
						})
					})
				}
			}
		})
	}
}
