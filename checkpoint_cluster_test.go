package codeq

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/testkit"
)

// TestCheckpointOfClusterIsOneCut: TestCheckpointIsOneCut, of three nodes with a shard
// each, whose copies are made on all of them, and two at a time.
func TestCheckpointOfClusterIsOneCut(t *testing.T) {
	t.Parallel()
	seed := testkit.Seed()
	t.Logf("seed %d", seed)
	synctest.Test(t, func(t *testing.T) {
		opts := Options{Shards: 3, Retention: Forever, WindowTasks: 64, MemTableBytes: 256 << 10}
		c := newSimCluster(t, seed, 3, opts)
		c.awaitLeaders()
		l := newCopyLoad(t, opts, seed)
		for _, n := range c.members() {
			l.queues = append(l.queues, simQueue(n))
		}
		var mu sync.Mutex // guards made
		var made []copied
		l.run(func() {
			for i := range *copiesFlag {
				l.after(20 + l.chance(100))
				var calls sync.WaitGroup
				for n := range 2 {
					calls.Go(func() {
						one := l.checkpoint(l.queues[(i+n)%3], fmt.Sprint("copies/", i))
						mu.Lock()
						defer mu.Unlock()
						made = append(made, one)
					})
				}
				calls.Wait()
			}
		})
		c.rest()
		require.NoError(t, c.check())
		for i := range made {
			l.check(&made[i])
		}
		c.close()
	})
}

// TestCheckpointWithoutMajority: Checkpoint on a node that is cut off from its cluster says that no
// leader is there, and why, when its ctx ends, in its first try or a later one.
func TestCheckpointWithoutMajority(t *testing.T) {
	simCase(t, Options{}, func(t *testing.T, c *simCluster) {
		leader, other := c.lead()
		for _, n := range []*simNode{leader, other} {
			c.net.Isolate(n.name, c.names())
			for _, wait := range []time.Duration{simCallTimeout / 2, 2 * simCallTimeout, time.Hour} {
				ctx, cancel := context.WithTimeoutCause(context.Background(), wait, errors.New("impatience"))
				err := simQueue(n).Checkpoint(ctx, "copy")
				cancel()
				require.True(t, errors.Is(err, ErrNotLeader) || errors.Is(err, ErrUncertain), "%v", err)
				require.Equal(t, wait < time.Hour, errors.Is(err, context.DeadlineExceeded), "%v", err)
				require.Equal(t, wait < time.Hour, strings.Contains(err.Error(), "impatience"), "%v", err)
				require.ErrorContains(t, err, "shard 0")
			}
			c.net.Heal(true)
			c.awaitLeaders()
		}
	})
}

// atCopy calls do when a node begins to copy its stores, which is while the shards stand
// still.
func (n *simNode) atCopy(do func()) {
	var once sync.Once
	n.breakDisk(func(_, name string) bool {
		if strings.HasPrefix(name, "copy/shard-") {
			once.Do(do)
		}
		return false
	})
}

// requireCopy checks that a node's copy has the tasks, and that it is a queue by itself.
func requireCopy(t *testing.T, n *simNode, tasks []ID) {
	opts := inspect.With(&Options{}, inspect.Private{FS: n.machine.Disk()})
	requireTasks(t, "copy", opts, tasks)
	report, err := Verify("copy", inspect.With(&VerifyOptions{}, inspect.Private{FS: n.machine.Disk()}))
	require.NoError(t, err)
	require.Empty(t, report.Problems)
	q, err := Open("copy", opts)
	require.NoError(t, err)
	for _, r := range q.replicas {
		entries, err := r.dump()
		require.NoError(t, err)
		for _, e := range entries {
			require.NotContains(t, []byte{keys.Applied, keys.Session, keys.Interest, keys.LeaseTime}, e.key[0], "of a node of a cluster")
		}
	}
	require.NoError(t, q.Close())
}

// deposed is the committer of a leader that is not one any more.
type deposed struct{ committer }

func (deposed) Confirm() error { return ErrNotLeader }

// TestBarrierOfCluster: whoever holds the shards, nothing is done in any of them until it
// lets them go on.
func TestBarrierOfCluster(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newSimCluster(t, 1, 3, Options{Shards: 3})
		c.spread()
		for _, n := range c.members() {
			h, err := simQueue(n).raiseBarrier(t.Context())
			require.NoError(t, err)
			done := make(chan error, 9)
			for _, by := range c.members() {
				for shard := range 3 {
					go func() {
						_, err := simQueue(by).Produce(context.Background(), Task{Queue: "a", LimitKey: keyOf("a", shard, 3)})
						done <- err
					}()
				}
			}
			time.Sleep(time.Second)
			require.Empty(t, done)
			require.NoError(t, h.resume())
			for range 9 {
				require.NoError(t, <-done)
			}
		}
		c.rest()
		require.NoError(t, c.check())
		c.close()
	})
}

// TestBarrierIsConfirmed: that an owner has stood still says nothing unless a majority
// confirms that its node has led all the time.
func TestBarrierIsConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := Open("q", inspect.With(&Options{Shards: 2, InboxDepth: 1}, inspect.Private{FS: crashfs.New()}))
		require.NoError(t, err)
		h, err := q.raiseBarrier(t.Context())
		require.NoError(t, err)
		var calls sync.WaitGroup
		for range 5 { // more than there is room for
			calls.Go(func() { produce(t, q, Task{Queue: "a"}) })
		}
		synctest.Wait()
		require.NoError(t, h.resume())
		calls.Wait()
		require.ErrorIs(t, h.resume(), ErrUncertain, "it has gone on before")
		h, err = q.raiseBarrier(t.Context())
		require.NoError(t, err)
		s := q.shard(1) // its owner stands still
		s.commit = deposed{s.commit}
		require.ErrorIs(t, h.resume(), ErrNotLeader)
		require.ErrorIs(t, q.Close(), ErrFailed)
	})
}

// TestCheckpointLosesItsLeader: another node leads, and stores more, while a copy is
// being made of what the leader before it had. The copy is made again.
func TestCheckpointLosesItsLeader(t *testing.T) {
	t.Parallel()
	simCase(t, Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		old, other := c.lead()
		var tasks []ID
		add := func(by *simNode) {
			id, err := simQueue(by).Produce(ctx, Task{Queue: "a"})
			require.NoError(t, err)
			tasks = append(tasks, id)
		}
		for range 10 {
			add(other)
		}
		c.rest()
		lost := make(chan struct{})
		other.atCopy(func() {
			c.net.Isolate(old.name, c.names())
			by := c.newLeader(old)
			for range 10 {
				add(by)
			}
			c.net.Heal(true)
			close(lost)
		})
		require.NoError(t, simQueue(other).Checkpoint(ctx, "copy"))
		<-lost
		require.Len(t, tasks, 20)
		requireCopy(t, other, tasks)
	})
}

// TestCheckpointIsForgotten: a node dies while the shards stand still for its sake. They go on
// by themselves; so they do at once when the caller gives up before all of them stand still.
func TestCheckpointIsForgotten(t *testing.T) {
	t.Parallel()
	simCase(t, Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		leader, other := c.lead()
		stands := make(chan struct{})
		other.atCopy(func() {
			other.crash(0)
			close(stands)
			time.Sleep(simPatience)
		})
		gone := make(chan error, 1)
		go func(q *Queue) { gone <- q.Checkpoint(ctx, "copy") }(simQueue(other))
		<-stands
		begin := time.Now()
		_, err := simQueue(leader).Produce(ctx, Task{Queue: "a"})
		require.NoError(t, err)
		require.Greater(t, time.Since(begin), time.Second, "the shard has stood still")
		require.LessOrEqual(t, time.Since(begin), barrierLimit+time.Second)
		require.Error(t, <-gone)

		other.start()
		c.rest()
		q := simQueue(other)
		giveUp, cancel := context.WithCancel(ctx)
		h, err := simQueue(leader).raiseBarrier(ctx) // another one's turn comes first
		require.NoError(t, err)
		go func() { gone <- q.Checkpoint(giveUp, "another copy") }()
		time.Sleep(time.Second)
		cancel()
		require.ErrorIs(t, <-gone, context.Canceled)
		require.NoError(t, h.resume())
		begin = time.Now()
		_, err = simQueue(leader).Produce(ctx, Task{Queue: "a"})
		require.NoError(t, err)
		require.Less(t, time.Since(begin), time.Second)
	})
}
