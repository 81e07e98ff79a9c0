package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/cluster"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/raftlog"
	"codeq/internal/simtest"
	"codeq/internal/store"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// simCluster is a cluster whose nodes have a network, disks and clocks in
// memory. It lives in one synctest bubble. Its methods belong to the bubble's
// main goroutine, except node.queue.
type simCluster struct {
	t     *testing.T
	net   *simtest.Net
	rng   *rand.Rand    // of power losses
	opts  codeq.Options // of all nodes, without a Cluster
	peers []codeq.Peer  // founders
	mu    sync.Mutex    // guards what follows
	nodes []*simNode    // all that are members, in order of their joining
	next  int           // number of the next node
	rates bool          // monotonic clocks run at rates of their own

	tell  func() string // what has happened; or nil
	ended sync.WaitGroup
	ends  atomic.Int32 // queues that are being closed
}

// simNode is a node, on a machine of its own.
type simNode struct {
	cluster *simCluster
	name    string
	join    bool
	leaves  bool        // it is removed when it is closed
	broken  atomic.Bool // its disk fails
	machine *simtest.Machine

	turn sync.Mutex // see hold

	mu      sync.Mutex    // guards what follows
	newest  int           // format that its build knows; 0: that of this one
	q       *codeq.Queue  // nil: the node is down
	life    *simtest.Life // nil: the node is down, or nothing more befalls it
	lives   int           // that have begun
	booted  string        // the boot of the machine in which the node was opened last
	removed bool          // it is not started again
}

// newSimCluster starts a cluster of so many nodes.
func newSimCluster(t *testing.T, seed uint64, nodes int, opts codeq.Options) *simCluster {
	return newSimClusterOf(t, seed, nodes, opts, 0)
}

// newSimClusterOf is newSimCluster with builds that know a format.
func newSimClusterOf(t *testing.T, seed uint64, nodes int, opts codeq.Options, newest int) *simCluster {
	c := &simCluster{
		t: t, net: simtest.NewNet(seed, 5*time.Millisecond), rng: rand.New(rand.NewPCG(seed, 2)), opts: opts,
	}
	if c.opts.MemTableBytes == 0 {
		c.opts.MemTableBytes = 256 << 10
	}
	c.opts.CacheBytes = 1 << 20
	for i := range nodes {
		name := fmt.Sprint("n", i)
		c.peers = append(c.peers, codeq.Peer{Node: name, Address: name})
	}
	for range nodes {
		n := c.node(false)
		n.newest = newest
		n.start()
		c.nodes = append(c.nodes, n)
	}
	return c
}

// found makes the founders of a cluster that has no nodes, and starts none of them.
func (c *simCluster) found(nodes int) {
	for range nodes {
		n := c.node(false)
		c.peers, c.nodes = append(c.peers, codeq.Peer{Node: n.name, Address: n.name}), append(c.nodes, n)
	}
}

func newSimNode(c *simCluster, name string, join bool) *simNode {
	return &simNode{cluster: c, name: name, join: join, machine: simtest.NewMachine()}
}

// node makes a node; join says that it is not one of the founders.
func (c *simCluster) node(join bool) *simNode {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := newSimNode(c, fmt.Sprint("n", c.next), join)
	c.next++
	if c.rates {
		n.machine.Mono.Run(simtest.DrawRate(c.rng))
	}
	return n
}

// seed is that of a power loss; any goroutine may call it.
func (c *simCluster) seed() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rng.Uint64()
}

// members returns the nodes; any goroutine may call it.
func (c *simCluster) members() []*simNode {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.nodes)
}

func (c *simCluster) names() (names []string) {
	for _, n := range c.members() {
		names = append(names, n.name)
	}
	return names
}

// log fails the test for a panic of codeq's own on the node. A Logger of the cluster's options has
// the records of all nodes.
func (n *simNode) log() *slog.Logger {
	h := testkit.PanicHandler{T: n.cluster.t}
	if l := n.cluster.opts.Logger; l != nil {
		h.Next = l.Handler()
	}
	if os.Getenv("CODEQ_LOG") != "" {
		h.Next = slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})
	}
	return slog.New(h).With("life", n.lives)
}

// start opens the node's queue. A node that joins, and finds nobody but a stranger at the addresses
// of the others, is opened again, and so is one whose last life has yet to end on a slow disk.
func (n *simNode) start() {
	var err error
	for end := time.Now().Add(simPatience); time.Now().Before(end); time.Sleep(time.Second) {
		if err = n.cluster.open(n); err == nil {
			return
		}
		if !strings.Contains(err.Error(), "its peers are of") && !errors.Is(err, codeq.ErrLocked) {
			break
		}
	}
	if tell := n.cluster.tell; tell != nil {
		fmt.Fprintln(os.Stderr, tell()) // the log of a test that panics is not printed
	}
	// Else the goroutines of the bubble would not end.
	panic(fmt.Sprintf("node %s does not start: %v", n.name, err))
}

func (c *simCluster) open(n *simNode) error {
	o, life := c.options(n)
	q, err := codeq.Open("queue", o)
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.q, n.life = q, life
	n.lives++
	return nil
}

// options are those of the node's next life.
func (c *simCluster) options(n *simNode) (*codeq.Options, *simtest.Life) {
	host := c.net.Listen(n.name)
	o := c.opts
	n.mu.Lock()
	life := n.machine.Start()
	n.booted = life.Boot()
	peers, join, newest := c.peers, n.join, n.newest
	n.mu.Unlock()
	inspect.Options(&o).FS, inspect.Options(&o).Boot = life.FS(), life.Boot()
	inspect.Options(&o).Wall, inspect.Options(&o).Mono = n.machine.Wall.Now, n.machine.Mono.Now
	o.Logger = n.log()
	if join {
		peers = nil
		for _, m := range c.members() {
			peers = append(peers, codeq.Peer{Node: m.name, Address: m.name})
		}
	}
	o.Cluster = inspect.With(&codeq.Cluster{
		Node: n.name, Listener: host, Peers: peers, Join: join, LeaveOnClose: n.leaves, CallTimeout: simCallTimeout,
	}, inspect.Private{
		Newest: newest,
		Dial:   func(ctx context.Context, addr string) (net.Conn, error) { return c.net.Dial(ctx, host, addr) },
		Votes:  func(string) (raftlog.Stables, error) { return life.Stables(), nil },
		Log:    func(g *raftlog.Group) cluster.LogStore { return life.Log(g) },
	})
	return &o, life
}

// stablesOf is Cluster.stable of a life of a node to which nothing befalls.
func stablesOf(n *simNode) func(string) (raftlog.Stables, error) {
	return func(string) (raftlog.Stables, error) { return n.machine.Votes(), nil }
}

// setRates gives the monotonic clock of each node, and of those that join, a rate of its own.
func (c *simCluster) setRates() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rates = true
	for _, n := range c.nodes {
		n.machine.Mono.Run(simtest.DrawRate(c.rng))
	}
}

// recover lets a node that is down go on by itself; the others are members no more. It
// stays down.
func (c *simCluster) recover(n *simNode) error {
	o, _ := c.options(n)
	o.Cluster.Join, o.Cluster.Peers = false, nil
	c.mu.Lock()
	c.nodes = []*simNode{n}
	c.mu.Unlock()
	return codeq.RecoverCluster("queue", o)
}

// furthest is the node that is to go on alone, as ClusterStatus of some nodes tells an operator:
// one that is not suspect, if there is any, and of these the one that has most of what was stored,
// by the larger of Applied and LastIndex. A node that has stored nothing cannot go on: it had not
// become a member when its power failed. REQUIRES: all are up.
func (c *simCluster) furthest(by ...*simNode) (furthest *simNode) {
	type replica struct {
		node  string
		shard int
	}
	stored, suspect := make(map[replica]uint64), make(map[string]bool)
	for _, n := range by {
		st, err := simQueue(n).ClusterStatus(context.Background())
		if err != nil {
			c.t.Errorf("ClusterStatus of %s: %v", n.name, err)
			continue
		}
		for _, sh := range st.Shards {
			for _, r := range sh.Replicas {
				of := replica{r.Node, sh.Shard}
				stored[of] = max(stored[of], r.Applied, r.LastIndex)
				suspect[r.Node] = suspect[r.Node] || r.Suspect
			}
		}
	}
	has := func(n *simNode) (all uint64) {
		for of, last := range stored {
			if of.node == n.name {
				all += last
			}
		}
		return all
	}
	for _, n := range c.members() {
		sound := func(n *simNode) bool { return !suspect[n.name] && has(n) > 0 }
		if f := furthest; f == nil || sound(n) && !sound(f) || sound(n) == sound(f) && has(n) > has(f) {
			furthest = n
		}
	}
	return furthest
}

const simCallTimeout = 3 * time.Second

// queue returns the node's queue, nil while it is down, and the number of the node's life.
func (n *simNode) queue() (*codeq.Queue, int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.q, n.lives
}

// alive reports whether the node has not ended since its given life.
func (n *simNode) alive(life int) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.q != nil && n.lives == life
}

// raise starts the node if it is down, and reports whether it was.
func (n *simNode) raise() bool {
	defer n.hold()()
	n.mu.Lock()
	down := n.q == nil && !n.removed
	n.mu.Unlock()
	if down {
		n.broken.Store(false)
		n.start()
	}
	return down
}

// joinsNoMore is called before the node is removed. It is started again if it crashes, since its
// vote may be needed, but then it must not join again.
func (n *simNode) joinsNoMore() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.join = false
}

// hold returns when nobody else starts or closes the node, and waits for it as goroutines of a
// bubble have to: time passes only for those that sleep.
func (n *simNode) hold() (release func()) {
	for !n.turn.TryLock() {
		time.Sleep(10 * time.Millisecond)
	}
	return n.turn.Unlock
}

// crash ends the node as a kill -9 does, or a power loss after which so many
// percent of what was not synced are left. What is left of the process ends in its
// own time, and reaches neither the network nor the disk and the votes that the next life has.
// It is false if the node is down.
func (n *simNode) crash(percent int) bool { return n.die(nil, percent, n.cluster.seed()) }

// die is crash, of the given life, if one is given.
func (n *simNode) die(life *simtest.Life, percent int, seed uint64) bool {
	c := n.cluster
	n.mu.Lock()
	defer n.mu.Unlock()
	q := n.q
	if q == nil || life != nil && life != n.life {
		return false
	}
	if n.life != nil {
		n.life.Answer()
	}
	n.q, n.life = nil, nil
	if percent == 100 {
		c.net.Kill(n.name)
	} else {
		c.net.Crash(n.name)
	}
	n.machine.Crash(percent, seed) // what was synced after the cut nobody has heard of
	c.ends.Add(1)
	c.ended.Go(func() {
		_ = q.Close() // it misses the others
		c.ends.Add(-1)
	})
	return true
}

// breakDisk makes operations on the node's disk fail until its next life.
func (n *simNode) breakDisk(fails func(op, name string) bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.life != nil {
		n.life.Fail(fails)
	}
}

// hang makes operations on the node's disk hang until answer is called, or its life ends.
func (n *simNode) hang(hangs func(op, name string) bool) (answer func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.life.Hang(hangs)
	return n.life.Answer
}

// fill leaves that many bytes free on the node's disk until its next life.
func (n *simNode) fill(free int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.life != nil {
		n.life.SetFree(free)
	}
}

// crashAfter crashes the node amid its work, before the last of that many operations on its disk,
// and then calls then. It does nothing if such a crash is to come already.
func (n *simNode) crashAfter(operations int64, percent int, then ...func()) {
	seed := n.cluster.seed()
	n.mu.Lock()
	defer n.mu.Unlock()
	if l := n.life; l != nil {
		l.CrashAfter(operations, func() {
			if n.die(l, percent, seed) {
				callAll(then)
			}
		})
	}
}

// stop closes the node's queue and waits.
func (n *simNode) stop() {
	if err := n.close(); err != nil && !n.broken.Load() && !errors.Is(err, codeq.ErrOldCopy) && !errors.Is(err, codeq.ErrStalled) {
		n.cluster.t.Errorf("close of node %s: %v", n.name, err)
	}
}

// close is stop, and returns what Close does; nil if the node is down.
func (n *simNode) close() error {
	defer n.hold()()
	n.mu.Lock()
	q := n.q
	n.q = nil
	n.mu.Unlock()
	if q == nil {
		return nil
	}
	done := make(chan error, 1)
	go func() { done <- q.Close() }()
	select {
	case err := <-done:
		return err
	case <-time.After(simPatience):
		n.cluster.hangs("Close of node " + n.name)
		return nil
	}
}

// simPatience is how long, in the bubble, anything may take once all nodes are up and connected.
const simPatience = 5 * time.Minute

// hangs ends the test with the state of the nodes and the stacks of all goroutines.
func (c *simCluster) hangs(what string) {
	if c.tell != nil {
		fmt.Fprintln(os.Stderr, c.tell())
	}
	for _, n := range c.members() {
		q, _ := n.queue()
		if q == nil {
			c.t.Logf("%s is down", n.name)
			continue
		}
		in := inspect.Of(q)
		for i := range in.Shards() {
			g := in.Group(i)
			fmt.Fprintf(os.Stderr, "%s shard %d: led %t applied %d failure %v %v\n", n.name, i, in.Leads(i), g.Applied(), g.Failure(), g.Raft().Stats())
		}
	}
	buf := make([]byte, 16<<20)
	_ = os.WriteFile("/tmp/codeq-sim-stacks", buf[:runtime.Stack(buf, true)], 0o644)
	panic(what + " hangs; the stacks of all goroutines are in /tmp/codeq-sim-stacks") // the goroutines of the bubble would not end
}

// close closes all nodes and waits for those that have crashed.
func (c *simCluster) close() {
	c.mend(false)
	for _, n := range c.members() {
		n.stop()
	}
	for end := time.Now().Add(simPatience); c.ends.Load() > 0; {
		if time.Now().After(end) {
			c.hangs("Close of a node without a network")
		}
		time.Sleep(100 * time.Millisecond)
	}
	c.ended.Wait()
}

// mend heals the network, makes room on the disks, lets all nodes run, and starts those that are
// down.
func (c *simCluster) mend(start bool) {
	c.net.Heal(false)
	c.net.Unshape()
	for _, n := range c.members() {
		c.net.Pause(n.name, false)
		n.mu.Lock()
		if n.life != nil {
			n.life.MakeRoom()
			n.life.Answer()
		}
		n.life = nil
		n.mu.Unlock()
	}
	if !start {
		return
	}
	var raised sync.WaitGroup
	for _, n := range c.members() { // together: one that has not joined yet needs the others
		raised.Go(func() { n.raise() })
	}
	raised.Wait()
}

// requireNode fails the test unless a node is the one that is wanted. (require.Equal and Same print
// all that nodes refer to, which others write, when they fail.)
func requireNode(t *testing.T, want, got *simNode) {
	t.Helper()
	require.True(t, want == got, "%q instead of %q", nameOf(got), nameOf(want))
}

// nameOf is the name of a node, or "" of none.
func nameOf(n *simNode) string {
	if n == nil {
		return ""
	}
	return n.name
}

// leader returns the node that leads a shard, or nil if none does. Of several that
// believe it, it is the one with the highest term.
func (c *simCluster) leader(shard int) (leader *simNode) {
	var term uint64
	for _, n := range c.members() {
		if q, _ := n.queue(); q != nil {
			if inspect.Of(q).Leads(shard) && inspect.Of(q).Group(shard).Raft().CurrentTerm() > term {
				leader, term = n, inspect.Of(q).Group(shard).Raft().CurrentTerm()
			}
		}
	}
	return leader
}

// awaitReady waits until each node can call every shard, and so is a member.
func (c *simCluster) awaitReady() {
	for _, n := range c.members() {
		require.NoError(c.t, simQueue(n).WaitReady(context.Background()))
	}
}

// awaitLeaders waits until each shard has a leader that serves; some nodes may not be members yet.
func (c *simCluster) awaitLeaders() {
	for end := time.Now().Add(simPatience); ; time.Sleep(10 * time.Millisecond) {
		missing := false
		for shard := range c.opts.Shards {
			missing = missing || c.leader(shard) == nil
		}
		if !missing {
			return
		}
		if time.Now().After(end) {
			c.hangs("the election of a leader")
		}
	}
}

// transfer asks one node to let another one lead a shard, if that can be done soon, and
// calls then when it does.
func (c *simCluster) transfer(by *simNode, shard int, to *simNode, then ...func()) {
	if q, _ := by.queue(); q != nil {
		c.ended.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			if q.TransferLeadership(ctx, shard, to.name) == nil {
				callAll(then)
			}
		})
	}
}

// spread lets each of the first three nodes lead the shard that belongs there: leaders stay then.
func (c *simCluster) spread() {
	spread := func() bool {
		for i, n := range c.nodes[:3] {
			if c.leader(i) != n {
				return false
			}
		}
		return true
	}
	for end := time.Now().Add(simPatience); !spread(); {
		if time.Now().After(end) {
			c.hangs("the balance of leaders")
		}
		c.awaitLeaders()
		for i, n := range c.nodes[:3] {
			c.transfer(n, i, n)
		}
		time.Sleep(time.Second)
	}
}

func callAll(fs []func()) {
	for _, f := range fs {
		f()
	}
}

// snapshot lets a node take a snapshot of a shard and keep so many entries of the log, and calls
// then when it has.
func (c *simCluster) snapshot(n *simNode, shard int, trailing uint64, then ...func()) {
	q, _ := n.queue()
	if q == nil {
		return
	}
	c.ended.Go(func() {
		r := inspect.Of(q).Group(shard).Raft()
		set := r.ReloadableConfig()
		set.TrailingLogs = trailing
		_ = r.ReloadConfig(set)
		if r.Snapshot().Error() == nil { // or nothing is new, or the node crashes
			callAll(then)
		}
	})
}

// replace adds a node and removes another one, and returns when that is done,
// however often it has to be tried. It may be called from any goroutine, one at a time. What
// busy begins, if it is not nil, goes on while the node is removed.
func (c *simCluster) replace(old *simNode, note func(string, ...any), busy func() (end func())) {
	c.grow(note)
	c.remove(old, note, busy)
}

// grow adds a node.
func (c *simCluster) grow(note func(string, ...any)) {
	n := c.node(true)
	note("%s joins", n.name)
	for end := time.Now().Add(4 * simPatience); ; time.Sleep(time.Second) {
		err := c.open(n)
		if err == nil {
			break
		}
		note("%s has not joined: %v", n.name, err) // there was no majority for too long
		if time.Now().After(end) {
			c.hangs("joining of " + n.name)
		}
	}
	c.mu.Lock()
	c.nodes = append(c.nodes, n)
	c.mu.Unlock()
	note("%s has joined", n.name)
}

// remove removes a node.
func (c *simCluster) remove(old *simNode, note func(string, ...any), busy func() (end func())) {
	note("%s is removed", old.name)
	old.joinsNoMore()
	if busy != nil {
		defer busy()()
	}
	for begin := time.Now(); ; {
		var q *codeq.Queue
		for _, by := range c.members() {
			if q, _ = by.queue(); q != nil && by != old {
				break
			}
		}
		err := error(codeq.ErrClosed)
		if q != nil {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			err = q.RemoveNode(ctx, old.name)
			cancel()
		}
		if err == nil || errors.Is(err, codeq.ErrNotMember) { // by a try before
			break
		}
		if time.Since(begin) > 2*simPatience {
			c.hangs(fmt.Sprintf("removal of %s, by %s (%v), which", old.name, inspect.Of(q).Node().Self().Node, err))
		}
		time.Sleep(100 * time.Millisecond)
	}
	note("%s has been removed", old.name)
	c.mu.Lock()
	c.nodes = slices.DeleteFunc(c.nodes, func(n *simNode) bool { return n == old })
	c.mu.Unlock()
	old.mu.Lock()
	old.removed = true
	old.mu.Unlock()
	old.stop()
}

// rest waits until all replicas of every shard have applied the same, and nothing more comes.
func (c *simCluster) rest() {
	var last []uint64
	var seen [][]uint64 // what the leaders had applied
	for end := time.Now().Add(simPatience); ; time.Sleep(2 * time.Second) {
		var applied []uint64
		same := true
		for shard := range c.opts.Shards {
			l := c.leader(shard)
			if l == nil {
				same = false
				continue
			}
			lq, _ := l.queue()
			want := inspect.Of(lq).Group(shard).Raft().LastIndex()
			for _, n := range c.members() {
				q, _ := n.queue()
				if inspect.Of(q).Leads(shard) && n != l || inspect.Of(q).Group(shard).Raft().AppliedIndex() != want {
					same = false
				}
			}
			applied = append(applied, want)
		}
		if same && slices.Equal(applied, last) {
			return
		}
		last = nil
		if same {
			last = applied
		}
		seen = append(seen, applied)
		if time.Now().After(end) {
			c.hangs(fmt.Sprintf("the way to rest (leaders applied %v)", seen[max(0, len(seen)-10):]))
		}
	}
}

// check compares the replicas byte for byte, and lets the checker look at one of
// each shard. REQUIRES: the cluster is at rest.
func (c *simCluster) check() error {
	var errs []error
	for shard := range c.opts.Shards {
		var first []simEntry
		nodes := c.members()
		for i, n := range nodes {
			q, _ := n.queue()
			entries, err := dump(q, shard)
			if err != nil {
				return err
			}
			if i == 0 {
				first = entries
			} else if err := sameEntries(first, entries); err != nil {
				errs = append(errs, fmt.Errorf("shard %d of %s and %s: %w", shard, nodes[0].name, n.name, err))
			}
		}
	}
	for _, n := range c.members() {
		q, _ := n.queue()
		if err := queuetest.CheckAll(q); err != nil {
			errs = append(errs, fmt.Errorf("on %s: %w", n.name, err))
		}
	}
	return errors.Join(errs...)
}

type simEntry struct{ key, value []byte }

// dump is all that a node has stored of a shard.
func dump(q *codeq.Queue, shard int) (entries []simEntry, err error) {
	err = inspect.Of(q).Read(shard, func(st *store.Store) error {
		entries, err = dumpStore(st.DB())
		return err
	})
	return entries, err
}

// tasksIn is the tasks that a node has stored of a shard.
func tasksIn(q *codeq.Queue, shard int) (map[codeq.ID]*codeq.TaskInfo, error) {
	tasks, err := inspect.Of(q).Tasks(shard)
	return tasks.(map[codeq.ID]*codeq.TaskInfo), err
}

// shardOf is the shard to which a task belongs.
func shardOf(q *codeq.Queue, id codeq.ID) int {
	return keys.ShardOf(keys.ID(id), inspect.Of(q).Shards())
}

// optionsOf is the options of a queue, with their defaults.
func optionsOf(q *codeq.Queue) *codeq.Options { return inspect.Of(q).Options().(*codeq.Options) }

// termOf is the term of a shard, as a node knows it.
func termOf(n *simNode, shard int) uint64 {
	return inspect.Of(simQueue(n)).Group(shard).Raft().CurrentTerm()
}

func dumpStore(db pebble.Reader) (entries []simEntry, err error) {
	it, err := db.NewIter(nil)
	if err != nil {
		return nil, err
	}
	for valid := it.First(); valid; valid = it.Next() {
		entries = append(entries, simEntry{bytes.Clone(it.Key()), bytes.Clone(it.Value())})
	}
	return entries, it.Close()
}

func sameEntries(a, b []simEntry) error {
	for i := range max(len(a), len(b)) {
		switch {
		case i >= len(a):
			return fmt.Errorf("only the second has key %x", b[i].key)
		case i >= len(b):
			return fmt.Errorf("only the first has key %x", a[i].key)
		case !bytes.Equal(a[i].key, b[i].key):
			return fmt.Errorf("entry %d has keys %x and %x", i, a[i].key, b[i].key)
		case !bytes.Equal(a[i].value, b[i].value):
			return fmt.Errorf("key %x has values %x and %x", a[i].key, a[i].value, b[i].value)
		}
	}
	return nil
}

// tasks is all tasks of the shards, as their leaders have them stored.
func (c *simCluster) tasks() (map[codeq.ID]*codeq.TaskInfo, error) {
	tasks := make(map[codeq.ID]*codeq.TaskInfo)
	for shard := range c.opts.Shards {
		l := c.leader(shard)
		if l == nil {
			return nil, fmt.Errorf("shard %d has no leader", shard)
		}
		q, _ := l.queue()
		stored, err := tasksIn(q, shard)
		if err != nil {
			return nil, err
		}
		maps.Copy(tasks, stored)
	}
	return tasks, nil
}
