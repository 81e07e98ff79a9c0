package codeq

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/testkit"
)

// What tests let the owner of a shard, its commits and its disk do.

// latch is a committer that holds commits back while it is shut.
type latch struct {
	committer
	open chan struct{}
}

// shut makes the owner of a shard block in its next commit, until the channel
// is closed. That may be the commit of the group under way, if others call as well.
func shut(t *testing.T, q *Queue, index int) chan struct{} {
	t.Helper()
	g := &latch{open: make(chan struct{})}
	done := make(chan struct{})
	go func() {
		_ = q.shard(index).probe(func(s *shard) error {
			g.committer = s.commit
			s.commit = g
			close(done)
			return nil
		})
	}()
	<-done
	return g.open
}

func (g *latch) Commit(b *pebble.Batch) error {
	<-g.open
	return g.committer.Commit(b)
}

// standStill makes the owner of a shard wait, before it decides what comes next, until goOn is
// called.
func standStill(s *shard) (goOn func()) {
	stands, over := make(chan struct{}), make(chan struct{})
	go s.probe(func(*shard) error { close(stands); <-over; return nil })
	<-stands
	return func() { close(over) }
}

// hold is standStill, of a shard of q.
func hold(q *Queue, index int) (goOn func()) { return standStill(q.shard(index)) }

// slowCommitter takes a time for each commit. In a bubble, where nothing else takes time, a
// caller knows by the clock how many groups it has waited for.
type slowCommitter struct {
	committer
	takes   time.Duration
	Commits atomic.Int64
}

func (c *slowCommitter) Commit(b *pebble.Batch) error {
	c.Commits.Add(1)
	time.Sleep(c.takes)
	return c.committer.Commit(b)
}

// slowDown makes each commit of a shard take a time from now on.
func slowDown(t *testing.T, q *Queue, index int, takes time.Duration) *slowCommitter {
	t.Helper()
	c := &slowCommitter{takes: takes}
	require.NoError(t, q.shard(index).probe(func(s *shard) error {
		c.committer, s.commit = s.commit, c
		return nil
	}))
	return c
}

// burningCommitter refuses every batch.
type burningCommitter struct{}

func (burningCommitter) Commit(*pebble.Batch) error { return testkit.ErrDisk }

func (burningCommitter) Confirm() error { return nil }

// failShard makes the next commit of a shard fail.
func failShard(t *testing.T, q *Queue, index int) {
	t.Helper()
	require.NoError(t, q.shard(index).probe(func(s *shard) error {
		s.commit = burningCommitter{}
		return nil
	}))
}

// imager keeps an image of a disk, as a power loss would leave it, after each
// commit of a shard.
type imager struct {
	committer
	disk   *crashfs.Disk
	Images []*crashfs.Disk
}

func (c *imager) Commit(b *pebble.Batch) error {
	err := c.committer.Commit(b)
	c.Images = append(c.Images, c.disk.CrashClone(vfs.CrashCloneCfg{}))
	return err
}

// keepImages begins to keep images of the disk of a queue with one shard.
func keepImages(t *testing.T, q *Queue, disk *crashfs.Disk) *imager {
	im := &imager{disk: disk}
	require.NoError(t, q.shard(0).probe(func(s *shard) error {
		im.committer = s.commit
		s.commit = im
		return nil
	}))
	return im
}

// TestCrashLastsUntilStored: a crash is over when a process has closed the queue with all that it
// has taken back stored. A shard that has failed says nothing of that.
func TestCrashLastsUntilStored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		q := openForRun(t, *inspect.With(&Options{Shards: 2}, inspect.Private{FS: disk}))
		produce(t, q, Task{Queue: "a"})
		_, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"a"}, Local: true})
		require.NoError(t, err)
		for _, fails := range []bool{true, false} {
			disk := disk.Clone()
			q := openForRun(t, *inspect.With(&Options{Shards: 2}, inspect.Private{FS: disk}))
			synctest.Wait()
			if fails {
				failShard(t, q, 0)
				require.ErrorIs(t, q.Configure(t.Context(), "a", func(s *Settings) { s.Paused = true }), ErrUncertain)
			}
			require.Equal(t, fails, q.Close() != nil)
			m, err := manifest.Read(disk, "q")
			require.NoError(t, err)
			require.Equal(t, fails, m.Crashed)
		}
	})
}
