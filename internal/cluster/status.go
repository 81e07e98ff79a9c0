package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/peer"
	"codeq/internal/wire"
)

// ShardStatus is the Raft group of a shard.
type ShardStatus struct {
	Shard    int
	Leader   string // the node that leads it; "": none is known
	Term     uint64 // of the leader, or the latest that any node knows
	Placed   string // the node that must lead it, by hand; "": any
	Format   int    // of the store; 0: not known
	Replicas []ReplicaStatus
	// Removed: it is certain that the directory of this node was removed from the group.
	Removed bool
}

// ReplicaStatus is the state of a shard's replica on one node.
type ReplicaStatus struct {
	Node    string
	Address string
	// ID is the ID of the node's directory, which identifies it to the shard.
	ID string
	// Voter: the node counts in majorities; a new one does not until it has caught up.
	Voter bool
	// Suspect: the node may have lost acknowledged entries (a power loss, an older copy). It does
	// not count in majorities until it has been taken back.
	Suspect bool
	// LastError is the reason why the node gave no answer; the fields below are zero then.
	LastError string
	// Drained: the node should lead nothing.
	Drained bool
	// Serves: the shard's operations are decided on this node.
	Serves bool
	// NewestFormat is the newest format of the node's version of codeq.
	NewestFormat int
	Term         uint64
	// LastIndex is the index of the last entry in its log, Committed that of the last one that a
	// majority has as far as the node knows, Applied that of the last one in its store.
	LastIndex, Committed, Applied uint64
	// Lag is the number of entries that the leader has applied, and the node has not.
	Lag uint64
	// LastContact is the time since the last message of the leader; 0 for the leader itself.
	LastContact time.Duration
	// ClockAhead is how far its wall clock is ahead of the median of the nodes that have answered.
	ClockAhead time.Duration
	// Stalled is how long its log, or its store of the shard, has not answered; 0: they do.
	Stalled time.Duration
	// FreeBytes and DiskBytes are of the node's disk, as measured last; 0: not known.
	FreeBytes, DiskBytes int64
}

// statusTimeout bounds how long ClusterStatus waits for a node.
const statusTimeout = 2 * time.Second

// Status asks all nodes for their states. Those that do not answer within two seconds, or until ctx
// ends, are in the result with an error.
func (n *Node) Status(ctx context.Context) []ShardStatus {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	answers := make(map[Peer]*nodeAnswer)
	ask := func(states []replicaState) {
		var asked []Peer
		for _, s := range states {
			for _, m := range s.Members {
				if answers[m.Peer] == nil {
					answers[m.Peer] = new(nodeAnswer)
					asked = append(asked, m.Peer)
				}
			}
		}
		for i, err := range n.together("question for a state", len(asked), func(i int) error {
			return answers[asked[i]].ask(ctx, n, asked[i])
		}) {
			answers[asked[i]].err = err
		}
	}
	// First the nodes that this one knows, then those that they know, if none of them leads, and
	// then those that the leaders know.
	own := n.state()
	ask(own)
	leaders, unknown := leadersOf(own, answers)
	if len(unknown) > 0 {
		ask(unknown)
		leaders, _ = leadersOf(own, answers)
	}
	ask(leaders)
	compareClocks(answers)
	var status []ShardStatus
	for i := range leaders {
		sh := ShardStatus{Shard: i}
		for _, m := range leaders[i].Members {
			rs := ReplicaStatus{Node: m.Node, Address: m.Address, ID: m.ID, Voter: m.Voter}
			rs.fill(answers[m.Peer], &sh)
			sh.Replicas = append(sh.Replicas, rs)
		}
		for _, a := range answers {
			sh.Removed = sh.Removed || i < len(a.replicas) && a.replicas[i].Removed
		}
		slices.SortFunc(sh.Replicas, func(a, b ReplicaStatus) int { return cmp.Compare(a.Node, b.Node) })
		sh.compare()
		status = append(status, sh)
	}
	return status
}

// lacksLeader reports whether a majority of the members has answered, and none of them leads, or
// had contact with a leader within the given time.
func (s *ShardStatus) lacksLeader(lately time.Duration) bool {
	voters, asked := 0, 0
	for i := range s.Replicas {
		if r := &s.Replicas[i]; r.Voter {
			voters++
			if r.LastError == "" {
				asked++
			}
			if r.LastContact > 0 && r.LastContact < lately {
				return false
			}
		}
	}
	return s.Leader == "" && asked > voters/2
}

// leadersOf is the states of the shards' leaders, or of this node where there is no leader; unknown
// are the states of other nodes for shards without a leader.
func leadersOf(own []replicaState, answers map[Peer]*nodeAnswer) (leaders, unknown []replicaState) {
	leaders = slices.Clone(own)
	for i := range leaders {
		led := false
		for _, a := range answers {
			if i < len(a.replicas) && a.replicas[i].Leader && a.replicas[i].Term >= leaders[i].Term {
				leaders[i], led = a.replicas[i], true
			}
		}
		for _, a := range answers {
			if !led && i < len(a.replicas) {
				unknown = append(unknown, a.replicas[i])
			}
		}
	}
	return leaders, unknown
}

// nodeAnswer is the answer of a node about its replicas.
type nodeAnswer struct {
	replicas     []replicaState
	suspect      bool
	clock, ahead time.Duration // difference of its wall clock from this node's, and from the median
	err          error
}

// compareClocks finds how far the nodes' wall clocks are ahead of their median.
func compareClocks(answers map[Peer]*nodeAnswer) {
	var clocks []time.Duration
	for _, a := range answers {
		if a.err == nil {
			clocks = append(clocks, a.clock)
		}
	}
	slices.Sort(clocks)
	for _, a := range answers {
		if a.err == nil {
			a.ahead = a.clock - middle(clocks)
		}
	}
}

// replicaState is the report of a node on its own replica.
type replicaState struct {
	Leader                        bool
	Serves                        bool
	Failed                        bool
	Drained                       bool          // of the node
	Stalled                       time.Duration // of the log, or the store
	FreeBytes, DiskBytes          int64         `json:",omitempty"` // of the node's disk; 0: not known
	Unsteady                      bool          // either is stalled, or was a moment ago
	Placed                        string        // the node that must lead, by hand, if this one serves
	Format, Newest                int           // of the store; the newest of the node's build, 0: the first
	Term                          uint64
	LastIndex, Committed, Applied uint64
	LastContact                   time.Duration
	Wall                          uint64 // clock of the node, ms
	Members                       []memberState
	Removed                       bool // the node that sent the question, for certain
}

// memberState is a node as another one knows it.
type memberState struct {
	Peer
	Voter bool
}

// has reports whether a member has one of the IDs.
func (sh *ShardStatus) has(ids []string) bool {
	return slices.ContainsFunc(sh.Replicas, func(r ReplicaStatus) bool { return slices.Contains(ids, r.ID) })
}

// hasName reports whether a member has a name.
func (sh *ShardStatus) hasName(node string) bool {
	return slices.ContainsFunc(sh.Replicas, func(r ReplicaStatus) bool { return r.Node == node })
}

func (rs *ReplicaStatus) fill(a *nodeAnswer, sh *ShardStatus) {
	rs.Suspect = a.suspect
	if a.err != nil {
		rs.LastError = a.err.Error()
		return
	}
	if sh.Shard >= len(a.replicas) {
		rs.LastError = "the node does not have the shard"
		return
	}
	s := a.replicas[sh.Shard]
	rs.NewestFormat, sh.Format = s.Newest, max(sh.Format, s.Format)
	rs.Serves, rs.Term, rs.LastIndex, rs.Committed, rs.Applied = s.Serves, s.Term, s.LastIndex, s.Committed, s.Applied
	rs.LastContact, rs.Drained, rs.ClockAhead, rs.Stalled = s.LastContact, s.Drained, a.ahead, s.Stalled
	rs.FreeBytes, rs.DiskBytes = s.FreeBytes, s.DiskBytes
	if s.Leader && s.Term >= sh.Term {
		sh.Leader, sh.Placed = rs.Node, s.Placed
	} else if s.Term > sh.Term {
		sh.Leader = ""
	}
	sh.Term = max(sh.Term, s.Term)
}

// compare finds how far the replicas are behind the leader.
func (sh *ShardStatus) compare() {
	var ahead uint64
	for _, rs := range sh.Replicas {
		if rs.Node == sh.Leader {
			ahead = rs.Applied
		}
	}
	for i := range sh.Replicas {
		if rs := &sh.Replicas[i]; rs.LastError == "" && rs.Applied < ahead {
			rs.Lag = ahead - rs.Applied
		}
	}
}

// ask asks a node for its state.
func (a *nodeAnswer) ask(ctx context.Context, n *Node, p Peer) (err error) {
	p, a.suspect = n.current(p)
	sent := time.Now()
	if a.replicas, err = n.stateOf(ctx, p); err == nil && len(a.replicas) > 0 {
		a.clock = millis(a.replicas[0].Wall).Add(time.Since(sent) / 2).Sub(millis(n.wallMillis()))
	}
	return err
}

// stateOf asks a node for the state of its replicas.
func (n *Node) stateOf(ctx context.Context, p Peer) ([]replicaState, error) {
	if p.ID == n.self.ID {
		return n.state(), nil
	}
	to, err := p.target()
	if err != nil {
		return nil, err
	}
	b, err := n.peer.Call(ctx, to, kindState, n.appendFormer(nil))
	if err != nil {
		return nil, n.callError(ctx, err)
	}
	var states []replicaState
	return states, json.Unmarshal(b, &states)
}

// state is the states of this node's replicas.
func (n *Node) state() []replicaState {
	states, drained := make([]replicaState, len(n.groups)), n.drained()
	free, total := n.diskBytes()
	for i, g := range n.groups {
		s := &states[i]
		s.Leader, s.Serves = g.raft.State() == raft.Leader, g.leads()
		s.Failed, s.Drained, s.Wall = g.Failure() != nil, drained, n.wallMillis()
		s.Stalled, s.Unsteady = g.stalledFor(), g.isUnsteady()
		s.FreeBytes, s.DiskBytes = free, total
		if s.Serves {
			s.Placed = *g.placement.Load()
		}
		s.Format, s.Newest = int(g.format.Load()), n.c.Newest
		s.Term, s.LastIndex, s.Committed = g.raft.CurrentTerm(), g.raft.LastIndex(), g.raft.CommitIndex()
		s.Applied = g.Applied()
		if at := g.raft.LastContact(); !s.Leader && !at.IsZero() {
			s.LastContact = time.Since(at)
		}
		members, err := g.members()
		if err != nil {
			continue // the group has ended here
		}
		for _, m := range members {
			s.Members = append(s.Members, memberState{peerOf(m), m.Suffrage == raft.Voter})
		}
	}
	return states
}

// serveState answers a member without a wait. Any other node learns whether it was removed.
func (n *Node) serveState(r *peer.Request) error {
	ids, err := idsOf(r)
	if err != nil {
		return err
	}
	states := n.state()
	if n.groups[0].HasDirectory(r.From.ID) {
		r.Reply(wire.AppendJSON(nil, states))
		return nil
	}
	n.answer(r, "question for a state", func() ([]byte, error) {
		n.addRemoved(states, r.From.Name, ids)
		return wire.AppendJSON(nil, states), nil
	})
	return nil
}
