package cluster

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/manifest"
	"codeq/internal/snapshot"
	"codeq/internal/store"
)

// Group is this node's part in the Raft group of a shard. Its methods are safe for concurrent use.
type Group struct {
	index         int // of the shard
	node          *Node
	machine       StateMachine
	raft          *raft.Raft
	stopRaft      func() raft.Future // shuts Raft down; Raft's goroutines have ended when the future has
	running       bool               // Raft's goroutines have begun; set before they do
	transport     *transport
	snapshots     *snapshot.Store
	replayed      uint64 // the last entry that the log had when the node was opened
	applied       lastApplied
	format        atomic.Int32 // of the store; 0: it has none yet
	log           *groupLog
	continues     bool    // the log has been seen to continue the store; only the state machine uses it
	progress      changes // of applied
	growth        growth
	outgoing      outgoing
	incoming      incoming
	latestTerm    atomic.Uint64 // that Raft has known here
	leading       leaderTerm
	configuration configuration
	changing      chan struct{}          // capacity 1: held by who adds or removes a node
	kept          chan struct{}          // capacity 1: the shard may be served here again; see wake
	route         changes                // of where the shard is led
	callee        atomic.Pointer[callee] // the leader that was called last
	tenure        tenure
	health        peerHealth
	asking        asking
	proposing     proposing
	work          atomic.Uint64 // entries that were committed here, and reads that were confirmed
	told          atomic.Uint64 // work of the leader, by its last heartbeat
	still         atomic.Bool   // see StandStill
	limits        base.Limits
	confirming    confirming
	placement     atomic.Pointer[string] // the node that is to lead, by hand; "": any; while this one leads
	invited       atomic.Bool            // the leader has asked this node to take over
	standing      atomic.Bool            // this node is about to stand in
	removed       atomic.Bool            // other nodes have a leader, and this one is no member any more
	broken        atomic.Pointer[error]

	forfeited atomic.Uint64 // the latest term that this node has given up; see stall.go
	forfeits  changes
	heard     atomic.Pointer[heard]
	compared  comparison // of clocks
}

func newGroup(n *Node, index int, m StateMachine) *Group {
	g := &Group{
		index: index, node: n, machine: m, kept: make(chan struct{}, 1), changing: make(chan struct{}, 1),
		leading: leaderTerm{leaving: make(chan struct{}, 1)}, growth: growth{due: make(chan struct{}, 1)},
		outgoing: outgoing{turn: make(chan struct{}, 1)},
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
	g.progress.changed()
	return nil
}

// install puts what the snapshots have received in the place of the store, if anything.
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
	if err := manifest.SyncDirectory(d.FS, d.Path); err != nil {
		return err
	}
	return g.snapshots.Swapped()
}

// restore replaces the store by what the snapshots have received.
func (g *Group) restore() error {
	g.leave(base.ErrNotLeader)
	if _, _, ok := g.snapshots.Installed(); ok { // or else the store is as far as the snapshot
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
	g.asking.enter() // a group that fails at once waits for raft
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
	g.asking.leave()
	if err != nil {
		return errors.Join(damageOf(err), trans.Close())
	}
	g.transport = trans
	logs.raft.Store(g.raft)
	elections := make(chan raft.Observation, 1) // one that is not seen adds nothing to one that is
	g.raft.RegisterObserver(raft.NewObserver(elections, false, func(o *raft.Observation) bool {
		_, ok := o.Data.(raft.LeaderObservation)
		return ok
	}))
	n.watches.Go(func() { n.contain("watch of leaders", func() { g.follow(elections) }, g.Fail) })
	return nil
}

// Place notes which node is to lead, as the shard has stored it; "": any. The Leader calls it when
// it begins, and when it changes that.
func (g *Group) Place(node string) { g.placement.Store(&node) }

// Raft is for tests.
func (g *Group) Raft() *raft.Raft { return g.raft }

// FirstIndex is the first entry that the log has. It is for tests.
func (g *Group) FirstIndex() (uint64, error) { return g.log.FirstIndex() }

// Snapshots are the group's snapshots, the newest one first. It is for tests.
func (g *Group) Snapshots() ([]*raft.SnapshotMeta, error) { return g.snapshots.List() }

// Receive hands Raft a message as if another node had sent it. It is for tests.
func (g *Group) Receive(rpc raft.RPC) { g.transport.pass(rpc) }

// Propose returns when an entry that was decided in a term is in the logs of a majority, and this
// node has applied it. The first EntryHeader bytes of the entry are the group's, and all of them
// from now on. What was not proposed, or has had no effect, matches ErrNotLeader; of any other
// error it is unknown. It waits for Node.commitLimit, longer
// for a large entry that gets further, and no longer than until the term is forfeited.
func (g *Group) Propose(term uint64, entry []byte) error {
	binary.BigEndian.PutUint64(entry, term)
	err := g.propose(proposal{term: term, entry: entry})
	if err == nil {
		g.work.Add(1)
	}
	return err
}

// isIn returns an error if a term is over, or this node leads in it no more.
func (g *Group) isIn(term uint64) error {
	if g.hasForfeited(term) {
		return fmt.Errorf("%w: term %d: %w", base.ErrNotLeader, term, g.stallError())
	}
	if g.raft.CurrentTerm() != term {
		return fmt.Errorf("%w: term %d is over", base.ErrNotLeader, term)
	}
	return nil
}

// raftError tells what was certainly not proposed from what may be in the log, and says what is
// damaged.
func raftError(err error) error {
	if errors.Is(err, errNotStored) { // Raft has stepped down
		return fmt.Errorf("%w: %w", base.ErrNotLeader, err)
	}
	if errors.Is(err, raft.ErrNotLeader) || errors.Is(err, raft.ErrLeadershipTransferInProgress) || errors.Is(err, raft.ErrEnqueueTimeout) {
		return fmt.Errorf("%w: %w", base.ErrNotLeader, err)
	}
	return damageOf(err)
}

// Fail ends the group here: its store cannot be written, or its log not be read, or its vote not be
// stored. The others go on without it. It never waits.
func (g *Group) Fail(cause error) {
	err := fmt.Errorf("%w: shard %d: %w", base.ErrFailed, g.index, cause)
	if !g.broken.CompareAndSwap(nil, &err) {
		return
	}
	g.node.log.Error("replica failed", "shard", g.index, "err", cause)
	g.changed()
	g.node.background.Go(func() { g.node.contain("end of a replica", g.shutDown, nil) })
}

// Failure is why the group has ended here; nil if it has not.
func (g *Group) Failure() error {
	if err := g.broken.Load(); err != nil {
		return *err
	}
	return nil
}

// shutDown ends Raft's part. Raft does not answer what is on its way to the state machine when it
// is shut down. Until then all is answered: entries by Apply, with the failure, or else when the
// leadership is lost.
func (g *Group) shutDown() {
	<-g.asking.end()
	if g.raft == nil { // the node is recovered
		return
	}
	_ = g.stopRaft().Error() // of the group's goroutines; Raft has logged what went wrong
}

// beginProposal lets a proposal go to Raft, which answers it; the caller then has asking
// left. It never waits.
func (g *Group) beginProposal() error {
	if g.Failure() != nil || !g.asking.enter() {
		return fmt.Errorf("%w: %w", base.ErrNotLeader, cmp.Or(g.Failure(), base.ErrClosed))
	}
	return nil
}

// asking is those whom Raft is to answer.
type asking struct {
	mu    sync.Mutex // guards what follows
	count int
	over  chan struct{} // closed when all have been answered; nil: more may come
}

// enter reports whether there may be one more, who calls leave then.
func (a *asking) enter() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over != nil {
		return false
	}
	a.count++
	return true
}

func (a *asking) leave() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.count--
	if a.count == 0 && a.over != nil {
		close(a.over)
	}
}

// end lets nobody else enter, and returns what is closed when all have left.
func (a *asking) end() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over == nil {
		a.over = make(chan struct{})
		if a.count == 0 {
			close(a.over)
		}
	}
	return a.over
}
