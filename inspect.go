package codeq

import (
	"context"
	"fmt"
	"iter"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// TaskInfo is a stored task as an observer sees it.
type TaskInfo struct {
	ID ID
	Task
	State State
	// Attempts made so far; of a leased task, the running one included.
	Attempts int
	// LastError is what the last failed attempt left behind.
	LastError string
	// At is a time that belongs to the state. Ready: since when; Scheduled:
	// when it becomes ready; Leased: when the lease expires; Dead: since when;
	// Done: when it was completed.
	At time.Time
	// Result of a completed task.
	Result []byte
}

// Get returns a task in whatever state it is, as of the last commit. It
// returns ErrNotFound for one that never was, or is done and no longer kept.
func (q *Queue) Get(ctx context.Context, id ID) (*TaskInfo, error) {
	v, err := q.view(ctx, q.shardOf(id))
	if err != nil {
		return nil, err
	}
	defer v.close()
	p, err := v.placeOf(id)
	if err != nil {
		return nil, err
	}
	value, closer, err := v.snap.Get(p.AppendKey(nil, id))
	if err == pebble.ErrNotFound {
		return nil, fmt.Errorf("%w: %s", ErrNotFound, id)
	}
	if err != nil {
		return nil, storageError(err)
	}
	defer func() { _ = closer.Close() }()
	return v.info(id, p, value)
}

// ListOptions says which tasks List yields.
type ListOptions struct {
	Queue string // "": of all queues
	State State  // required
}

// listPage is how many tasks List reads at a time.
const listPage = 256

// List yields the tasks of one state: shard after shard, and in each in the
// order of TaskInfo.At, except that ready and leased tasks come by tenant and
// priority first. It reads some hundred tasks at a time, each time as of the
// last commit: a task that changes its state meanwhile may be missed. The
// sequence ends after the first error.
func (q *Queue) List(ctx context.Context, opts ListOptions) iter.Seq2[*TaskInfo, error] {
	return func(yield func(*TaskInfo, error) bool) {
		prefix, ok := stateRange[opts.State]
		if !ok {
			yield(nil, &InvalidError{"ListOptions.State", opts.State, "Ready, Scheduled, Leased, Dead or Done"})
			return
		}
		for _, s := range q.shards {
			from, _ := keys.Range(prefix)
			for from != nil {
				var page []*TaskInfo
				var err error
				if page, from, err = q.listPage(ctx, s, prefix, from, opts); err != nil {
					yield(nil, err)
					return
				}
				for _, t := range page {
					if !yield(t, nil) {
						return
					}
				}
			}
		}
	}
}

var stateRange = map[State]byte{
	Ready: keys.Task, Leased: keys.Task, Scheduled: keys.Scheduled, Dead: keys.Dead, Done: keys.Done,
}

// listPage returns the tasks among the next entries of a range, and where the
// next page begins; nil: nowhere.
func (q *Queue) listPage(ctx context.Context, s *shard, prefix byte, from []byte, opts ListOptions) (page []*TaskInfo, next []byte, err error) {
	v, err := q.view(ctx, s)
	if err != nil {
		return nil, nil, err
	}
	defer v.close()
	_, upper := keys.Range(prefix)
	it, err := v.snap.NewIter(&pebble.IterOptions{LowerBound: from, UpperBound: upper})
	if err != nil {
		return nil, nil, storageError(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	n := 0
	for valid := it.First(); valid; valid = it.Next() {
		if n++; n > listPage {
			return page, append([]byte(nil), it.Key()...), nil
		}
		value, err := it.ValueAndErr()
		if err != nil {
			return nil, nil, storageError(err)
		}
		id, p, err := keys.ParsePlaceKey(it.Key())
		if err != nil {
			return nil, nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		t, err := v.info(id, p, value)
		if err != nil {
			return nil, nil, err
		}
		if t.State == opts.State && (opts.Queue == "" || t.Queue == opts.Queue) {
			page = append(page, t)
		}
	}
	return page, nil, storageError(it.Error())
}

// view is a shard's disk between two commits. Reading it does not disturb the
// owner.
type view struct {
	queue  *Queue
	snap   *pebble.Snapshot
	lanes  map[uint32]*lane
	leases map[ID]leaseView // nil until asked for
}

type leaseView struct {
	keys.LeaseEntry
	deadline uint64
}

// view opens a view; the queue cannot close before the view has.
func (q *Queue) view(ctx context.Context, s *shard) (*view, error) {
	q.mu.RLock()
	op := &viewOp{completion: newCompletion()}
	settled, err := s.do(ctx, op, &op.completion)
	if !settled && op.claimed.Swap(true) { // settled just now
		settled, err = true, <-op.done
	}
	switch {
	case !settled:
		err = context.Cause(ctx)
	case err == nil:
		return &view{queue: q, snap: op.snap, lanes: make(map[uint32]*lane)}, nil
	}
	q.mu.RUnlock()
	return nil, err
}

// viewOp takes a snapshot. Only the owner can: Pebble shows a batch to readers
// before it has persisted, and the owner is where none is under way.
type viewOp struct {
	completion
	snap    *pebble.Snapshot
	claimed atomic.Bool // by the caller that gives up, or by settle
}

func (op *viewOp) resolve(s *shard) {
	op.snap = s.store.db.NewSnapshot()
	s.settle(op)
}

func (op *viewOp) settle(err error) {
	if (err != nil || op.claimed.Swap(true)) && op.snap != nil { // nobody will close it
		_ = op.snap.Close()
	}
	op.completion.settle(err)
}

func (v *view) close() {
	_ = v.snap.Close() // fails only when closed twice
	v.queue.mu.RUnlock()
}

// placeOf finds where the record of a task lies, if it exists.
func (v *view) placeOf(id ID) (keys.Place, error) {
	value, closer, err := v.snap.Get(keys.AppendIndex(nil, id))
	if err == pebble.ErrNotFound {
		return keys.FirstPlace(keys.LaneOf(id), id), nil
	}
	if err != nil {
		return keys.Place{}, storageError(err)
	}
	defer func() { _ = closer.Close() }()
	p, err := keys.ParsePlace(value)
	if err != nil {
		return p, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return p, nil
}

// info decodes a task. Nothing in it aliases value.
func (v *view) info(id ID, p keys.Place, value []byte) (*TaskInfo, error) {
	value = append([]byte(nil), value...)
	t := &TaskInfo{ID: id, At: msTime(p.At)}
	number, rec := p.Group, value
	var err error
	switch p.Range {
	case keys.Task:
		t.State, t.At = Ready, msTime(keys.SinceMillis(p.At))
	case keys.Scheduled:
		t.State = Scheduled
		number, rec, err = keys.SplitLane(value)
	case keys.Dead:
		t.State = Dead
		number, rec, err = keys.SplitLane(value)
	case keys.Done:
		t.State = Done
		var done keys.DoneValue
		done, rec, err = keys.ParseDone(value)
		number, t.Result, t.At = done.Lane, done.Result, msTime(done.At)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: task %s: %w", ErrCorrupt, id, err)
	}
	r, err := record.Decode(rec)
	if err != nil {
		return nil, fmt.Errorf("%w: task %s: %w", ErrCorrupt, id, err)
	}
	l, err := v.lane(number)
	if err != nil {
		return nil, fmt.Errorf("task %s: %w", id, err)
	}
	t.Task = task(l, &r)
	t.Attempts, t.LastError = int(r.Attempts), r.Error
	if t.State == Ready {
		if err := v.loadLeases(); err != nil {
			return nil, err
		}
		if e, ok := v.leases[id]; ok && e.Since == p.At && e.Leases == r.Leases+1 {
			t.State, t.Attempts, t.At = Leased, int(e.Attempts), msTime(e.deadline)
		}
	}
	return t, nil
}

// lane reads a lane's catalogue entry.
func (v *view) lane(n uint32) (*lane, error) {
	if l := v.lanes[n]; l != nil {
		return l, nil
	}
	b, closer, err := v.snap.Get(keys.AppendNumbered(nil, keys.Lane, n))
	if err != nil {
		return nil, fmt.Errorf("%w: lane %d: %w", ErrCorrupt, n, err)
	}
	entry, err := keys.ParseLaneValue(b)
	_ = closer.Close()
	if err != nil {
		return nil, fmt.Errorf("%w: lane %d: %w", ErrCorrupt, n, err)
	}
	name, closer, err := v.snap.Get(keys.AppendNumbered(nil, keys.Queue, entry.Queue))
	if err != nil {
		return nil, fmt.Errorf("%w: queue %d: %w", ErrCorrupt, entry.Queue, err)
	}
	l := &lane{
		number: n, tenant: entry.Tenant, priority: entry.Priority,
		queue: &queueState{name: string(name), number: entry.Queue},
	}
	_ = closer.Close()
	v.lanes[n] = l
	return l, nil
}

// loadLeases reads the lease records. Of several entries for one task the last
// is the newest.
func (v *view) loadLeases() error {
	if v.leases != nil {
		return nil
	}
	v.leases = make(map[ID]leaseView)
	return scanLeases(v.snap, func(_ uint64, h keys.LeaseHeader, entries []keys.LeaseEntry) error {
		for _, e := range entries {
			if old, ok := v.leases[e.ID]; !ok || old.Leases <= e.Leases {
				v.leases[e.ID] = leaseView{e, h.Deadline}
			}
		}
		return nil
	})
}

// msTime is the time of a stored number of milliseconds; zero for one that no
// clock shows, such as the expiry of what is kept for ever.
func msTime(ms uint64) time.Time {
	if ms > 1<<48 {
		return time.Time{}
	}
	return time.UnixMilli(int64(ms))
}
