package engine

import (
	"fmt"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// Grant is a lease as the claimer sees it.
type Grant struct {
	Receipt Receipt
	*LaneKey
	Attempt  uint32
	Wait     uint32 // since when the task was ready, ms; at most 49 days
	Deadline uint64 // wall clock, ms
	Rec      []byte
}

// Holder is the holder of a lease.
type Holder struct {
	Local  bool   // the lease ends with the process
	Runner uint32 // the owner's number, which CanceledLease returns
	// Handled: a handler of Run works on the task. When the lease ends without it, Run calls Fail
	// as soon as the handler has returned.
	Handled bool
	Worker  string // its name, for people; "": it has none
	Process uint64 // a number that no other process has; 0: not known
}

// CanceledLease is a lease that ended because its task was canceled.
type CanceledLease struct {
	Receipt
	Runner uint32
}

// Grant leases the first task of a lane's window for duration ms, and adds the lease to grants.
// REQUIRES: the window is not empty.
func (s *State) Grant(l *Lane, duration uint64, to Holder, grants []Grant) ([]Grant, error) {
	ls := s.Leases.newLease()
	ls.leases, ls.attempts, ls.duration = 1, 1, duration
	it := s.Names.ready.Pop(&l.tasks)
	if _, plain := record.Plain(it.Record); !plain {
		head, err := record.DecodeHead(it.Record)
		if err != nil {
			return grants, fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(it.ID), err)
		}
		if head.Lease != 0 && !to.Local {
			ls.duration = head.Lease
		}
		ls.leases, ls.attempts = head.Leases+1, head.Attempts+1
		ls.rewritten, ls.retention, ls.suspect = head.Rewritten, head.Retention, head.Suspect
		s.Ties.tieLease(ls, &head)
	}
	s.noteRead(len(it.Record))
	ls.id, ls.lane, ls.since = it.ID, l, it.Since
	ls.local, ls.handled, ls.runner, ls.worker = to.Local, to.Handled, to.Runner, to.Worker
	process := uint64(0)
	if s.config.Replicated {
		process = to.Process
	}
	s.Leases.addToRecord(ls, process, 0)
	cleared := ls.suspect && !s.Suspects.beginSuspect(ls)
	s.Leases.add(ls, s.Now+ls.duration)
	s.Leases.copyRecord(ls, it.Record)
	if cleared {
		if err := s.clearSuspect(ls); err != nil {
			return grants, err
		}
	}
	s.Names.emit(EventClaimed, l, ls.id, ls.attempts, "")
	q := l.queue
	s.Names.ready.Turn(&l.tasks)
	q.Counts.Ready--
	q.Counts.Leased++
	if q.Gated && q.Settings.Rate > 0 {
		s.Names.noteGrant(q)
	}
	s.Names.touch(q)
	return append(grants, Grant{
		Receipt:  ls.receipt(),
		LaneKey:  &l.LaneKey,
		Attempt:  ls.attempts,
		Wait:     s.mint.age(it.Since),
		Deadline: s.Wall + ls.duration,
		Rec:      it.Record,
	}), nil
}

// tieLease copies a task's ties to its lease.
func (ti *ties) tieLease(ls *lease, head *record.Head) {
	ls.ties, ls.tied = head.Ties, head.Ties != record.Ties{}
	if head.Limit != 0 {
		ti.limits.enter(head.Limit)
	}
}
