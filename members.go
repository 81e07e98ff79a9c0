package codeq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/manifest"
	"codeq/internal/peer"
	"codeq/internal/wire"
)

// AddNode makes a node part of the cluster: in the Raft group of every shard it
// first follows, and votes when it has caught up. The node must be open, with
// [Cluster.Join] (whose Open calls AddNode) or with the Peers of this cluster, and
// must never have been a member under its name with another directory.
//
// AddNode may be called on any node, and again if it has returned an error, such
// as that of ctx: what has been done stays done.
//
// Errors: [ErrInvalid], [ErrNoCluster], [ErrNotLeader], [ErrUncertain], [ErrFailed], [ErrClosed],
// and that of ctx.
func (q *Queue) AddNode(ctx context.Context, p Peer) (err error) {
	defer public(&err)
	if err := q.checkCluster(ctx, p.Node); err != nil {
		return err
	}
	if p.Address == "" {
		return &InvalidError{"Peer.Address", `""`, "an address"}
	}
	for i := range q.replicas {
		if err := q.member(ctx, i, memberAdd, p); err != nil {
			return fmt.Errorf("add node %s to shard %d: %w", p.Node, i, err)
		}
	}
	for i := range q.replicas {
		err := q.node.follow(ctx, i, p)
		if err == nil {
			err = q.member(ctx, i, memberVote, p)
		}
		if err == nil {
			err = q.node.acquaint(ctx, i)
		}
		if err != nil {
			return fmt.Errorf("give node %s a vote in shard %d: %w", p.Node, i, err)
		}
	}
	return nil
}

// RemoveNode takes a node out of the cluster, for good: its name and directory
// are not to be used again. What it leads is first led by others. It may be this
// node, or one that is gone. RemoveNode may be called on any node, and again.
//
// Errors: [ErrInvalid], [ErrNoCluster], [ErrNotLeader], [ErrUncertain], [ErrFailed], [ErrClosed],
// and that of ctx.
func (q *Queue) RemoveNode(ctx context.Context, node string) (err error) {
	defer public(&err)
	if err := q.checkCluster(ctx, node); err != nil {
		return err
	}
	for i := range q.replicas {
		if err := q.member(ctx, i, memberRemove, Peer{Node: node}); err != nil {
			return fmt.Errorf("remove node %s from shard %d: %w", node, i, err)
		}
		op := &interestOp{completion: newCompletion(), node: node, gone: true}
		if _, err := q.do(ctx, i, op); err != nil {
			return fmt.Errorf("forget node %s in shard %d: %w", node, i, err)
		}
	}
	return nil
}

// ReplaceNode adds a node and then removes another one, such as one that has
// lost its disk.
//
// Errors: [ErrInvalid], [ErrNoCluster], [ErrNotLeader], [ErrUncertain], [ErrFailed], [ErrClosed],
// and that of ctx.
func (q *Queue) ReplaceNode(ctx context.Context, old string, p Peer) (err error) {
	defer public(&err)
	if old == p.Node {
		return &InvalidError{"Peer.Node", p.Node, "a name other than that of the node to be replaced"}
	}
	if err := q.AddNode(ctx, p); err != nil {
		return err
	}
	return q.RemoveNode(ctx, old)
}

// TransferLeadership has a node lead a shard. The shard waits for a moment, and nothing is lost.
// After a while the cluster spreads the leaders evenly again. The error tells why the node cannot
// lead now, as when it cannot be reached, does not vote or lags behind; the shard then stays where
// it is.
//
// Errors: [ErrInvalid], [ErrNoCluster], [ErrNotLeader], [ErrUncertain], [ErrFailed], [ErrClosed],
// and that of ctx.
func (q *Queue) TransferLeadership(ctx context.Context, shard int, node string) (err error) {
	defer public(&err)
	if err := q.checkCluster(ctx, node); err != nil {
		return err
	}
	if shard < 0 || shard >= len(q.replicas) {
		return &InvalidError{"TransferLeadership shard", shard, fmt.Sprintf("0 to %d", len(q.replicas)-1)}
	}
	return q.member(ctx, shard, memberLead, Peer{Node: node})
}

func (q *Queue) checkCluster(ctx context.Context, node string) error {
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	if q.node == nil {
		return ErrNoCluster
	}
	if node == "" || len(node) > maxNodeName {
		return &InvalidError{"node", fmt.Sprintf("%q", node), fmt.Sprintf("1 to %d bytes", maxNodeName)}
	}
	return nil
}

// memberChange is a change of a shard's Raft group.
type memberChange byte

const (
	memberAdd    memberChange = iota // as one that does not vote
	memberVote                       // let it vote
	memberRemove                     // for good
	memberLead                       // let it lead
	endOfMemberChanges
)

func (q *Queue) member(ctx context.Context, shard int, how memberChange, p Peer) error {
	op := &memberOp{completion: newCompletion(), how: how, peer: p}
	_, err := q.do(ctx, shard, op)
	return err
}

// memberOp changes the Raft group of a shard, on the node that leads it. The
// owner only makes sure that it does.
type memberOp struct {
	completion
	how  memberChange
	peer Peer
	at   *replica
}

// configTimeout bounds how long a change of a group waits for the one before.
const configTimeout = 10 * time.Second

func (op *memberOp) resolve(s *shard) {
	op.at = s.replica
	s.settle(op)
}

func (op *memberOp) settle(err error) {
	if err != nil {
		op.completion.settle(err)
		return
	}
	log := op.at.node.log
	op.at.node.background.Go(func() {
		op.completion.settle(guarded(log, "change of members", func() error { return op.change(op.at) }))
	})
}

// change is called on the leader.
func (op *memberOp) change(r *replica) error {
	id, addr := raft.ServerID(op.peer.Node), raft.ServerAddress(op.peer.Address)
	members, err := r.members()
	if err != nil {
		return err
	}
	at := slices.IndexFunc(members, func(m raft.Server) bool { return m.ID == id })
	var future raft.Future
	switch op.how {
	case memberAdd:
		if at >= 0 && members[at] == (raft.Server{Suffrage: raft.Voter, ID: id, Address: addr}) {
			return nil // it has been added before
		}
		future = r.raft.AddNonvoter(id, addr, 0, configTimeout)
	case memberVote:
		future = r.raft.AddVoter(id, addr, 0, configTimeout)
	case memberRemove:
		switch {
		case at < 0:
			return nil
		case len(members) == 1:
			return &InvalidError{"node", op.peer.Node, "one that is not the last"}
		case op.peer.Node == r.node.self.Node:
			if r.handOver() == nil {
				return notLed(r.index, ErrNotLeader) // so that the next leader is asked
			} // or else it leads until it has removed itself
		}
		future = r.raft.RemoveServer(id, 0, configTimeout)
	case memberLead:
		switch {
		case at < 0:
			return fmt.Errorf("%w: node %s", ErrNotFound, op.peer.Node)
		case op.peer.Node == r.node.self.Node:
			return nil
		}
		err := r.transfer(members[at])
		if err == nil || errors.Is(err, errOffered) || errors.Is(err, errUnfit) {
			return err
		}
		return fmt.Errorf("%w: %w", ErrUncertain, err)
	}
	if err := future.Error(); err != nil {
		if err = raftError(err); !errors.Is(err, ErrNotLeader) {
			err = fmt.Errorf("%w: %w", ErrUncertain, err)
		}
		return err
	}
	return nil
}

func (op *memberOp) encode(dst []byte) (callKind, []byte) {
	dst = wire.AppendBytes(append(dst, byte(op.how)), op.peer.Node)
	return callMember, wire.AppendBytes(dst, op.peer.Address)
}

func (op *memberOp) decode(r *wire.Reader) {
	op.how, op.peer = memberChange(r.Byte()), Peer{r.String(), r.String()}
	if op.how >= endOfMemberChanges {
		r.Fail()
	}
}

// members is the group of the shard as this node knows it.
func (r *replica) members() ([]raft.Server, error) {
	f := r.raft.GetConfiguration()
	if err := f.Error(); err != nil {
		return nil, raftError(err)
	}
	return f.Configuration().Servers, nil
}

// closeBehind is how many entries a node may lack when it gets a vote, or leads.
const closeBehind = 256

// follow waits until a new node has nearly caught up with a shard.
func (n *node) follow(ctx context.Context, shard int, p Peer) error {
	var unknown error // why the state of the new node was, the last time
	err := poll(ctx, func() (bool, error) {
		leader := &indexOp{completion: newCompletion()}
		if settled, err := n.do(ctx, shard, leader); !settled {
			return false, base.EndOf(ctx)
		} else if err != nil {
			return false, err
		}
		var states []replicaState
		states, unknown = n.stateOf(ctx, p.Address)
		return unknown == nil && shard < len(states) && states[shard].Applied+closeBehind > leader.applied, nil
	})
	if ctx.Err() != nil {
		return errors.Join(err, unknown)
	}
	return err
}

// acquaint waits until all nodes of a shard that can be reached have in their logs
// what its leader has: Raft lets nobody vote for a node that it has not heard of.
func (n *node) acquaint(ctx context.Context, shard int) error {
	var last uint64 // in the leader's log, when it was first heard of
	return poll(ctx, func() (bool, error) {
		st, err := n.status(ctx)
		if err != nil {
			return false, err
		}
		sh := &st.Shards[shard]
		for _, rs := range sh.Replicas {
			if last == 0 && rs.Node == sh.Leader {
				last = rs.LastIndex
			}
		}
		return !slices.ContainsFunc(sh.Replicas, func(rs ReplicaStatus) bool {
			return rs.LastError == "" && (last == 0 || rs.LastIndex < last)
		}), nil
	})
}

// join has the nodes of the cluster add this one.
func (n *node) join() error {
	if n.votes() {
		return nil
	}
	ctx, cancel := context.WithTimeout(n.ctx, joinTimeout)
	defer cancel()
	var errs []error
	for _, p := range n.opts.Peers {
		if p.Node == n.self.Node {
			continue
		}
		_, err := n.peer.Call(ctx, p.Address, byte(callJoin), wire.AppendJSON(nil, n.self))
		if err == nil {
			return poll(ctx, func() (bool, error) { return n.votes(), nil }) // until it knows
		}
		var refused *peer.RefusedError
		if errors.As(err, &refused) && refused.Reason == peer.RefusedGroups {
			err = fmt.Errorf("%w: %w", ErrShardCount, err)
		}
		errs = append(errs, fmt.Errorf("node %s: %w", p.Node, err))
	}
	return fmt.Errorf("codeq: join the cluster: %w", errors.Join(errs...))
}

const joinTimeout = 5 * time.Minute

// votes reports whether this node is a voter of every shard's group.
func (n *node) votes() bool {
	for _, s := range n.state() {
		if !slices.Contains(s.Members, memberState{n.self.Node, n.self.Address, true}) {
			return false
		}
	}
	return true
}

// depart takes the node out of the cluster if that is asked for.
func (n *node) depart() error {
	if !n.opts.LeaveOnClose {
		return nil
	}
	ctx, cancel := context.WithTimeout(n.ctx, n.opts.CallTimeout)
	defer cancel()
	return n.queue.RemoveNode(ctx, n.self.Node)
}

// serveJoin adds the node that asks for it.
func (n *node) serveJoin(r *peer.Request) error {
	var p Peer
	if err := json.Unmarshal(r.Body, &p); err != nil {
		return errMalformedCall
	}
	ctx, cancel := context.WithCancel(n.ctx)
	r.OnCancel(cancel)
	n.background.Go(func() {
		defer cancel()
		if err := guarded(n.log, "joining of a node", func() error { return n.queue.AddNode(ctx, p) }); err != nil {
			r.Fail(encodeError(err))
			return
		}
		r.Reply(nil)
	})
	return nil
}

// RecoverCluster has a node go on without a majority of its cluster, which is
// lost for good: in its directory, which must be closed, the nodes in
// opts.Cluster.Peers become the members of every shard; this one must be among
// them, or is added. Then the node is opened as ever. If several nodes are left,
// recover each of them with the same Peers, or recover the one that is furthest
// (ClusterStatus shows LastIndex) alone, and have the others join it under new
// names with empty directories.
//
// It is the last resort. What was acknowledged is in the logs of a majority; if
// the nodes that are left lack some of it, it is gone, and what they have in
// their logs without a majority's knowing becomes so.
func RecoverCluster(dir string, opts *Options) (err error) {
	defer public(&err)
	o, err := opts.withDefaults()
	if err != nil {
		return err
	}
	if o.Cluster == nil {
		return ErrNoCluster
	}
	d, err := manifest.Open(o.fs, dir, manifest.Want{NewShards: shardsForThisMachine(), Node: o.Cluster.Node})
	if err != nil {
		return err
	}
	if d.Creating {
		return errors.Join(fmt.Errorf("%w: %s is empty", ErrNotQueue, dir), d.Close())
	}
	if err := d.Take(o.AcceptCopy); err != nil {
		return errors.Join(fmt.Errorf("codeq: open %s: %w", dir, err), d.Close())
	}
	o.Shards = d.Shards
	q := newQueue(o, d)
	n := q.newNode()
	if err = n.openReplicas(); err == nil {
		for _, r := range q.replicas {
			if err = n.recover(r); err != nil {
				err = fmt.Errorf("codeq: recover shard %d of %s: %w", r.index, dir, err)
				break
			}
		}
	}
	return errors.Join(err, n.closeLogs(), q.closeFiles())
}

func (n *node) recover(r *replica) error {
	logs, votes, err := n.stores(r)
	if err != nil {
		return err
	}
	logger := raftLogger(n.log)
	_, trans := raft.NewInmemTransport(raft.ServerAddress(n.self.Address)) // talks to nobody
	return errors.Join(raft.RecoverCluster(
		n.raftConfig(logger), &stateMachine{replica: r}, logs, votes, r.snapshots, trans, n.founders(),
	), trans.Close())
}
