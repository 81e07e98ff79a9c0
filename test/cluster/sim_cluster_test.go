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

// simCluster is a cluster with its network, disks and clocks in memory. It runs in one synctest
// bubble. Only the main goroutine of the bubble calls its methods, except node.queue.
type simCluster struct {
	t     *testing.T
	net   *simtest.Net
	rng   *rand.Rand    // of power losses
	opts  codeq.Options // of all nodes, without a Cluster
	peers []codeq.Peer  // founders
	mu    sync.Mutex    // guards the fields below
	nodes []*simNode    // all members, in the order in which they joined
	next  int           // number of the next node
	rates bool          // each monotonic clock has its own rate

	tell  func() string // the events so far; or nil
	ended sync.WaitGroup
	ends  atomic.Int32 // queues in Close
}

// simNode is a node on its own machine.
type simNode struct {
	cluster *simCluster
	name    string
	join    bool
	leaves  bool        // Close removes it from the cluster
	broken  atomic.Bool // its disk fails
	machine *simtest.Machine

	turn sync.Mutex // see hold

	mu      sync.Mutex    // guards the fields below
	newest  int           // newest format of its build; 0: that of this build
	q       *codeq.Queue  // nil: the node is down
	life    *simtest.Life // nil: the node is down, or its faults have ended
	lives   int           // the number of lives that have begun
	booted  string        // the boot of the machine at the last start of the node
	removed bool          // it is not started again
}

// newSimCluster starts a cluster of that many nodes.
func newSimCluster(t *testing.T, seed uint64, nodes int, opts codeq.Options) *simCluster {
	return newSimClusterOf(t, seed, nodes, opts, 0)
}

// newSimClusterOf is newSimCluster; newest is the newest format of the builds.
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

// found makes the founders of a cluster without nodes. It does not start them.
func (c *simCluster) found(nodes int) {
	for range nodes {
		n := c.node(false)
		c.peers, c.nodes = append(c.peers, codeq.Peer{Node: n.name, Address: n.name}), append(c.nodes, n)
	}
}

func newSimNode(c *simCluster, name string, join bool) *simNode {
	return &simNode{cluster: c, name: name, join: join, machine: simtest.NewMachine()}
}

// node makes a node; with join it is not a founder.
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

// seed draws the seed of a power loss; any goroutine may call it.
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

// log fails the test if codeq itself panics on the node. A Logger in the cluster's options gets the
// records of all nodes.
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

// start opens the node's queue. It tries again if the node joins and finds only a stranger at the
// addresses of the others, and if the last life has not ended yet because the disk is slow.
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
		fmt.Fprintln(os.Stderr, tell()) // a test that panics does not print its log
	}
	// Without the panic, the goroutines of the bubble would not end.
	panic(fmt.Sprintf("node %s does not start: %v", n.name, err))
}

func (c *simCluster) open(n *simNode) error { return c.openWith(n, func(*codeq.Options) {}) }

// openWith opens the node's queue with changed options.
func (c *simCluster) openWith(n *simNode, change func(*codeq.Options)) error {
	o, life := c.options(n)
	change(o)
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

// options returns the options of the node's next life.
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

// setRates gives each monotonic clock its own rate, also those of nodes that join later.
func (c *simCluster) setRates() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rates = true
	for _, n := range c.nodes {
		n.machine.Mono.Run(simtest.DrawRate(c.rng))
	}
}

// recover calls RecoverCluster on a node that is down: the others are no longer members. The node
// stays down.
func (c *simCluster) recover(n *simNode) error {
	o, _ := c.options(n)
	o.Cluster.Join, o.Cluster.Peers = false, nil
	c.mu.Lock()
	c.nodes = []*simNode{n}
	c.mu.Unlock()
	return codeq.RecoverCluster("queue", o)
}

// furthest returns the node that an operator would choose for RecoverCluster by the ClusterStatus
// of some nodes: not a suspect node, if there is another one, and the one with the largest of
// Applied and LastIndex. It leaves out a node that has stored nothing: its power failed before it
// became a member. REQUIRES: all are up.
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

// alive reports whether the given life of the node has not ended.
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

// joinsNoMore is called before the node is removed. If the node crashes, it starts again, since its
// vote may be needed, but it must not join again.
func (n *simNode) joinsNoMore() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.join = false
}

// hold returns when no other goroutine starts or closes the node. It sleeps while it waits: time in
// the bubble passes only while all goroutines sleep.
func (n *simNode) hold() (release func()) {
	for !n.turn.TryLock() {
		time.Sleep(10 * time.Millisecond)
	}
	return n.turn.Unlock
}

// crash ends the node like a kill -9, or like a power loss that keeps that many percent of the
// unsynced data. The goroutines of the old process end later: they no longer reach the network, nor
// the disk and the votes of the next life. It returns false if the node is down.
func (n *simNode) crash(percent int) bool { return n.die(nil, percent, n.cluster.seed()) }

// die is crash; if life is not nil, it ends only that life.
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
	n.machine.Crash(percent, seed) // no other node saw a sync after the cut
	c.ends.Add(1)
	c.ended.Go(func() {
		_ = q.Close() // the error is that the other nodes are missing
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

// crashAfter crashes the node during its work, before the last of that many operations on its disk,
// and calls then after that. It does nothing if such a crash is already set.
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

// each calls do for some nodes, one after the other.
func each(nodes []*simNode, do func(*simNode)) {
	for _, n := range nodes {
		do(n)
	}
}

// stop closes the node's queue and waits.
func (n *simNode) stop() {
	if err := n.close(); err != nil && !n.broken.Load() && !errors.Is(err, codeq.ErrOldCopy) && !errors.Is(err, codeq.ErrStalled) {
		n.cluster.t.Errorf("close of node %s: %v", n.name, err)
	}
}

// close is stop, and returns the error of Close; nil if the node is down.
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

// simPatience is the longest time, in the bubble, for any action while all nodes are up and
// connected.
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

// close closes all nodes and waits for the goroutines of crashed ones.
func (c *simCluster) close() {
	c.mend(false)
	each(c.members(), (*simNode).stop)
	c.until("Close of a node without a network", func() bool { return c.ends.Load() == 0 })
	c.ended.Wait()
}

// mend ends all faults of the cluster: it connects the nodes, frees the disks, resumes paused nodes
// and starts those that are down.
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
	for _, n := range c.members() { // together: a node that has not joined yet needs the others
		raised.Go(func() { n.raise() })
	}
	raised.Wait()
}

// requireNode fails the test unless got is want. (require.Equal and Same print every value that a
// node refers to when they fail, and other goroutines write those values.)
func requireNode(t *testing.T, want, got *simNode) {
	t.Helper()
	require.True(t, want == got, "%q instead of %q", nameOf(got), nameOf(want))
}

// nameOf is the name of a node, or "" without one.
func nameOf(n *simNode) string {
	if n == nil {
		return ""
	}
	return n.name
}

// leader returns the leader of a shard, or nil. If several nodes believe that they lead, it returns
// the one with the highest term.
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

// until waits until a condition holds.
func (c *simCluster) until(what string, holds func() bool) {
	for end := time.Now().Add(simPatience); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			c.hangs(what)
		}
	}
}

// awaitReady waits until each node can call every shard: it is then a member.
func (c *simCluster) awaitReady() {
	for _, n := range c.members() {
		require.NoError(c.t, simQueue(n).WaitReady(context.Background()))
	}
}

// awaitLeaders waits until each shard has a leader that serves; some nodes may not be members yet.
func (c *simCluster) awaitLeaders() {
	c.until("the election of a leader", func() bool {
		for shard := range c.opts.Shards {
			if c.leader(shard) == nil {
				return false
			}
		}
		return true
	})
}

// transfer asks the node by to transfer a shard to the node to, if that is soon possible, and calls
// then when to leads.
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

// spread makes each of the first three nodes the leader of its home shard: leadership is then
// stable.
func (c *simCluster) spread() {
	c.until("the balance of leaders", func() bool {
		home := true
		for i, n := range c.nodes[:3] {
			home = home && c.leader(i) == n
		}
		if !home {
			c.awaitLeaders()
			for i, n := range c.nodes[:3] {
				c.transfer(n, i, n)
			}
			time.Sleep(time.Second)
		}
		return home
	})
}

func callAll(fs []func()) {
	for _, f := range fs {
		f()
	}
}

// snapshot makes a node take a snapshot of a shard and keep that many log entries, and then calls
// then.
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
		if r.Snapshot().Error() == nil { // an error: nothing is new, or the node crashes
			callAll(then)
		}
	})
}

// replace adds a node and removes another one. It tries until both are done. Any goroutine may call
// it, one at a time. If busy is not nil, it is called before the removal, and its end after that.
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
		if err == nil || errors.Is(err, codeq.ErrNotMember) { // an earlier try removed it
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

// rest waits until all replicas of every shard have applied the same entries, and no new ones come.
func (c *simCluster) rest() {
	var last []uint64
	var seen [][]uint64 // the applied indexes of the leaders
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

// check compares the replicas byte for byte, and runs the checker on one of each shard. REQUIRES:
// the cluster is at rest.
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

// dump returns all entries of a shard that a node has stored.
func dump(q *codeq.Queue, shard int) (entries []simEntry, err error) {
	err = inspect.Of(q).Read(shard, func(st *store.Store) error {
		entries, err = dumpStore(st.DB())
		return err
	})
	return entries, err
}

// shardOf returns the shard of a task.
func shardOf(q *codeq.Queue, id codeq.ID) int {
	return keys.ShardOf(keys.ID(id), inspect.Of(q).Shards())
}

// optionsOf returns the options of a queue, with their defaults.
func optionsOf(q *codeq.Queue) *codeq.Options { return inspect.Of(q).Options().(*codeq.Options) }

// termOf returns the term of a shard that a node knows.
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

// tasks returns all tasks that the leaders of the shards have stored.
func (c *simCluster) tasks() (map[codeq.ID]*codeq.TaskInfo, error) {
	tasks := make(map[codeq.ID]*codeq.TaskInfo)
	for shard := range c.opts.Shards {
		l := c.leader(shard)
		if l == nil {
			return nil, fmt.Errorf("shard %d has no leader", shard)
		}
		q, _ := l.queue()
		stored, err := queuetest.Tasks(q, shard)
		if err != nil {
			return nil, err
		}
		maps.Copy(tasks, stored)
	}
	return tasks, nil
}
