package engine

import (
	"bytes"
	"errors"
	"reflect"
	"slices"

	"codeq/internal/keys"
	"codeq/internal/store"
)

// Checks of the lanes and queues in memory: numbers, counts, and settings.

// catalogue: memory knows which numbers are taken, and has no lane or queue without need.
func (c *checker) catalogue() error {
	s, cat := c.state, &c.state.Names.catalogue
	lanes, queues := 0, 1
	err := errors.Join(store.Scan(c.disk, keys.Lane, func(key, _ []byte) error {
		n, err := keys.ParseNumbered(key)
		if lanes++; !cat.lanes.Has(n) {
			c.report("lane %d is taken on disk only", n)
		}
		return err
	}), store.Scan(c.disk, keys.Queue, func(key, _ []byte) error {
		n, err := keys.ParseNumbered(key)
		if queues++; !cat.queues.Has(n) {
			c.report("queue %d is taken on disk only", n)
		}
		return err
	}))
	if err != nil {
		return err
	}
	if lanes != cat.lanes.Len() || queues != cat.queues.Len() {
		c.report("%d lanes and %d queues are taken, on disk %d and %d", cat.lanes.Len(), cat.queues.Len(), lanes, queues)
	}
	loaded := 0
	for n, l := range s.Names.lanes.All() {
		if l == nil {
			continue
		}
		if loaded++; !cat.loaded.Has(uint32(n)) || l.queue.lanes.At(int(l.place)) != l {
			c.report("lane %d is not known to be in memory", n)
		}
	}
	if loaded != cat.loaded.Len() {
		c.report("%d lanes are in memory, %d by the catalogue", loaded, cat.loaded.Len())
	}
	if n := s.Names.absentLanes(); cat.sweep == nil && n > cat.sweepAt {
		c.report("%d lanes are not in memory, a sweep is due at %d", n, cat.sweepAt)
	}
	current, busy := 0, 0
	for _, q := range s.Names.Queues {
		if q.Number != 0 {
			current++
		}
		if q.isBusy() {
			busy++
		}
		if s.Names.isUnknown(q) && !c.needed(q) {
			c.report("queue %q is in memory for nothing", q.Name)
		}
	}
	if current != cat.current.Len() || busy != s.Names.busy {
		c.report("%d queues are in memory, %d by the catalogue; %d have tasks that have not ended, %d by the shard",
			current, cat.current.Len(), busy, s.Names.busy)
	}
	return nil
}

// former: numbers of lanes and queues that are not in memory are those of their newest entries.
func (c *checker) former() error {
	s, cat := c.state, &c.state.Names.catalogue
	names := make(map[uint32]string)
	newest, entries := make(map[LaneKey]store.StoredLane), make(map[uint32]store.StoredLane)
	err := errors.Join(store.Scan(c.disk, keys.Queue, func(key, value []byte) error {
		n, err := keys.ParseNumbered(key)
		names[n] = string(value)
		return err
	}), store.Scan(c.disk, keys.Lane, func(key, value []byte) error {
		n, err := keys.ParseNumbered(key)
		if err != nil {
			return err
		}
		v, err := keys.ParseLaneValue(value)
		e := store.StoredLane{Number: n, LaneValue: v}
		entries[n] = e
		if k := (LaneKey{names[v.Queue], v.Tenant, v.Priority}); newest[k].Seq <= v.Seq {
			newest[k] = e
		}
		return err
	}))
	for name, n := range cat.formerQueues.All() {
		if names[n] != name || !cat.queues.Has(n) || s.Names.numbers.At(int(n)) != nil {
			c.report("queue %d is not %q, which has left memory", n, name)
		}
	}
	for name, n := range cat.formerLanes.All() {
		v := entries[n]
		if (formerLane{v.Queue, laneName{v.Tenant, v.Priority}}) != name || !cat.lanes.Has(n) || s.Names.lanes.At(int(n)) != nil {
			c.report("lane %d is not %+v, which has left memory", n, name)
		}
		q := s.Names.numbers.At(int(v.Queue))
		if q != nil && q.lane(v.Tenant, v.Priority) == nil && newest[LaneKey{q.Name, v.Tenant, v.Priority}].Number != n {
			c.report("lane %+v has left memory with another number than %d", name, n)
		}
	}
	return err
}

// queues: counts and numbers are those on disk, rings are closed, and no claim waits for a queue
// with a ready task that may be claimed.
func (c *checker) queues() error {
	s := c.state
	counted := make(map[uint32]keys.CountersValue)
	var clock uint64
	err := store.Scan(c.disk, keys.Counters, func(key, value []byte) error {
		n, err := keys.ParseNumbered(key)
		if err != nil {
			return err
		}
		v, err := keys.ParseCounters(value)
		counted[n], clock = v, max(clock, v.Clock)
		return err
	})
	if err != nil {
		return err
	}
	if clock != s.mint.Clock || c.last > clock {
		c.report("clock is %x, stored is %x, used is %x", s.mint.Clock, clock, c.last)
	}
	if b, err := store.Lookup(c.disk, []byte{keys.ClockSets}); err != nil {
		return err
	} else if !s.mint.Unset && !bytes.Equal(b, keys.AppendClockSets(nil, s.mint.Sets)) {
		c.report("set clocks are %v, on disk %x", s.mint.Sets, b)
	}
	for n, q := range s.Names.numbers.All() {
		if q != nil && (int(q.Number) != n || s.Names.Queues[q.Name] != q) {
			c.report("queue %d is not where it belongs", n)
		}
	}
	for name, q := range s.Names.Queues {
		stored := counted[q.Number]
		if q.Counts != stored.Counts {
			c.report("queue %q is counted as %+v, on disk %+v", name, q.Counts, stored.Counts)
		}
		if err := c.totals(q, stored.Totals); err != nil {
			return err
		}
	}
	return nil
}

// totals: those of a queue are on disk, in its counters or, if it is filed, in its last row.
func (c *checker) totals(q *Queue, stored keys.TotalsValue) error {
	if q.totals.Day == 0 { // not known, or not counted
		if stored.Day != 0 {
			c.report("totals of queue %q are on disk only: %+v", q.Name, stored)
		}
		return nil
	}
	if q.filed {
		if stored.Day != 0 {
			c.report("counters of queue %q, which is filed, have totals: %+v", q.Name, stored)
		}
		value, err := store.Lookup(c.disk, keys.AppendTotals(nil, q.Name, q.totals.Day))
		if err != nil || value == nil && q.totals.Day+TotalsDays <= c.state.Names.totals.today {
			return err
		}
		if stored, err = keys.ParseTotals(value); err != nil {
			return err
		}
	}
	if q.totals != stored {
		c.report("totals of queue %q are %+v, on disk %+v", q.Name, q.totals, stored)
	}
	return nil
}

// settings: those that the shard applies are those on disk.
func (c *checker) settings() error {
	stored := make(map[string][]byte)
	err := store.Scan(c.disk, keys.Settings, func(key, value []byte) error {
		stored[string(key[1:])] = bytes.Clone(value)
		return nil
	})
	if b := stored[""]; b != nil || c.state.Names.Given > 0 {
		delete(stored, "")
		if given, err := keys.ParseSettings(b); err != nil || given.Version != c.state.Names.Given {
			c.report("settings up to version %d are removed, on disk %d: %v", c.state.Names.Given, given.Version, err)
		}
	}
	for place, q := range c.state.Names.settled.All() {
		if q != nil && (q.Version == 0 || q.settledAt != place) {
			c.report("queue %q has place %d among those with settings, which is %d", q.Name, place, q.settledAt)
		}
	}
	for name, q := range c.state.Names.Queues {
		value := stored[name]
		if q.Version > 0 && c.state.Names.settled.At(q.settledAt) != q {
			c.report("queue %q is not among those with settings", name)
		}
		delete(stored, name)
		if !bytes.Equal(q.Value, value) || (q.Version == 0) != (value == nil) {
			c.report("settings of queue %q are %x, on disk %x", name, q.Value, value)
			continue
		}
		if value == nil {
			value = keys.SettingsValue{Version: 1, JSON: keys.GivenSettings}.Append(nil)
		}
		if want, err := ParseSettings(value); err != nil || !reflect.DeepEqual(q.Settings, want.Settings) {
			c.report("queue %q applies %+v, its settings are %s: %v", name, q.Settings, value, err)
		}
	}
	if len(stored) > 0 {
		c.report("settings on disk only: %q", stored)
	}
	return err
}

// outbox: the numbers of messages are as on disk.
func (c *checker) outbox() error {
	ml := &c.state.Mail
	c.errs = append(c.errs, ml.Outbox.Check(c.disk)...)
	inbound, err := store.LoadNumbers(c.disk, keys.Inbound, len(ml.inbound))
	if !slices.Equal(inbound, ml.inbound) {
		c.report("the last messages of shards are %d, on disk %d", ml.inbound, inbound)
	}
	return err
}
