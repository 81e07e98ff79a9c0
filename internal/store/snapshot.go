package store

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// Snapshot reads tasks of a store as it is at one moment, and caches the lanes that it has read. It
// is for one goroutine.
type Snapshot struct {
	r      pebble.Reader
	lanes  map[uint32]*Lane
	queues map[uint32]string
	// Leases of the tasks that are read, if the caller knows them; nil: the lease records are read
	// for the first task that may be leased.
	Leases map[keys.ID]Lease
	// Clock is the times of the shard's clocks, for Task.Shown.
	Clock Clock
}

// NewSnapshot returns a Snapshot of r, which must not change.
func NewSnapshot(r pebble.Reader) *Snapshot {
	return &Snapshot{r: r, lanes: make(map[uint32]*Lane), queues: make(map[uint32]string)}
}

// Reader returns the reader of the snapshot.
func (s *Snapshot) Reader() pebble.Reader { return s.r }

// Lane is a lane of the catalogue.
type Lane struct {
	Number      uint32
	Queue       string
	QueueNumber uint32
	Tenant      string
	Priority    uint8
}

// Lease is a lease of a task.
type Lease struct {
	keys.LeaseEntry
	Deadline uint64        // ms since 1970
	Notes    *record.Notes // newer ones than the record has; nil: none
}

// Task is a task as it is stored.
type Task struct {
	ID keys.ID
	keys.Place
	Lane    *Lane
	Record  record.Record
	Ended   keys.EndedValue // of an ended task
	Lease   *Lease          // nil: the task is not leased
	Steps   []record.Step   // the finished ones, for Get
	Cursors record.Cursors  // for Get
	clock   Clock           // of the Snapshot
}

// Lane reads a lane's entry, and that of its queue. Its error matches pebble.ErrNotFound if there
// is none.
func (s *Snapshot) Lane(n uint32) (*Lane, error) {
	if l := s.lanes[n]; l != nil {
		return l, nil
	}
	b, err := Lookup(s.r, keys.AppendNumbered(nil, keys.Lane, n))
	if err == nil && b == nil {
		err = fmt.Errorf("%w: %w", base.ErrCorrupt, pebble.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("lane %d: %w", n, err)
	}
	entry, err := keys.ParseLaneValue(b)
	if err != nil {
		return nil, fmt.Errorf("%w: lane %d: %w", base.ErrCorrupt, n, err)
	}
	queue, known := s.queues[entry.Queue]
	if !known {
		name, err := Lookup(s.r, keys.AppendNumbered(nil, keys.Queue, entry.Queue))
		if err == nil && name == nil {
			err = fmt.Errorf("%w: it is missing", base.ErrCorrupt)
		}
		if err != nil {
			return nil, fmt.Errorf("queue %d: %w", entry.Queue, err)
		}
		queue = string(name)
		s.queues[entry.Queue] = queue
	}
	l := &Lane{Number: n, Queue: queue, QueueNumber: entry.Queue, Tenant: entry.Tenant, Priority: entry.Priority}
	s.lanes[n] = l
	return l, nil
}

// Get returns a task in any state. It returns an error that matches base.ErrNotFound if there is
// none.
func (s *Snapshot) Get(id keys.ID) (*Task, error) {
	p, value, err := s.Find(id)
	if err == nil && value == nil {
		err = fmt.Errorf("%w: %s", base.ErrNotFound, keys.FormatID(id))
	}
	if err != nil {
		return nil, err
	}
	t, err := s.Task(id, p, value)
	if err != nil {
		return nil, err
	}
	if t.Steps, t.Cursors = t.Record.Kept, t.Record.Cursors; !keys.Ended(p.Range) {
		if t.Steps, err = StepsOf(s.r, id); err == nil {
			t.Cursors, err = CursorsOf(s.r, id)
		}
	}
	return t, err
}

// GetByKey returns the task that has an idempotency key: the holder, if the caller has added its
// lease. Otherwise t is nil, and the caller adds the lease of holder. The error matches
// base.ErrNotFound if no task has the key, or its task has ended and is not kept.
func (s *Snapshot) GetByKey(hash [keys.UniqueLen]byte, known keys.ID) (t *Task, holder keys.ID, err error) {
	b, err := Lookup(s.r, keys.AppendHashed(nil, hash))
	if err == nil && b == nil {
		err = fmt.Errorf("%w: no task has the idempotency key", base.ErrNotFound)
	}
	if err != nil {
		return nil, holder, err
	}
	v, err := keys.ParseUnique(b)
	if err != nil {
		return nil, holder, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
	}
	if v.ID != known {
		return nil, v.ID, nil
	}
	t, err = s.Get(v.ID)
	return t, v.ID, err
}

// Find returns the place of a task and the value there; nil if the task does not exist.
func (s *Snapshot) Find(id keys.ID) (p keys.Place, value []byte, err error) {
	p, indexed, err := PlaceOf(s.r, id)
	if err != nil {
		return p, nil, err
	}
	if value, err = Lookup(s.r, p.AppendKey(nil, id)); err != nil || value != nil || indexed {
		return p, value, err
	}
	l, err := s.Lane(keys.LaneOf(id))
	if errors.Is(err, pebble.ErrNotFound) {
		return p, nil, nil
	}
	if err != nil {
		return p, nil, err
	}
	for _, prefix := range [...]byte{keys.Done, keys.Dead, keys.Canceled} {
		var buckets []uint64
		err := ScanPrefix(s.r, keys.AppendBuckets(nil, prefix, l.QueueNumber), func(key, _ []byte) error {
			_, _, until, err := keys.ParseBucket(key)
			buckets = append(buckets, until)
			return err
		})
		if err != nil {
			return p, nil, err
		}
		for _, until := range buckets {
			p = keys.Place{Range: prefix, Group: l.QueueNumber, At: until}
			if value, err = Lookup(s.r, p.AppendKey(nil, id)); err != nil || value != nil {
				return p, value, err
			}
		}
	}
	return p, nil, nil
}

// Task decodes a task from its place and the value there. The result does not alias value.
func (s *Snapshot) Task(id keys.ID, p keys.Place, value []byte) (*Task, error) {
	return s.View(id, p, append([]byte(nil), value...))
}

// View is Task, but the payload and the result of the task alias value.
func (s *Snapshot) View(id keys.ID, p keys.Place, value []byte) (*Task, error) {
	number, rec, ended, err := SplitValue(p, value)
	if err != nil {
		return nil, fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(id), err)
	}
	r, err := record.Decode(rec)
	if err != nil {
		return nil, fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(id), err)
	}
	l, err := s.Lane(number)
	if err != nil {
		return nil, fmt.Errorf("task %s: %w", keys.FormatID(id), err)
	}
	t := &Task{ID: id, Place: p, Lane: l, Record: r, Ended: ended, clock: s.Clock}
	if p.Range == keys.Task {
		if err := s.LoadLeases(); err != nil {
			return nil, err
		}
		if e, ok := s.Leases[id]; ok && e.Since == p.At && e.Leases == r.Leases+1 {
			t.Lease = &e
		}
	}
	return t, nil
}

// LoadLeases reads the lease records, unless the leases are known. The last of several entries for
// one task is the newest.
func (s *Snapshot) LoadLeases() error {
	if s.Leases != nil {
		return nil
	}
	s.Leases = make(map[keys.ID]Lease)
	return ScanLeases(s.r, func(_ uint64, h keys.LeaseHeader, entries []keys.LeaseEntry) error {
		for _, e := range entries {
			if old, ok := s.Leases[e.ID]; !ok || old.Leases <= e.Leases {
				s.Leases[e.ID] = Lease{LeaseEntry: e, Deadline: h.Deadline}
			}
		}
		return nil
	})
}
