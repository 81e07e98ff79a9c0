package queuetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/fsck"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/offline"
	"codeq/internal/store"
	"codeq/internal/testkit"
)

// Led yields the shards that the process leads.
func Led(q *codeq.Queue) func(yield func(shard int) bool) {
	return func(yield func(int) bool) {
		in := inspect.Of(q)
		for shard := range in.Shards() {
			if in.Leads(shard) && !yield(shard) {
				return
			}
		}
	}
}

// StoreOf returns the store that this process has of a shard; nil while it is replaced.
func StoreOf(q *codeq.Queue, shard int) (found *store.Store) {
	_ = inspect.Of(q).Read(shard, func(st *store.Store) error { found = st; return nil })
	return found
}

// StartingAt returns q with a given shard in place of a random one: Produce and ProduceBatch store
// there, Claim and ClaimBatch ask there first.
func StartingAt(q *codeq.Queue, shard int) *codeq.Queue {
	return inspect.Of(q).StartingAt(shard).(*codeq.Queue)
}

// OfAnotherProcess returns q as a process has it that shares only the shards with this one.
func OfAnotherProcess(q *codeq.Queue) *codeq.Queue {
	return inspect.Of(q).OfAnotherProcess().(*codeq.Queue)
}

// Watched reports whether events of a queue are collected for anybody.
func Watched(q *codeq.Queue) bool { return inspect.Of(q).Watched() }

// Awaiting returns how many callers of Await the leader of a task's shard knows.
func Awaiting(t *testing.T, qs []*codeq.Queue, id codeq.ID) (n int) {
	for _, q := range qs {
		shard := keys.ShardOf(keys.ID(id), inspect.Of(q).Shards())
		_ = inspect.Of(q).Owner(shard, func(o *inspect.Owner) error { // or another node leads it
			n += o.Awaiting(keys.ID(id))
			return nil
		})
	}
	return n
}

// LoseLease ends a lease as if its deadline had passed.
func LoseLease(t *testing.T, q *codeq.Queue, id codeq.ID) {
	t.Helper()
	shard := keys.ShardOf(keys.ID(id), inspect.Of(q).Shards())
	require.NoError(t, inspect.Of(q).Owner(shard, func(o *inspect.Owner) error {
		if !o.Rules.Probe().Expire(keys.ID(id)) {
			return codeq.ErrNotFound
		}
		return nil
	}))
}

// CheckAll runs the checker over the disk of every shard that the process leads.
func CheckAll(q *codeq.Queue) error {
	var errs []error
	in := inspect.Of(q)
	for shard := range Led(q) {
		errs = append(errs, in.Read(shard, func(st *store.Store) error {
			snap := st.DB().NewSnapshot()
			return errors.Join(fsck.Check(snap, offline.Rules, shard, in.Shards()), snap.Close())
		}))
	}
	return errors.Join(errs...)
}

// ErrBusy says that an owner has something under way, so that its memory cannot be compared.
var ErrBusy = errors.New("the group is not empty")

// CheckMemory compares the memory of every shard with its disk. REQUIRES: no operation is under
// way, except claims that wait.
func CheckMemory(q *codeq.Queue) error {
	in := inspect.Of(q)
	for shard := range Led(q) {
		err := ErrBusy
		for tries := 0; errors.Is(err, ErrBusy) && tries < 1000; tries++ {
			err = in.Owner(shard, checkMemory)
		}
		if err != nil {
			return fmt.Errorf("memory of shard %d: %w", shard, err)
		}
	}
	return checkGates(q)
}

// checkMemory returns what in the memory of a shard is not as its disk says it should be.
func checkMemory(o *inspect.Owner) error {
	if !o.Rules.Probe().IsAtRest() || o.Busy {
		return ErrBusy
	}
	snap := o.Store.DB().NewSnapshot()
	defer snap.Close()
	claimable, err := o.Rules.Check(snap, o.Claims.Needs)
	if err != nil {
		return err
	}
	return o.Claims.Check(claimable)
}

// checkGates makes sure that the gate of every queue counts the leases of all shards, and that all
// shards go by the same settings.
func checkGates(q *codeq.Queue) error {
	in := inspect.Of(q)
	leased := make(map[string]int)
	var first map[string]engine.Configured // as the first shard knows them
	for shard := range Led(q) {
		settings := make(map[string]engine.Configured)
		if err := in.Owner(shard, func(o *inspect.Owner) error {
			for name, qs := range o.Rules.Names.Queues {
				leased[name] += int(qs.Counts.Leased) + qs.Orphans
				if qs.Version != 0 {
					settings[name] = qs.Configured
				}
			}
			return nil
		}); err != nil {
			return err
		}
		if first == nil {
			first = settings
		}
		if !maps.EqualFunc(first, settings, func(a, b engine.Configured) bool {
			return a.Version == b.Version && bytes.Equal(a.Value, b.Value)
		}) {
			return fmt.Errorf("shard %d has settings %v, the first one has %v", shard, settings, first)
		}
	}
	for shard := range Led(q) {
		return in.Owner(shard, func(o *inspect.Owner) error { return o.Claims.CheckLimits(leased, first) })
	}
	return nil
}

// RequireSettled waits until nothing moves any more, and checks disk and memory of every shard.
func RequireSettled(t *testing.T, q *codeq.Queue) {
	t.Helper()
	synctest.Wait()
	require.NoError(t, CheckAll(q))
	require.NoError(t, CheckMemory(q))
}

// RequireNoGroups makes sure that nothing is left of any group.
func RequireNoGroups(t *testing.T, q *codeq.Queue) {
	t.Helper()
	for shard := range Led(q) {
		require.NoError(t, inspect.Of(q).Owner(shard, func(o *inspect.Owner) error {
			if u := o.Rules.Probe().Usage().Groups; u.Whole && u.Held > 0 {
				return fmt.Errorf("%d groups in memory", u.Held)
			}
			return store.Scan(o.Store.DB(), keys.Group, func(key, value []byte) error {
				return fmt.Errorf("group %x is %x", key, value)
			})
		}))
	}
}

// RequireNoLimits makes sure that no shard holds anything for any LimitKey.
func RequireNoLimits(t *testing.T, q *codeq.Queue) {
	t.Helper()
	for shard := range Led(q) {
		require.NoError(t, inspect.Of(q).Owner(shard, func(o *inspect.Owner) error {
			require.Zero(t, o.Rules.Probe().Usage().Limits)
			return nil
		}))
	}
}

// RequireInShards makes sure that all shards go by the same settings.
func RequireInShards(t *testing.T, q *codeq.Queue, queue string, version uint64, want codeq.Settings) {
	t.Helper()
	for shard := range Led(q) {
		require.NoError(t, inspect.Of(q).Owner(shard, func(o *inspect.Owner) error {
			c := o.Rules.Names.QueueNamed(queue).Configured
			var got codeq.Settings
			text, err := json.Marshal(c.Settings)
			require.NoError(t, err)
			require.NoError(t, json.Unmarshal(text, &got))
			require.Equal(t, want, got, "shard %d", shard)
			require.Equal(t, version, c.Version, "shard %d", shard)
			return nil
		}))
	}
}

// List returns all tasks that the disk has, without asking the owners.
func List(q *codeq.Queue) (map[codeq.ID]*codeq.TaskInfo, error) {
	found := make(map[codeq.ID]*codeq.TaskInfo)
	var errs []error
	for shard := range Led(q) {
		tasks, err := Tasks(q, shard)
		maps.Copy(found, tasks)
		errs = append(errs, err)
	}
	return found, errors.Join(errs...)
}

// Tasks returns the tasks that the store of a shard has, without asking its owner.
func Tasks(q *codeq.Queue, shard int) (map[codeq.ID]*codeq.TaskInfo, error) {
	found := make(map[codeq.ID]*codeq.TaskInfo)
	err := inspect.Of(q).Read(shard, func(st *store.Store) error {
		snap := st.DB().NewSnapshot()
		defer snap.Close()
		for _, prefix := range keys.RecordRanges {
			if err := store.Scan(snap, prefix, func(key, value []byte) error {
				id, place, err := keys.ParsePlaceKey(key)
				if err != nil {
					return err
				}
				task, err := store.NewSnapshot(snap).Task(id, place, value)
				if err == nil {
					found[id] = inspect.TaskInfo(task).(*codeq.TaskInfo)
				}
				return err
			}); err != nil {
				return err
			}
		}
		return nil
	})
	return found, err
}

// Stored returns how many entries a range has in all shards.
func Stored(t *testing.T, q *codeq.Queue, prefix byte) (n int) {
	t.Helper()
	for shard := range Led(q) {
		n += StoredIn(t, q, shard, prefix)
	}
	return n
}

// StoredIn returns how many entries a range has in a shard.
func StoredIn(t *testing.T, q *codeq.Queue, shard int, prefix byte) (n int) {
	t.Helper()
	require.NoError(t, inspect.Of(q).Read(shard, func(st *store.Store) error {
		return store.Scan(st.DB(), prefix, func([]byte, []byte) error { n++; return nil })
	}))
	return n
}

// Flush writes what each shard has in memory into tables.
func Flush(t *testing.T, q *codeq.Queue) {
	t.Helper()
	for shard := range Led(q) {
		require.NoError(t, inspect.Of(q).Owner(shard, func(o *inspect.Owner) error {
			return o.Store.Flush(context.Background())
		}))
	}
}

// Quiesce waits until nothing is under way between the shards.
func Quiesce(t *testing.T, q *codeq.Queue) {
	t.Helper()
	for range 2 { // what one shard sends may make another one send
		for shard := range Led(q) {
			require.Eventually(t, func() bool { return isQuiet(t, q, shard) }, 20*time.Second, time.Millisecond)
		}
	}
}

func isQuiet(t *testing.T, q *codeq.Queue, shard int) (quiet bool) {
	require.NoError(t, inspect.Of(q).Owner(shard, func(o *inspect.Owner) error {
		quiet = !o.Busy
		for _, n := range o.Rules.Probe().Usage().Out.Waiting {
			quiet = quiet && n == 0
		}
		return nil
	}))
	return quiet
}

// Hold makes the owner of a shard wait, before its next decision, until goOn is called.
func Hold(q *codeq.Queue, shard int) (goOn func()) {
	stands, over := make(chan struct{}), make(chan struct{})
	go inspect.Of(q).Owner(shard, func(*inspect.Owner) error { close(stands); <-over; return nil })
	<-stands
	return func() { close(over) }
}

// WrapCommits puts a committer in the place of the one of a shard, which it may use.
func WrapCommits(t *testing.T, q *codeq.Queue, shard int, wrap func(inspect.Committer) inspect.Committer) {
	t.Helper()
	require.NoError(t, inspect.Of(q).Owner(shard, func(o *inspect.Owner) error {
		o.Commit = wrap(o.Commit)
		return nil
	}))
}

// latch is a committer that holds commits back while it is shut.
type latch struct {
	inspect.Committer
	open chan struct{}
}

func (g *latch) Commit(b *pebble.Batch) error {
	<-g.open
	return g.Committer.Commit(b)
}

// Shut makes the owner of a shard block in its next commit, until the channel is closed. That may
// be the commit of the group under way, if others call as well.
func Shut(t *testing.T, q *codeq.Queue, shard int) chan struct{} {
	t.Helper()
	g := &latch{open: make(chan struct{})}
	done := make(chan struct{})
	go func() {
		_ = inspect.Of(q).Owner(shard, func(o *inspect.Owner) error {
			g.Committer, o.Commit = o.Commit, g
			close(done)
			return nil
		})
	}()
	<-done
	return g.open
}

// FillInbox makes the owner of a queue's only shard, which has an inbox of depth one, block in a
// commit, and fills the inbox.
func FillInbox(t *testing.T, q *codeq.Queue) (open chan struct{}, errs chan error) {
	t.Helper()
	open, errs = Shut(t, q, 0), make(chan error, 2)
	for range 2 {
		go func() {
			_, err := q.Produce(context.Background(), codeq.Task{Queue: "a"})
			errs <- err
		}()
		synctest.Wait()
	}
	require.Equal(t, 1, inspect.Of(q).Waiting(0))
	return open, errs
}

// SlowCommitter takes a time for each commit. In a bubble, where nothing else takes time, a
// caller knows by the clock how many groups it has waited for.
type SlowCommitter struct {
	inspect.Committer
	takes   time.Duration
	Commits atomic.Int64
}

func (c *SlowCommitter) Commit(b *pebble.Batch) error {
	c.Commits.Add(1)
	time.Sleep(c.takes)
	return c.Committer.Commit(b)
}

// SlowDown makes each commit of a shard take a time from now on.
func SlowDown(t *testing.T, q *codeq.Queue, shard int, takes time.Duration) *SlowCommitter {
	t.Helper()
	c := &SlowCommitter{takes: takes}
	WrapCommits(t, q, shard, func(next inspect.Committer) inspect.Committer {
		c.Committer = next
		return c
	})
	return c
}

// burningCommitter refuses every batch.
type burningCommitter struct{}

func (burningCommitter) Commit(*pebble.Batch) error { return testkit.ErrDisk }

func (burningCommitter) Confirm() error { return nil }

// FailShard makes the next commit of a shard fail.
func FailShard(t *testing.T, q *codeq.Queue, shard int) {
	t.Helper()
	WrapCommits(t, q, shard, func(inspect.Committer) inspect.Committer { return burningCommitter{} })
}

// Imager keeps an image of a disk, as a power loss would leave it, after each commit of a shard.
type Imager struct {
	inspect.Committer
	disk   *crashfs.Disk
	Images []*crashfs.Disk
}

func (c *Imager) Commit(b *pebble.Batch) error {
	err := c.Committer.Commit(b)
	c.Images = append(c.Images, c.disk.CrashClone(vfs.CrashCloneCfg{}))
	return err
}

// KeepImages begins to keep images of the disk of a queue with one shard.
func KeepImages(t *testing.T, q *codeq.Queue, disk *crashfs.Disk) *Imager {
	im := &Imager{disk: disk}
	WrapCommits(t, q, 0, func(next inspect.Committer) inspect.Committer {
		im.Committer = next
		return im
	})
	return im
}

// CountingCommitter counts the commits. The owner alone writes it.
type CountingCommitter struct {
	inspect.Committer
	Commits int
	Keys    uint32
	Largest uint32 // keys in one commit
}

func (c *CountingCommitter) Commit(b *pebble.Batch) error {
	c.Commits++
	c.Keys += b.Count()
	c.Largest = max(c.Largest, b.Count())
	return c.Committer.Commit(b)
}
