package cluster

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/container/slowlock"
	"codeq/internal/manifest"
	"codeq/internal/platform"
	"codeq/internal/snapshot"
	"codeq/internal/store"
)

// Group is this node's part in the Raft group of a shard. Its methods are safe for concurrent use.
type Group struct {
	index            int // of the shard
	node             *Node
	machine          StateMachine
	raft             *raft.Raft
	stopRaft         func() raft.Future // shuts Raft down; Raft's goroutines have ended when the future has
	running          bool               // Raft's goroutines have begun; set before they do
	transport        *transport
	snapshots        *snapshot.Store
	replayed         uint64 // the last entry that the log had when the node was opened
	applied          lastApplied
	format           atomic.Int32 // of the store; 0: it has none yet
	log              *groupLog
	continues        bool     // the log has been seen to follow on the store; only the state machine uses it
	progress         notifier // of applied
	growth           logGrowth
	sender           snapshotSender
	receiver         snapshotReceiver
	latestTerm       atomic.Uint64 // the latest that Raft has had here
	leading          leaderTerm
	configuration    configuration
	changing         slowlock.Lock          // held while a node is added or removed
	kept             chan struct{}          // capacity 1: the shard may be served here again; see wake
	route            notifier               // changes when the shard gets another leader
	callee           atomic.Pointer[callee] // the leader that was called last
	termOwner        termOwner
	health           peerHealth
	pendingProposals pendingProposals
	proposing        proposing
	work             atomic.Uint64 // entries that were committed here, and reads that were confirmed
	told             atomic.Uint64 // work of the leader, by its last heartbeat
	still            atomic.Bool   // see StandStill
	limits           base.Limits
	confirming       confirming
	placement        atomic.Pointer[string] // the node that must lead, by hand; "": any; while this one leads
	invited          atomic.Bool            // the leader has asked this node to take over
	standing         atomic.Bool            // this node is about to stand in
	removed          atomic.Bool            // other nodes have a leader, and this one is no longer a member
	broken           atomic.Pointer[error]

	forfeited atomic.Uint64 // the latest term that this node has given up; see stall.go
	forfeits  notifier
	heard     atomic.Pointer[heard]
	compared  comparison // of clocks
}

func newGroup(n *Node, index int, m StateMachine) *Group {
	g := &Group{
		index: index, node: n, machine: m, kept: make(chan struct{}, 1), changing: slowlock.New(),
		leading: leaderTerm{leaving: slowlock.New()}, growth: logGrowth{due: make(chan struct{}, 1)},
		sender: snapshotSender{turn: slowlock.New()},
	}
	g.limits.Init(n.c.CallTimeout, g.workDone)
	g.Place("")
	return g
}

// openStore opens the store.
func (g *Group) openStore() error {
	g.configuration.setCovers(false)
	last, err := g.machine.Open(g.install)
	if err != nil {
		return err
	}
	g.applied.set(last)
	g.continues = false
	g.progress.notify()
	return nil
}

// install moves the store that the snapshots have received, if any, to the place of the old one.
func (g *Group) install() error {
	from, _, ok := g.snapshots.Installed()
	if !ok {
		return nil
	}
	d := g.node.c.Directory
	dir := manifest.ShardDir(d.FS, d.Path, g.index)
	if err := d.FS.RemoveAll(dir); err != nil {
		return err
	}
	if err := d.FS.Rename(from, dir); err != nil {
		return err
	}
	if err := platform.SyncDirectory(d.FS, d.Path); err != nil {
		return err
	}
	return g.snapshots.Swapped()
}

// restore replaces the store by the one that the snapshots have received.
func (g *Group) restore() error {
	g.leave(base.ErrNotLeader)
	if _, _, ok := g.snapshots.Installed(); ok { // or else the store has all of the snapshot
		if err := g.openStore(); err != nil {
			return err
		}
	}
	return g.adoptConfiguration()
}

// start starts the node's part in the group, and founds the group if the cluster is new.
func (g *Group) start() error {
	n := g.node
	logs, votes, err := g.stores()
	if err != nil {
		return damageOf(err)
	}
	if err := g.beginFromStore(votes); err != nil {
		return err
	}
	if g.replayed, err = logs.LastIndex(); err != nil {
		return err
	}
	if err := g.adoptConfiguration(); err != nil {
		return err
	}
	diverged := logs.compare()
	if diverged != nil && !errors.Is(diverged, base.ErrDiverged) {
		return damageOf(diverged)
	}
	logger := newRaftLogger(n.log.With("shard", g.index))
	conf := n.raftConfig(logger)
	trans := newTransport(g, &raft.NetworkTransportConfig{
		Stream: stream{n.peer.Group(g.index), n.self.Address, g.moved}, MaxPool: maxPool, MaxRPCsInFlight: inFlight,
		Timeout: raftTimeout, Logger: logger,
	}, diverged)
	snapshots := groupSnapshots{g.snapshots, g}
	g.pendingProposals.enter() // a group that fails at once waits for raft
	// Raft panics, before it has a goroutine, when it cannot read its log.
	err = store.Protect(func() error {
		known, err := raft.HasExistingState(logs, votes, snapshots)
		switch d := n.c.Directory; {
		case err != nil:
		case len(d.Founders) > 0:
			err = g.goOnFounding(logs, votes, configurationOf(d.Founders))
		case d.Cluster == "" && (known || g.Applied() > 0):
			err = fmt.Errorf("%w: it is of no cluster, but was once (RecoverCluster makes it one of its own)", base.ErrNotMember)
		}
		if err == nil {
			g.raft, err = raft.NewRaft(conf, fsm{g}, logs, votes, snapshots, trans)
		}
		if err == nil {
			g.stopRaft = sync.OnceValue(g.raft.Shutdown) // a second call of Shutdown would not wait
		}
		return err
	})
	g.pendingProposals.leave()
	if err != nil {
		return errors.Join(damageOf(err), trans.Close())
	}
	g.transport = trans
	logs.raft.Store(g.raft)
	elections := make(chan raft.Observation, 1) // capacity 1: one that waits stands for those that are dropped
	g.raft.RegisterObserver(raft.NewObserver(elections, false, func(o *raft.Observation) bool {
		_, ok := o.Data.(raft.LeaderObservation)
		return ok
	}))
	n.watch("watch of leaders", func() { g.follow(elections) }, g.Fail)
	return nil
}

// Place sets the node that must lead, as the shard has stored it; "": any. The Leader calls it when
// it begins, and when it changes the node.
func (g *Group) Place(node string) { g.placement.Store(&node) }

// Raft is for tests.
func (g *Group) Raft() *raft.Raft { return g.raft }

// FirstIndex is the first entry of the log. It is for tests.
func (g *Group) FirstIndex() (uint64, error) { return g.log.FirstIndex() }

// Snapshots are the group's snapshots, the newest one first. It is for tests.
func (g *Group) Snapshots() ([]*raft.SnapshotMeta, error) { return g.snapshots.List() }

// Receive passes a message to Raft as if another node had sent it. It is for tests.
func (g *Group) Receive(rpc raft.RPC) { g.transport.pass(rpc) }

// Propose returns when an entry that was decided in a term is in the logs of a majority, and this
// node has applied it. The first EntryHeader bytes of the entry belong to the group, and from now
// on all of them do. An error that matches ErrNotLeader says that the entry was not proposed, or
// had no effect; after any other error that is unknown. Propose waits for Node.commitLimit, longer
// for a large entry that makes progress, and no longer than until the term is forfeited.
func (g *Group) Propose(term uint64, entry []byte) error {
	binary.BigEndian.PutUint64(entry, term)
	err := g.propose(proposal{term: term, entry: entry})
	if err == nil {
		g.work.Add(1)
	}
	return err
}

// isIn returns an error if a term is over, or this node has forfeited it. Only Confirm says that
// the node leads.
func (g *Group) isIn(term uint64) error {
	if g.hasForfeited(term) {
		return fmt.Errorf("%w: term %d: %w", base.ErrNotLeader, term, g.stallError())
	}
	if g.raft.CurrentTerm() != term {
		return fmt.Errorf("%w: term %d is over", base.ErrNotLeader, term)
	}
	return nil
}

// raftError separates an entry that was certainly not proposed from one that may be in the log, and
// reports damage.
func raftError(err error) error {
	if errors.Is(err, errNotStored) { // Raft has stepped down
		return fmt.Errorf("%w: %w", base.ErrNotLeader, err)
	}
	if errors.Is(err, raft.ErrNotLeader) || errors.Is(err, raft.ErrLeadershipTransferInProgress) || errors.Is(err, raft.ErrEnqueueTimeout) {
		return fmt.Errorf("%w: %w", base.ErrNotLeader, err)
	}
	return damageOf(err)
}

// Fail ends the group here, because its store cannot be written, its log not read, or its vote not
// stored. The other groups go on. It never waits.
func (g *Group) Fail(cause error) {
	err := fmt.Errorf("%w: shard %d: %w", base.ErrFailed, g.index, cause)
	if !g.broken.CompareAndSwap(nil, &err) {
		return
	}
	g.node.log.Error("replica failed", "shard", g.index, "err", cause)
	g.changed()
	g.node.run("end of a replica", g.shutDown, nil)
}

// Failure is the reason why the group has ended here; nil: it has not.
func (g *Group) Failure() error {
	if err := g.broken.Load(); err != nil {
		return *err
	}
	return nil
}

// shutDown ends Raft here. Raft does not answer the entries that are on their way to the state
// machine when it is shut down. So shutDown waits until all are answered: by Apply, with the
// failure, or else when the leadership is lost.
func (g *Group) shutDown() {
	<-g.pendingProposals.end()
	if g.raft == nil { // the node is recovered
		return
	}
	_ = g.stopRaft().Error() // waits for the group's goroutines; Raft has logged the error
}
