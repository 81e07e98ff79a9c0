package engine

import (
	"bytes"
	"slices"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// limits: the leases of each key are counted, and tasks that wait for room have a lease whose end
// lets them go on.
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
	waiting := make(map[uint64]int)
	err := store.Scan(c.disk, keys.Blocked, func(key, value []byte) error {
		_, scope, id, err := keys.ParseGrouped(key)
		if f, n := s.Ties.cursors.byScope[scope], waiting[scope]; f != nil {
			switch {
			case n < len(f.ahead) && (f.ahead[n].id != id || !bytes.Equal(f.ahead[n].value, value)):
				c.report("task %s waits in scope %x at %d, where memory has %s", keys.FormatID(id), scope, n, f.ahead[n].id)
			case n >= len(f.ahead) && f.all:
				c.report("task %s waits in scope %x behind the last that memory has", keys.FormatID(id), scope)
			}
		}
		waiting[scope]++
		if cursor := cursorOf(&s.Ties.cursors, scope); bytes.Compare(id[:], cursor[:]) < 0 {
			c.report("task %s waits in scope %x before its cursor %s", keys.FormatID(id), scope, cursor)
		}
		number, _, _, _ := keys.ParseGrouped(key)
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
	held := 0
	for scope, f := range s.Ties.cursors.byScope {
		if n := waiting[scope]; n < len(f.ahead) {
			c.report("%d tasks wait in scope %x, memory has %d", n, scope, len(f.ahead))
		}
		for i := range f.ahead {
			held += f.ahead[i].size()
		}
	}
	if held != s.Ties.cursors.bytes {
		c.report("tasks that wait take %d bytes of memory, counted are %d", held, s.Ties.cursors.bytes)
	}
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

// cursorOf is the ID before which no task waits in a scope.
func cursorOf(t *scanCursors, scope uint64) keys.ID {
	if f := t.byScope[scope]; f != nil {
		return f.id
	}
	return keys.ID{}
}
