package codeq

import (
	"context"
	"errors"
	"slices"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/entries"
)

// Outcome is how a task has ended.
type Outcome struct {
	State     State  `json:",omitzero"`  // Done, Dead or Canceled
	Result    []byte `json:",omitempty"` // of a completed task
	LastError string `json:",omitzero"`  // error of the last failed attempt; "" if the task was completed
	Attempts  int    `json:",omitzero"`
}

// Await waits until a task has ended (completed, canceled, or a dead letter) and returns its
// outcome. A dead letter that is redriven may be awaited again.
//
// It need not be kept ([Task].Retention). Await does not miss the end of a task while it waits, and
// each shard remembers, until it is closed or another node leads it, the last tasks that have ended
// without being kept: at least 2,048 of the last ten minutes, if their results and errors take no
// more than 512 KiB. Others, purged dead letters and unknown tasks are [ErrNotFound].
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrNotLeader] (the node was removed from its cluster),
// [ErrFailed], [ErrClosed], and that of ctx, as long as which it waits for leaders.
func (q *Queue) Await(ctx context.Context, id ID) (_ *Outcome, err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return nil, err
	}
	o, err := q.backend.await(ctx, id)
	if err != nil {
		return nil, err
	}
	return outcomeOf(o), nil
}

// awaitBy asks the shard of a task for its end.
func awaitBy(ctx context.Context, b backend, id ID, shards int) (*engine.Outcome, error) {
	op := &awaitOp{completion: newCompletion(callAwait), Await: entries.Await{ID: id}}
	settled, err := b.do(ctx, id.shard(shards), op)
	if !settled {
		op.GiveUp()
		return nil, base.EndOf(ctx)
	}
	return &op.Outcome, err
}

// endOfTask waits for the end of a task that was produced for it. It is called once, with an ended
// ctx if nobody waits any more.
type endOfTask func(ctx context.Context) (*engine.Outcome, error)

// call is backend.call.
func (q *standalone) call(ctx context.Context, shard int, op *produceOp) (endOfTask, error) {
	ends := &awaitOp{completion: newCompletion(callAwait)}
	op.ends = ends
	if _, err := q.do(ctx, shard, op); err != nil || len(op.Duplicates) > 0 {
		ends.GiveUp()
		return nil, err
	}
	return func(ctx context.Context) (*engine.Outcome, error) {
		settled, err := ends.wait(ctx, nil)
		if !settled {
			ends.GiveUp()
			return nil, base.EndOf(ctx)
		}
		return orNil(&ends.Outcome, err)
	}, nil
}

// await asks the shard's leader, as ever, and listens.
func (n *node) await(ctx context.Context, id ID) (*engine.Outcome, error) {
	if err := n.Insist(ctx, func() error { return n.interests.Keep(ctx, engine.WantOutcomes) }); err != nil {
		return nil, err
	}
	return n.listen(n.queue.shardOf(id)).wait(ctx, id)
}

// call is backend.call. The node listens also for a task of which it does not know the ID yet: the
// commit of the produce has it under the number of the call.
func (n *node) call(ctx context.Context, shard int, op *produceOp) (endOfTask, error) {
	if err := n.interests.Keep(n.begin(ctx), engine.WantOutcomes); err != nil {
		return nil, err
	}
	l := n.listen(shard)
	op.hears = &l.Listener
	if _, err := n.produce(ctx, shard, op); err != nil || len(op.Duplicates) > 0 {
		l.leave()
		return nil, err
	}
	id := op.IDs[0]
	return func(ctx context.Context) (*engine.Outcome, error) { return l.wait(ctx, id) }, nil
}

// listener is a caller on a node that waits for the end of a task of a shard.
type listener struct {
	entries.Listener
	node    *node
	replica *replica
}

// listen makes a listener. REQUIRES: the node wants outcomes. leave, or wait, gives that up.
func (n *node) listen(shard int) *listener {
	return &listener{node: n, replica: n.queue.replicas[shard]}
}

func (l *listener) leave() *engine.Outcome {
	l.node.interests.Release(engine.WantOutcomes)
	return l.replica.awaits.Leave(&l.Listener)
}

// wait asks the shard's leader; a stored end of the task that no leader has told is in the log.
func (l *listener) wait(ctx context.Context, id ID) (*engine.Outcome, error) {
	n, r := l.node, l.replica
	asking, heard := context.WithCancel(ctx)
	defer heard()
	r.awaits.Listen(id, &l.Listener, heard)
	op := &awaitOp{completion: newCompletion(callAwait), Await: entries.Await{ID: id}}
	settled, err := n.do(asking, r.index, op)
	if !settled {
		op.GiveUp()
	}
	if errors.Is(err, ErrNotFound) { // perhaps this replica has yet to apply how it ended
		_ = n.Insist(asking, func() error { return n.catchUp(asking, r) }) // if it cannot, nothing more will be heard
	}
	switch o := l.leave(); {
	case o != nil:
		return o, nil
	case !settled || ctx.Err() != nil:
		return nil, base.EndOf(ctx)
	case err != nil:
		return nil, err
	}
	return &op.Outcome, nil
}

// catchUp waits until this node's replica has applied what its leader has now.
func (n *node) catchUp(ctx context.Context, r *replica) error {
	applied, err := (*leaders)(n).Applied(ctx, r.index)
	if err != nil {
		return err
	}
	return r.group.AwaitApplied(ctx, applied)
}

// indexOp asks how far the leader has applied the log.
type indexOp struct {
	completion
	call.Index
}

func (op *indexOp) resolve(s *shard) {
	op.Applied = s.replica.group.Applied()
	s.settleAfterCommit(op)
}

// awaitOp waits for the end of a task.
type awaitOp struct {
	completion
	entries.Patience
	entries.Await
}

func (op *awaitOp) resolve(s *shard) {
	o, v, err := s.rules.Outcome(op.ID, true)
	if o == nil && v == engine.Decided && err == nil && s.rules.Broken == nil {
		op.begin(s)
		return
	}
	if o != nil {
		op.Outcome = *o
	}
	s.conclude(op, &op.completion, v, err)
}

// begin makes the operation wait for the end of a task that has not ended.
func (op *awaitOp) begin(s *shard) {
	s.awaits.Add(op.ID, op)
	s.rules.Want(engine.WantOutcomes)
}

func (op *awaitOp) abandon(*shard) { op.GiveUp() }

// outcomeOf converts an outcome of the engine.
func outcomeOf(o *engine.Outcome) *Outcome {
	return &Outcome{State: State(o.State), Result: o.Result, LastError: o.LastError, Attempts: o.Attempts}
}

// WaitIdle waits until the named queues, or all queues if none is named, have no task that is
// ready, scheduled, blocked or leased: every task has ended. It waits for tasks with overdue
// handlers, and not for handlers that go on after the ends of their leases ([QueueInfo.Held]).
//
// It is for programs that end when all tasks are done. It is linearizable: at one moment of the
// call no shard had such a task, nor was one on its way to another shard. Other producers may add
// tasks at the moment at which it returns.
//
// Errors: [ErrInvalid], [ErrNotLeader] (the node was removed from its cluster), [ErrFailed],
// [ErrClosed], and that of ctx, as long as which it waits for leaders.
func (q *Queue) WaitIdle(ctx context.Context, queues ...string) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	queues = slices.Clone(queues)
	type round struct{ arrived, epochs uint64 }
	for last := (round{arrived: engine.Never}); ; {
		waited, now := false, round{}
		for i := range q.replicas {
			op := &idleOp{completion: newCompletion(callIdle), Idle: call.Idle{Idleness: engine.Idleness{Queues: queues}}}
			if settled, err := q.do(ctx, i, op); !settled {
				op.GiveUp()
				return base.EndOf(ctx)
			} else if err != nil {
				return err
			}
			waited, now = waited || op.Waited, round{now.arrived + op.Arrived, now.epochs + op.Epoch}
		}
		// While the call waited for one shard, a completion there may have caused a produce into
		// another; and between two operations a task may have moved from a shard that was not asked
		// yet to one that was. If no task arrived between two rounds, and no shard got another
		// leader, which counts from 0, all shards were idle at one moment.
		if !waited && (now == last || len(q.replicas) == 1) {
			return nil
		}
		last = now
	}
}

// idleOp waits for queues to become idle in one shard.
type idleOp struct {
	completion
	call.Idle
	entries.Patience
}

func (op *idleOp) resolve(s *shard) {
	op.Epoch = s.epoch
	if s.rules.Idle(&op.Idleness) {
		s.settleAfterCommit(op)
		return
	}
	op.Waited = true
	s.idlers = append(slices.DeleteFunc(s.idlers, (*idleOp).IsGone), op)
}

func (op *idleOp) abandon(*shard) { op.GiveUp() }

// takenOp waits until another shard has taken the messages that this one had stored for it.
type takenOp struct {
	completion
	call.Taken
	entries.Patience
}

func (op *takenOp) resolve(s *shard) {
	if op.To >= s.opts.Shards { // Read does not know how many shards there are
		op.err = errMalformedCall
	} else if first, next := s.rules.Mail.Untaken(op.To); first < next {
		if op.err = s.takers.Ended(op.To); op.err == nil && !s.rules.HasRoom(engine.RoomLow) {
			op.err = s.space.Refusal(s.index)
		}
		if op.err == nil {
			s.takers.Add(op.To, next-1, op)
			return
		}
	}
	s.settleAfterCommit(op)
}

func (op *takenOp) abandon(*shard) { op.GiveUp() }
