package codeq

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"

	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/entries"
	"codeq/internal/peer"
	"codeq/internal/raftlog"
)

// node makes a queue part of a cluster: the node itself, and the queue's state for it.
type node struct {
	*cluster.Node
	queue     *Queue
	log       *slog.Logger
	claims    *claimTable
	interests *entries.Interests

	ctx        context.Context // ends when no shard is led here any more
	background sync.WaitGroup  // calls without a waiting caller
}

var logSync = map[Durability]raftlog.Sync{
	DurabilityNone: raftlog.SyncNone, DurabilityProcess: raftlog.SyncProcess, DurabilityDisk: raftlog.SyncDisk,
}

func (q *Queue) newNode() *node {
	c := q.opts.Cluster
	n := &node{queue: q, log: q.opts.log.With("node", c.Node)}
	n.interests = entries.NewInterests(q.dir.Incarnation, q.events.Wanted, n.storeInterests)
	machines := make([]cluster.StateMachine, len(q.replicas))
	for i := range q.replicas {
		r := &replica{index: i, node: n, mono: q.opts.private.Mono, producing: call.NewSession(q.dir.Incarnation)}
		m := newStateMachine(r)
		m.writer.Node = c.Node
		q.replicas[i], machines[i] = r, m
	}
	config := c.config()
	config.Directory, config.Disk, config.Sync = q.dir, q.disk, logSync[q.opts.Durability]
	config.StallAfter, config.MinFree, config.Logger = q.opts.StallAfter, q.opts.MinFreeBytes, n.log
	config.MaxAppend, config.SnapshotBytes, config.HidesRoom = q.opts.private.MaxAppend, int64(q.opts.private.SnapshotBytes), q.opts.private.HidesRoom
	config.PebbleFormat, config.Wall, config.Mono = q.opts.private.Pebble, q.opts.private.Wall, q.opts.private.Mono
	config.Machines, config.Reconcile, config.Leaders, config.Serve, config.ServeNode = machines, q.reconcile, (*leaders)(n), n.serve, q.serveNode
	config.EncodeError, config.DecodeError, config.PanicError = encodeError, decodeError, panicError
	config.Removed = func(err error) { n.claims.End(err) }
	n.Node = cluster.New(config)
	for i, r := range q.replicas {
		r.group = n.Group(i)
		r.slot.Check = r.group.Failure
	}
	n.ctx = n.Context()
	n.claims = newClaimTable(n)
	q.node, q.backend, q.events.Less = n, n, n.interests.Less
	q.slow.Connect(n.AskNodesAside)
	return n
}

func (n *node) begin(ctx context.Context) context.Context { return n.Begin(ctx) }

func (n *node) tell(context.Context, byte, any, any) (told bool, err error) { return false, nil }

// close ends the node; the stores stay open.
func (n *node) close() error {
	err := n.Close()
	n.claims.End(ErrClosed) // no owner runs any more
	n.background.Wait()
	return err
}

type leaders node

func (l *leaders) Change(ctx context.Context, shard int, how cluster.Change, p cluster.Peer, former ...string) error {
	_, err := (*node)(l).do(ctx, shard, &memberOp{completion: newCompletion(callMember), how: how, peer: p, former: former})
	return err
}

func (l *leaders) Applied(ctx context.Context, shard int) (uint64, error) {
	op := &indexOp{completion: newCompletion(callIndex)}
	err := l.queue.ask(ctx, shard, op)
	return op.Applied, err
}

func (l *leaders) Forget(ctx context.Context, shard int, name string) error {
	_, err := (*node)(l).do(ctx, shard, &interestOp{completion: newCompletion(callInterest), Interest: call.Interest{Node: name, Gone: true}})
	return err
}

func (n *node) serve(shard int, r *peer.Request) error {
	op, err := n.queue.requestOf(r.Kind, r.From.Name, r.Body)
	if err != nil {
		return err
	}
	s := n.queue.replicas[shard].lead.Load()
	if s == nil {
		return n.Group(shard).NotLed()
	}
	if op.verb().is(ofMembers) && !n.Group(shard).HasDirectory(r.From.ID) {
		return cluster.RemovedError(shard, r.From.Name)
	}
	if waits, ok := op.(abandoned); ok {
		r.OnCancel(func() { waits.abandon(s) })
	}
	op.base().reply = func(err error) {
		if err != nil {
			r.Fail(encodeError(err))
			return
		}
		r.Reply(op.AppendReply(nil))
	}
	return s.inbox.Pass(op)
}

// anyShard is a shard for any task: one that this node leads, or else one that has a leader.
func (n *node) anyShard() int {
	replicas := n.queue.replicas
	first := rand.IntN(len(replicas))
	reachable := first
	for i := range replicas {
		at := (first + i) % len(replicas)
		if replicas[at].lead.Load() != nil {
			return at
		}
		if !replicas[reachable].group.HasLeader() && replicas[at].group.HasLeader() {
			reachable = at
		}
	}
	return reachable
}
