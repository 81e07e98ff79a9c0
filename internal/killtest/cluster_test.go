package killtest

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/keys"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
)

// The cluster kill test runs three nodes as processes on loopback. They produce and work. On their
// standard output they report the acknowledgements with their times, and their shards as leaders.
// The parent kills one node after another with SIGKILL, starts it again, and compares the
// acknowledgements with the work on the tasks.

var (
	clusterFor      = flag.Duration("cluster.for", 0, "how long TestClusterKill keeps the nodes under load, at each durability; 0: 2s, 10s with -long")
	clusterFailover = flag.Duration("cluster.failover", 3*time.Second, "from the kill of a node to the next task claimed of a shard that it led, at the most")
)

const (
	clusterShardsN = 3
	clusterQueue   = "kill"
	clusterLease   = 3 * time.Second
	// Each producer of a node pauses for so long after each task: the machine is busy, but
	// elections still find processors.
	clusterPause = 5 * time.Millisecond
)

// clusterConfig is the configuration of a node for its start.
type clusterConfig struct {
	Dir   string
	Life  uint64 // of all processes of the test
	Self  int
	Peers []codeq.Peer
	Level codeq.Durability
	Joins bool // the node joins the others, and leaves them when it closes
}

// clusterChild is a node. It produces until its standard input has a byte, works
// until nothing is left, and ends with its standard input.
func clusterChild(c clusterConfig) error {
	opts := &codeq.Options{
		Shards: clusterShardsN, Durability: c.Level, LeaseFor: clusterLease, MaxAttempts: 1 << 20, Logger: childLogger(),
		Cluster: &codeq.Cluster{
			Node: c.Peers[c.Self].Node, Listen: c.Peers[c.Self].Address, Peers: c.Peers, Join: c.Joins, LeaveOnClose: c.Joins,
		},
	}
	q, err := codeq.Open(c.Dir, opts)
	if err != nil {
		return err
	}
	go reportLeadership(q, c.Peers[c.Self].Node)
	go reportCaughtUp(q, c.Peers[c.Self].Node)
	var stop atomic.Bool
	const producers, workers = 4, 8
	errs := make(chan error)
	var produces, works sync.WaitGroup
	for p := range producers {
		produces.Go(func() {
			if err := clusterProduce(q, c.Life<<40|uint64(p)<<32, &stop); err != nil {
				errs <- fmt.Errorf("produce: %w", err)
			}
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for range workers {
		works.Go(func() {
			if err := clusterWork(ctx, q); err != nil {
				errs <- fmt.Errorf("work: %w", err)
			}
		})
	}
	ended := make(chan error, 1)
	go func() {
		ended <- func() error {
			if _, err := io.ReadFull(os.Stdin, make([]byte, 1)); err != nil {
				return err
			}
			stop.Store(true)
			produces.Wait()
			if err := q.WaitIdle(ctx); err != nil {
				return fmt.Errorf("wait: %w", err)
			}
			stats, err := q.Stats(ctx)
			if err != nil {
				return fmt.Errorf("stats: %w", err)
			}
			nodeEvent{kind: nodeDrained, number: stats[clusterQueue].Total()}.report()
			_, err = io.Copy(io.Discard, os.Stdin)
			return err
		}()
	}()
	select {
	case err := <-errs:
		return err
	case err := <-ended:
		cancel()
		works.Wait()
		return errors.Join(err, q.Close())
	}
}

// statusOf is the status of each replica, by shard and node, from the nodes that answer at once.
func statusOf(q *codeq.Queue) (shards []codeq.ShardStatus, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	st, err := q.ClusterStatus(ctx)
	if err != nil {
		return nil, err
	}
	return st.Shards, nil
}

// replicaOf is a node's replica of a shard; nil if it is not known.
func replicaOf(sh codeq.ShardStatus, node string) *codeq.ReplicaStatus {
	for i, r := range sh.Replicas {
		if r.Node == node && r.LastError == "" {
			return &sh.Replicas[i]
		}
	}
	return nil
}

// reportLeadership reports the shards that the node leads, and the oldest format of all shards,
// until its queue closes.
func reportLeadership(q *codeq.Queue, self string) {
	var was [clusterShardsN]bool
	format := 0
	for ; ; time.Sleep(20 * time.Millisecond) {
		shards, err := statusOf(q)
		if errors.Is(err, codeq.ErrClosed) {
			return
		} else if err != nil {
			continue // the node was too slow
		}
		oldest := slices.MinFunc(shards, func(a, b codeq.ShardStatus) int { return cmp.Compare(a.Format, b.Format) }).Format
		if oldest > format {
			format = oldest
			nodeEvent{kind: nodeFormat, number: uint64(format)}.report()
		}
		for i, sh := range shards {
			r := replicaOf(sh, self)
			if r == nil || r.Serves == was[i] {
				continue
			}
			was[i] = r.Serves
			kind := byte(nodeLeadsNot)
			if was[i] {
				kind = nodeLeads
			}
			nodeEvent{kind: kind, number: uint64(i)}.report()
		}
	}
}

// reportCaughtUp reports once that the node has all entries that the leaders of all shards had at
// its start.
func reportCaughtUp(q *codeq.Queue, self string) {
	var want [clusterShardsN]uint64 // 0: the leader of the shard is not known yet
	for ; ; time.Sleep(10 * time.Millisecond) {
		shards, err := statusOf(q)
		if errors.Is(err, codeq.ErrClosed) {
			return // the test never gets the report
		} else if err != nil {
			continue // the node was too slow
		}
		behind := false
		for i, sh := range shards {
			if r := replicaOf(sh, sh.Leader); r != nil && want[i] == 0 {
				want[i] = r.Applied
			}
			r := replicaOf(sh, self)
			behind = behind || r == nil || want[i] == 0 || r.Applied < want[i]
		}
		if !behind {
			nodeEvent{kind: nodeCaughtUp}.report()
			return
		}
	}
}

func clusterProduce(q *codeq.Queue, number uint64, stop *atomic.Bool) error {
	for ; !stop.Load(); number++ {
		t := codeq.Task{Queue: clusterQueue, Payload: binary.BigEndian.AppendUint64(nil, number)}
		id, err := q.Produce(context.Background(), t)
		if err != nil {
			return err
		}
		nodeEvent{kind: nodeProduced, id: id, number: number}.report()
		time.Sleep(clusterPause)
	}
	return nil
}

func clusterWork(ctx context.Context, q *codeq.Queue) error {
	for {
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{clusterQueue}})
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		e := nodeEvent{kind: nodeClaimed, id: l.ID, number: binary.BigEndian.Uint64(l.Payload), attempt: l.Attempt}
		e.report()
		e.kind = nodeFinishing
		e.report()
		switch err := q.Complete(context.Background(), l.Receipt, nil); {
		case err == nil:
			e.kind = nodeCompleted
		case errors.Is(err, codeq.ErrUncertain):
			continue // the task is done, or a worker claims it again
		case errors.Is(err, codeq.ErrLeaseLost), errors.Is(err, codeq.ErrNotLeader):
			e.kind = nodeUnfinished
		default:
			return err
		}
		e.report()
	}
}

// clusterHistory has the reports of the nodes.
type clusterHistory struct {
	t  *testing.T
	mu sync.Mutex // guards the fields below

	leader    [clusterShardsN]int // -1: no node reports that it leads
	since     [clusterShardsN]time.Time
	claimedAt [clusterShardsN]time.Time // the last claim
	elections int
	changed   chan struct{} // closed and replaced by every event

	produced  map[codeq.ID]uint64
	byNumber  map[uint64]codeq.ID // a produce has one effect
	attempts  map[codeq.ID]map[int]bool
	finishing map[codeq.ID]int // calls of Complete with a possible effect
	completed map[codeq.ID]int // the attempt
	caughtUp  map[int]int      // how often a node has caught up
	drained   map[int]uint64
	formats   map[int]uint64 // of the shards, from the last reports of the nodes
}

func newClusterHistory(t *testing.T) *clusterHistory {
	return &clusterHistory{
		t: t, leader: [clusterShardsN]int{-1, -1, -1}, changed: make(chan struct{}),
		produced: map[codeq.ID]uint64{}, byNumber: map[uint64]codeq.ID{}, attempts: map[codeq.ID]map[int]bool{},
		finishing: map[codeq.ID]int{}, completed: map[codeq.ID]int{}, caughtUp: map[int]int{}, drained: map[int]uint64{},
		formats: map[int]uint64{},
	}
}

func (h *clusterHistory) add(node int, e nodeEvent) {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.changed)
	h.changed = make(chan struct{})
	shard := keys.ShardOf(keys.ID(e.id), clusterShardsN)
	switch e.kind {
	case nodeLeads: // a report may come after a later one of another node
		if h.elections++; e.at.After(h.since[e.number]) {
			h.leader[e.number], h.since[e.number] = node, e.at
		}
	case nodeLeadsNot:
		if h.leader[e.number] == node {
			h.leader[e.number] = -1
		}
	case nodeCaughtUp:
		h.caughtUp[node]++
	case nodeProduced:
		h.produced[e.id] = e.number
		h.numbered(e)
	case nodeClaimed:
		h.numbered(e)
		if h.attempts[e.id] == nil {
			h.attempts[e.id] = map[int]bool{}
		}
		if h.attempts[e.id][e.attempt] {
			h.t.Errorf("attempt %d of task %s was handed out twice", e.attempt, e.id)
		}
		h.attempts[e.id][e.attempt] = true
		if e.at.After(h.claimedAt[shard]) {
			h.claimedAt[shard] = e.at
		}
	case nodeFinishing:
		h.finishing[e.id]++
	case nodeUnfinished:
		h.finishing[e.id]--
	case nodeCompleted:
		if _, ok := h.completed[e.id]; ok {
			h.t.Errorf("task %s was completed twice", e.id)
		}
		h.completed[e.id] = e.attempt
	case nodeDrained:
		h.drained[node] = e.number
	case nodeFormat:
		h.formats[node] = e.number
	}
}

func (h *clusterHistory) numbered(e nodeEvent) {
	if id, ok := h.byNumber[e.number]; ok && id != e.id {
		h.t.Errorf("task number %x is there twice: %s, %s", e.number, id, e.id)
	}
	h.byNumber[e.number] = e.id
}

// wait waits until the history meets a condition.
func (h *clusterHistory) wait(what string, limit time.Duration, holds func() bool) {
	h.t.Helper()
	over := time.After(limit)
	for {
		h.mu.Lock()
		ok, changed := holds(), h.changed
		h.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-over:
			h.mu.Lock()
			defer h.mu.Unlock()
			require.FailNow(h.t, what+": not within "+limit.String(), "leaders %v, drained %v, caught up %v, %d tasks produced, %d completed",
				h.leader, h.drained, h.caughtUp, len(h.produced), len(h.completed))
		}
	}
}

// clusterNodes are three nodes that run as processes, and their reports.
type clusterNodes struct {
	*clusterHistory
	dir       string
	level     codeq.Durability
	peers     []codeq.Peer
	lives     uint64 // of all nodes so far
	build     string // the test binary of nodes that start
	processes []*child
}

// startNodes starts a new cluster, and waits until all shards have leaders. The cluster ends with
// the test. The nodes run a test binary: this one, or that of another build.
func startNodes(t *testing.T, random *rand.Rand, level codeq.Durability, build string) *clusterNodes {
	c := newNodes(t, random, level, build)
	for i := range c.processes {
		c.start(i)
	}
	c.waitForLeaders()
	return c
}

// newNodes prepares three nodes.
func newNodes(t *testing.T, random *rand.Rand, level codeq.Durability, build string) *clusterNodes {
	c := &clusterNodes{
		clusterHistory: newClusterHistory(t), dir: t.TempDir(), level: level, build: build,
		peers: threePeers(t, random.IntN), processes: make([]*child, 3),
	}
	t.Cleanup(func() {
		for _, p := range c.processes {
			if p != nil {
				if t.Failed() {
					p.dump()
				}
				p.kill()
			}
		}
	})
	return c
}

// waitForLeaders waits until all shards have leaders.
func (c *clusterNodes) waitForLeaders() {
	c.t.Helper()
	c.wait("the shards have leaders", 20*time.Second, func() bool { return !slices.Contains(c.leader[:], -1) })
}

// start starts a node, perhaps again.
func (c *clusterNodes) start(node int) { c.startWith(c.config(node)) }

// startAfter starts a node of a cluster that began with the first node; each of the others joins
// it.
func (c *clusterNodes) startAfter(node int) {
	conf := c.config(node)
	conf.Peers, conf.Joins = c.peers[:node+1], node > 0
	c.startWith(conf)
}

func (c *clusterNodes) startWith(conf clusterConfig) {
	c.processes[conf.Self] = start(c.t, command(c.t, c.build, "node", conf), events(c.t, func(e nodeEvent) { c.add(conf.Self, e) }))
}

// config is the configuration of a node for its next life.
func (c *clusterNodes) config(node int) clusterConfig {
	c.lives++
	return clusterConfig{
		Dir: filepath.Join(c.dir, c.peers[node].Node), Life: c.lives, Self: node, Peers: c.peers, Level: c.level,
	}
}

// dump makes a node write the stacks of its goroutines to the standard error; this ends the node.
func (c *child) dump() {
	_ = resume(c.Process)                         // it may have ended
	if c.Process.Signal(syscall.SIGQUIT) == nil { // else it has ended
		<-c.read
	}
}

// TestClusterKill: while one node after another dies, no acknowledged task is lost, and no task
// with an acknowledged end runs again. Other nodes serve the shards of a killed node in time. The
// test pauses some nodes instead, and they go on later.
func TestClusterKill(t *testing.T) {
	testbase.SkipUnderRace(t)
	parallel := func(t *testing.T) {
		if *clusterFor == 0 { // a measurement needs one cluster at a time
			t.Parallel()
		}
	}
	parallel(t)
	for _, level := range []codeq.Durability{codeq.DurabilityDisk, codeq.DurabilityProcess} {
		t.Run(level.String(), func(t *testing.T) {
			parallel(t)
			killNodes(t, level)
		})
	}
}

func killNodes(t *testing.T, level codeq.Durability) {
	load := cmp.Or(*clusterFor, time.Duration(testkit.Sized(2, 10))*time.Second)
	random := testkit.Seeded(t)
	c := startNodes(t, random, level, thisBuild(t))

	var failovers []time.Duration
	kills, stops := 0, 0
	for begun := time.Now(); time.Since(begun) < load; kills++ {
		time.Sleep(time.Second + time.Duration(random.IntN(500))*time.Millisecond) // a load between the kills
		c.waitForLeaders()
		victim := random.IntN(len(c.processes))
		if kills%2 == 0 { // a node that leads a shard
			c.mu.Lock()
			victim = c.leader[random.IntN(clusterShardsN)]
			c.mu.Unlock()
		}
		what, end, back := "kill", c.kill, c.start
		if pauses && kills%3 == 1 {
			what, end, back = "pause", c.pause, c.resume
			stops++
		}
		took, elected := c.miss(victim, end)
		t.Logf("%s %d: node %d, shards led again after %v, served after %v", what, kills, victim, elected, took)
		failovers = append(failovers, took...)
		time.Sleep(time.Duration(random.IntN(1000)) * time.Millisecond) // the others go on without it
		back(victim)
	}

	c.finish()
	t.Logf("%d kills and pauses (%d), %d elections, %d tasks acknowledged, %d completed, failovers %v",
		kills, stops, c.elections, len(c.produced), len(c.completed), distribution(failovers))
	for _, took := range failovers {
		require.LessOrEqual(t, took, *clusterFailover)
	}
}

// drain ends the producers, and waits until no work is left.
func (c *clusterNodes) drain() {
	for _, p := range c.processes {
		_, err := p.stdin.Write([]byte{0})
		require.NoError(c.t, err)
	}
	c.wait("all tasks are done", 60*time.Second, func() bool { return len(c.drained) == len(c.peers) })
}

// finish drains the queue and ends the nodes. It compares the acknowledgements with the work on the
// tasks.
func (c *clusterNodes) finish() {
	c.drain()
	for _, p := range c.processes {
		require.NoError(c.t, p.stdin.Close())
	}
	closing := time.Now()
	for i, p := range c.processes {
		require.NoError(c.t, p.wait(), "node %d", i)
	}
	c.t.Logf("closed within %v", time.Since(closing).Round(time.Millisecond))
	c.verify()
}

// TestClusterReturn: a node that was away for long counts again as soon as it is back: then the
// cluster can do without another node.
func TestClusterReturn(t *testing.T) {
	if testing.Short() {
		t.Skip("a node is away for 6 s")
	}
	t.Parallel()
	c := startNodes(t, testkit.Seeded(t), codeq.DurabilityProcess, thisBuild(t))
	c.wait("the node has been there", 20*time.Second, func() bool { return c.caughtUp[0] == 1 })
	c.miss(0, c.kill)
	time.Sleep(6 * time.Second) // so long that Raft now rarely tries to replicate to it
	c.start(0)
	back := time.Now()
	c.wait("the node has caught up", 20*time.Second, func() bool { return c.caughtUp[0] == 2 })
	require.Less(t, time.Since(back), *clusterFailover, "until the node has caught up")

	victim := 1 // and the other one goes on leading
	c.mu.Lock()
	if !slices.Contains(c.leader[:], 2) {
		victim = 2
	}
	c.mu.Unlock()
	at := time.Now()
	c.miss(victim, c.kill)
	c.wait("all shards are served", 30*time.Second, func() bool {
		for _, claimed := range c.claimedAt {
			if claimed.Sub(at) < 200*time.Millisecond { // it may have been under way
				return false
			}
		}
		return true
	})
	c.mu.Lock()
	claimedAt := c.claimedAt
	c.mu.Unlock()
	for shard, claimed := range claimedAt {
		t.Logf("shard %d is served after %v", shard, claimed.Sub(at).Round(time.Millisecond))
		require.Less(t, claimed.Sub(at), *clusterFailover)
	}
}

// kill ends a node without a warning.
func (c *clusterNodes) kill(node int) { c.processes[node].kill() }

// pause stops a node: its clocks go on, and the other nodes do not notice the pause at once.
func (c *clusterNodes) pause(node int) {
	require.NoError(c.t, pause(c.processes[node].Process))
}

// resume continues a paused node. For a moment the node may act as a leader.
func (c *clusterNodes) resume(node int) {
	require.NoError(c.t, resume(c.processes[node].Process))
}

// miss ends or pauses a node. For each shard that it led, miss returns the time until the claim of
// a task at another node, and the time until the election of that node.
func (c *clusterNodes) miss(node int, end func(node int)) (took, elected []time.Duration) {
	at := time.Now()
	end(node)
	var missed []int
	c.mu.Lock()
	for i, leader := range c.leader {
		if leader == node {
			missed = append(missed, i)
			c.leader[i] = -1
		}
	}
	c.mu.Unlock()
	took, elected = make([]time.Duration, len(missed)), make([]time.Duration, len(missed))
	c.wait(fmt.Sprint("shards ", missed, " are served again"), 30*time.Second, func() bool {
		all := true
		for i, shard := range missed {
			if took[i] == 0 && c.leader[shard] >= 0 && c.claimedAt[shard].After(c.since[shard]) {
				elected[i] = c.since[shard].Sub(at).Round(time.Millisecond)
				took[i] = c.claimedAt[shard].Sub(at).Round(time.Millisecond)
			}
			all = all && took[i] > 0
		}
		return all
	})
	return took, elected
}

// verify compares the acknowledgements with the work on the tasks.
func (h *clusterHistory) verify() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for node, left := range h.drained {
		require.Zero(h.t, left, "node %d", node)
	}
	lost := 0
	for id, number := range h.produced {
		if _, ok := h.completed[id]; !ok && h.finishing[id] <= 0 {
			h.t.Errorf("task %s (%x) is lost", id, number)
			if lost++; lost > 10 {
				break
			}
		}
	}
	for id, attempt := range h.completed {
		for later := range h.attempts[id] {
			if later > attempt {
				h.t.Errorf("task %s was handed out as attempt %d, and had been completed as attempt %d", id, later, attempt)
			}
		}
	}
	require.NotEmpty(h.t, h.completed)
}

func distribution(list []time.Duration) string {
	if len(list) == 0 {
		return "none"
	}
	slices.Sort(list)
	at := func(part float64) time.Duration { return list[int(part*float64(len(list)-1))] }
	return strings.TrimSpace(fmt.Sprintf("of %d: min %v, median %v, 90%% %v, max %v", len(list), at(0), at(0.5), at(0.9), at(1)))
}
