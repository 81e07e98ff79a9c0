package engine

import (
	"encoding/binary"
	"errors"
	"slices"

	"codeq/internal/keys"
)

// Probe reads and disturbs a State, for the tests of packages that use it. Only the owner uses it.
type Probe struct{ s *State }

// Probe is for tests.
func (s *State) Probe() Probe { return Probe{s} }

// Usage is what memory holds, and what has been done since the shard was loaded.
type Usage struct {
	Refills, RefilledLanes, RefilledTasks, RefilledBytes uint64
	Read                                                 int    // entries of the store
	Walked                                               uint64 // keys that were stepped over
	WindowBytes                                          int
	Lanes, Doubtful                                      int
	LaneSweeps                                           uint64
	Wakeups                                              int
	WakeupsOnDisk                                        bool
	WakeupsFrom                                          []byte
	Limits                                               int
	Telling                                              int    // parents with children to be told
	Schedules                                            uint64 // times that a schedule had a turn
	Groups, Uniques                                      CacheUsage
	OutNext, OutFirst, OutStored, OutWaiting             []uint64 // messages, by receiver
	// by sender, the last message taken
	Inbound []uint64
}

// CacheUsage is what memory holds of a range of small entries.
type CacheUsage struct {
	Held    int
	Whole   bool // nothing else exists
	Listed  bool // all keys have fingerprints
	TooMany bool
	Prints  int
	Most    int // that are held between two groups, at most
}

func usageOf[K comparable, V any](m *writeBackCache[K, V]) CacheUsage {
	return CacheUsage{len(m.held), m.whole, m.all, m.tooMany, m.prints.Len(), m.most()}
}

// Usage returns what memory has.
func (p Probe) Usage() Usage {
	s, f := p.s, &p.s.refiller
	return Usage{
		Refills: f.passes, RefilledLanes: f.lanes, RefilledTasks: f.tasks, RefilledBytes: f.read,
		Read: s.reading.entries, Walked: s.walked, WindowBytes: s.windows.bytes,
		Lanes: s.catalogue.loaded.Len(), Doubtful: s.doubtful.Len(), LaneSweeps: s.catalogue.swept,
		Wakeups: len(s.wakeups.order), WakeupsOnDisk: s.wakeups.onDisk, WakeupsFrom: s.wakeups.from,
		Limits: len(s.limits), Telling: s.teller.count, Schedules: s.recurring.looked,
		Groups: usageOf(&s.groups), Uniques: usageOf(&s.uniques),
		OutNext: slices.Clone(s.out.next), OutFirst: slices.Clone(s.out.first), OutStored: slices.Clone(s.out.stored),
		OutWaiting: slices.Clone(s.out.waiting), Inbound: slices.Clone(s.inbound),
	}
}

// MostGroups and MostUniques are how many groups, and idempotency keys, memory holds between two
// groups.
func MostGroups() int  { m := newGroupCache(); return m.most() }
func MostUniques() int { m := newUniqueCache(); return m.most() }

// WindowBytesOf returns the bytes that the windows of a queue hold.
func (p Probe) WindowBytesOf(queue string) (n int) {
	for l := p.s.windows.oldest; l != nil; l = l.newer {
		if l.queue.Name == queue {
			n += l.window.Footprint()
		}
	}
	return n
}

// WasRefilled reports whether a refill has read tasks of a lane.
func (p Probe) WasRefilled(queue, tenant string, priority uint8) bool {
	return p.s.Queues[queue].lane(tenant, priority).pass != 0
}

// CursorOf returns the ID before which no task waits in a scope.
func (p Probe) CursorOf(scope uint64) keys.ID { return cursorOf(&p.s.cursors, scope) }

// ForgetCaches empties the caches: the next access to an entry reads disk, and keys are listed
// again. It returns false if the group has changed entries.
func (p Probe) ForgetCaches() bool {
	s := p.s
	if len(s.uniques.changed)+len(s.groups.changed)+len(s.pending.changed)+len(s.teller.ends.changed)+len(s.pins.counts.changed) > 0 {
		return false
	}
	forgetCache(&s.uniques)
	forgetCache(&s.groups)
	forgetCache(&s.pending)
	forgetCache(&s.teller.ends)
	forgetCache(&s.pins.counts)
	return true
}

func forgetCache[K comparable, V any](m *writeBackCache[K, V]) {
	clear(m.held)
	m.whole = false
	m.forgetPrints()
}

// TooManyUniques adds more fingerprints of idempotency keys than memory has room for.
func (p Probe) TooManyUniques() {
	forgetCache(&p.s.uniques)
	for n := uint32(0); p.s.uniques.note([keys.UniqueLen]byte(binary.BigEndian.AppendUint32(make([]byte, 12, 16), n))); n++ {
	}
}

// LimitWindows sets the limit of the windows to what they hold.
func (p Probe) LimitWindows() { p.s.windows.limit = p.s.windows.bytes }

// HoldCopies adds to the counted bytes of the copies of leased tasks' records.
func (p Probe) HoldCopies(bytes int) { p.s.leases.held += bytes }

// Plant adds an entry to the group.
func (p Probe) Plant(key, value []byte) { p.s.Group.set(key, value) }

// Expire ends the lease of a task as if its deadline had passed. It returns false if the task has
// no lease.
func (p Probe) Expire(id keys.ID) bool {
	ls := p.s.leases.byID[id]
	if ls != nil {
		p.s.expire(ls)
	}
	return ls != nil
}

// Cancel cancels a task without a caller.
func (p Probe) Cancel(id keys.ID) error {
	at, err := p.s.locate(id)
	if err == nil && at == nil {
		err = errors.New("no such task")
	}
	if err == nil {
		p.s.cancel(at)
	}
	return err
}

// Admit takes in a task without a caller.
func (p Probe) Admit(t *NewTask) { p.s.admit(t) }

// Doubt makes queues doubtful: some may have wakeups on disk.
func (p Probe) Doubt(queues []string) {
	for _, name := range queues {
		q := p.s.QueueNamed(name)
		q.resting, q.hasWakeups = true, true
		p.s.doubtful.Append(q)
	}
}

// ReloadOutbox reads the numbers of messages again.
func (p Probe) ReloadOutbox(shards int) error { return p.s.loadOutbox(shards) }

// LoseNumbers resets the stored numbers of messages in memory, as if disk had none.
func (p Probe) LoseNumbers() {
	clear(p.s.out.stored)
	p.s.out.ahead = true
}

// NumbersAhead reports whether numbers of messages are to be stored.
func (p Probe) NumbersAhead() bool { return p.s.out.ahead }

// Send stores a message to a shard.
func (p Probe) Send(to int, m *keys.Message) { p.s.send(to, m) }

// IsSending reports whether some messages are not confirmed.
func (p Probe) IsSending() bool { return p.s.out.busy() }
