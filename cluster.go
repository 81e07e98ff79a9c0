package codeq

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"codeq/internal/manifest"
	"codeq/internal/peer"
	"codeq/internal/raftlog"
	"codeq/internal/snapshot"
	"codeq/internal/store"
)

// Cluster makes a queue one of several nodes that hold the same tasks: each
// shard is a Raft group (Ongaro and Ousterhout, "In Search of an Understandable
// Consensus Algorithm"; github.com/hashicorp/raft). What is acknowledged is in
// the logs of a majority of the nodes, and any node serves any call. Three nodes
// go on without one of them, five without two.
//
// [Options.Limits], LeaseFor, MaxAttempts, Backoff and Retention are those of the node
// that leads a task's shard: give all nodes the same.
type Cluster struct {
	// Node is this node's name, of 1 to 255 bytes. It is the name of its
	// directory as well: a node that has lost its directory comes back under
	// another name. Required.
	Node string
	// Listen is the address on which the other nodes reach this one, such as
	// "10.0.0.1:7400". Required, unless Listener is given.
	Listen string
	// Listener is used in place of listening on Listen. The queue closes it.
	Listener net.Listener
	// Advertise is the address that other nodes dial. Default: Listen, or the
	// address of Listener.
	Advertise string
	// Peers are the nodes with which a new cluster begins; this one may be
	// among them or not. All nodes of a new cluster give the same. Once the
	// directory exists, the cluster itself knows its members, and Peers has no
	// meaning.
	Peers []Peer
	// Join has a new node become part of the cluster of Peers, which exists
	// already: Open asks them to add it, and returns when it votes.
	Join bool
	// TLS protects the connections between nodes. Both sides take their
	// certificate from it: for mutual authentication set ClientAuth to
	// tls.RequireAndVerifyClientCert, and RootCAs and ClientCAs to who signs the
	// nodes' certificates. ServerName, if it is empty, is the host that is dialed.
	// Default: connections are neither encrypted nor authenticated; whoever
	// reaches the address may do anything.
	TLS *tls.Config
	// HeartbeatTimeout is after how long without a word from its leader a node
	// has a new one elected: between one and two times as long. Default: 500 ms.
	HeartbeatTimeout time.Duration
	// ElectionTimeout bounds an election, after which there is another one.
	// Default: HeartbeatTimeout.
	ElectionTimeout time.Duration
	// CallTimeout is how long a call waits for a shard that has no leader, or
	// whose leader cannot be reached, if its ctx does not end before. Default: 10 s.
	CallTimeout time.Duration
	// LeaveOnClose has Close remove the node from the cluster, for good. By
	// default a closed node stays a member, and is missed until it is back.
	LeaveOnClose bool

	dial   func(ctx context.Context, addr string) (net.Conn, error)
	stable func(path string) (raftlog.Stables, error)
	log    func(*raftlog.Group) groupLog
}

// Peer is a node as others know it.
type Peer struct {
	Node    string
	Address string
}

// withDefaults returns a checked copy.
func (c *Cluster) withDefaults() (*Cluster, error) {
	o := *c
	o.Peers, o.TLS = slices.Clone(o.Peers), o.TLS.Clone()
	if o.Node == "" || len(o.Node) > maxNodeName {
		return nil, &InvalidError{"Cluster.Node", fmt.Sprintf("%q", o.Node), fmt.Sprintf("1 to %d bytes", maxNodeName)}
	}
	if o.Listen == "" && o.Listener == nil {
		return nil, &InvalidError{"Cluster.Listen", `""`, "an address, or a Listener"}
	}
	names := make(map[string]bool)
	for _, p := range o.Peers {
		if p.Node == "" || len(p.Node) > maxNodeName || p.Address == "" || names[p.Node] {
			return nil, &InvalidError{"Cluster.Peers", fmt.Sprintf("%+v", p), "nodes with a name of their own, and an address"}
		}
		names[p.Node] = true
	}
	if o.Join && len(o.Peers) == 0 {
		return nil, &InvalidError{"Cluster.Peers", "none", "nodes of the cluster that is to be joined"}
	}
	for _, d := range []struct {
		name  string
		value *time.Duration
		def   time.Duration
	}{
		{"Cluster.HeartbeatTimeout", &o.HeartbeatTimeout, 500 * time.Millisecond},
		{"Cluster.ElectionTimeout", &o.ElectionTimeout, 0},
		{"Cluster.CallTimeout", &o.CallTimeout, 10 * time.Second},
	} {
		if *d.value == 0 {
			*d.value = d.def
		}
		if *d.value == 0 { // comes after it
			*d.value = o.HeartbeatTimeout
		}
		if *d.value < minTimeout || *d.value > maxTimeout {
			return nil, &InvalidError{d.name, *d.value, fmt.Sprint(minTimeout, " to ", maxTimeout)}
		}
	}
	if o.ElectionTimeout < o.HeartbeatTimeout {
		return nil, &InvalidError{"Cluster.ElectionTimeout", o.ElectionTimeout, "HeartbeatTimeout or more"}
	}
	if o.stable == nil {
		o.stable = openVotes
	}
	if o.log == nil {
		o.log = func(g *raftlog.Group) groupLog { return g }
	}
	if o.dial == nil {
		o.dial = o.dialTCP
	}
	return &o, nil
}

const (
	maxNodeName = 255
	minTimeout  = 20 * time.Millisecond
	maxTimeout  = time.Hour
)

func (c *Cluster) dialTCP(ctx context.Context, addr string) (net.Conn, error) {
	if c.TLS == nil {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", addr)
	}
	d := tls.Dialer{Config: c.TLS}
	return d.DialContext(ctx, "tcp", addr)
}

// node is what makes a queue part of a cluster.
type node struct {
	queue     *Queue
	opts      *Cluster
	self      Peer
	log       *slog.Logger
	peer      *peer.Node
	logs      *raftlog.Store
	stable    raftlog.Stables
	room      *logRoom
	claims    *claimTable
	interests interests
	routes    changes // of any replica's route
	life      uint64  // random: tells this life of the node from the others

	ready      atomic.Bool // every replica takes part in its group
	quit       chan struct{}
	watches    sync.WaitGroup // goroutines of the replicas
	background sync.WaitGroup // calls that nobody waits for
	ctx        context.Context
	cancel     context.CancelFunc
}

// newNode prepares to open a node.
func (q *Queue) newNode() *node {
	c := q.opts.Cluster
	n := &node{
		queue: q, opts: c, log: q.opts.log.With("node", c.Node), life: newLife(),
		self: Peer{c.Node, cmp.Or(c.Advertise, c.Listen)},
		quit: make(chan struct{}), interests: interests{turn: make(chan struct{}, 1)},
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.claims = newClaimTable(n)
	n.room = newLogRoom(q.opts, q.dir.Path, n.log)
	q.node = n
	return n
}

// open opens the replicas of all shards and begins to talk to the other nodes.
// What it has opened when it returns an error is closed by close.
func (n *node) open() error {
	q := n.queue
	if err := n.openReplicas(); err != nil {
		return err
	}
	if err := n.listen(); err != nil {
		return err
	}
	for _, r := range q.replicas {
		if err := n.startRaft(r); err != nil {
			return fmt.Errorf("codeq: start shard %d of %s: %w", r.index, q.dir.Path, err)
		}
	}
	n.ready.Store(true)
	for _, r := range q.replicas {
		n.watches.Go(func() {
			contain(n.log, "watch of elections", func() { r.watch(n.quit) }, func(err error) {
				r.fail(err)
				r.leave(ErrNotLeader)
			})
		})
		n.watches.Go(func() { contain(n.log, "compaction of the log", func() { r.compact(n.quit) }, r.fail) })
	}
	n.watches.Go(func() { contain(n.log, "balance", func() { n.balance(n.quit) }, nil) }) // leaders then stay where they are
	if n.opts.Join {
		return n.join()
	}
	return nil
}

// openReplicas opens the stores of the shards, and the logs.
func (n *node) openReplicas() (err error) {
	q := n.queue
	fs, dir := q.dir.FS, q.dir.Path
	for i := range q.replicas {
		r := &replica{
			index: i, node: n, ended: make(chan *shard, 1), kept: make(chan struct{}, 1),
			leading: newLeaderTerm(), growth: growth{due: make(chan struct{}, 1)},
		}
		q.replicas[i] = r
		meta := manifest.MetaDir(fs, dir, i)
		if q.dir.Creating {
			if err := errors.Join(fs.RemoveAll(meta), fs.RemoveAll(manifest.ShardDir(fs, dir, i))); err != nil {
				return err
			}
		}
		if r.snapshots, err = snapshot.Open(fs, meta, r.live, n.log); err != nil {
			return fmt.Errorf("codeq: open shard %d of %s: %w", i, dir, damageOf(err))
		}
		if err := r.openStore(); err != nil {
			return fmt.Errorf("codeq: open shard %d of %s: %w", i, dir, err)
		}
	}
	n.logs, err = raftlog.Open(fs.PathJoin(dir, manifest.RaftDir), raftlog.Options{
		FS: fs, Sync: logSync[q.opts.Durability], Logger: n.log,
	})
	if err != nil {
		return fmt.Errorf("codeq: open the log of %s: %w", dir, damageOf(err))
	}
	if n.stable, err = n.opts.stable(fs.PathJoin(dir, manifest.VotesFile)); err != nil {
		return fmt.Errorf("codeq: open the votes of %s: %w", dir, damageOf(err))
	}
	return q.dir.FinishCreation()
}

func openVotes(path string) (raftlog.Stables, error) {
	votes, err := raftlog.OpenStable(path)
	if err != nil {
		return nil, err // not an interface with a nil in it
	}
	return votes, nil
}

// damageOf has what is damaged beside the stores of the shards match ErrCorrupt.
func damageOf(err error) error {
	if errors.Is(err, raftlog.ErrCorrupt) || errors.Is(err, snapshot.ErrDamaged) {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return err
}

var logSync = map[Durability]raftlog.Sync{
	DurabilityNone: raftlog.SyncNone, DurabilityProcess: raftlog.SyncProcess, DurabilityDisk: raftlog.SyncDisk,
}

// listen begins to accept the other nodes.
func (n *node) listen() error {
	c := n.opts
	l := c.Listener
	if l == nil {
		var err error
		if l, err = net.Listen("tcp", c.Listen); err != nil {
			return fmt.Errorf("codeq: %w", err)
		}
	}
	if n.self.Address == "" {
		n.self.Address = l.Addr().String()
	}
	if c.TLS != nil {
		l = tls.NewListener(l, c.TLS)
	}
	n.peer = peer.New(peer.Config{
		Name: c.Node, Listener: l, Dial: c.dial, Groups: len(n.queue.replicas), Handler: n.serve, Logger: n.log,
	})
	return nil
}

// startRaft starts a replica's part in its group, and founds the group if the
// cluster is new.
func (n *node) startRaft(r *replica) error {
	logs, votes, err := n.stores(r)
	if err != nil {
		return damageOf(err)
	}
	if r.replayed, err = logs.LastIndex(); err != nil {
		return err
	}
	logger := raftLogger(n.log.With("shard", r.index))
	conf := n.raftConfig(logger)
	trans := &transport{raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: stream{n.peer.Group(r.index), n.self.Address}, MaxPool: 3, Timeout: raftTimeout, Logger: logger,
	}), r, conf.HeartbeatTimeout}
	snapshots := replicaSnapshots{r.snapshots, n.room}
	r.asking.enter() // a replica that fails at once waits for raft
	// Raft panics, before it has a goroutine, when it cannot read its log.
	err = store.Protect(func() error {
		known, err := raft.HasExistingState(logs, votes, snapshots)
		if err == nil && !known && !n.opts.Join {
			err = raft.BootstrapCluster(conf, logs, votes, snapshots, trans, n.founders())
		}
		if err == nil {
			r.raft, err = raft.NewRaft(conf, &stateMachine{replica: r}, logs, votes, snapshots, trans)
		}
		return err
	})
	r.asking.leave()
	if err != nil {
		return errors.Join(damageOf(err), trans.Close())
	}
	r.transport = trans
	elections := make(chan raft.Observation, 1) // one that is not seen adds nothing to one that is
	r.raft.RegisterObserver(raft.NewObserver(elections, false, func(o *raft.Observation) bool {
		_, ok := o.Data.(raft.LeaderObservation)
		return ok
	}))
	n.watches.Go(func() { contain(n.log, "watch of leaders", func() { r.follow(elections) }, r.fail) })
	return nil
}

// follow notes which node leads, until the node is closed.
func (r *replica) follow(elections <-chan raft.Observation) {
	for {
		select {
		case <-elections:
			if addr, leader := r.raft.LeaderWithID(); addr != "" {
				r.tenure.begin(leader, r.node.opts.ElectionTimeout)
			}
			r.changed()
		case <-r.node.quit:
			return
		}
	}
}

// resign hands the shards that this node leads to others, as far as they are
// there to take them.
func (n *node) resign() {
	var transfers sync.WaitGroup
	for _, r := range n.queue.replicas {
		if r != nil && r.raft != nil && r.lead.Load() != nil {
			transfers.Go(func() {
				contain(n.log, "resignation", func() { _ = r.handOver() }, nil) // or they will miss this one
			})
		}
	}
	transfers.Wait()
}

// raftTimeout bounds what Raft sends and waits for, but for snapshots.
const raftTimeout = 10 * time.Second

func (n *node) raftConfig(logger hclog.Logger) *raft.Config {
	conf := raft.DefaultConfig()
	conf.LocalID = raft.ServerID(n.opts.Node)
	conf.HeartbeatTimeout = n.opts.HeartbeatTimeout
	conf.ElectionTimeout = n.opts.ElectionTimeout
	conf.LeaderLeaseTimeout = n.opts.HeartbeatTimeout // a moment's standstill is no reason to step down
	conf.NoSnapshotRestoreOnStart = true              // the store has what it had
	conf.SnapshotThreshold = 1 << 62                  // upkeep takes them, by the bytes in the log
	conf.SnapshotInterval = time.Hour
	conf.ShutdownOnRemove = false
	conf.MaxAppendEntries = n.queue.opts.maxAppend
	conf.NoLegacyTelemetry = true
	conf.Logger = logger
	return conf
}

// founders is the configuration with which a new cluster begins.
func (n *node) founders() raft.Configuration {
	peers := slices.Clone(n.opts.Peers)
	if !slices.ContainsFunc(peers, func(p Peer) bool { return p.Node == n.self.Node }) {
		peers = append(peers, n.self)
	}
	return configurationOf(peers)
}

// configurationOf is a Raft configuration in which all of peers vote.
func configurationOf(peers []Peer) raft.Configuration {
	slices.SortFunc(peers, func(a, b Peer) int { return cmp.Compare(a.Node, b.Node) })
	var c raft.Configuration
	for _, p := range peers {
		c.Servers = append(c.Servers, raft.Server{ID: raft.ServerID(p.Node), Address: raft.ServerAddress(p.Address)})
	}
	return c
}

// close ends what open has begun; the stores stay open.
func (n *node) close() error {
	n.resign()
	close(n.quit)
	n.watches.Wait()
	n.cancel()
	n.claims.close()
	var errs []error
	for _, r := range n.queue.replicas {
		if r != nil && r.raft != nil {
			errs = append(errs, r.raft.Shutdown().Error(), r.transport.Close(), r.failure())
		}
	}
	if n.peer != nil {
		errs = append(errs, n.peer.Close())
	}
	n.background.Wait()
	return errors.Join(append(errs, n.closeLogs())...)
}

func (n *node) closeLogs() error {
	var errs []error
	if n.logs != nil {
		if err := n.logs.Close(); err != nil {
			errs = append(errs, fmt.Errorf("%w: close the log of Raft: %w", ErrFailed, err))
		}
	}
	if n.stable != nil {
		errs = append(errs, n.stable.Close())
	}
	return errors.Join(errs...)
}

// stream gives Raft the address under which others know this node.
type stream struct {
	raft.StreamLayer
	address string
}

func (s stream) Addr() net.Addr { return advertised(s.address) }

type advertised string

func (advertised) Network() string  { return "tcp" }
func (a advertised) String() string { return string(a) }
