package codeq

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/simtest"
	"codeq/internal/testkit"
)

// album keeps an image of a disk after each commit that leaves children to be told.
type album struct {
	disk *crashfs.Disk

	mu     sync.Mutex
	images []*crashfs.Disk
}

// albumCommitter is that of one shard.
type albumCommitter struct {
	committer
	*album
	shard *shard
}

func (c *albumCommitter) Commit(b *pebble.Batch) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.committer.Commit(b)
	if c.shard.Probe().Usage().Telling > 0 {
		c.images = append(c.images, c.disk.CrashClone(vfs.CrashCloneCfg{}))
	}
	return err
}

// TestCrashAmidTelling: whichever of the commits a power loss follows that tell many children
// how their parent has ended, Verify finds nothing wrong, and each child is told of this end
// once, also after a repair, or a redrive or purge of the parent. The children wait for
// another parent as well: one that was told twice would not.
func TestCrashAmidTelling(t *testing.T) {
	t.Parallel()
	const third = 800 // children that take the death of a parent alike
	ctx := context.Background()
	ends := map[State]func(f *FlowTest, l *Lease) error{
		Done:     func(f *FlowTest, l *Lease) error { return f.Q.Complete(ctx, l.Receipt, nil) },
		Dead:     func(f *FlowTest, l *Lease) error { return f.Q.DeadLetter(ctx, l.Receipt, nil) },
		Canceled: func(f *FlowTest, l *Lease) error { return f.Q.Cancel(ctx, l.ID) },
	}
	next := map[string]struct {
		before func(f *FlowTest, disk *crashfs.Disk) // before the image is opened
		after  func(f *FlowTest, parent ID)
		only   State // of the parent; 0: any
	}{
		"reopen": {},
		"repair": {before: func(f *FlowTest, disk *crashfs.Disk) {
			simtest.AlterStore(f.T, disk, func(db *pebble.DB) {
				lower, upper := keys.Range(keys.Counters)
				require.NoError(f, db.DeleteRange(lower, upper, nil))
			})
			require.False(f, verifyImage(f.T, disk, false).OK())
			r := verifyImage(f.T, disk, true)
			require.True(f, r.OK(), "%v", r.Problems)
		}},
		"redrive": {only: Dead, after: func(f *FlowTest, parent ID) {
			require.NoError(f, f.Q.RedriveDead(ctx, parent))
			require.NoError(f, f.Q.Complete(ctx, f.Claim("parents").Receipt, nil))
		}},
		"purge": {only: Dead, after: func(f *FlowTest, _ ID) {
			n, err := f.Q.PurgeDead(ctx, DeadFilter{})
			require.NoError(f, err)
			require.Equal(f, 1, n)
		}},
	}
	for end, finish := range ends {
		t.Run(end.String(), func(t *testing.T) {
			disk := crashfs.New()
			opts := *inspect.With(&Options{Shards: 2, Durability: DurabilityDisk, Limits: Limits{Parents: 1 << 20}}, inspect.Private{FS: disk})
			photos := &album{disk: disk}
			var parent, other ID
			inFlow(t, opts, func(f *FlowTest) {
				parent = f.ProduceAt(0, Task{Queue: "parents"})
				other = f.ProduceAt(1, Task{Queue: "others"})
				f.ProduceAt(0, Task{Queue: "bystanders"}) // by which the counters are missed that are taken out
				for i := range 3 * third / 400 {
					tasks := make([]Task, 400)
					for j := range tasks {
						onDead := OnDead((i*len(tasks) + j) % 3)
						tasks[j] = Task{Queue: fmt.Sprint("children", onDead), After: []ID{parent, other}, OnDead: onDead}
					}
					f.Batch(tasks...)
				}
				f.Check()
				l := f.Claim("parents")
				for _, s := range f.Q.led() {
					require.NoError(t, s.probe(func(s *shard) error {
						s.commit = &albumCommitter{s.commit, photos, s}
						return nil
					}))
				}
				require.NoError(t, finish(f, l))
				synctest.Wait()
				for _, s := range f.Q.led() {
					require.NoError(t, s.probe(func(s *shard) error {
						s.commit = s.commit.(*albumCommitter).committer
						return nil
					}))
				}
			})
			require.GreaterOrEqual(t, len(photos.images), 2, "they are told in pieces")
			rng := testkit.Seeded(t)
			for name, next := range next {
				if next.only != 0 && next.only != end {
					continue
				}
				images := photos.images
				if testing.Short() {
					i := rng.IntN(len(images))
					images = images[i : i+1]
				}
				for i, image := range images {
					t.Run(fmt.Sprint(name, " ", i), func(t *testing.T) {
						disk := image.CrashClone(vfs.CrashCloneCfg{})
						r := verifyImage(t, disk, false)
						require.True(t, r.OK(), "%v", r.Problems)
						opts := opts
						inspect.Options(&opts).FS = disk
						if next.before != nil {
							next.before(&FlowTest{T: t, Opts: opts}, disk)
						}
						inFlow(t, opts, func(f *FlowTest) {
							if next.after != nil {
								next.after(f, parent)
							}
							require.NoError(t, f.Q.checkAll())
							f.Check()
							want := func(onDead OnDead, free bool) Counts {
								switch {
								case end == Canceled, end == Dead && onDead == CancelOnDead:
									return Counts{}
								case name == "purge" && onDead == HoldOnDead:
									return Counts{}
								case free && (end == Done || onDead == RunOnDead || name == "redrive"):
									return Counts{Ready: third}
								}
								return Counts{Blocked: third}
							}
							for _, free := range []bool{false, true} {
								if free {
									l := f.Claim("others")
									require.Equal(t, other, l.ID)
									require.NoError(t, f.Q.Complete(ctx, l.Receipt, nil))
									f.Check()
								}
								for onDead := HoldOnDead; onDead <= RunOnDead; onDead++ {
									require.Equal(t, want(onDead, free), countsOf(t, f.Q, fmt.Sprint("children", onDead)), onDead)
								}
							}
							for _, s := range f.Q.led() {
								require.NoError(t, s.probe(func(s *shard) error {
									require.Zero(t, s.Probe().Usage().Telling)
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
