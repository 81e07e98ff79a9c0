package codeq

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// requireSettled waits until nothing moves any more, and has every shard's disk
// and memory checked.
func requireSettled(t *testing.T, q *Queue) {
	t.Helper()
	synctest.Wait()
	require.NoError(t, q.checkAll())
	require.NoError(t, q.checkMemory())
}

// configure is Configure that has to succeed.
func configure(t *testing.T, q *Queue, queue string, change func(*Settings)) {
	t.Helper()
	require.NoError(t, q.Configure(context.Background(), queue, change))
}

// complete is Complete that has to succeed.
func complete(t *testing.T, q *Queue, l *Lease) {
	t.Helper()
	require.NotNil(t, l, "nothing to complete")
	require.NoError(t, q.Complete(context.Background(), l.Receipt, nil))
}

// named returns tasks that are like the given one and have the names as payloads.
func named(like Task, names ...string) []Task {
	tasks := make([]Task, len(names))
	for i, name := range names {
		tasks[i] = like
		tasks[i].Payload = []byte(name)
	}
	return tasks
}

// requireNext claims and completes tasks of a queue, which are to have these
// payloads, and then no further one.
func requireNext(t *testing.T, q *Queue, queue string, names ...string) {
	t.Helper()
	for _, name := range names {
		l := claimNow(t, q, queue)
		require.NotNil(t, l, "no task instead of %q", name)
		require.Equal(t, name, string(l.Payload))
		complete(t, q, l)
	}
	require.Nil(t, claimNow(t, q, queue))
}

// stateOf is the state in which a task is stored.
func stateOf(t *testing.T, q *Queue, id ID) State {
	t.Helper()
	info, err := q.Get(context.Background(), id)
	require.NoError(t, err)
	return info.State
}

// waitingClaim is a Claim under way.
func waitingClaim(t *testing.T, q *Queue, queue string) <-chan *Lease {
	got := make(chan *Lease, 1)
	go func() {
		if l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{queue}}); err == nil {
			got <- l
		}
	}()
	synctest.Wait()
	require.Empty(t, got, "the claim did not wait")
	return got
}

// imager keeps an image of a disk, as a power loss would leave it, after each
// commit of a shard.
type imager struct {
	committer
	disk   *vfs.MemFS
	images []*vfs.MemFS
}

func (c *imager) commit(b *pebble.Batch) error {
	err := c.committer.commit(b)
	c.images = append(c.images, c.disk.CrashClone(vfs.CrashCloneCfg{}))
	return err
}

// keepImages begins to keep images of the disk of a queue with one shard.
func keepImages(t *testing.T, q *Queue, disk *vfs.MemFS) *imager {
	im := &imager{disk: disk}
	require.NoError(t, q.shards[0].probe(func(s *shard) error {
		im.committer = s.commit
		s.commit = im
		return nil
	}))
	return im
}

// TestLimitKeyCanceledOnTheWay: a task that was let go on and is withdrawn
// before it is leased leaves its room to the next.
func TestLimitKeyCanceledOnTheWay(t *testing.T) {
	for name, withdraw := range map[string]func(q *Queue, id ID) error{
		"canceled": func(q *Queue, id ID) error { return q.Cancel(context.Background(), id) },
		"put off": func(q *Queue, id ID) error {
			return q.SetRunAt(context.Background(), id, time.Now().Add(time.Hour))
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
				configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 1 })
				ids := produce(t, q, named(Task{Queue: "a", LimitKey: "k"}, "1", "2", "3", "4")...)
				first := claimNow(t, q, "a")
				require.Nil(t, claimNow(t, q, "a"))
				complete(t, q, first)
				synctest.Wait()
				require.Equal(t, Ready, stateOf(t, q, ids[1]))
				require.Equal(t, Blocked, stateOf(t, q, ids[2]))
				require.NoError(t, withdraw(q, ids[1]))
				requireSettled(t, q)
				requireNext(t, q, "a", "3", "4")
			})
		})
	}
}

// TestLimitKeyCrashWhileParked: wherever a crash falls, those that wait for
// room get it in the end, in their order.
func TestLimitKeyCrashWhileParked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := vfs.NewCrashableMem()
		opts := Options{Durability: DurabilityDisk, fs: disk}
		q := openForRun(t, opts)
		configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 1 })
		names := []string{"0", "1", "2", "3", "4"}
		produce(t, q, named(Task{Queue: "a", LimitKey: "k"}, names...)...)
		im := keepImages(t, q, disk)
		for l := claimNow(t, q, "a"); l != nil; l = claimNow(t, q, "a") {
			require.Nil(t, claimNow(t, q, "a"), "one at a time")
			complete(t, q, l)
			requireSettled(t, q)
		}
		require.GreaterOrEqual(t, len(im.images), 3*len(names))
		for i, image := range im.images {
			opts.fs = image
			q := openForRun(t, opts)
			requireSettled(t, q)
			time.Sleep(time.Minute) // leases expire
			requireSettled(t, q)
			counts, err := q.Stats(t.Context())
			require.NoError(t, err)
			left := names[len(names)-int(counts["a"].Total()):]
			requireNext(t, q, "a", left...)
			requireSettled(t, q)
			require.NoError(t, q.Close(), "image %d", i)
		}
	})
}
