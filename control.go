package codeq

import (
	"context"
	"time"

	"codeq/internal/keys"
	"codeq/internal/wire"
)

// Cancel ends a task that has not been completed: it is not delivered again,
// and kept as Canceled for its retention. If a handler of Run has it, the
// handler's context is cancelled with the cause ErrCanceled, and whatever it
// returns has no effect; any other worker learns of it by an error that matches
// ErrLeaseLost and ErrCanceled when it next uses its receipt. Tasks that wait for
// a canceled one are canceled too. Dead letters can be canceled.
//
// Cancel returns ErrNotFound if the task does not exist, or is no longer kept,
// and ErrNotWaiting if it is completed or canceled already.
func (q *Queue) Cancel(ctx context.Context, id ID) error {
	_, err := q.doFor(ctx, id, new(cancelOp).init(id))
	return err
}

type cancelOp struct {
	lookupOp
}

func (op *cancelOp) init(id ID) *cancelOp {
	op.lookupOp = lookupOp{completion: newCompletion(), id: id, do: op.cancel}
	return op
}

// resolve is that of lookupOp with the cancelOp as the operation.
func (op *cancelOp) resolve(s *shard) { op.lookupOp.resolveAs(s, op) }

func (op *cancelOp) cancel(s *shard, at *located) error {
	if at.state == Done || at.state == Canceled {
		return notWaiting(at)
	}
	if !s.hasRoom(roomScarce) && s.retention(at.lane.queue, at.rec.Retention) != 0 { // it would be moved
		return s.errNoRoom()
	}
	s.cancel(at)
	return nil
}

func (op *cancelOp) encode(dst []byte) (callKind, []byte) {
	return callCancel, append(dst, op.id[:]...)
}

func (op *cancelOp) decode(r *wire.Reader) { op.init(ID(keys.ReadID(r))) }

// SetPriority moves a task that waits (ready, scheduled or blocked) to another
// priority, 0 to 9. A ready task keeps its turn by age. It returns ErrNotFound
// if the task does not exist, and ErrNotWaiting if it is leased or has ended.
func (q *Queue) SetPriority(ctx context.Context, id ID, priority int) error {
	if priority < MinPriority || priority > MaxPriority {
		return &InvalidError{"SetPriority priority", priority, "0 to 9"}
	}
	return q.alter(ctx, id, alterPriority, uint64(priority))
}

// SetRunAt changes when a task that waits (ready, scheduled or blocked) becomes
// ready; zero or past: now, as far as nothing else holds it back. A task that
// had become ready is then behind those that are. Errors are those of SetPriority.
func (q *Queue) SetRunAt(ctx context.Context, id ID, t time.Time) error {
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	task := Task{Queue: "any", RunAt: t}
	if err := task.check(&q.opts.Limits); err != nil {
		return err
	}
	return q.alter(ctx, id, alterRunAt, runAtMillis(t))
}

// alteration is what a call may do to a task that it names by its ID.
type alteration byte

const (
	alterPriority alteration = iota
	alterRunAt
	alterRedrive
	alterPurge
	endOfAlterations
)

// alterations decide; arg is a priority or a time, ms.
var alterations = [endOfAlterations]func(s *shard, at *located, arg uint64) error{
	alterPriority: (*shard).setPriority,
	alterRunAt:    (*shard).setRunAt,
	alterRedrive:  func(s *shard, at *located, _ uint64) error { return s.redrive(at) },
	alterPurge:    func(s *shard, at *located, _ uint64) error { return s.purge(at) },
}

// alterOp does one of the alterations.
type alterOp struct {
	lookupOp
	how alteration
	arg uint64
}

func (op *alterOp) init(id ID, how alteration, arg uint64) *alterOp {
	op.lookupOp = lookupOp{completion: newCompletion(), id: id, do: op.alter}
	op.how, op.arg = how, arg
	return op
}

func (op *alterOp) alter(s *shard, at *located) error { return alterations[op.how](s, at, op.arg) }

func (op *alterOp) resolve(s *shard) { op.lookupOp.resolveAs(s, op) }

func (op *alterOp) encode(dst []byte) (callKind, []byte) {
	return callAlter, wire.AppendUint(append(append(dst, op.id[:]...), byte(op.how)), op.arg)
}

func (op *alterOp) decode(r *wire.Reader) {
	op.init(ID(keys.ReadID(r)), alteration(r.Byte()), r.Uint())
	if op.how >= endOfAlterations {
		r.Fail()
	}
}

func (q *Queue) alter(ctx context.Context, id ID, how alteration, arg uint64) error {
	_, err := q.doFor(ctx, id, new(alterOp).init(id, how, arg))
	return err
}
