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

// transport is Raft's, but its messages are of a bounded size, or have one entry. Of what other
// nodes send, Raft gets what admit lets through.
type transport struct {
	*raft.NetworkTransport
	group    *Group
	diverged error // if it is not nil, the group fails as soon as Raft can bear it
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
	g.node.background.Go(func() { g.node.contain("transport", t.receive, g.Fail) })
	return t
}

// Close is raft.WithClose's.
func (t *transport) Close() error {
	t.once.Do(func() { close(t.quit) })
	return t.NetworkTransport.Close()
}

// Consumer is raft.Transport's.
func (t *transport) Consumer() <-chan raft.RPC { return t.admitted }

// receive passes on what other nodes send, but for heartbeats.
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

// reach is the address by which only the member that is meant is reached.
func reach(id raft.ServerID, target raft.ServerAddress) (raft.ServerAddress, error) {
	if isAlias(id, target) {
		return "", errAlias
	}
	to, err := peerOf(raft.Server{ID: id, Address: target}).target()
	return to.RaftAddress(), err
}

// RequestVote is raft.Transport's.
func (t *transport) RequestVote(
	id raft.ServerID, target raft.ServerAddress, req *raft.RequestVoteRequest, resp *raft.RequestVoteResponse,
) error {
	to, err := reach(id, target)
	if err != nil {
		return err
	}
	return t.anew(func() error { return t.NetworkTransport.RequestVote(id, to, req, resp) }, always)
}

// RequestPreVote is raft.WithPreVote's.
func (t *transport) RequestPreVote(
	id raft.ServerID, target raft.ServerAddress, req *raft.RequestPreVoteRequest, resp *raft.RequestPreVoteResponse,
) error {
	to, err := reach(id, target)
	if err != nil {
		return err
	}
	return t.anew(func() error { return t.NetworkTransport.RequestPreVote(id, to, req, resp) }, always)
}

// TimeoutNow is raft.Transport's. Who has handled it stands for election in a later term; if it
// came again after that, it would end the term in which that node leads.
func (t *transport) TimeoutNow(
	id raft.ServerID, target raft.ServerAddress, req *raft.TimeoutNowRequest, resp *raft.TimeoutNowResponse,
) error {
	to, err := reach(id, target)
	if err != nil {
		return err
	}
	term := t.group.raft.CurrentTerm()
	return t.anew(func() error { return t.NetworkTransport.TimeoutNow(id, to, req, resp) }, func() bool {
		return t.group.isLeaderIn(term) == nil
	})
}

// maxPool is how many connections to a node Raft keeps for its next messages.
const maxPool = 3

// anew sends a message that a node may get more than once. Raft does not notice that a connection
// which it keeps has ended, as the node was opened again, before it has sent something; then
// another connection is used. A node that does not answer in time, or cannot be dialed, is not
// asked again; neither is any when the message is of no use any more.
func (t *transport) anew(send func() error, isOfUse func() bool) error {
	for range maxPool {
		began := time.Now()
		err := send()
		var dialed *dialError
		if err == nil || errors.As(err, &dialed) || time.Since(began) >= t.group.node.c.HeartbeatTimeout || !isOfUse() {
			return err
		}
	}
	return send()
}

func always() bool { return true }

// SetHeartbeatHandler is raft.Transport's. Raft calls it last before its goroutines begin.
func (t *transport) SetHeartbeatHandler(handle func(raft.RPC)) {
	t.group.running = true
	if t.diverged != nil {
		t.group.Fail(t.diverged) // the other shards go on
	}
	t.handle = handle
	t.NetworkTransport.SetHeartbeatHandler(t.heartbeat)
}

// heartbeat takes a heartbeat of another node.
func (t *transport) heartbeat(rpc raft.RPC) {
	if t.admit(rpc) {
		t.handle(rpc)
	}
}

// admit reports whether Raft is to get a message. Entries are known to be the leader's as far as
// the message goes: what follows in the log here may be of an earlier leader, and Raft would take
// it for committed if the leader has committed more.
//
// Raft handles heartbeats on goroutines of their own. One that comes with another message may put
// Raft back from the term of that one to its own, so that it agrees with a leader whose successor
// it has elected. What that leader sends is refused here.
//
// A snapshot may come again, long after it was sent: when it has been installed, and entries that
// follow it have been acknowledged. Raft would install it again, and drop those entries.
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
		t.followAgain()
		t.vouch(&req.RPCHeader)
		t.group.standIn(req.LastLogTerm, req.LastLogIndex)
	case *raft.RequestPreVoteRequest:
		t.followAgain()
		t.vouch(&req.RPCHeader)
		t.group.standIn(req.LastLogTerm, req.LastLogIndex)
	case *raft.TimeoutNowRequest:
		t.group.invited.Store(true)
	case *raft.InstallSnapshotRequest:
		held := t.group.log.holds(req.LastLogIndex)
		if req.Term >= latest && !held {
			return true
		}
		t.group.node.background.Go(func() {
			t.group.node.contain("late snapshot", func() {
				_, _ = io.Copy(io.Discard, rpc.Reader) // the answer is read after all has been sent
				rpc.Respond(&raft.InstallSnapshotResponse{RPCHeader: t.header(), Term: latest, Success: req.Term >= latest}, nil)
			}, func(err error) { rpc.Respond(nil, err) })
		})
		return false
	}
	return true
}

// vouch lets Raft consider a candidate of which this node has not heard yet, or not that it votes.
// Raft would refuse it, and with it the only one, perhaps, that a majority of the nodes which are
// left can elect: all that is committed may be there and nowhere else. That a node asks for votes
// without consulting its configuration, and so gives them, is how the algorithm is meant (Ongaro,
// "Consensus: Bridging Theory and Practice", 4.1). Raft asks of the ID only whether it votes; the
// address says who it is.
func (t *transport) vouch(h *raft.RPCHeader) {
	r := t.group.log.raft.Load()
	if r == nil {
		return // it asks again
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

// followAgain makes a candidate that knows a leader a follower, which forgets that leader as soon
// as it does not hear of it. Raft has such candidates: one that is asked to take over while it
// stands for election already heeds heartbeats, but goes on; and a heartbeat may be handled at the
// moment in which a node begins to stand. They give nobody a vote, as they have a leader, for as
// long as they are candidates. If their log is too short to be elected, and the shard needs their
// vote, it has no leader any more.
//
// Raft gets what the leader sends to say that it is there. It proves no entry, so it changes
// nothing but whom the node follows.
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

// clampCommit lowers the leader's commit index to the last entry of which a message says something.
func clampCommit(req *raft.AppendEntriesRequest) {
	req.LeaderCommitIndex = min(req.LeaderCommitIndex, req.PrevLogEntry+uint64(len(req.Entries)))
}

// compareWithSnapshot compares the entry before those of a message with what the newest snapshot
// ends with, if the log begins behind it. Raft, which looks for it in the log if that has others,
// does not have it then, and takes entries that follow none as they are. If it refused those from
// there on, whose log ends with what an earlier leader has decided could not go on from its
// snapshot: the leader would look for an earlier entry, and then send a snapshot of an earlier one,
// again and again.
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

// AppendEntriesPipeline is raft.Transport's.
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

// AppendEntries is raft.Transport's.
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
		t.group.health.note(id, req.Term, err == nil || removed) // nothing is to wait for who was removed
		switch {
		case removed:
		case err != nil:
			t.group.node.missed(peerOf(raft.Server{ID: id, Address: target}), err)
		case resp.Term > req.Term:
			// Raft takes any answer to a heartbeat for contact with a node that follows. What is
			// replicated tells it the term.
			t.group.health.doubted.changed()
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

// ask sends a heartbeat of this package: somebody waits for the answer.
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

// replicate sends entries. A node that has them follow what it has, but cannot store them, as its
// disk is full, is asked again every refusedPause, with one entry only. Raft would do so ever more
// rarely, as with one that cannot be reached, and each time go back by an entry, until it came to a
// snapshot at last. So it learns what is true as well: without the entries the node would have
// agreed.
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

// resume asks a node that has more than it was asked for, but not that, whether its last entry is
// the one that is here, and if so, goes on from there. Raft only ever goes back. That ends nowhere
// if the node has got a later snapshot from another leader than the one of this node: it has no
// entries before that, and does not take an earlier one.
func (t *transport) resume(
	id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	at, err := t.group.log.position(resp.LastLog)
	if err != nil || at == (Position{}) {
		return nil // the refusal stands
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

// header is that of a message that Raft does not send by itself.
func (t *transport) header() raft.RPCHeader {
	self := t.group.node.self.ServerID()
	return raft.RPCHeader{
		ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(self), Addr: t.EncodePeer(self, t.LocalAddr()),
	}
}
