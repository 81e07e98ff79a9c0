package cluster

import (
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/crashfs"
)

// TestPositionAdmits: a log with an entry at one position can have the other one, or cannot.
func TestPositionAdmits(t *testing.T) {
	p := Position{10, 5}
	for _, e := range []Position{{10, 5}, {9, 5}, {9, 4}, {1, 1}, {11, 5}, {20, 6}} {
		require.NoError(t, p.admits(e))
		require.NoError(t, Position{}.admits(e), "the store is empty")
	}
	for _, e := range []Position{{10, 4}, {10, 6}, {9, 6}, {11, 4}} {
		err := p.admits(e)
		require.ErrorIs(t, err, base.ErrDiverged)
		require.ErrorContains(t, err, "entry 10 of term 5")
		require.ErrorContains(t, err, fmt.Sprintf("entry %d of term %d", e.Index, e.Term))
		require.ErrorContains(t, err, "ReplaceNode")
		require.ErrorContains(t, err, "RecoverCluster")
	}
}

// TestDivergedEntryIsRefused: entries that contradict the store are neither stored nor applied, and
// those that it has are not acknowledged by it.
func TestDivergedEntryIsRefused(t *testing.T) {
	for _, bad := range []Position{{10, 4}, {9, 6}, {11, 4}} {
		log := loneLog(t, crashfs.New())
		g := log.group
		m := new(notes)
		g.machine = m
		g.applied.set(Position{10, 5})
		require.NoError(t, log.StoreLogs([]*raft.Log{{Index: 8, Term: 5}}))
		require.Equal(t, errHeld, fsm{g}.Apply(entryOf(9, 5, 5, "")))
		g.pendingProposals.enter() // Raft is not to be shut down: it is not there
		err := log.StoreLogs([]*raft.Log{{Index: 9, Term: 5}, {Index: bad.Index, Term: bad.Term}})
		require.ErrorIs(t, err, base.ErrDiverged)
		require.ErrorIs(t, err, errNotStored)
		require.ErrorIs(t, g.Failure(), base.ErrDiverged)
		last, err := log.LastIndex()
		require.NoError(t, err)
		require.EqualValues(t, 8, last)

		g = loneGroup(crashfs.New(), m)
		g.applied.set(Position{10, 5})
		g.pendingProposals.enter()
		require.ErrorIs(t, fsm{g}.Apply(entryOf(bad.Index, bad.Term, bad.Term, "")).(error), base.ErrDiverged)
		require.ErrorIs(t, g.Failure(), base.ErrDiverged)
		require.Empty(t, m.applied)

		g = loneGroup(crashfs.New(), m)
		g.applied.set(Position{10, 5})
		g.pendingProposals.enter()
		_, err = groupSnapshots{nil, g}.Create(raft.SnapshotVersionMax, bad.Index, bad.Term, raft.Configuration{}, 1, nil)
		require.ErrorIs(t, err, base.ErrDiverged)
		require.ErrorIs(t, g.Failure(), base.ErrDiverged)
	}
}

// TestLogContinuesStore: entries after the store's last one are applied only if the log has that
// one, also those that were in the log when the node was opened.
func TestLogContinuesStore(t *testing.T) {
	for term, diverged := range map[uint64]bool{4: true, 5: false, 6: true} {
		log := loneLog(t, crashfs.New())
		require.NoError(t, log.StoreLogs([]*raft.Log{{Index: 10, Term: term}}))
		g, m := log.group, new(notes)
		g.machine, g.log, g.continues = m, log, false
		g.applied.set(Position{10, 5})
		g.pendingProposals.enter() // Raft is not to be shut down: it is not there
		err := log.compare()
		require.Equal(t, term == 6, errors.Is(err, base.ErrDiverged), "an earlier term may be replaced: %v", err)
		err, _ = fsm{g}.Apply(entryOf(11, 6, 6, "")).(error)
		require.Equal(t, diverged, errors.Is(err, base.ErrDiverged), "%v", err)
		require.Equal(t, diverged, errors.Is(g.Failure(), base.ErrDiverged))
		require.Equal(t, diverged, len(m.applied) == 0)
	}
	log := loneLog(t, crashfs.New())
	require.NoError(t, log.compare())
	log.group.applied.set(Position{10, 5})
	require.ErrorIs(t, log.compare(), base.ErrDiverged, "the log is lost")
	log.snapshot = Position{9, 5}
	require.NoError(t, log.compare(), "a checkpoint")
}

// TestAppliedEntryIsNotReplaced: an entry that is on its way to the state machine stays in the log.
// One that an interrupted installation of a snapshot has left does not.
func TestAppliedEntryIsNotReplaced(t *testing.T) {
	for _, left := range []bool{false, true} {
		disk, votes := crashfs.New(), filepath.Join(t.TempDir(), "votes")
		m := &stuckMachine{stuck: make(chan struct{}, 1), goOn: make(chan struct{})}
		n := newLoneNode(t, disk, votes, m)
		g := openLone(t, n)
		f := g.raft.Apply(entryOf(0, 0, g.raft.CurrentTerm(), "").Data, 0)
		<-m.stuck
		last, err := g.log.LastIndex()
		require.NoError(t, err)
		require.Eventually(t, func() bool { return g.raft.AppliedIndex() == last }, 10*time.Second, time.Millisecond)
		require.Less(t, g.Applied(), last)
		if left {
			g.log.snapshot.Index = last
		}
		err = g.log.DeleteRange(last, last)
		require.Equal(t, left, err == nil)
		require.Equal(t, !left, errors.Is(err, base.ErrDiverged))
		require.Equal(t, !left, errors.Is(g.Failure(), base.ErrDiverged))
		close(m.goOn)
		require.NoError(t, f.Error())
		require.Equal(t, left, n.Close() == nil)
	}
}

// TestNodeThatHasDiverged: if the log of a shard contradicts its store, the node opens for its
// other shards, and reports the error.
func TestNodeThatHasDiverged(t *testing.T) {
	disk, votes := crashfs.New(), filepath.Join(t.TempDir(), "votes")
	n := newLoneNode(t, disk, votes, new(notes))
	openLone(t, n)
	require.NoError(t, n.Close())
	n = newLoneNode(t, disk, votes, &notes{last: Position{2, 1}}) // Raft's own entry is of term 2
	require.NoError(t, n.Open())
	require.ErrorIs(t, n.Group(0).Failure(), base.ErrDiverged)
	require.ErrorIs(t, n.Group(0).Propose(3, make([]byte, EntryHeader)), base.ErrDiverged)
	require.ErrorIs(t, n.Close(), base.ErrDiverged)
}
