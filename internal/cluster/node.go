// Package cluster replicates shards over several nodes: each shard is a Raft group (Ongaro and
// Ousterhout, "In Search of an Understandable Consensus Algorithm"; github.com/hashicorp/raft). It
// elects the node that decides for a shard, replicates the decisions, and forwards calls to that
// node. It does not know the content of decisions: a shard is a StateMachine.
package cluster

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/container/slowlock"
	"codeq/internal/failstop"
	"codeq/internal/manifest"
	"codeq/internal/peer"
	"codeq/internal/platform"
	"codeq/internal/raftlog"
	"codeq/internal/snapshot"
)

// Peer is a node as others know it.
type Peer struct {
	Node    string // its name
	Address string
	ID      string // of its directory; "": not known
}

// CheckListen returns an error if this process cannot listen at an address now.
func CheckListen(address string) error {
	l, err := listenAt(address)
	if err != nil {
		return err
	}
	return l.Close()
}

// listenAt listens at the address of a node. An error says what to do about it.
func listenAt(address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		err = fmt.Errorf("Cluster.Listen: %w: end the program that listens there, perhaps this node in another process, or choose another port", err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		err = fmt.Errorf("Cluster.Listen: %w: this machine does not have it; others dial Cluster.Advertise", err)
	case err != nil:
		err = fmt.Errorf("Cluster.Listen: %w", err)
	}
	return l, err
}

// Leaders calls the leaders of the shards.
type Leaders interface {
	// Change changes the group of a shard, by Group.Change on the node that leads it.
	Change(ctx context.Context, shard int, how Change, p Peer, former ...string) error
	// Applied is the index of the last entry that the leader of a shard has applied.
	Applied(ctx context.Context, shard int) (uint64, error)
	// Forget deletes the data that a shard keeps for a node that was removed, and stores the
	// removal. The name may be that of a directory (Peer.ServerID), which is then never taken back.
	Forget(ctx context.Context, shard int, name string) error
}

// Node is this node's part in the groups of all shards. Its methods are safe for concurrent use.
type Node struct {
	c       Config
	self    Peer
	log     *slog.Logger
	groups  []*Group
	peer    *peer.Node
	logs    *raftlog.Store
	stable  raftlog.Stables
	room    *logRoom
	routes  notifier // of any group's route
	crashes crashLog

	heartbeats heartbeatBatches
	clocks     clockOffsets
	rooms      rooms
	limits     base.Limits // of calls that any shard may answer

	ready      atomic.Bool   // the node takes part in every group
	silent     atomic.Bool   // the node no longer sends anything as a leader
	opened     chan struct{} // closed when it is ready
	founding   atomic.Bool   // the cluster is new: some groups may not have begun
	membership membership
	elders     elders
	hints      hints
	// replacement has its own mutex; only the leader of the first shard uses it.
	replacement replacement
	birth       uint64 // first incarnation of this process
	removal     removal
	quit        chan struct{}
	watches     sync.WaitGroup // goroutines of the groups
	background  sync.WaitGroup // goroutines that only Close waits for
	ctx         context.Context
	cancel      context.CancelFunc
}

// New prepares to open a node.
func New(c Config) *Node {
	if c.Dial == nil {
		c.Dial = c.dialTCP
	}
	if c.Wall == nil {
		c.Wall = time.Now
	}
	if c.Mono == nil {
		c.Mono = time.Now
	}
	if c.Votes == nil {
		c.Votes = func(path string) (raftlog.Stables, error) { return raftlog.OpenStable(c.Directory.FS, path) }
	}
	if c.Log == nil {
		c.Log = func(g *raftlog.Group) LogStore { return g }
	}
	if c.Disk == nil {
		c.Disk = failstop.NewWatch(time.Hour, c.Logger, partNames(len(c.Machines))...)
	}
	c.Newest = cmp.Or(c.Newest, manifest.Format)
	if c.PebbleFormat == nil {
		c.PebbleFormat = manifest.PebbleFormat
	}
	self := Peer{c.Node, cmp.Or(c.Advertise, c.Listen), c.Directory.ID}
	if self.Address == "" && c.Listener != nil {
		self.Address = c.Listener.Addr().String()
	}
	n := &Node{c: c, self: self, log: c.Logger, birth: c.Directory.Incarnation, opened: make(chan struct{}), quit: make(chan struct{})}
	n.limits.Init(c.CallTimeout, n.workDone)
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.membership.writing = slowlock.New()
	n.membership.ctx, n.membership.stop = context.WithCancel(n.ctx)
	n.room = newLogRoom(c.Directory.FS, c.Directory.Path, c.MinFree, n.log)
	n.room.lost = n.failAll
	for i, m := range c.Machines {
		n.groups = append(n.groups, newGroup(n, i, m))
	}
	return n
}

func (c *Config) dialTCP(ctx context.Context, addr string) (net.Conn, error) {
	if c.TLS == nil {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", addr)
	}
	d := tls.Dialer{Config: c.TLS}
	conn, err := d.DialContext(ctx, "tcp", addr)
	if _, plain := errors.AsType[tls.RecordHeaderError](err); plain || errors.Is(err, io.EOF) {
		err = fmt.Errorf("%w: the other side does not use TLS: set Cluster.TLS on all nodes, or on none", err)
	}
	return conn, err
}

// Self is the node as others know it.
func (n *Node) Self() Peer { return n.self }

// Group is the group of a shard.
func (n *Node) Group(shard int) *Group { return n.groups[shard] }

// Context ends when no shard has a leader on this node, and none will.
func (n *Node) Context() context.Context { return n.ctx }

// HasSpace reports whether the log of Raft can be written.
func (n *Node) HasSpace() bool { return n.logs.HasSpace() }

// Hurry makes writes of the log fail that wait for room on a full disk.
func (n *Node) Hurry() { n.logs.Hurry() }

// Open opens the stores of all shards, and starts the communication with the other nodes. After an
// error, Close closes the open parts.
func (n *Node) Open() error {
	if err := n.openStores(); err != nil {
		return err
	}
	if err := n.listen(); err != nil {
		return err
	}
	n.founding.Store(len(n.c.Directory.Founders) > 0)
	n.logs.SyncToDisk(len(n.former()) > 0) // see manifest.Volatile
	if err := n.reconcile(); err != nil {
		return fmt.Errorf("codeq: begin a cluster with %s: %w", n.c.Directory.Path, err)
	}
	for _, g := range n.groups {
		if err := g.start(); err != nil {
			return fmt.Errorf("codeq: start shard %d of %s: %w", g.index, n.c.Directory.Path, err)
		}
	}
	n.ready.Store(true)
	close(n.opened)
	n.watchBeginning()
	for _, g := range n.groups {
		n.watch("watch of elections", func() { g.watch(n.quit) }, func(err error) {
			g.Fail(err)
			g.leave(base.ErrNotLeader)
		})
		n.watch("compaction of the log", func() { g.compact(n.quit) }, g.Fail)
	}
	// After a panic leaders stay where they are.
	n.watch("balance", func() { n.balance(n.quit) }, nil)
	n.watch("upgrade", func() { n.upgrade(n.quit) }, nil)
	n.watch("greeting", n.makeKnown, nil)
	n.watch("candidacy of the only voter", n.standAlone, nil)
	switch {
	case len(n.former()) > 0:
		n.watch("rejoining", n.rejoin, n.failAll)
	case n.c.Join:
		return n.join()
	case n.Cluster() == "":
		return n.found()
	}
	return nil
}

// openStores opens the stores of the shards, the logs and the votes.
func (n *Node) openStores() (err error) {
	if err := n.openReplicas(); err != nil {
		return err
	}
	d := n.c.Directory
	if n.stable, err = n.c.Votes(d.FS.PathJoin(d.Path, manifest.VotesFile)); err != nil {
		return fmt.Errorf("codeq: open the votes of %s: %w", d.Path, damageOf(err))
	}
	return nil
}

// openReplicas opens the stores of the shards, and the logs.
func (n *Node) openReplicas() (err error) {
	d := n.c.Directory
	for _, g := range n.groups {
		meta := manifest.MetaDir(d.FS, d.Path, g.index)
		if d.Creating {
			if err := errors.Join(d.FS.RemoveAll(meta), d.FS.RemoveAll(manifest.ShardDir(d.FS, d.Path, g.index))); err != nil {
				return err
			}
		}
		if g.snapshots, err = snapshot.Open(d.FS, meta, g.machine.Live, n.log); err != nil {
			return fmt.Errorf("codeq: open shard %d of %s: %w", g.index, d.Path, damageOf(err))
		}
		if err := g.openStore(); err != nil {
			return fmt.Errorf("codeq: open shard %d of %s: %w", g.index, d.Path, err)
		}
	}
	n.logs, err = raftlog.Open(d.FS.PathJoin(d.Path, manifest.RaftDir), raftlog.Options{
		FS: d.FS, Sync: n.c.Sync, Format: n.c.PebbleFormat(n.Format()), Logger: n.log,
	})
	if err != nil {
		return fmt.Errorf("codeq: open the log of %s: %w", d.Path, damageOf(err))
	}
	for _, g := range n.groups {
		if err := g.openLog(); err != nil {
			return fmt.Errorf("codeq: open the log of shard %d of %s: %w", g.index, d.Path, damageOf(err))
		}
	}
	return nil
}

// damageOf makes an error match ErrCorrupt if a log or a snapshot is damaged, and ErrLocked if
// another process has a file open.
func damageOf(err error) error {
	switch {
	case errors.Is(err, raftlog.ErrCorrupt) || errors.Is(err, snapshot.ErrDamaged):
		return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
	case errors.Is(err, platform.ErrHeld):
		return fmt.Errorf("%w: %w", base.ErrLocked, err)
	}
	return err
}

// listen begins to accept the other nodes.
func (n *Node) listen() error {
	l := n.c.Listener
	if l == nil {
		var err error
		if l, err = listenAt(n.c.Listen); err != nil {
			return fmt.Errorf("codeq: %w", err)
		}
	}
	if n.c.TLS != nil {
		l = tls.NewListener(l, n.c.TLS)
	}
	self, err := n.identity()
	if err != nil {
		return errors.Join(err, l.Close())
	}
	n.peer = peer.New(peer.Config{
		Identity: self, Listener: l, Dial: n.c.Dial, Verify: n.c.verifyName, Groups: len(n.groups), Handler: n.serve,
		Files: n.receiveFiles, Logger: n.log,
		Formats: peer.Formats{Newest: n.c.Newest, Least: n.c.Directory.Format}, Raise: n.announceFormat,
		Addresses:    n.addresses,
		Incarnations: peer.Incarnations{All: n.c.Directory.Incarnations(), Birth: n.birth}, CheckIncarnations: n.checkIncarnations,
	})
	return nil
}

// raftTimeout bounds what Raft sends and waits for; see patientConn for large messages.
const raftTimeout = 10 * time.Second

func (n *Node) raftConfig(logger hclog.Logger) *raft.Config {
	conf := raft.DefaultConfig()
	conf.LocalID = n.self.ServerID()
	conf.HeartbeatTimeout = n.c.HeartbeatTimeout
	conf.ElectionTimeout = n.c.ElectionTimeout
	conf.LeaderLeaseTimeout = n.c.HeartbeatTimeout // a short standstill is no reason to step down
	conf.NoSnapshotRestoreOnStart = true           // the store has the content already
	conf.SnapshotThreshold = 1 << 62               // compact takes snapshots, by the bytes in the log
	conf.SnapshotInterval = time.Hour
	conf.ShutdownOnRemove = false
	conf.MaxAppendEntries = n.c.MaxAppend
	conf.NoLegacyTelemetry = true
	conf.Logger = logger
	return conf
}

// Close ends what Open has begun; the stores of the shards stay open.
func (n *Node) Close() error {
	n.membership.mu.Lock() // a call of Drain may be about to write the manifest
	n.membership.stop()
	n.membership.mu.Unlock()
	ended := make(chan struct{})
	n.run("end of a replica", func() { n.forceShutdown(ended) }, nil)
	n.resign()
	close(n.quit)
	n.watches.Wait()
	n.cancel()
	for _, g := range n.groups {
		g.shutDown()
	}
	close(ended)
	var errs []error
	for _, g := range n.groups {
		if g.raft != nil {
			errs = append(errs, g.transport.Close(), g.Failure())
		}
	}
	if n.peer != nil {
		errs = append(errs, n.peer.Close())
	}
	for _, g := range n.groups {
		g.sender.end()
		g.receiver.close()
		if g.snapshots != nil {
			g.snapshots.Close()
		}
	}
	n.background.Wait()
	return errors.Join(append(errs, n.closeLogs())...)
}

// forceShutdown gives up all terms of this node if it has not ended after some time: its proposals
// may wait for nodes that are down, or have full disks. Raft answers them when it has lost the
// leadership.
func (n *Node) forceShutdown(ended <-chan struct{}) {
	t := time.NewTimer(2*n.c.ElectionTimeout + raftTimeout) // longer than a transfer
	defer t.Stop()
	select {
	case <-ended:
	case <-t.C:
		n.silent.Store(true)
	}
}

func (n *Node) closeLogs() error {
	var errs []error
	if n.logs != nil {
		if err := n.logs.Close(); err != nil {
			errs = append(errs, fmt.Errorf("%w: close the log of Raft: %w", base.ErrFailed, damageOf(err)))
		}
	}
	if n.stable != nil {
		errs = append(errs, n.stable.Close())
	}
	return errors.Join(errs...)
}
