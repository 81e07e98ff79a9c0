package cluster

import (
	"encoding/binary"
	"testing"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/crashfs"
	"codeq/internal/snapshot"
)

func entryOf(index, term, decided uint64, data string) *raft.Log {
	return &raft.Log{Index: index, Term: term, Data: append(binary.BigEndian.AppendUint64(nil, decided), data...)}
}

// TestOutdatedEntry: a decision of one term has no effect in the log of another one, and an applied
// entry has none again.
func TestOutdatedEntry(t *testing.T) {
	m := new(notes)
	g := loneGroup(crashfs.New(), m)
	g.replayed = 5
	require.Nil(t, fsm{g}.Apply(entryOf(5, 2, 2, "first")))
	require.Equal(t, errOutdated, fsm{g}.Apply(entryOf(6, 4, 3, "of a leader that was deposed meanwhile")))
	require.Nil(t, fsm{g}.Apply(entryOf(7, 4, 4, "second")))
	require.Equal(t, errHeld, fsm{g}.Apply(entryOf(5, 2, 2, "first, replayed")))
	require.Equal(t, []Entry{
		{Index: 5, Term: 2, Data: []byte("first"), Replayed: true}, {Index: 7, Term: 4, Data: []byte("second")},
	}, m.applied)
	require.EqualValues(t, 7, g.Applied())
}

// TestEntryThatCannotBeApplied: the replica has failed, and applies nothing more.
func TestEntryThatCannotBeApplied(t *testing.T) {
	for _, bad := range []struct {
		log  *raft.Log
		err  error // of the state machine
		want error
	}{
		{&raft.Log{Index: 1, Term: 1, Data: []byte("short")}, nil, base.ErrCorrupt},
		{entryOf(1, 1, 1, ""), errBroken, errBroken},
	} {
		m := &notes{err: bad.err}
		g := loneGroup(crashfs.New(), m)
		g.pendingProposals.enter() // Raft is not to be shut down: it is not there
		err, _ := fsm{g}.Apply(bad.log).(error)
		require.ErrorIs(t, err, bad.want)
		require.ErrorIs(t, g.Failure(), bad.want)
		require.ErrorIs(t, g.Failure(), base.ErrFailed)
		tried := len(m.applied)
		require.Equal(t, g.Failure(), fsm{g}.Apply(entryOf(2, 1, 1, "next")))
		require.Len(t, m.applied, tried)
		require.Zero(t, g.Applied())
		_, err = fsm{g}.Snapshot()
		require.ErrorIs(t, err, bad.want)
	}
	_, err := fsm{loneGroup(crashfs.New(), new(notes))}.Snapshot()
	require.ErrorIs(t, err, snapshot.ErrNotLive)
}

// lease is a leader that ends when it is told to.
type lease struct {
	done   chan struct{}
	begun  bool
	reason error
}

func (l *lease) Serve()                { l.begun = true }
func (l *lease) Done() <-chan struct{} { return l.done }
func (l *lease) Crashed() bool         { return false }

func (l *lease) StepDown(reason error) {
	l.reason = reason
	close(l.done)
}

// TestLeaderOfAnEarlierTermEnds: a leader has ended before an entry of a later term is applied, and
// none begins when its term is over, or while the shard is handed over.
func TestLeaderOfAnEarlierTermEnds(t *testing.T) {
	m := new(notes)
	g := loneGroup(crashfs.New(), m)
	l := &lease{done: make(chan struct{})}
	require.Nil(t, fsm{g}.Apply(entryOf(1, 3, 3, ""))) // by Lead
	require.True(t, g.serve(l, 3))
	require.True(t, l.begun)
	require.Nil(t, fsm{g}.Apply(entryOf(2, 3, 3, "")))
	require.True(t, g.leads())
	require.Nil(t, fsm{g}.Apply(entryOf(3, 4, 4, "")))
	require.False(t, g.leads())
	require.Equal(t, base.ErrNotLeader, l.reason)
	late := new(lease)
	require.False(t, g.serve(late, 3))
	g.leading.handing = true
	require.False(t, g.serve(late, 5))
	require.False(t, late.begun)
}
