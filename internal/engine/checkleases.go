package engine

import (
	"slices"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// leases: the table has exactly the valid leases on disk.
func (c *checker) leases() error {
	s := c.state
	type entry struct {
		keys.LeaseEntry
		keys.LeaseHeader
		seq uint64
	}
	valid := make(map[keys.ID]entry)
	onDisk := make(map[uint64]bool)
	err := store.Scan(c.disk, keys.Lease, func(key, value []byte) error {
		seq, err := keys.ParseLease(key)
		if err != nil {
			return err
		}
		onDisk[seq] = true
		c.last = max(c.last, seq)
		h, entries, err := keys.ParseLeases(seq, value)
		if err != nil {
			return err
		}
		for _, e := range entries {
			head, err := store.LeasedHead(c.disk, &e)
			if err != nil {
				return err
			}
			if head != nil {
				valid[e.ID] = entry{e, h, seq}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	live, held := make(map[*leaseRecord]int), 0
	for id, l := range s.Leases.byID {
		held += len(l.copied)
		e, ok := valid[id]
		if !ok {
			c.report("lease of %s is not valid on disk", id)
			continue
		}
		live[l.record]++
		got := keys.LeaseEntry{
			ID: l.id, Lane: l.lane.number, Since: l.since, Token: l.token,
			Leases: l.leases, Attempts: l.attempts, Duration: l.duration,
		}
		if e.Worker != "" { // or else it was stored before lease records had workers
			got.Worker = l.worker
		}
		if got != e.LeaseEntry || l.local != e.Local {
			c.report("lease of %s is %+v, on disk %+v", id, got, e)
		}
		if r := l.record; r.seq != e.seq || r.deadline != e.Deadline || r.ends != e.Ends || r.local != e.Local || r.process != e.Process || !r.written {
			c.report("record of the lease of %s is %+v, on disk %+v", id, r, e)
		}
		if !l.expiry.Queued() || l.expiry.Value != l {
			c.report("lease of %s has no deadline", id)
		}
		delete(valid, id)
	}
	for id := range valid {
		c.report("lease of %s is valid on disk only", id)
	}
	for id, of := range s.Leases.stepsOf {
		if steps, err := store.StepsOf(c.disk, id); s.Leases.byID[id] == nil || of.steps >= 0 && len(steps) != int(of.steps) || err != nil {
			c.report("task %s has %+v, on disk %d steps: %v", id, of, len(steps), err)
		}
		if signals, err := store.SignalsOf(c.disk, id); len(signals) > 0 && of.beside&record.HasSignals == 0 || err != nil {
			c.report("task %s has %+v, on disk %d signals: %v", id, of, len(signals), err)
		}
		if cursors, err := store.CursorsOf(c.disk, id); len(cursors) > 0 && of.beside&record.HasCursors == 0 || err != nil {
			c.report("task %s has %+v, on disk %d cursors: %v", id, of, len(cursors), err)
		}
	}
	if n := s.Leases.wheel.Len(); n != len(s.Leases.byID)+len(s.Leases.orphans) {
		c.report("%d deadlines for %d leases and %d orphans", n, len(s.Leases.byID), len(s.Leases.orphans))
	}
	if held != s.Leases.copies {
		c.report("copies of records have %d bytes, counted are %d", held, s.Leases.copies)
	}
	for r, n := range live {
		if r.live != n {
			c.report("lease record %x counts %d leases and has %d", r.seq, r.live, n)
		}
		delete(onDisk, r.seq)
	}
	for seq := range onDisk {
		c.report("nothing refers to lease record %x", seq)
	}
	for _, l := range s.Leases.ended {
		if s.Leases.byID[l.id] == l || l.expiry.Queued() {
			c.report("lease of %s is in use and free", l.id)
		}
	}
	for _, r := range s.Leases.spare {
		if live[r] > 0 {
			c.report("lease record %x is in use and spare", r.seq)
		}
	}
	return nil
}

// orphans: they are counted in their queues and groups, and will end.
func (c *checker) orphans() error {
	s := c.state
	queues, turns := make(map[*Queue]int), make(map[uint64]int)
	for r, o := range s.Leases.orphans {
		if o.receipt() != r || !o.goesOn || !o.expiry.Queued() || o.expiry.Value != o {
			c.report("orphan %s is %+v", r, o)
		}
		if queues[o.lane.queue]++; o.ties.Group != 0 {
			turns[o.ties.Group]++
		}
	}
	for _, q := range s.Names.Queues {
		if q.Orphans != queues[q] {
			c.report("queue %q counts %d orphans of %d", q.Name, q.Orphans, queues[q])
		}
		delete(queues, q)
	}
	for q := range queues {
		c.report("queue %q is forgotten, and has orphans", q.Name)
	}
	for scope, held := range s.Leases.heldTurns {
		if held.orphans != turns[scope] {
			c.report("group %x counts %d orphans of %d", scope, held.orphans, turns[scope])
		}
		delete(turns, scope)
	}
	if len(turns) > 0 {
		c.report("nobody holds the turns of groups with orphans: %v", turns)
	}
	return nil
}

// leaseClock: disk has the clock of leases. If there are leases, this leader has stored it.
func (c *checker) leaseClock() error {
	s := c.state
	b, err := store.Lookup(c.disk, []byte{keys.LeaseTime})
	if err != nil {
		return err
	}
	stored := uint64(0)
	if b != nil {
		v, err := keys.ParseLeaseTime(b)
		if err != nil {
			return err
		}
		stored = v.Clock
	}
	if stored != s.Leases.clock.Stored || b != nil && !s.config.Replicated {
		c.report("the clock of leases is %x on disk, and %d was stored", b, s.Leases.clock.Stored)
	}
	if now := s.Leases.leaseClock(); s.config.Replicated && (now < stored || s.Leases.all.Len() > 0 && !s.Leases.clock.Begun) {
		c.report("the clock of leases is at %d, on disk at %d, stored by this leader: %t", now, stored, s.Leases.clock.Begun)
	}
	return nil
}

// limits: the leases of each key are counted. If tasks wait for room, there is a lease of their
// key, and the end of this lease wakes them.
func (c *checker) limits() error {
	s := c.state
	leased, ready := make(map[uint64]int), make(map[uint64]bool)
	for id, l := range s.Leases.byID {
		if l.ties.Limit != 0 {
			leased[l.ties.Limit]++
		}
		head, err := store.LeasedHead(c.disk, &keys.LeaseEntry{ID: l.id, Lane: l.lane.number, Since: l.since, Leases: l.leases})
		if err != nil {
			return err
		}
		if head != nil && head.Ties != l.ties {
			c.report("lease of %s is bound by %+v, on disk %+v", id, l.ties, head.Ties)
		}
	}
	for _, o := range s.Leases.orphans {
		if o.ties.Limit != 0 {
			leased[o.ties.Limit]++
		}
	}
	for _, items := range c.onDisk {
		for _, it := range items {
			head, err := record.DecodeHead(it.Record)
			if err != nil {
				return err
			}
			ready[head.Limit] = true
		}
	}
	parked := make(map[uint64]bool)
	err := store.Scan(c.disk, keys.Blocked, func(key, _ []byte) error {
		number, scope, id, err := keys.ParseGrouped(key)
		switch q := s.Names.numbers.At(int(number)); {
		case keys.IsSuspectScope(scope):
			if q.Suspects>>keys.SuspectPart(scope)&1 == 0 && !slices.Contains(s.Suspects.unread, q) {
				c.report("nobody starts suspect %s of queue %q", keys.FormatID(id), q.Name)
			}
		case scope != 0 && scope&keys.GroupScopeBit == 0:
			parked[scope] = true
		}
		return err
	})
	for scope, st := range s.Ties.limits {
		if st.leased != leased[scope] {
			c.report("limit %x counts %d leases of %d", scope, st.leased, leased[scope])
		}
		if st.leased == 0 && !parked[scope] {
			c.report("limit %x is of no use", scope)
		}
	}
	for scope := range parked {
		if st := s.Ties.limits[scope]; st == nil || !st.parked || st.leased == 0 && !ready[scope] {
			c.report("nobody ends the wait for room in limit %x: %+v", scope, st)
		}
	}
	for scope := range leased {
		if s.Ties.limits[scope] == nil {
			c.report("limit %x does not count its leases", scope)
		}
	}
	return err
}
