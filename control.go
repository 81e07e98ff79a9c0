package codeq

import (
	"context"
	"fmt"
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
	runner  *runner
	receipt Receipt
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
	if at.lease != nil && s.node == nil { // in a cluster it is in the news
		op.runner, op.receipt = at.lease.runner, at.lease.receipt()
	}
	s.cancel(at)
	return nil
}

// settle has the handler's context cancelled once the end of its task is stored.
func (op *cancelOp) settle(err error) {
	if r := op.runner; r != nil && err == nil {
		r.canceled(op.receipt)
	}
	op.completion.settle(err)
}

func (op *cancelOp) encode(dst []byte) (callKind, []byte) {
	return callCancel, append(dst, op.id[:]...)
}

func (op *cancelOp) decode(r *wire.Reader) { op.init(ID(keys.ReadID(r))) }

func notWaiting(at *located) error { return fmt.Errorf("%w: %s is %v", ErrNotWaiting, at.id, at.state) }

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

// blockAgain has a task wait in the scope from which it was withdrawn.
func (s *shard) blockAgain(l *lane, at *located, rec []byte) {
	if at.place.At == 0 && at.pending > 0 {
		s.pending.put(s, at.id, at.pending)
	}
	s.block(l, at.place.At, at.id, rec)
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

func (s *shard) setPriority(at *located, priority uint64) error {
	if !at.waiting() {
		return notWaiting(at)
	}
	if err := s.hasLanes(1); err != nil {
		return err
	}
	l := s.lane(laneKey{at.lane.queue.name, at.lane.tenant, uint8(priority)})
	s.withdraw(at)
	rec := at.rec.Encode()
	switch at.state {
	case Ready:
		s.place(l, keys.MovedSince(keys.SinceMillis(at.place.At)), at.id, rec)
	case Scheduled:
		s.schedule(l, at.id, at.place.At, rec)
	default:
		s.blockAgain(l, at, rec)
	}
	return nil
}

func (s *shard) setRunAt(at *located, runAt uint64) error {
	if !at.waiting() {
		return notWaiting(at)
	}
	s.withdraw(at)
	at.rec.RunAt = runAt
	rec := at.rec.Encode()
	switch due := runAt > s.wall; {
	case at.state == Blocked && (at.place.At == 0 || !due):
		s.blockAgain(at.lane, at, rec)
	case due:
		s.schedule(at.lane, at.id, runAt, rec)
	default:
		s.enter(at.lane, s.mint.since(), at.id, at.rec.Group, rec)
	}
	return nil
}

// canceledLeases remembers the leases that cancels have ended, so that their
// workers learn why: as many as there is room for, the latest ones.
type canceledLeases struct {
	receipts map[Receipt]struct{}
	ring     []Receipt
	next     int
}

const canceledCap = 1024

func (c *canceledLeases) add(r Receipt) {
	if c.receipts == nil {
		c.receipts = make(map[Receipt]struct{})
	}
	if len(c.ring) < canceledCap {
		c.ring = append(c.ring, r)
	} else {
		delete(c.receipts, c.ring[c.next])
		c.ring[c.next] = r
		c.next = (c.next + 1) % canceledCap
	}
	c.receipts[r] = struct{}{}
}

func (c *canceledLeases) has(r Receipt) bool {
	_, ok := c.receipts[r]
	return ok
}

// leaseLost is the error for a receipt that is not that of a lease in force.
func (s *shard) leaseLost(r Receipt) error { return leaseLost(r, s.canceled.has(r)) }

func leaseLost(r Receipt, canceled bool) error {
	if canceled {
		return fmt.Errorf("%w: %s: %w", ErrLeaseLost, r, ErrCanceled)
	}
	return fmt.Errorf("%w: %s", ErrLeaseLost, r)
}
