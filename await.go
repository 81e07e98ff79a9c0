package codeq

import (
	"bytes"
	"context"
	"slices"
	"sync/atomic"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/wire"
)

// Outcome is how a task has ended.
type Outcome struct {
	State     State  `json:",omitzero"`  // Done, Dead or Canceled
	Result    []byte `json:",omitempty"` // of a completed task
	LastError string `json:",omitzero"`  // error of the last failed attempt; "" if the task was completed
	Attempts  int    `json:",omitzero"`
}

// Await waits until a task has ended (completed, canceled, or a dead letter) and returns its
// outcome. It returns the result of a task that ends while it waits even if the task is not kept. A
// dead letter that is redriven may be awaited again.
//
// Await returns [ErrNotFound] if the task does not exist, or has ended and is not kept; the error
// of ctx if ctx ends first, and [ErrClosed] when the queue is closed. Another call may be
// completing the task at the same time: Await does not miss its end, and does not poll.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrUncertain] and [ErrNotLeader] (in a cluster),
// [ErrFailed], [ErrClosed], and that of ctx.
func (q *Queue) Await(ctx context.Context, id ID) (_ *Outcome, err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return nil, err
	}
	if q.node != nil {
		return q.node.await(ctx, id)
	}
	op := &awaitOp{completion: newCompletion(), id: id}
	if settled, err := q.do(ctx, q.shardOf(id), op); !settled {
		op.gone.Store(true)
		return nil, base.EndOf(ctx)
	} else if err != nil {
		return nil, err
	}
	return &op.outcome, nil
}

// awaitOp waits for the end of a task.
type awaitOp struct {
	completion
	id      ID
	outcome Outcome
	gone    atomic.Bool // the caller has given up
}

func (op *awaitOp) resolve(s *shard) {
	o, v, err := s.Outcome(op.id)
	if o == nil && v == engine.Decided && err == nil && s.Broken == nil {
		s.awaits.add(op)
		s.Wanted |= engine.WantOutcomes
		return
	}
	if o != nil {
		op.outcome = outcomeOf(o)
	}
	s.conclude(op, &op.completion, v, err)
}

// awaits holds the calls that wait in a shard for the end of a task, or for queues to become idle.
// Only the owner uses it.
type awaits struct {
	tasks  map[ID][]*awaitOp
	idlers []*idleOp
	calls  int // calls of Await since the last sweep, plus those that waited after it
	sweep  int // the value of calls at which the next sweep is due
}

// add lets a call wait for the end of a task.
func (a *awaits) add(op *awaitOp) {
	if a.tasks == nil {
		a.tasks = make(map[ID][]*awaitOp)
	}
	a.tasks[op.id] = append(a.tasks[op.id], op)
	if a.calls++; a.calls >= a.sweep {
		a.dropGone()
	}
}

func (op *awaitOp) isGone() bool { return op.gone.Load() }

func (op *awaitOp) abandon(*shard) { op.gone.Store(true) }

func (op *awaitOp) encode(dst []byte) (callKind, []byte) { return callAwait, append(dst, op.id[:]...) }
func (op *awaitOp) decode(r *wire.Reader)                { op.id = keys.ReadID(r) }
func (op *awaitOp) encodeReply(dst []byte) []byte        { return op.outcome.append(dst) }
func (op *awaitOp) decodeReply(r *wire.Reader)           { op.outcome = readOutcome(r) }

func (o *Outcome) append(dst []byte) []byte {
	dst = wire.AppendBytes(append(dst, byte(o.State)), o.Result)
	return wire.AppendUint(wire.AppendBytes(dst, o.LastError), uint64(o.Attempts))
}

// clone returns an outcome that shares no memory with o.
func (o *Outcome) clone() Outcome {
	c := *o
	c.Result = append([]byte(nil), o.Result...)
	return c
}

// readOutcome reads an outcome that shares no memory with the message.
func readOutcome(r *wire.Reader) Outcome {
	o := Outcome{State: State(r.Byte())}
	if b := r.Bytes(); len(b) > 0 {
		o.Result = bytes.Clone(b)
	}
	o.LastError, o.Attempts = r.String(), int(r.Uint())
	return o
}

// awaitSweepMin is the least number of calls of Await between two sweeps.
const awaitSweepMin = 64

// dropGone removes callers that have given up. It is called often enough that there are never more
// entries than twice the waiting callers plus awaitSweepMin.
func (a *awaits) dropGone() {
	a.calls = 0
	for id, ops := range a.tasks {
		ops = slices.DeleteFunc(ops, (*awaitOp).isGone)
		if len(ops) == 0 {
			delete(a.tasks, id)
			continue
		}
		a.tasks[id] = ops
		a.calls += len(ops)
	}
	a.sweep = 2*a.calls + awaitSweepMin
}

// all yields the waiting calls.
func (a *awaits) all(yield func(operation) bool) {
	for _, op := range a.idlers {
		if !yield(op) {
			return
		}
	}
	for _, ops := range a.tasks {
		for _, op := range ops {
			if !yield(op) {
				return
			}
		}
	}
}

// outcomeOf converts an outcome of the engine.
func outcomeOf(o *engine.Outcome) Outcome {
	return Outcome{State: State(o.State), Result: o.Result, LastError: o.LastError, Attempts: o.Attempts}
}

// WaitIdle waits until the named queues, or all queues if none is named, have no task that is
// ready, scheduled, blocked or leased: every task has ended. It returns the error of ctx if ctx
// ends first.
//
// It is for programs that end when all tasks are done. It is linearizable: at one moment of the
// call no shard had such a task, nor was one on its way to another shard. Other producers may add
// tasks at the moment at which it returns.
//
// Errors: [ErrInvalid], [ErrUncertain] and [ErrNotLeader] (in a cluster), [ErrFailed], [ErrClosed],
// and that of ctx.
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
			op := &idleOp{completion: newCompletion(), Idleness: engine.Idleness{Queues: queues}}
			if settled, err := q.do(ctx, i, op); !settled {
				op.gone.Store(true)
				return base.EndOf(ctx)
			} else if err != nil {
				return err
			}
			waited, now = waited || op.waited, round{now.arrived + op.Arrived, now.epochs + op.epoch}
		}
		// While the call waited for one shard, a completion there may have caused a produce into
		// another; and between two operations a task may have moved from a shard that was not asked
		// yet to one that was. If no task arrived between two rounds, and no shard got another leader,
		// which counts from 0, all shards were idle at one moment.
		if !waited && (now == last || len(q.replicas) == 1) {
			return nil
		}
		last = now
	}
}

// idleOp waits for queues to become idle in one shard.
type idleOp struct {
	completion
	engine.Idleness
	epoch  uint64 // of the shard
	waited bool
	gone   atomic.Bool // the caller has given up
}

func (op *idleOp) resolve(s *shard) {
	op.epoch = s.epoch
	if s.Idle(&op.Idleness) {
		s.settle(op)
		return
	}
	op.waited = true
	s.awaits.idlers = append(slices.DeleteFunc(s.awaits.idlers, (*idleOp).isGone), op)
}

func (op *idleOp) isGone() bool { return op.gone.Load() }

func (op *idleOp) abandon(*shard) { op.gone.Store(true) }

func (op *idleOp) encode(dst []byte) (callKind, []byte) {
	return callIdle, wire.AppendStrings(dst, op.Queues)
}
func (op *idleOp) decode(r *wire.Reader) { op.Queues = r.Strings() }

func (op *idleOp) encodeReply(dst []byte) []byte {
	return wire.AppendUint(wire.AppendUint(wire.AppendBool(dst, op.waited), op.Arrived), op.epoch)
}

func (op *idleOp) decodeReply(r *wire.Reader) {
	op.waited, op.Arrived, op.epoch = r.Bool(), r.Uint(), r.Uint()
}

// again sets waited, whatever the next try finds: while there was no leader, tasks may have come
// and gone.
func (op *idleOp) again() { op.waited, op.err = true, nil }
