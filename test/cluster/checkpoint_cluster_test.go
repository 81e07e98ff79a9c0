package cluster_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/simtest"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestCheckpointOfClusterIsOneCut: TestCheckpointIsOneCut with three nodes that lead a shard each.
// All nodes make copies, two at a time.
func TestCheckpointOfClusterIsOneCut(t *testing.T) {
	t.Parallel()
	seed := testkit.Seed()
	t.Logf("seed %d", seed)
	opts := codeq.Options{Shards: 3, Retention: codeq.Forever, WindowTasks: 64, MemTableBytes: 256 << 10}
	simCaseOf(t, seed, 3, opts, 0, func(t *testing.T, c *simCluster) {
		l := queuetest.NewCopyLoad(t, opts, seed)
		for _, n := range c.members() {
			l.Queues = append(l.Queues, simQueue(n))
		}
		var mu sync.Mutex // guards made
		var made []queuetest.Copied
		l.Run(func() {
			for i := range *queuetest.Copies {
				l.After(20 + l.Chance(100))
				var calls sync.WaitGroup
				for n := range 2 {
					calls.Go(func() {
						one := l.Checkpoint(l.Queues[(i+n)%3], fmt.Sprint("copies/", i))
						mu.Lock()
						defer mu.Unlock()
						made = append(made, one)
					})
				}
				calls.Wait()
			}
		})
		c.rest()
		for i := range made {
			l.Check(&made[i])
		}
	})
}

// TestCheckpointWithoutMajority: Checkpoint runs on a node that is cut off from its cluster. When
// its ctx ends, in the first try or a later one, Checkpoint says that there is no leader, and why.
func TestCheckpointWithoutMajority(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, other := c.lead()
		for _, n := range []*simNode{leader, other} {
			c.net.Isolate(n.name, c.names())
			for _, wait := range []time.Duration{simCallTimeout / 2, 2 * simCallTimeout, time.Hour} {
				ctx, cancel := context.WithTimeoutCause(context.Background(), wait, errors.New("impatience"))
				err := simQueue(n).Checkpoint(ctx, "copy")
				cancel()
				require.True(t, errors.Is(err, codeq.ErrNotLeader) || errors.Is(err, codeq.ErrUncertain), "%v", err)
				require.Equal(t, wait < time.Hour, errors.Is(err, context.DeadlineExceeded), "%v", err)
				require.Equal(t, wait < time.Hour, strings.Contains(err.Error(), "impatience"), "%v", err)
				require.ErrorContains(t, err, "shard 0")
			}
			c.net.Heal(true)
			c.awaitLeaders()
		}
	})
}

// atCopy calls do when a node begins to copy its stores. The shards stand still at that time.
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
func requireCopy(t *testing.T, n *simNode, tasks []codeq.ID) {
	opts := inspect.With(&codeq.Options{}, inspect.Private{FS: n.machine.Disk()})
	queuetest.RequireTasks(t, "copy", opts, tasks)
	report, err := codeq.Verify("copy", inspect.With(&codeq.VerifyOptions{}, inspect.Private{FS: n.machine.Disk()}))
	require.NoError(t, err)
	require.Empty(t, report.Problems)
	q, err := codeq.Open("copy", opts)
	require.NoError(t, err)
	requireAlone(t, q)
	require.NoError(t, q.Close())
}

// requireAlone checks that a queue has no entries of a node of a cluster.
func requireAlone(t *testing.T, q *codeq.Queue) {
	for shard := range inspect.Of(q).Shards() {
		entries, err := dump(q, shard)
		require.NoError(t, err)
		for _, e := range entries {
			require.NotContains(t, []byte{keys.Applied, keys.Session, keys.Interest, keys.LeaseTime}, e.key[0])
		}
	}
}

// deposed is the committer of a leader that has lost its leadership, once set is true.
type deposed struct {
	inspect.Committer
	set *atomic.Bool
}

func (d deposed) Confirm() error {
	if d.set.Load() {
		return codeq.ErrNotLeader
	}
	return d.Committer.Confirm()
}

// TestBarrierIsConfirmed: an owner stood still. This counts only if a majority confirms that its
// node has led all the time.
func TestBarrierIsConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := codeq.Open("q", inspect.With(&codeq.Options{Shards: 2, InboxDepth: 1}, inspect.Private{FS: crashfs.New()}))
		require.NoError(t, err)
		resume, err := inspect.Of(q).RaiseBarrier(t.Context())
		require.NoError(t, err)
		var calls sync.WaitGroup
		for range 5 { // more than the inbox has room for
			calls.Go(func() { queuetest.Produce(t, q, codeq.Task{Queue: "a"}) })
		}
		synctest.Wait()
		require.NoError(t, resume())
		calls.Wait()
		require.ErrorIs(t, resume(), codeq.ErrUncertain, "it has gone on before")
		var set atomic.Bool
		queuetest.WrapCommits(t, q, 1, func(next inspect.Committer) inspect.Committer { return deposed{next, &set} })
		resume, err = inspect.Of(q).RaiseBarrier(t.Context())
		require.NoError(t, err)
		set.Store(true)
		require.ErrorIs(t, resume(), codeq.ErrNotLeader)
		require.ErrorIs(t, q.Close(), codeq.ErrFailed)
	})
}

// TestCheckpointLosesItsLeader: while a node copies the tasks of a leader, another node becomes the
// leader and stores more tasks. The copy is made again.
func TestCheckpointLosesItsLeader(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		old, other := c.lead()
		var tasks []codeq.ID
		add := func(by *simNode) {
			id := queuetest.Produce(t, simQueue(by), codeq.Task{Queue: "a"})[0]
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

// TestCheckpointIsForgotten: a node dies while the shards stand still for its checkpoint. The
// shards go on after a time limit. They go on at once when the caller gives up before all of them
// stand still.
func TestCheckpointIsForgotten(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		leader, other := c.lead()
		stands := make(chan struct{})
		other.atCopy(func() {
			other.crash(0)
			close(stands)
			time.Sleep(simPatience)
		})
		gone := make(chan error, 1)
		go func(q *codeq.Queue) { gone <- q.Checkpoint(ctx, "copy") }(simQueue(other))
		<-stands
		begin := time.Now()
		queuetest.Produce(t, simQueue(leader), codeq.Task{Queue: "a"})
		require.Greater(t, time.Since(begin), time.Second, "the shard has stood still")
		require.LessOrEqual(t, time.Since(begin), barrierLimit+time.Second)
		require.Error(t, <-gone)

		other.start()
		c.rest()
		q := simQueue(other)
		giveUp, cancel := context.WithCancel(ctx)
		resume, err := inspect.Of(simQueue(leader)).RaiseBarrier(ctx) // this one comes first
		require.NoError(t, err)
		go func() { gone <- q.Checkpoint(giveUp, "another copy") }()
		time.Sleep(time.Second)
		cancel()
		require.ErrorIs(t, <-gone, context.Canceled)
		require.NoError(t, resume())
		begin = time.Now()
		queuetest.Produce(t, simQueue(leader), codeq.Task{Queue: "a"})
		require.Less(t, time.Since(begin), time.Second)
	})
}

// barrierLimit is the longest time that an owner stands still after the node that stopped it is
// gone.
const barrierLimit = 5 * time.Second

// simCopy is a copy made by a node: it has the stored tasks of some moment during a call.
type simCopy struct {
	node *simNode
	lost *crashfs.Disk // the disk of the copy, if the node has lost that disk since then
	dir  string
	h    *simtest.History[codeq.ID]
	call *simtest.Call
}

// checkpoint makes a node copy the queue, without a time limit. It returns false if the node is
// down.
func (s *schedule) checkpoint(n *simNode) bool {
	q, life := n.queue()
	if q == nil {
		return false
	}
	s.copied++
	dir := fmt.Sprint("copies/", s.copied)
	s.done.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		h := s.h
		call := h.Begin(simtest.Read, 0, n.name)
		s.cutting.Add(1)
		err := q.Checkpoint(ctx, dir)
		if err == nil {
			s.cutting.Add(-1)
		} else { // shards that got no message stand still
			time.AfterFunc(barrierLimit, func() { s.cutting.Add(-1) })
		}
		if err != nil || !n.alive(life) { // the copy may be complete even if its node died
			s.note("no copy on %s: %v", n.name, err)
			return
		}
		h.Finish(call, nil, true)
		s.note("copied on %s to %s", n.name, dir)
		s.copying.Lock()
		defer s.copying.Unlock()
		s.copies = append(s.copies, simCopy{node: n, dir: dir, h: h, call: call})
	})
	return true
}

// readCopies opens the copies on the disks of their nodes, and adds their tasks to the history. The
// nodes may have crashed since the copy, and leases in a copy may have expired.
func (s *schedule) readCopies() {
	for _, c := range s.copies {
		q, err := codeq.Open(c.dir, inspect.With(&codeq.Options{}, inspect.Private{FS: cmp.Or(c.lost, c.node.machine.Disk())}))
		if err != nil {
			s.t.Errorf("copy on %s: %v", c.node.name, err)
			continue
		}
		list, err := queuetest.List(q)
		if err == nil {
			err = queuetest.CheckAll(q)
		}
		if err != nil {
			s.t.Errorf("copy on %s: %v", c.node.name, err)
		}
		tasks := make(map[codeq.ID]*codeq.TaskInfo)
		for _, info := range list {
			tasks[info.ID] = info
		}
		c.h.Stored(c.call, shownOf(tasks))
		if err := q.Close(); err != nil {
			s.t.Errorf("copy on %s: %v", c.node.name, err)
		}
	}
}
