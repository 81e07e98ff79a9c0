package store

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/container/numset"
	"codeq/internal/keys"
)

// LaneNames has the numbers of lanes and queues that IDs of tasks and stored values name.
type LaneNames struct {
	Absent        numset.Set // lanes that were not in memory
	Lanes, Queues numset.Set // that are named
	Entries       int        // read
}

var errSweepEnded = errors.New("the shard has ended")

// Read reads the names, until stop returns true.
func (m *LaneNames) Read(r pebble.Reader, stop func() bool) error {
	for _, of := range [...]struct {
		prefix byte
		name   func(key, value []byte) error
	}{
		{keys.Index, m.byKey}, {keys.Pending, m.byKey},
		{keys.Scheduled, m.waiting}, {keys.Blocked, m.waiting},
		{keys.Dead, m.ended}, {keys.Done, m.ended}, {keys.Canceled, m.ended},
		{keys.Lease, m.leases}, {keys.Unique, m.unique}, {keys.Group, m.turn}, {keys.Wake, m.wakeup},
		{keys.Dependent, m.dependent}, {keys.Pin, m.pin}, {keys.Outbound, m.message}, {keys.Session, m.session},
		{keys.Lane, m.entry}, // last, once all named lanes are known
	} {
		if err := Scan(r, of.prefix, func(key, value []byte) error {
			if m.Entries++; m.Entries%1024 == 0 && stop() {
				return errSweepEnded
			}
			return of.name(key, value)
		}); err != nil {
			return err
		}
	}
	return nil
}

func (m *LaneNames) id(id keys.ID) { m.Lanes.Add(keys.LaneOf(id)) }

func (m *LaneNames) byKey(key, _ []byte) error {
	id, err := keys.ParseByID(key)
	m.id(id)
	return err
}

func (m *LaneNames) waiting(key, value []byte) error {
	id, _, err := keys.ParsePlaceKey(key)
	if err != nil {
		return err
	}
	m.id(id)
	n, _, err := keys.SplitLane(value)
	m.Lanes.Add(n)
	return err
}

func (m *LaneNames) ended(key, value []byte) error {
	_, _, id, err := keys.ParseGrouped(key)
	if err != nil {
		return err
	}
	m.id(id)
	v, _, err := keys.ParseEnded(value)
	m.Lanes.Add(v.Lane)
	return err
}

func (m *LaneNames) leases(key, value []byte) error {
	seq, err := keys.ParseLease(key)
	if err != nil {
		return err
	}
	_, entries, err := keys.ParseLeases(seq, value)
	for i := range entries {
		m.id(entries[i].ID)
		m.Lanes.Add(entries[i].Lane)
	}
	return err
}

func (m *LaneNames) unique(_, value []byte) error {
	v, err := keys.ParseUnique(value)
	m.id(v.ID)
	return err
}

func (m *LaneNames) turn(_, value []byte) error {
	v, err := keys.ParseGroup(value)
	m.id(v.Holder)
	return err
}

func (m *LaneNames) wakeup(key, _ []byte) error {
	queue, _, id, err := keys.ParseGrouped(key)
	m.id(id)
	m.Queues.Add(queue)
	return err
}

func (m *LaneNames) dependent(key, _ []byte) error {
	parent, child, err := keys.ParseDependent(key)
	m.id(parent)
	m.id(child)
	return err
}

func (m *LaneNames) pin(key, _ []byte) error {
	child, parent, err := keys.ParsePin(key)
	m.id(child)
	m.id(parent)
	return err
}

func (m *LaneNames) message(_, value []byte) error {
	msg, err := keys.ParseMessage(value)
	if err == nil {
		m.id(msg.Parent)
		m.id(msg.Child)
	}
	return err
}

func (m *LaneNames) session(_, value []byte) error {
	v, err := keys.ParseSession(value)
	for i := range v.Calls {
		for _, id := range v.Calls[i].IDs {
			m.id(id)
		}
	}
	return err
}

// entry adds the queue of a lane that stays.
func (m *LaneNames) entry(key, value []byte) error {
	n, err := keys.ParseNumbered(key)
	if err != nil {
		return err
	}
	v, _, err := keys.SplitLaneValue(value)
	if err != nil {
		return fmt.Errorf("lane %d: %w", n, err)
	}
	if !m.Absent.Has(n) || m.Lanes.Has(n) {
		m.Queues.Add(v.Queue)
	}
	return nil
}
