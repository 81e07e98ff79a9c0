package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/snapshot"
)

// StateMachine is the replica of a shard on this node: a store, and the Leader while this node
// leads the group. Apply and Open are called one at a time.
type StateMachine interface {
	// Apply puts an entry into the store, and stores its index and term with it. After an error the
	// group has failed, and applies nothing more. No Leader of a term before the entry's runs here.
	Apply(Entry) error
	// Open closes the store if it is open, and opens it. In between it calls install, which moves
	// the store of a received snapshot, if any, to its place. It returns the position of the last
	// entry in the store, the zero Position if there is none. No Leader runs here meanwhile. A
	// store with a format is used only after Group.AdoptFormat; so is an entry that gives it one.
	Open(install func() error) (last Position, err error)
	// Live is the store for snapshots; nil while it is not open.
	Live() snapshot.Live
	// Lead prepares the Leader of a term that this node was elected for. It commits an entry of the
	// term, so that every entry that an earlier leader has acknowledged is in the store.
	Lead(term uint64) (Leader, error)
	// Raise commits an entry that gives the store a format, in a term of this node as the leader.
	// Later writes to the store may use it.
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
	// Done is closed when it has ended, by StepDown or on its own.
	Done() <-chan struct{}
	// Crashed reports whether it ended because of a bug, so that another node should lead.
	// REQUIRES: it has ended.
	Crashed() bool
}

// Entry is an entry of the log as it is applied.
type Entry struct {
	Index, Term uint64
	Data        []byte // after the EntryHeader; the log's, not to be changed
	Replayed    bool   // it was in the log when the node was opened: its notifications were sent before
	Reclaim     uint64 // free bytes while space must be reclaimed; 0: it need not be
}

// EntryHeader is the number of bytes at the beginning of an entry that belong to the group: they
// hold the term of its decision.
//
// Invariant: an entry has an effect only if it was decided in its term in the log. A leader that is
// deposed and elected again has other entries in between, and its decisions from before them no
// longer hold.
const EntryHeader = 8

// errOutdated is the outcome of an entry that was decided in another term than its term in the log.
var errOutdated = errors.New("decided in an earlier term")

// errHeld is the outcome of an entry that the store had before. An entry proposed here gets it as
// an error, so that none is acknowledged that the store has not applied.
var errHeld = errors.New("applied before")

// fsm applies the log of a group to its state machine. Raft calls its methods from one goroutine.
type fsm struct{ *Group }

// Apply implements raft.FSM. It returns nil, errOutdated, errHeld, or the error that has ended the
// group; after that nothing more is applied, and the node leaves the group.
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
	g.progress.notify()
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

// AwaitApplied waits until the store has the log up to an index. It fails if the group has, the
// node is closed, or ctx ends.
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

// Reach is AwaitApplied for a time; its error says how far the store is. A nil Group has no log.
func (g *Group) Reach(index uint64, within time.Duration) error {
	if g == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	err := g.AwaitApplied(ctx, index)
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("this node is behind: it has applied %d of %d log entries", g.Applied(), index)
	}
	return err
}

// Snapshot begins a snapshot, which is the store itself.
func (m fsm) Snapshot() (raft.FSMSnapshot, error) {
	if err := m.Failure(); err != nil {
		return nil, err
	}
	if m.sender.holding.Load() {
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

// applied is the store as a snapshot of Raft. It becomes durable when it is persisted.
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
