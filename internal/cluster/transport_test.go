package cluster

import (
	"context"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/manifest"
	"codeq/internal/snapshot"
)

// TestFailedReplicaSendsNothing: the entries that it has read of its log may be wrong.
func TestFailedReplicaSendsNothing(t *testing.T) {
	g := loneGroup(crashfs.New(), nil)
	g.broken.Store(&errBroken)
	tr := &transport{group: g}
	require.ErrorIs(t, tr.AppendEntries("a", "a", new(raft.AppendEntriesRequest), nil), errBroken)
	p := newPipeline(newFakePipeline(0), g, "b")
	_, err := p.AppendEntries(new(raft.AppendEntriesRequest), new(raft.AppendEntriesResponse))
	require.ErrorIs(t, err, errBroken)
	require.NoError(t, p.Close())
}

// TestFollowerCommitsWhatIsProved: a follower has entries of an earlier leader behind those that
// its leader has sent by now. They are not committed, however far the leader is.
func TestFollowerCommitsWhatIsProved(t *testing.T) {
	n, other := openFollower(t)
	g := n.Group(0)
	send := func(term, commit uint64, entries ...*raft.Log) *raft.AppendEntriesResponse {
		return sendEntries(t, g, other, term, commit, entries...)
	}
	entry := func(index, term uint64) *raft.Log { return entryOf(index, term, term, "") }
	require.True(t, send(5, 1, entry(2, 5), entry(3, 5), entry(4, 5)).Success)
	require.True(t, send(6, 4, entry(2, 5)).Success)
	require.EqualValues(t, 2, g.raft.CommitIndex())
	require.True(t, send(6, 4, entry(2, 5), entry(3, 6), entry(4, 6)).Success)
	require.EqualValues(t, 4, g.raft.CommitIndex())

	// Raft handles a heartbeat beside other messages, and may go back to the term of it.
	require.NoError(t, newVotes(n.stable.Group(0), g).SetUint64([]byte(keyCurrentTerm), 8))
	late := send(7, 4)
	require.False(t, late.Success)
	require.EqualValues(t, 8, late.Term)
	require.True(t, send(8, 4).Success)
}

// openFollower opens a node of a cluster without its other member.
func openFollower(t *testing.T) (n *Node, other Peer) { return openFollowerWith(t, func(*Config) {}) }

// openFollowerWith is openFollower of a node that adapt has adapted.
func openFollowerWith(t *testing.T, adapt func(*Config)) (n *Node, other Peer) {
	disk, m := crashfs.New(), &notes{}
	n = newLoneNode(t, disk, filepath.Join(t.TempDir(), "votes"), m)
	other = Peer{"b", "b:1", manifest.NewID()}
	n.c.Directory.Cluster, n.c.Directory.Founders = manifest.NewID(), foundersOf([]Peer{n.self, other})
	n.c.HeartbeatTimeout, n.c.ElectionTimeout = time.Hour, time.Hour
	n.c.Dial = func(context.Context, string) (net.Conn, error) { return nil, errBroken }
	adapt(&n.c)
	require.NoError(t, n.Open())
	t.Cleanup(func() { require.NoError(t, n.Close()) })
	return n, other
}

// sendEntries sends a node the entries after the first one, as the other member.
func sendEntries(t *testing.T, g *Group, from Peer, term, commit uint64, entries ...*raft.Log) *raft.AppendEntriesResponse {
	return deliver(t, g, nil, &raft.AppendEntriesRequest{
		RPCHeader: headerOf(from), Term: term, PrevLogEntry: 1, PrevLogTerm: 1, Entries: entries, LeaderCommitIndex: commit,
	}).(*raft.AppendEntriesResponse)
}

func headerOf(p Peer) raft.RPCHeader {
	return raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(p.ServerID()), Addr: []byte(p.Address)}
}

// deliver returns the answer to a message.
func deliver(t *testing.T, g *Group, body io.Reader, message any) any {
	answer := make(chan raft.RPCResponse, 1)
	g.transport.pass(raft.RPC{RespChan: answer, Command: message, Reader: body})
	a := <-answer
	require.NoError(t, a.Error)
	return a.Response
}

// TestLateSnapshot: a snapshot that comes from an earlier leader, or once more, drops no later
// entry that was acknowledged.
func TestLateSnapshot(t *testing.T) {
	n, other := openFollower(t)
	g := n.Group(0)
	require.True(t, sendEntries(t, g, other, 5, 3, entryOf(2, 5, 5, ""), entryOf(3, 5, 5, ""), entryOf(4, 5, 5, "")).Success)
	send := func(term, index uint64) (answer *raft.InstallSnapshotResponse) {
		body := strings.NewReader("what nobody reads")
		answer = deliver(t, g, body, &raft.InstallSnapshotRequest{
			RPCHeader: headerOf(other), SnapshotVersion: raft.SnapshotVersionMax, Term: term, LastLogIndex: index, LastLogTerm: 5,
			Configuration: raft.EncodeConfiguration(n.alone()), ConfigurationIndex: 1, Size: body.Size(),
		}).(*raft.InstallSnapshotResponse)
		require.Zero(t, body.Len(), "the answer is not read before")
		return answer
	}
	again := send(5, 2)
	require.True(t, again.Success)
	require.EqualValues(t, 5, again.Term)
	late := send(4, 100)
	require.False(t, late.Success)
	require.EqualValues(t, 5, late.Term)
	last, err := g.log.LastIndex()
	require.NoError(t, err)
	require.EqualValues(t, 4, last)
}

// TestEntriesBehindSnapshot: the log of a node begins behind its snapshot, with entries of an
// earlier leader. The node takes the entries of another one in their place, if they follow the same
// entry.
func TestEntriesBehindSnapshot(t *testing.T) {
	n, other := openFollower(t)
	g := n.Group(0)
	require.True(t, sendEntries(t, g, other, 5, 3, entryOf(2, 5, 5, ""), entryOf(3, 5, 5, ""), entryOf(4, 5, 5, "")).Success)
	live := &oneFile{newSizedDisk(1 << 30)}
	g.machine.(*notes).live = live
	sink, err := g.snapshots.Create(raft.SnapshotVersionMax, 3, 5, n.alone(), 1, nil)
	require.NoError(t, err)
	require.NoError(t, sink.(*snapshot.Sink).Persist(live))
	require.NoError(t, sink.Close())
	require.NoError(t, g.log.LogStore.DeleteRange(1, 3))
	send := func(term, before, beforeTerm uint64) bool {
		return deliver(t, g, nil, &raft.AppendEntriesRequest{
			RPCHeader: headerOf(other), Term: term, PrevLogEntry: before, PrevLogTerm: beforeTerm,
			Entries: []*raft.Log{entryOf(before+1, term, term, "")},
		}).(*raft.AppendEntriesResponse).Success
	}
	require.False(t, send(7, 3, 6), "not the same entry")
	require.False(t, send(7, 2, 5), "before the snapshot")
	require.True(t, send(7, 3, 5))
	var last raft.Log
	require.NoError(t, g.log.GetLog(4, &last))
	require.EqualValues(t, 7, last.Term)
}

// TestOwnMessagesNameTheNode: a node that gets a message of this package takes its sender for the
// leader, as if Raft had sent it.
func TestOwnMessagesNameTheNode(t *testing.T) {
	n, _ := openFollower(t)
	require.Equal(t, headerOf(n.self), n.Group(0).transport.header())
}

// TestResumption: a node that has got a snapshot beyond what its leader asks it for has nothing
// before it. The leader goes on behind it, if it has the same entry there.
func TestResumption(t *testing.T) {
	for _, same := range []bool{true, false} {
		ends := connected(t)
		g := loneGroup(crashfs.New(), nil)
		g.log = loneLog(t, crashfs.New())
		require.NoError(t, g.log.LogStore.StoreLogs(entriesFrom(1, 20)))
		req := &raft.AppendEntriesRequest{Term: 9, PrevLogEntry: 7, PrevLogTerm: 1, LeaderCommitIndex: 20}
		req.Entries = []*raft.Log{entryOf(8, 1, 1, "")}
		sent, resp := make(chan error, 1), new(raft.AppendEntriesResponse)
		go func() {
			sent <- (&transport{NetworkTransport: ends[0], group: g}).replicate("b", ends[1].LocalAddr(), req, resp)
		}()
		rpc := <-ends[1].Consumer()
		rpc.Respond(&raft.AppendEntriesResponse{Term: 9, LastLog: 15, NoRetryBackoff: true}, nil)
		rpc = <-ends[1].Consumer()
		question := rpc.Command.(*raft.AppendEntriesRequest)
		require.EqualValues(t, 15, question.PrevLogEntry)
		require.EqualValues(t, 1, question.PrevLogTerm)
		require.Empty(t, question.Entries)
		rpc.Respond(&raft.AppendEntriesResponse{Term: 9, LastLog: 15, Success: same, NoRetryBackoff: !same}, nil)
		require.NoError(t, <-sent)
		require.Equal(t, same, resp.Success)
		if same {
			require.EqualValues(t, 15, req.Entries[0].Index) // Raft goes on behind it
		}
	}
}

// TestCutMessageClaimsLess: of the entries for a node that refuses them one is sent, and the
// message does not say that those behind it are committed.
func TestCutMessageClaimsLess(t *testing.T) {
	ends := connected(t)
	g := loneGroup(crashfs.New(), nil)
	g.health.noteRefusal("b", true)
	sent := make(chan error, 1)
	req := &raft.AppendEntriesRequest{PrevLogEntry: 10, LeaderCommitIndex: 20}
	for i := range uint64(5) {
		req.Entries = append(req.Entries, entryOf(11+i, 1, 1, ""))
	}
	go func() {
		sent <- (&transport{NetworkTransport: ends[0], group: g}).replicate("b", ends[1].LocalAddr(), req, new(raft.AppendEntriesResponse))
	}()
	rpc := <-ends[1].Consumer()
	rpc.Respond(&raft.AppendEntriesResponse{Success: true}, nil)
	require.NoError(t, <-sent)
	require.Len(t, rpc.Command.(*raft.AppendEntriesRequest).Entries, 1)
	require.EqualValues(t, 11, rpc.Command.(*raft.AppendEntriesRequest).LeaderCommitIndex)
}

// TestRefusalOfEndingNode: a leader that is about to end asks a node without room no more often
// than before.
func TestRefusalOfEndingNode(t *testing.T) {
	ends := connected(t)
	g := loneGroup(crashfs.New(), nil)
	g.node.cancel()
	req := &raft.AppendEntriesRequest{PrevLogEntry: 10, Entries: []*raft.Log{entryOf(11, 1, 1, "")}}
	sent := make(chan error, 1)
	began := time.Now()
	go func() {
		sent <- (&transport{NetworkTransport: ends[0], group: g}).replicate("b", ends[1].LocalAddr(), req, new(raft.AppendEntriesResponse))
	}()
	rpc := <-ends[1].Consumer()
	rpc.Respond(&raft.AppendEntriesResponse{LastLog: 10}, nil)
	require.NoError(t, <-sent)
	require.GreaterOrEqual(t, time.Since(began), refusedPause)
}

// TestVotesOutliveConnections: all connections that Raft keeps to a node have ended, as it was
// opened again. Questions for its vote, and the offer to lead, reach it nevertheless.
func TestVotesOutliveConnections(t *testing.T) {
	from, err := raft.NewTCPTransport("127.0.0.1:0", nil, maxPool, time.Minute, io.Discard)
	require.NoError(t, err)
	defer from.Close()
	g := loneGroup(crashfs.New(), nil)
	g.node.c.HeartbeatTimeout = time.Minute
	tr := &transport{NetworkTransport: from, group: g}
	open := func(at string) *raft.NetworkTransport {
		to, err := raft.NewTCPTransport(at, nil, maxPool, time.Minute, io.Discard)
		require.NoError(t, err)
		return to
	}
	offer := func(to *raft.NetworkTransport) error {
		return from.TimeoutNow("b", to.LocalAddr(), new(raft.TimeoutNowRequest), new(raft.TimeoutNowResponse))
	}
	other := open("127.0.0.1:0")
	var kept [maxPool]raft.RPC
	sent := make(chan error, maxPool)
	for i := range kept { // at one moment, so that each has a connection
		go func() { sent <- offer(other) }()
		kept[i] = <-other.Consumer()
	}
	for _, rpc := range kept {
		rpc.Respond(new(raft.TimeoutNowResponse), nil)
		require.NoError(t, <-sent)
	}
	at := string(other.LocalAddr())
	other.CloseStreams()
	require.NoError(t, other.Close())
	other = open(at)
	defer other.Close()
	require.Error(t, offer(other), "one of them is used first")
	b := Peer{Node: "b", ID: manifest.NewID()}
	go func() {
		sent <- tr.anew(b.ServerID(), "b", func(raft.ServerAddress) error { return offer(other) }, always)
	}()
	rpc := <-other.Consumer()
	rpc.Respond(new(raft.TimeoutNowResponse), nil)
	require.NoError(t, <-sent)

	require.NoError(t, other.Close())
	from.CloseStreams()
	tries := 0
	require.Error(t, tr.anew(b.ServerID(), "b", func(raft.ServerAddress) error {
		tries++
		_, err := stream{StreamLayer: noStream{}}.Dial("b", 0)
		return err
	}, always))
	require.Equal(t, 1, tries, "a node that cannot be dialed")
}

// noStream fails each dial.
type noStream struct{ raft.StreamLayer }

func (noStream) Dial(raft.ServerAddress, time.Duration) (net.Conn, error) { return nil, errBroken }

// dialer calls a function before it dials.
type dialer struct {
	noStream
	dialed func() error
}

func (d dialer) Dial(raft.ServerAddress, time.Duration) (net.Conn, error) { return nil, d.dialed() }
func (dialer) Accept() (net.Conn, error)                                  { return nil, errBroken }
func (dialer) Addr() net.Addr                                             { return &net.TCPAddr{} }
func (dialer) Close() error                                               { return nil }

// TestOfferEndsWithTheTerm: the offer to lead may have been handled although no answer has come. It
// is not repeated when another term has begun.
func TestOfferEndsWithTheTerm(t *testing.T) {
	for _, stays := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			nodes, _ := openTrio(t, 1)
			g, to := nodes[0].Group(0), nodes[1].self
			dials := 0
			from := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{Logger: newRaftLogger(nodes[0].log), Stream: dialer{dialed: func() error {
				if dials++; dials == 1 && !stays {
					deliver(t, g, nil, &raft.AppendEntriesRequest{RPCHeader: headerOf(to), Term: g.raft.CurrentTerm() + 1})
				}
				return errBroken
			}}})
			tr := &transport{NetworkTransport: from, group: g}
			require.Error(t, tr.TimeoutNow(to.ServerID(), "b", new(raft.TimeoutNowRequest), new(raft.TimeoutNowResponse)))
			require.Equal(t, stays, dials > 1)
			require.NoError(t, from.Close())
			closeAll(t, nodes)
		})
	}
}

// connected returns two transports.
func connected(t *testing.T) (ends [2]*raft.NetworkTransport) {
	for i := range ends {
		var err error
		ends[i], err = raft.NewTCPTransport("127.0.0.1:0", nil, 1, time.Minute, io.Discard)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, ends[i].Close()) })
	}
	return ends
}
