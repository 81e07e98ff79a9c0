package cluster

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/crashfs"
	"codeq/internal/manifest"
	"codeq/internal/platform"
	"codeq/internal/raftlog"
)

// newLoneNode is a node that is a cluster, with one shard. It leads it in the eyes of Raft only.
func newLoneNode(t *testing.T, disk vfs.FS, votes string, m StateMachine) *Node {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	return newLoneNodeAt(l, disk, votes, m)
}

func newLoneNodeAt(l net.Listener, disk vfs.FS, votes string, m StateMachine) *Node {
	_ = disk.MkdirAll("dir", 0o700) // or Open fails
	directory := manifest.New(disk, "dir", manifest.Manifest{Format: manifest.Format, Shards: 1, ID: manifest.NewID()})
	if m, err := manifest.Read(disk, "dir"); err == nil && m != nil { // it was opened before
		directory.Manifest = *m
	}
	directory.BeginIncarnation()
	return New(Config{
		Node: "a", Listener: l, Advertise: "a:1", MaxAppend: MaxAppend, SnapshotBytes: SnapshotBytes, Logger: slog.New(slog.DiscardHandler),
		HeartbeatTimeout: 50 * time.Millisecond, ElectionTimeout: 50 * time.Millisecond, CallTimeout: time.Second,
		Directory:  directory,
		Machines:   []StateMachine{m},
		Reconcile:  func(bool) error { return nil },
		PanicError: func(what string, value any, _ []byte) error { return fmt.Errorf("panic in %s: %v", what, value) },
		Votes:      func(string) (raftlog.Stables, error) { return raftlog.OpenStable(platform.FS, votes) },
	})
}

// openLone opens a lone node, and returns its group when it leads that.
func openLone(t *testing.T, n *Node) *Group {
	require.NoError(t, n.Open())
	g := n.Group(0)
	for g.raft.VerifyLeader().Error() != nil {
		time.Sleep(time.Millisecond)
	}
	return g
}

// stuckMachine does not apply the log before it is told to.
type stuckMachine struct {
	notes
	stuck, goOn chan struct{}
}

func (m *stuckMachine) Apply(e Entry) error {
	select {
	case m.stuck <- struct{}{}:
	default:
	}
	<-m.goOn
	return m.notes.Apply(e)
}

// TestEndAmidChange: a change of a group that is on its way to the state machine when the group
// fails, or the node is closed, has an outcome.
func TestEndAmidChange(t *testing.T) {
	for _, fails := range []bool{false, true} {
		t.Run(fmt.Sprint("fails ", fails), func(t *testing.T) {
			t.Parallel()
			for range 8 { // Raft drops some of the messages under way
				endAmidChange(t, fails)
			}
		})
	}
}

func endAmidChange(t *testing.T, fails bool) {
	disk, votes := crashfs.New(), filepath.Join(t.TempDir(), "votes")
	m := &stuckMachine{stuck: make(chan struct{}, 1), goOn: make(chan struct{})}
	n := newLoneNode(t, disk, votes, m)
	g := openLone(t, n)
	first := g.raft.Apply(entryOf(0, 0, g.raft.CurrentTerm(), "").Data, 0)
	<-m.stuck
	changed := make(chan error, 1)
	before := g.raft.LastIndex()
	g.Change(AddNode, Peer{"b", "b:1", manifest.NewID()}, nil, func(err error) { changed <- err })
	require.Eventually(t, func() bool { return g.raft.CommitIndex() > before }, 10*time.Second, time.Millisecond)
	closed := make(chan error, 1)
	if fails {
		g.Fail(errBroken)
	} else {
		go func() { closed <- n.Close() }()
	}
	time.Sleep(20 * time.Millisecond)
	close(m.goOn)
	require.NoError(t, first.Error())
	if fails {
		go func() { closed <- n.Close() }()
	}
	for range 2 {
		select {
		case <-changed:
			changed = nil
		case err := <-closed:
			require.Equal(t, fails, errors.Is(err, base.ErrFailed), "%v", err)
			closed = nil
		case <-time.After(20 * time.Second):
			t.Fatal("somebody waits for ever")
		}
	}
}

// TestCloseAwaitsRaft: Close returns after the last use of the state machine, also if Raft was shut
// down before.
func TestCloseAwaitsRaft(t *testing.T) {
	t.Parallel()
	votes := filepath.Join(t.TempDir(), "votes")
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		m := &stuckMachine{stuck: make(chan struct{}, 1), goOn: make(chan struct{})}
		n := newLoneNodeAt(make(silence), disk, votes, m)
		g := openLone(t, n)
		g.raft.Apply(entryOf(0, 0, g.raft.CurrentTerm(), "").Data, 0)
		<-m.stuck
		g.stopRaft()
		closed := make(chan error, 1)
		go func() { closed <- n.Close() }()
		time.Sleep(time.Minute)
		require.Empty(t, closed, "the state machine is still at work")
		close(m.goOn)
		require.NoError(t, <-closed)
	})
}

// silence is a listener without connections.
type silence chan struct{}

func (s silence) Accept() (net.Conn, error) { <-s; return nil, net.ErrClosed }
func (s silence) Addr() net.Addr            { return &net.TCPAddr{} }
func (s silence) Close() error {
	select {
	case <-s:
	default:
		close(s)
	}
	return nil
}

// TestCloseAnswersAll: Close waits for a state machine that is slow, and all that was proposed has
// an outcome.
func TestCloseAnswersAll(t *testing.T) {
	t.Parallel()
	for range 8 { // Raft drops some of the messages under way
		votes := filepath.Join(t.TempDir(), "votes")
		synctest.Test(t, func(t *testing.T) {
			disk := crashfs.New()
			m := &stuckMachine{stuck: make(chan struct{}, 1), goOn: make(chan struct{})}
			n := newLoneNodeAt(make(silence), disk, votes, m)
			g := openLone(t, n)
			term := g.raft.CurrentTerm()
			for range 10 {
				require.NoError(t, g.beginProposal())
				go func() { _ = g.put(proposal{entry: entryOf(0, 0, term, "").Data, term: term}) }()
			}
			<-m.stuck
			closed := make(chan error, 1)
			go func() { closed <- n.Close() }()
			time.Sleep(time.Minute)
			require.Empty(t, closed)
			close(m.goOn)
			require.NoError(t, <-closed)
		})
	}
}
