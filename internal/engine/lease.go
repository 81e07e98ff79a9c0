package engine

import (
	"fmt"

	"codeq/internal/base"
	"codeq/internal/container/chunked"
	"codeq/internal/container/recent"
	"codeq/internal/container/wheel"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// leases holds the leased tasks, and the clock that ends their leases.
type leases struct {
	*round
	names *names

	leaseTable
	clock    store.LeaseClock
	canceled recent.Set[Receipt]
	crashes  map[uint64]*processCrash // by process; in a cluster only
	steps    store.Steps
	stepsOf  map[keys.ID]leaseSteps // of leased tasks that may have any

	// ClockAge is the age of the stored clock of leases at the load, as far as it is known, ms; in
	// a cluster only.
	ClockAge uint64
}

// lease is a task that a worker holds.
//
// Invariant: a lease is in the table exactly while the task's record lies in its lane, and a lease
// record that is persisted, or in the current group, names it.
type lease struct {
	id        keys.ID
	lane      *Lane
	since     uint64 // where the task's record lies in its lane
	token     uint64
	leases    uint32        // granted to this task so far, this one included
	attempts  uint32        // counted so far, this one included
	local     bool          // granted to Run: lasts as long as the process
	suspect   bool          // of having ended a process
	rewritten bool          // the key of the record was written before
	over      bool          // its deadline, or its process, ended before the shard was loaded
	handled   bool          // a handler of Run works on the task
	goesOn    bool          // the handler goes on: the lease ends, or it is an orphan
	overdue   bool          // its attempt counts already: the record says so
	tied      bool          // ties is not zero
	runner    uint32        // the owner's number for the holder; 0: unknown
	slot      int32         // in leaseTable.all
	worker    string        // the holder's name; "": not known
	notes     *record.Notes // notes of its handler; nil: those of the record
	ties      record.Ties
	duration  uint64 // ms
	retention int64  // of the task, ms; 0: the one of the options
	record    *leaseRecord
	copied    []byte              // the task's record, as it lies in its lane; empty: not copied
	expiry    wheel.Entry[*lease] // deadline by the shard's monotonic clock, ms
}

func (l *lease) receipt() Receipt { return Receipt{ID: l.id, Token: l.token} }

// leaseRecord is one stored value. It holds the leases that a group granted with the same deadline.
// It is written once, and deleted when the last of its leases has ended, so that a claim costs a
// fraction of a key.
type leaseRecord struct {
	seq      uint64
	local    bool
	deadline uint64 // wall clock, ms
	ends     uint64 // the deadline by the clock of leases, ms; 0: granted without a cluster
	live     int    // leases that still refer to it
	written  bool
	process  uint64 // of the holder of the leases, in a cluster; 0: not known
	worker   string // of the leases that are added to value
	value    []byte // until it is written
}

// leaseTable holds the leases of a shard, by task and by deadline. It is a cache of the lease
// records, rebuilt by load.
type leaseTable struct {
	byID   map[keys.ID]*lease
	all    chunked.List[*lease] // in no order: the last one takes the slot of a lease that ends
	wheel  *wheel.Wheel[*lease]
	ended  []*lease // leases, for reuse
	copies int      // bytes of copied, of all leases in the table

	orphans   map[Receipt]*lease
	heldTurns map[uint64]heldTurn // by scope, of groups with orphans

	spare []*leaseRecord
}

// A lease has a copy of its task's record if the record is small, as long as the copies of a shard
// take at most copiesCap: the end of an attempt then reads nothing. It is a copy because the
// worker, which gets the record, may change the payload, and because records share memory.
const (
	copyCap   = 512      // bytes of a record
	copiesCap = 16 << 20 // bytes
)

// copyRecord keeps a copy of the current record of a lease's task.
func (t *leaseTable) copyRecord(l *lease, rec []byte) {
	t.copies -= len(l.copied)
	l.copied = l.copied[:0]
	if len(rec) <= copyCap && t.copies+len(rec) <= copiesCap {
		l.copied = append(l.copied, rec...)
		t.copies += len(rec)
	}
}

// freeLeases bounds the memory that a burst of leases leaves.
const freeLeases = 4096

func newLeaseTable(now uint64) leaseTable {
	return leaseTable{byID: make(map[keys.ID]*lease), wheel: wheel.New[*lease](int64(now))}
}

// reserve prepares an empty table for n leases.
func (t *leaseTable) reserve(n int) {
	t.byID = make(map[keys.ID]*lease, n)
}

// add puts a lease into the table. deadline is by the shard's clock of leases.
func (t *leaseTable) add(l *lease, deadline uint64) {
	if base.Invariants && (t.byID[l.id] != nil || l.record == nil || l.record.live <= 0) {
		base.Violated("task %s gets a second lease, or one without a record: %+v", keys.FormatID(l.id), l.record)
	}
	l.expiry.Value = l
	t.byID[l.id] = l
	l.lane.tasks.Lease(l.since)
	l.slot = int32(t.all.Len())
	t.all.Append(l)
	t.wheel.Add(&l.expiry, int64(deadline))
}

// remove takes a lease out of the table, not out of its lane. It stays readable until the next call
// of newLease.
func (t *leaseTable) remove(l *lease) {
	if base.Invariants && t.byID[l.id] != l {
		base.Violated("a lease of task %s ends that is not in the table", keys.FormatID(l.id))
	}
	delete(t.byID, l.id)
	t.copies -= len(l.copied)
	if moved, ok := t.all.Remove(int(l.slot)); ok {
		moved.slot = l.slot
	}
	t.wheel.Remove(&l.expiry)
	if len(t.ended) < freeLeases {
		t.ended = append(t.ended, l)
	}
}

func (t *leaseTable) newLease() *lease {
	if n := len(t.ended); n > 0 {
		l := t.ended[n-1]
		t.ended = t.ended[:n-1]
		*l = lease{copied: l.copied[:0]}
		return l
	}
	return new(lease)
}

func (t *leaseTable) newRecord() *leaseRecord {
	if n := len(t.spare); n > 0 {
		r := t.spare[n-1]
		t.spare = t.spare[:n-1]
		*r = leaseRecord{value: r.value[:0]}
		return r
	}
	return new(leaseRecord)
}

// held returns the lease that a receipt names, or nil if it is not valid. A lease is lost if its
// deadline passed before the operation that is being decided arrived.
func (le *leases) held(r Receipt) *lease {
	l := le.byID[r.ID]
	if l == nil || l.token != r.Token || uint64(l.expiry.Deadline()) <= le.Judged {
		return nil
	}
	return l
}

// HolderOf returns the queue and the kind of a leased task, and the process of its holder; nil: the
// lease is lost.
func (le *leases) HolderOf(r Receipt) (q *Queue, kind string, process uint64) {
	if ls := le.held(r); ls != nil {
		if rec, err := le.recordOf(ls); err == nil {
			return ls.lane.queue, rec.Kind, ls.record.process
		}
	}
	return nil, "", 0
}

// addToRecord looks for a record of the right deadline among the last recordLooks lease records of
// the group. Leases of more different durations are spread over more records.
const recordLooks = 16

// addToRecord adds a lease to a lease record of the group with its deadline, behind the record
// that had the lease before: the later of two entries counts. The caller sets the token; 0 stands
// for a new lease.
func (le *leases) addToRecord(l *lease, process, before uint64) {
	deadline := le.Wall + l.duration
	var r *leaseRecord
	for _, g := range le.Group.granted[max(0, len(le.Group.granted)-recordLooks):] {
		if g.deadline == deadline && g.local == l.local && g.process == process && g.seq >= before {
			r = g
			break
		}
	}
	if r == nil {
		r = le.newRecord()
		r.seq, r.local, r.deadline, r.process = le.mint.Next(), l.local, deadline, process
		if le.config.Replicated {
			r.ends = le.leaseClock() + l.duration
		}
		r.value = keys.LeaseHeader{Local: l.local, Deadline: deadline, Ends: r.ends, Process: process}.Append(r.value)
		le.Group.granted = append(le.Group.granted, r)
	}
	if l.token == 0 {
		l.token = r.seq
	}
	entry := keys.LeaseEntry{
		ID: l.id, Lane: l.lane.number, Since: l.since, Token: l.token,
		Leases: l.leases, Attempts: l.attempts, Duration: l.duration,
	}
	if r.worker != l.worker {
		r.worker = l.worker
		r.value = keys.AppendWorker(r.value, r.worker)
	}
	r.value = entry.Append(r.value, r.seq)
	r.live++
	l.record = r
}

// removeFromRecord removes a lease from its lease record, and deletes the record if no lease is
// left in it.
func (le *leases) removeFromRecord(l *lease) {
	r := l.record
	l.record = nil
	r.live--
	if r.live == 0 && r.written {
		le.Group.finished = append(le.Group.finished, r.seq)
		if len(le.spare) < freeLeases/16 {
			le.spare = append(le.spare, r)
		}
	}
}

// renew moves the deadline of a lease to d ms from now. It writes nothing for a local lease if this
// would never be read: without a cluster, or without room, when no lease runs out.
func (le *leases) renew(l *lease, d uint64) {
	le.wheel.Remove(&l.expiry)
	le.wheel.Add(&l.expiry, int64(le.Now+d))
	if l.local && !(le.config.Replicated && le.HasRoom(RoomScarce)) {
		return
	}
	l.duration = d
	before, process := l.record.seq, l.record.process
	le.removeFromRecord(l)
	le.addToRecord(l, process, before)
	le.names.touch(l.lane.queue)
}

// leasesEnd reports whether leases may have a deadline that is not after a time.
func (su *suspects) leasesEnd(at uint64) bool {
	next, ok := su.leases.wheel.Next()
	return ok && uint64(next) <= at && !su.isClearing()
}

// leaseLost is the error for a receipt that names no current lease.
func (le *leases) leaseLost(r Receipt) error { return LeaseLost(r, le.canceled.Has(r)) }

func LeaseLost(r Receipt, canceled bool) error {
	if canceled {
		return fmt.Errorf("%w: %s: %w", base.ErrLeaseLost, r, base.ErrCanceled)
	}
	return fmt.Errorf("%w: %s", base.ErrLeaseLost, r)
}

// An orphan is a handler of Run that still runs after the end of its lease: the handler itself, or
// another caller, has canceled, completed or returned the task. The limits of its queue and of its
// LimitKey, and the turn of its group, count the orphan until it returns, or until the deadline of
// its lease, which is not renewed any more. Orphans exist in memory only: after the next Open, or
// under the next leader, other tasks go on.
//
// An orphan is in the wheel of leases, like its lease before.

// heldTurn is the turn of a group that has an orphan. Wakeups of the group are on disk, for the
// next Open, and are not applied before the turn is free.
type heldTurn struct {
	orphans int
	wakes   bool // a wakeup was not applied
}

// orphan makes an orphan of a lease that has just ended.
func (le *leases) orphan(ls *lease) {
	t, q := le, ls.lane.queue
	o := &lease{id: ls.id, token: ls.token, lane: ls.lane, ties: ls.ties, goesOn: true}
	o.expiry.Value = o
	t.wheel.Add(&o.expiry, ls.expiry.Deadline())
	if t.orphans == nil {
		t.orphans, t.heldTurns = make(map[Receipt]*lease), make(map[uint64]heldTurn)
	}
	t.orphans[o.receipt()] = o
	q.Orphans++
	if scope := o.ties.Group; scope != 0 {
		held := t.heldTurns[scope]
		held.orphans++
		t.heldTurns[scope] = held
	}
}

// returned is called when the handler of a lease that is lost has returned.
func (ti *ties) returned(r Receipt) {
	if o := ti.leases.orphans[r]; o != nil {
		ti.leases.wheel.Remove(&o.expiry)
		ti.endOrphan(o)
	}
}

// endOrphan ends an orphan: others may go on.
func (ti *ties) endOrphan(o *lease) {
	q := o.lane.queue
	delete(ti.leases.orphans, o.receipt())
	q.Orphans--
	ti.leave(q, &o.ties)
	if scope := o.ties.Group; scope != 0 {
		held := ti.leases.heldTurns[scope]
		if held.orphans--; held.orphans > 0 {
			ti.leases.heldTurns[scope] = held
		} else if delete(ti.leases.heldTurns, scope); held.wakes {
			ti.wake(q, scope, keys.ID{}, keys.WakeUp)
		}
	}
	ti.names.Rest(q)
}

// leave is called when a lease has ended and no handler works on its task any more.
func (ti *ties) leave(q *Queue, ties *record.Ties) {
	if ties.Limit != 0 {
		ti.leaveLimit(q, ties.Limit)
	}
	ti.free(q)
}

// isTurnHeld reports whether a group has an orphan.
func (le *leases) isTurnHeld(scope uint64) bool { return le.heldTurns[scope].orphans > 0 }

// delaysWakeup reports whether a wakeup has to wait for the orphans of its group. It stays on disk.
func (le *leases) delaysWakeup(m wakeup) bool {
	held, ok := le.heldTurns[m.scope]
	if ok {
		held.wakes = true
		le.heldTurns[m.scope] = held
	}
	return ok
}
