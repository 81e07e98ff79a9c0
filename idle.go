package codeq

import (
	"context"
	"slices"
	"sync/atomic"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/wire"
)

// WaitIdle waits until the queues named, or all queues if none is, have no task
// that is ready, scheduled, blocked or leased: all work is done, or dead. It returns the
// error of ctx if ctx ends first.
//
// It is for programs that end when their work does. Nothing keeps others from
// producing at the moment at which it returns.
//
// Errors: [ErrInvalid], [ErrUncertain] and [ErrNotLeader] (in a cluster), [ErrFailed], [ErrClosed],
// and that of ctx.
func (q *Queue) WaitIdle(ctx context.Context, queues ...string) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	queues = slices.Clone(queues)
	for arrived := uint64(engine.Never); ; {
		waited, total := false, uint64(0)
		for i := range q.replicas {
			op := &idleOp{completion: newCompletion(), Idleness: engine.Idleness{Queues: queues}}
			if settled, err := q.do(ctx, i, op); !settled {
				op.gone.Store(true)
				return base.EndOf(ctx)
			} else if err != nil {
				return err
			}
			waited, total = waited || op.waited, total+op.Arrived
		}
		// While one shard was waited for, its completion may have been the cause
		// of a produce into another; and between two questions, a task may have
		// gone from a shard that was still to be asked to one that had been. If
		// none arrived between two rounds of questions, all were idle at once.
		if !waited && (total == arrived || len(q.replicas) == 1) {
			return nil
		}
		arrived = total
	}
}

// idleOp waits for queues to become idle in one shard.
type idleOp struct {
	completion
	engine.Idleness
	waited bool
	gone   atomic.Bool // the caller has given up
}

func (op *idleOp) resolve(s *shard) {
	if s.Idle(&op.Idleness) {
		s.settle(op)
		return
	}
	op.waited = true
	s.idlers = append(slices.DeleteFunc(s.idlers, (*idleOp).isGone), op)
}

func (op *idleOp) isGone() bool { return op.gone.Load() }

func (op *idleOp) abandon(*shard) { op.gone.Store(true) }

func (op *idleOp) encode(dst []byte) (callKind, []byte) { return callIdle, appendNames(dst, op.Queues) }
func (op *idleOp) decode(r *wire.Reader)                { op.Queues = readNames(r) }

func (op *idleOp) encodeReply(dst []byte) []byte {
	return wire.AppendUint(wire.AppendBool(dst, op.waited), op.Arrived)
}

func (op *idleOp) decodeReply(r *wire.Reader) { op.waited, op.Arrived = r.Bool(), r.Uint() }

// again says that the caller has waited, whatever the next try finds: while there
// was no leader, tasks may have come and gone.
func (op *idleOp) again() { op.waited, op.err = true, nil }

// settleIdlers settles who waits for what has become idle in this group.
func (s *shard) settleIdlers() {
	if len(s.idlers) == 0 {
		return
	}
	s.idlers = slices.DeleteFunc(s.idlers, func(op *idleOp) bool {
		if op.isGone() {
			return true
		}
		if !s.Idle(&op.Idleness) {
			return false
		}
		s.settle(op)
		return true
	})
}
