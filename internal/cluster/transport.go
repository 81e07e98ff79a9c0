package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// transport is Raft's, but its messages have a bounded size, or one entry. Messages that admit
// rejects never reach Raft.
type transport struct {
	*raft.NetworkTransport
	group    *Group
	diverged error // if it is not nil, the group fails as soon as Raft can handle that
	admitted chan raft.RPC
	handle   func(raft.RPC) // heartbeats
	quit     chan struct{}  // closed by Close
	once     sync.Once
}

// newTransport returns a transport that receives until it is closed.
func newTransport(g *Group, c *raft.NetworkTransportConfig, diverged error) *transport {
	t := &transport{
		NetworkTransport: raft.NewNetworkTransportWithConfig(c), group: g, diverged: diverged,
		admitted: make(chan raft.RPC), quit: make(chan struct{}),
	}
	g.node.run("transport", t.receive, g.Fail)
	return t
}

// Close implements raft.WithClose.
func (t *transport) Close() error {
	t.once.Do(func() { close(t.quit) })
	return t.NetworkTransport.Close()
}

// Consumer implements raft.Transport.
func (t *transport) Consumer() <-chan raft.RPC { return t.admitted }

// receive passes on the messages of other nodes, except heartbeats.
func (t *transport) receive() {
	for {
		select {
		case rpc := <-t.NetworkTransport.Consumer():
			t.pass(rpc)
		case <-t.quit:
			return
		}
	}
}

func (t *transport) pass(rpc raft.RPC) {
	if !t.admit(rpc) {
		return
	}
	select {
	case t.admitted <- rpc:
	case <-t.quit:
	}
}

// errAlias: the node gets its own address when it has been taken back.
var errAlias = errors.New("the node is being taken back")

// reach is an address for connections that reach only the given member.
func reach(id raft.ServerID, target raft.ServerAddress) (raft.ServerAddress, error) {
	if isAlias(id, target) {
		return "", errAlias
	}
	to, err := peerOf(raft.Server{ID: id, Address: target}).target()
	return to.RaftAddress(), err
}

// RequestVote implements raft.Transport.
func (t *transport) RequestVote(
	id raft.ServerID, target raft.ServerAddress, req *raft.RequestVoteRequest, resp *raft.RequestVoteResponse,
) error {
	return t.anew(id, target, func(to raft.ServerAddress) error {
		return t.NetworkTransport.RequestVote(id, to, req, resp)
	}, always)
}

// RequestPreVote implements raft.WithPreVote.
func (t *transport) RequestPreVote(
	id raft.ServerID, target raft.ServerAddress, req *raft.RequestPreVoteRequest, resp *raft.RequestPreVoteResponse,
) error {
	return t.anew(id, target, func(to raft.ServerAddress) error {
		return t.NetworkTransport.RequestPreVote(id, to, req, resp)
	}, always)
}

// TimeoutNow implements raft.Transport. The node that handles it stands for election in a later
// term; a second copy of the message after that would end the term of that node.
func (t *transport) TimeoutNow(
	id raft.ServerID, target raft.ServerAddress, req *raft.TimeoutNowRequest, resp *raft.TimeoutNowResponse,
) error {
	term := t.group.raft.CurrentTerm()
	return t.anew(id, target, func(to raft.ServerAddress) error {
		return t.NetworkTransport.TimeoutNow(id, to, req, resp)
	}, func() bool { return t.group.isLeaderIn(term) == nil })
}

// maxPool is the number of connections to a node that Raft keeps for later messages.
const maxPool = 3

// anew sends a message that a node may get more than once. When the other node was opened again,
// the connections that Raft keeps have ended; Raft notices that only when it sends, and then uses
// another connection. A node that does not answer in time, or cannot be dialed, is not asked again;
// nor is any when the message is no longer of use.
func (t *transport) anew(
	id raft.ServerID, target raft.ServerAddress, send func(to raft.ServerAddress) error, isOfUse func() bool,
) error {
	to, err := reach(id, target)
	if err != nil {
		return err
	}
	for range maxPool {
		began := time.Now()
		err := send(to)
		var dialed *dialError
		if err == nil || errors.As(err, &dialed) || time.Since(began) >= t.group.node.c.HeartbeatTimeout || !isOfUse() {
			return err
		}
	}
	return send(to)
}

func always() bool { return true }

// SetHeartbeatHandler implements raft.Transport. Raft calls it last before its goroutines begin.
func (t *transport) SetHeartbeatHandler(handle func(raft.RPC)) {
	t.group.running = true
	if t.diverged != nil {
		t.group.Fail(t.diverged) // the other shards go on
	}
	t.handle = handle
	t.NetworkTransport.SetHeartbeatHandler(t.heartbeat)
}

// heartbeat passes on a heartbeat of another node.
func (t *transport) heartbeat(rpc raft.RPC) {
	if t.admit(rpc) {
		t.handle(rpc)
	}
}

// admit reports whether Raft gets a message. Entries are known to be the leader's up to the end of
// the message: later ones in the log here may be of an earlier leader, and Raft would take them for
// committed if the leader has committed more.
//
// Raft handles heartbeats on goroutines of their own. One that comes with another message may set
// Raft back from the term of that one to its own, so that it follows a leader after it has elected
// the successor. The messages of that leader are refused here.
//
// A snapshot may come again, long after it was sent: when it has been installed, and entries after
// it have been acknowledged. Raft would install it again, and drop those entries.
func (t *transport) admit(rpc raft.RPC) bool {
	latest := t.group.latestTerm.Load()
	switch req := rpc.Command.(type) {
	case *raft.AppendEntriesRequest:
		if req.Term < latest {
			rpc.Respond(&raft.AppendEntriesResponse{RPCHeader: t.header(), Term: latest}, nil)
			return false
		}
		if t.group.isStuck(req, raft.ServerID(req.ID), t.DecodePeer(req.Addr)) {
			rpc.Respond(&raft.AppendEntriesResponse{RPCHeader: t.header(), Term: latest}, t.group.stallError())
			return false
		}
		clampCommit(req)
		t.compareWithSnapshot(req)
	case *raft.RequestVoteRequest:
		t.admitCandidate(&req.RPCHeader, req.LastLogTerm, req.LastLogIndex)
	case *raft.RequestPreVoteRequest:
		t.admitCandidate(&req.RPCHeader, req.LastLogTerm, req.LastLogIndex)
	case *raft.TimeoutNowRequest:
		t.group.invited.Store(true)
	case *raft.InstallSnapshotRequest:
		held := t.group.log.holds(req.LastLogIndex)
		if req.Term >= latest && !held {
			return true
		}
		t.group.node.run("late snapshot", func() {
			_, _ = io.Copy(io.Discard, rpc.Reader) // the answer is read after all has been sent
			rpc.Respond(&raft.InstallSnapshotResponse{RPCHeader: t.header(), Term: latest, Success: req.Term >= latest}, nil)
		}, func(err error) { rpc.Respond(nil, err) })
		return false
	}
	return true
}

// admitCandidate prepares Raft for the request of a candidate for its vote. term and index are
// those of the last entry in the log of the candidate.
func (t *transport) admitCandidate(h *raft.RPCHeader, term, index uint64) {
	t.followAgain()
	t.admitUnknownCandidate(h)
	t.group.standIn(term, index)
}

// admitUnknownCandidate makes Raft consider a candidate that this node does not know yet, or not as
// a voter. Raft would refuse it, although it may be the only node that a majority of the remaining
// nodes can elect: it may have committed entries that no other node has. The algorithm intends that
// a node asks for votes, and grants them, without consulting its configuration (Ongaro, "Consensus:
// Bridging Theory and Practice", 4.1). Raft checks only whether the ID has a vote; the address
// identifies the candidate.
func (t *transport) admitUnknownCandidate(h *raft.RPCHeader) {
	r := t.group.log.raft.Load()
	if r == nil {
		return // the candidate asks again
	}
	members := r.GetConfiguration().Configuration().Servers
	votes := func(m raft.Server) bool { return m.Suffrage == raft.Voter }
	if slices.ContainsFunc(members, func(m raft.Server) bool { return m.ID == raft.ServerID(h.ID) && votes(m) }) {
		return
	}
	if i := slices.IndexFunc(members, votes); i >= 0 {
		h.ID = []byte(members[i].ID)
	}
}

// followAgain makes a candidate that knows a leader a follower, which forgets that leader when its
// heartbeats end. Raft has such candidates: a node that is asked to take over while it stands for
// election already follows heartbeats, but remains a candidate; and a heartbeat may be handled at
// the moment when a node begins to stand. They vote for no node, as they have a leader, for as long
// as they are candidates. If their log is too short for them to be elected, and the shard needs
// their vote, it would have no leader any more.
//
// Raft gets a heartbeat as if from that leader. It proves no entry, so it changes nothing but the
// leader that the node follows.
func (t *transport) followAgain() {
	r := t.group.log.raft.Load()
	if r == nil || r.State() != raft.Candidate {
		return
	}
	addr, id := r.LeaderWithID()
	if addr == "" {
		return
	}
	beat := &raft.AppendEntriesRequest{RPCHeader: t.header(), Term: r.CurrentTerm()}
	beat.ID, beat.Addr = []byte(id), t.EncodePeer(id, addr)
	select {
	case t.admitted <- raft.RPC{Command: beat, RespChan: make(chan raft.RPCResponse, 1)}:
	case <-t.quit:
	}
}

// clampCommit lowers the leader's commit index to the last entry that a message covers.
func clampCommit(req *raft.AppendEntriesRequest) {
	req.LeaderCommitIndex = min(req.LeaderCommitIndex, req.PrevLogEntry+uint64(len(req.Entries)))
}

// compareWithSnapshot compares the entry before those of a message with the last entry of the
// newest snapshot, if the log begins after it. Raft looks for that entry in the log if that has
// others, does not find it, and needs no entry before those of a message that names none. Without
// the comparison, a node could not go on from its snapshot if its log ends with entries of an
// earlier leader: the leader would look for an earlier entry, and then send a snapshot of an
// earlier one, again and again.
func (t *transport) compareWithSnapshot(req *raft.AppendEntriesRequest) {
	if req.PrevLogEntry == 0 { // a heartbeat, mostly
		return
	}
	first, last, err := t.group.log.bounds()
	if err != nil || req.PrevLogEntry+1 != first || req.PrevLogEntry == last {
		return
	}
	snapshots, err := t.group.snapshots.List()
	if err == nil && len(snapshots) > 0 && snapshots[0].Index == req.PrevLogEntry && snapshots[0].Term == req.PrevLogTerm {
		req.PrevLogEntry, req.PrevLogTerm = 0, 0
	}
}

// AppendEntriesPipeline implements raft.Transport.
func (t *transport) AppendEntriesPipeline(id raft.ServerID, target raft.ServerAddress) (raft.AppendPipeline, error) {
	to, err := reach(id, target)
	if err != nil {
		return nil, err
	}
	p, err := t.NetworkTransport.AppendEntriesPipeline(id, to)
	if err != nil {
		return nil, err
	}
	return newPipeline(p, t.group, id), nil
}

// AppendEntries implements raft.Transport.
func (t *transport) AppendEntries(
	id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	if err := cmp.Or(t.group.Failure(), t.group.withholds(req.Term)); err != nil {
		return err
	}
	if isAlias(id, target) {
		t.group.node.search(peerOf(raft.Server{ID: id, Address: target}))
		return errAlias
	}
	if isHeartbeat(req) {
		err := t.beat(id, target, req, resp)
		removed := err != nil && t.group.hasRemoved(id)
		t.group.health.note(id, req.Term, err == nil || removed) // nothing must wait for a removed node
		switch {
		case removed:
		case err != nil:
			t.group.node.missed(peerOf(raft.Server{ID: id, Address: target}), err)
		case resp.Term > req.Term:
			// Raft takes any answer to a heartbeat for contact with a follower. It learns the term
			// from replicated messages.
			t.group.health.doubted.notify()
			return fmt.Errorf("%w: %d, after %d", errLaterTerm, resp.Term, req.Term)
		}
		return err
	}
	to, err := reach(id, target)
	if err != nil {
		return err
	}
	t.group.awaitContact(id, req.Term)
	return t.replicate(id, to, req, resp)
}

// ask sends a heartbeat of this package, and waits for the answer.
func (t *transport) ask(to raft.Server, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	if err := cmp.Or(t.group.Failure(), t.group.withholds(req.Term)); err != nil {
		return err
	}
	err := t.sendEntries(to.ID, to.Address, req, resp)
	t.group.health.note(to.ID, req.Term, err == nil)
	return err
}

// sendEntries sends a message on a connection of the group.
func (t *transport) sendEntries(
	id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	to, err := reach(id, target)
	if err != nil {
		return err
	}
	return t.NetworkTransport.AppendEntries(id, to, req, resp)
}

// replicate sends entries. A node that has the entries before them, but cannot store them, as its
// disk is full, is asked again every refusedPause, with one entry only. Raft would do so with ever
// longer pauses, as with an unreachable node, and each time go back by an entry, until it came to a
// snapshot at last. So Raft gets the answer that the node would have given to a message without
// entries, which is true as well: that the logs agree.
func (t *transport) replicate(
	id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	c := &t.group.health
	n := fitting(req.Entries)
	if n > 1 && c.refuses(id) {
		n = 1
	}
	message, err := t.group.message(req, n)
	if err != nil {
		return err
	}
	req.Entries = req.Entries[:n] // Raft takes them for sent
	if err = t.NetworkTransport.AppendEntries(id, target, message, resp); err != nil {
		return err
	}
	if resp.Success {
		t.group.acknowledge(id, message.PrevLogEntry+uint64(n))
	}
	if resp.NoRetryBackoff && resp.Term == req.Term && resp.LastLog > req.PrevLogEntry {
		return t.resume(id, target, req, resp)
	}
	if n == 0 {
		return nil
	}
	refused := !resp.Success && !resp.NoRetryBackoff && resp.Term == req.Term
	c.noteRefusal(id, refused)
	if refused {
		select {
		case <-time.After(refusedPause): // also while the node ends: it may lead until others do
		case <-t.quit:
		}
		req.Entries, resp.Success = nil, true
	}
	return nil
}

// resume is for a node that has a later entry than the one it was asked for, but not that one. It
// asks whether the node's last entry is the same here, and if so, continues from there. Raft only
// ever goes back. That never ends if the node has got a later snapshot from another leader than the
// one of this node: it has no entries before that, and refuses an earlier one.
func (t *transport) resume(
	id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	at, err := t.group.log.position(resp.LastLog)
	if err != nil || at == (Position{}) {
		return nil // the refusal stays
	}
	question, answer := *req, raft.AppendEntriesResponse{}
	question.PrevLogEntry, question.PrevLogTerm, question.Entries = at.Index, at.Term, nil
	if err := t.NetworkTransport.AppendEntries(id, target, &question, &answer); err != nil {
		return err
	}
	if answer.Success && answer.Term == req.Term {
		req.Entries, *resp = []*raft.Log{{Index: at.Index, Term: at.Term}}, answer // Raft takes it for sent
	}
	return nil
}

const refusedPause = 250 * time.Millisecond

func isHeartbeat(req *raft.AppendEntriesRequest) bool {
	return req.PrevLogEntry == 0 && req.PrevLogTerm == 0 && len(req.Entries) == 0 && req.LeaderCommitIndex == 0
}

// header is the header of a message that this package sends.
func (t *transport) header() raft.RPCHeader {
	self := t.group.node.self.ServerID()
	return raft.RPCHeader{
		ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(self), Addr: t.EncodePeer(self, t.LocalAddr()),
	}
}
