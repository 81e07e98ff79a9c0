package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/snapshot"
)

// StateMachine is a shard as a group replicates it: a store, and the one who decides while this
// node leads the group. Apply and Open are called one at a time.
type StateMachine interface {
	// Apply puts an entry into the store, and stores its index and term with it. After an error the
	// group has failed, and applies nothing more. Nobody decides here in a term before that of the
	// entry.
	Apply(Entry) error
	// Open closes the store if it is open, and opens it. In between it calls install, which puts
	// what a snapshot has brought in its place, if anything. It returns the position of the last
	// entry in the store, the zero Position if there is none. Nobody decides here meanwhile. A
	// store that has a format is used after Group.AdoptFormat only; so is an entry that gives it
	// one.
	Open(install func() error) (last Position, err error)
	// Live is the store for snapshots; nil while it is not open.
	Live() snapshot.Live
	// Lead prepares who is to decide in a term that this node was elected for. It commits an entry
	// of the term, so that whatever any leader has acknowledged before is in the store.
	Lead(term uint64) (Leader, error)
	// Raise commits an entry, in a term in which this node leads, that gives the store a format.
	// What is written to the store later may be of it.
	Raise(term uint64, format int) error
	// IsForgotten reports whether the store says that a node, or a directory, was removed from the
	// cluster; see Leaders.Forget.
	IsForgotten(name string) (bool, error)
}

// Leader decides for a shard. It is comparable.
type Leader interface {
	// Serve begins. It does not wait.
	Serve()
	// StepDown ends it for a reason, and returns when it has ended.
	StepDown(reason error)
	// Done is closed when it has ended, by StepDown or by itself.
	Done() <-chan struct{}
	// Crashed reports whether it ended because of a bug, so that another node is to lead.
	// REQUIRES: it has ended.
	Crashed() bool
}

// Entry is an entry of the log as it is applied.
type Entry struct {
	Index, Term uint64
	Data        []byte // after the EntryHeader; the log's, not to be changed
	Replayed    bool   // the log had it when the node was opened: what it tells has been told
	Reclaim     uint64 // so many bytes are free, and space is to be reclaimed; 0: it is not
}

// EntryHeader is how many bytes at the beginning of an entry are the group's: they hold the term in
// which it was decided.
//
// Invariant: an entry has an effect only if it was decided in the term in which it is in the log. A
// leader that is deposed and elected again has other entries in between, and what it had decided
// before them no longer holds.
const EntryHeader = 8

// errOutdated is the outcome of an entry that was decided in another term than the one in which it
// is in the log.
var errOutdated = errors.New("decided in an earlier term")

// errHeld is the outcome of an entry that the store has from before. It is not that of one which
// was proposed here, so that none is acknowledged that the store has not taken.
var errHeld = errors.New("applied before")

// fsm applies the log of a group to its state machine. Raft calls its methods from one goroutine.
type fsm struct{ *Group }

// Apply is raft.FSM's. What it returns is nil, errOutdated, errHeld, or why the group has failed;
// after that nothing more is applied, and the node leaves the group.
func (m fsm) Apply(l *raft.Log) (outcome any) {
	m.node.contain("state machine", func() { outcome = m.apply(l) }, func(err error) {
		m.Fail(err)
		outcome = err
	})
	return outcome
}

func (m fsm) apply(l *raft.Log) any {
	g := m.Group
	if err := g.Failure(); err != nil {
		return err
	}
	last, at := g.applied.get(), Position{l.Index, l.Term}
	err := last.admits(at)
	switch {
	case err != nil:
	case l.Index <= last.Index:
		if l.Index == last.Index {
			g.configuration.setCovers(true)
		}
		return errHeld
	default:
		if isReference(l) {
			whole, err := m.log.load(l)
			if err != nil {
				g.Fail(err)
				return err
			}
			l = &whole
		}
		if err = m.applyNext(l); errors.Is(err, errOutdated) {
			return err
		}
	}
	if err != nil {
		err = fmt.Errorf("apply entry %d: %w", l.Index, err)
		g.Fail(err)
		return err
	}
	g.applied.set(at)
	g.progress.changed()
	g.grow(int64(len(l.Data)), 1)
	return nil
}

func (m fsm) applyNext(l *raft.Log) error {
	if len(l.Data) < EntryHeader {
		return fmt.Errorf("%w: log entry of %d bytes", base.ErrCorrupt, len(l.Data))
	}
	if !m.continues {
		if err := m.log.continues(); err != nil {
			return err
		}
		m.continues = true
		m.configuration.setCovers(true)
	}
	if binary.BigEndian.Uint64(l.Data) != l.Term {
		return errOutdated
	}
	m.observeTerm(l.Term)
	return m.machine.Apply(Entry{
		Index: l.Index, Term: l.Term, Data: l.Data[EntryHeader:], Replayed: l.Index <= m.replayed, Reclaim: m.node.room.reclaim(),
	})
}

// Applied is the index of the last entry in the store.
func (g *Group) Applied() uint64 { return g.applied.get().Index }

// AwaitApplied waits until the store has what the log has at an index. It fails if the group has,
// the node is closed, or ctx ends.
func (g *Group) AwaitApplied(ctx context.Context, index uint64) error {
	for {
		progress, route := g.progress.next(), g.route.next() // which the failure of a group changes
		if g.Applied() >= index {
			return nil
		}
		if err := g.Failure(); err != nil {
			return err
		}
		select {
		case <-progress:
		case <-route:
		case <-g.node.ctx.Done():
			return base.ErrClosed
		case <-ctx.Done():
			return base.EndOf(ctx)
		}
	}
}

// Snapshot begins a snapshot, which is the store itself.
func (m fsm) Snapshot() (raft.FSMSnapshot, error) {
	if err := m.Failure(); err != nil {
		return nil, err
	}
	if m.outgoing.holding.Load() {
		return nil, errSending
	}
	live := m.machine.Live()
	if live == nil {
		return nil, snapshot.ErrNotLive
	}
	return applied{m.node, live}, nil
}

// Restore replaces the store by one that the snapshots have received.
func (m fsm) Restore(io.ReadCloser) error {
	err := m.node.guarded("restore", m.restore)
	if err != nil {
		m.Fail(err)
	}
	return err
}

// applied is what has been applied, as a snapshot of Raft. It becomes durable when it is persisted.
type applied struct {
	node *Node
	live snapshot.Live
}

// Persist makes the snapshot durable.
func (a applied) Persist(sink raft.SnapshotSink) error {
	return a.node.guarded("snapshot", func() error { return sink.(*snapshot.Sink).Persist(a.live) })
}

// Release has nothing to do: the store stays open.
func (applied) Release() {}
