package engine

import (
	"bytes"

	"codeq/internal/keys"
	"codeq/internal/ready"
	"codeq/internal/store"
)

// ready reads the ready tasks of every lane.
func (c *checker) ready() error {
	s := c.state
	return store.Scan(c.disk, keys.Task, func(key, value []byte) error {
		number, since, id, err := keys.ParseTask(key)
		if err != nil {
			return err
		}
		l, err := s.Names.laneNumbered(number)
		if err != nil {
			return err
		}
		ls := s.Leases.byID[id]
		if ls == nil {
			it := ready.Item{Pos: ready.Pos{Since: since, ID: id}, Record: bytes.Clone(value)}
			c.onDisk[l] = append(c.onDisk[l], it)
		} else if len(ls.copied) > 0 && !bytes.Equal(ls.copied, value) {
			c.report("record of leased task %s is copied as %x, on disk it is %x", id, ls.copied, value)
		}
		return nil
	})
}

// lanes: each lane is where it belongs, and its ready tasks are as on disk.
func (c *checker) lanes() error {
	s := c.state
	leased := make(map[*Lane][]uint64)
	for _, ls := range s.Leases.byID {
		leased[ls.lane] = append(leased[ls.lane], ls.since)
	}
	var lanes []ready.Stored
	for n, l := range s.Names.lanes.All() {
		if l == nil {
			continue
		}
		if int(l.number) != n || l.queue.lane(l.Tenant, l.Priority) != l {
			c.report("lane %d is not where it belongs", n)
		}
		if l.tasks.Number != l.number || l.tasks.Queue != &l.queue.Queue || l.tasks.Weight != l.queue.Settings.weight(l.Tenant) {
			c.report("lane %d is not as its ready tasks have it", n)
		}
		lanes = append(lanes, ready.Stored{Lane: &l.tasks, Name: l.queue.Name, Tasks: c.onDisk[l], Leased: leased[l]})
	}
	var queues []*ready.Queue
	for _, q := range s.Names.Queues {
		queues = append(queues, &q.Queue)
	}
	c.errs = append(c.errs, s.Names.ready.Check(lanes, queues)...)
	return nil
}
