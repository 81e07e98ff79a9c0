// Package ready decides which ready task of a shard is next. The lanes of a queue take turns in
// rings. Memory has the head of each lane, within a bound; refills read the rest from disk before
// its turn. Consumed parts of lanes are deleted by range, and idle lanes may leave memory. The
// package reads the range Task, and deletes by range in Task and Scheduled. It knows no record and
// no rule. Its owner, the rules, reports each task that becomes ready, and each lease.
package ready

import (
	"math"
	"sync/atomic"
	"time"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// Tasks are the ready tasks of a shard. Only the rules of the shard use it.
type Tasks struct {
	// Hold returns in how many shards of the process the tenant of a lane has turns; nil: that is
	// not counted. Release ends the hold.
	Hold    func(*Lane) *atomic.Int32
	Release func(*Lane)

	config Config
	store  *store.Store
	uptime uint64 // at Begin, ms

	windows  windowMemory
	refiller refiller
	trimmer  trimmer
	rings    []*ring // unused, for reuse
	idle     laneList
}

// Config is constant while the shard is open.
type Config struct {
	Shards                   int
	WindowTasks, WindowBytes int // of a lane, and of all shards
	TrimBytes                int // consumed in the shard that is then trimmed; an eighth on a tight disk
	TrimLane                 int // consumed in a lane that then deserves a range deletion
	IdleLanes                int // that stay in memory
	Elapsed                  func() time.Duration

	// Leased reports whether a task in the range Task is leased.
	Leased func(id keys.ID) bool
}

// Queue has the rings of a queue. The owner finds its own view of the queue by Number.
type Queue struct {
	Number uint32 // set before it has lanes
	Mask   uint16 // bit p: lanes of priority p may have ready tasks. Only Tasks changes it
	Shared bool   // the process has tenants with names here, as its owner says

	rings [keys.MaxPriority + 1]*ring // nil: no lane may have a ready task
	asked uint32                      // the epoch of the last claim
}

// Never is the time of an event that does not happen.
const Never = math.MaxUint64

func New(c Config, st *store.Store) Tasks {
	return Tasks{
		config:  c,
		store:   st,
		windows: windowMemory{limit: max(c.WindowBytes/c.Shards, 1)},
		rings:   make([]*ring, 0, spareRings),
		trimmer: trimmer{since: Never},
	}
}

// Begin begins a group, at a time by the clock of leases and by uptime, ms.
func (t *Tasks) Begin(now, uptime uint64) {
	t.uptime = uptime
	t.windows.next(now)
}

// Load takes a lane into memory. Its queue has queued ready tasks on disk: if it has none, nor has
// the lane.
func (t *Tasks) Load(l *Lane, queued uint64) {
	l.window.Use(&t.windows.pool)
	if queued == 0 {
		l.complete = true
		t.noteIdle(l)
		return
	}
	t.joinRing(l)
	if queued > deepLane {
		l.spilled = deepLane // perhaps another lane of the queue is the deep one
		t.store.AddDeepLane(l.Number)
	}
}

// Add makes a task ready. Its record is in the group.
func (t *Tasks) Add(l *Lane, it Item) {
	before := l.spilled
	if t.cache(l, it); before < deepLane && l.spilled >= deepLane {
		t.store.AddDeepLane(l.Number)
	}
	t.joinRing(l)
}

// cache adds a ready task to its lane's window if it belongs there, and memory has room for it.
func (t *Tasks) cache(l *Lane, it Item) {
	if !l.reaches(it.Pos) {
		l.weigh(len(it.Record))
		return // on disk, where the window reaches it later
	}
	w := &l.window
	last := w.IsLast(it.Pos)
	if l.complete && last && (w.Len() >= t.config.WindowTasks || !t.windows.admits(l, cap(it.Record))) {
		l.spill(it.Pos, len(it.Record))
		return
	}
	before := w.Footprint()
	if last {
		w.Append(it)
	} else {
		w.Insert(it)
	}
	if w.Len() > t.config.WindowTasks {
		last := w.PopLast()
		l.spill(last.Pos, len(last.Record))
	}
	t.windows.resized(l, before)
	t.windows.shrink()
}

// Replace replaces the record of a ready task.
func (t *Tasks) Replace(l *Lane, it Item) {
	before := l.window.Footprint()
	l.window.Replace(it)
	t.windows.resized(l, before)
	t.windows.shrink()
}

// Remove takes out a ready task with a record of about so many bytes.
func (t *Tasks) Remove(l *Lane, pos Pos, bytes int) {
	before := l.window.Footprint()
	l.window.Remove(pos)
	l.exact = l.exact && pos != l.next
	t.windows.resized(l, before)
	t.noteIdle(l)
	t.consumed(l, bytes)
}

// Pop takes out the first task of a lane to lease it. Lease and Turn follow.
// REQUIRES: Head has returned the lane, and its tasks have not changed since.
func (t *Tasks) Pop(l *Lane) Item {
	if base.Invariants && !l.reaches(l.window.Last()) {
		base.Violated("the window of lane %d has task %x, and the next one on disk is %x", l.Number, l.window.Last(), l.next)
	}
	before := l.window.Footprint()
	it := l.window.PopFirst()
	l.used = true
	t.windows.resized(l, before)
	l.trail.take(it.Since)
	t.consumed(l, len(it.Record))
	return it
}

// EndLease counts the end of a lease of a task at a since.
func (t *Tasks) EndLease(l *Lane, since uint64) {
	l.leased--
	if base.Invariants && l.leased < 0 {
		base.Violated("lane %d has %d leased tasks", l.Number, l.leased)
	}
	l.trail.unlease(since)
	t.noteIdle(l)
	if l.trail.ripe() >= t.config.TrimLane {
		t.trimSoon(l)
	}
}

// Usage is the memory of a lane and of all windows, and the reads of refills since the load of the
// shard.
type Usage struct {
	Held, Bytes           int    // tasks of the lane, and bytes with the room for others
	Complete, Turn, Share bool   // all its tasks are in memory; it is in its ring; its tenant is counted
	Pass                  uint32 // the last refill that read tasks of the lane

	Windows                    int // bytes of all lanes
	Passes, Lanes, Tasks, Read uint64
}

// Usage tells it, for tests. The lane may be nil.
func (t *Tasks) Usage(l *Lane) Usage {
	f := &t.refiller
	u := Usage{Windows: t.windows.bytes, Passes: f.passes, Lanes: f.lanes, Tasks: f.tasks, Read: f.read}
	if l != nil {
		u.Held, u.Bytes, u.Complete, u.Pass = l.window.Len(), l.window.Footprint(), l.complete, l.pass
		u.Turn, u.Share = l.ringNext != nil, l.share != nil
	}
	return u
}
