package engine

import (
	"errors"
	"fmt"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/ready"
	"codeq/internal/record"
	"codeq/internal/store"
)

// Load builds the memory from disk. Its reads grow with the catalogue and the leases, not with the
// backlog: windows are filled when a claim needs them. clockAge is the age of the stored clock of
// leases, as far as it is known, ms; in a cluster only.
// REQUIRES: Update was called, and convert.Reconcile, if the shards may be of different moments.
func (s *State) Load(clockAge uint64) error {
	s.Leases.ClockAge = clockAge
	s.Leases.leaseTable = newLeaseTable(s.Now)
	s.Names.ready = ready.New(ready.Config{
		Shards: s.config.Shards, WindowTasks: s.config.WindowTasks, WindowBytes: s.config.WindowBytes,
		TrimBytes: s.config.TrimBytes, TrimLane: s.config.TrimLane, IdleLanes: s.config.IdleLanes,
		Elapsed: s.config.Elapsed, Leased: func(id keys.ID) bool { return s.Leases.byID[id] != nil },
	}, s.Store)
	s.mint = store.NewMinter(s.config.Seed, s.config.Shard, s.config.Shards)
	for _, step := range []func() error{
		func() error {
			awakened, err := s.Awakened()
			if err != nil {
				return err
			}
			s.Ties.wakeups.onDisk = len(awakened) > 0
			return s.Names.loadCatalogue(awakened)
		},
		s.loadClockSets,
		s.loadPeriodClock,
		s.Names.loadSettings,
		func() error {
			s.tick(s.Uptime)
			return s.Names.loadGrants()
		},
		s.Leases.loadLeaseClock,
		s.Leases.steps.Load,
		s.loadLeases,
		func() error {
			s.Names.beginLanes()
			s.forgetIdle()
			return nil
		},
		s.Times.loadTimes,
		func() (err error) {
			s.Ties.nextFreed, err = s.FirstDue([]byte{keys.Freed}, keys.ParseFreed)
			return err
		},
		s.Times.loadBuckets,
		s.Ties.loadCaches,
		s.Mail.loadMessages,
		s.Times.loadRecurring,
		func() error { return s.Mail.Sessions.Load(s.Store.DB()) },
		s.Mail.loadInterests,
		s.Mail.loadPlacement,
		s.Names.totals.daily.Load,
		s.Names.sweepAtOpen,
	} {
		if err := s.Store.Read(step); err != nil {
			return err
		}
	}
	s.tick(s.Uptime)
	s.resume()
	return nil
}

// resume shows all queues to claims, and rechecks the tasks that wait for room in a limit: the
// settings may be newer than those that made the tasks wait.
func (s *State) resume() {
	for _, q := range s.Names.numbers.All() {
		if q != nil {
			s.show(q)
			if q.rechecks == 0 { // otherwise its settings asked for one
				s.Names.recheck(q)
			}
			if q.Counts.Blocked > 0 {
				s.Suspects.unread = append(s.Suspects.unread, q)
			}
		}
	}
	for _, st := range s.Ties.limits { // perhaps: the end of a lease shows it
		st.parked = true
	}
}

// loadLeases rebuilds the lease table. Leases of the process that had the queue open before are
// over: they expire at once.
func (s *State) loadLeases() error {
	leased := 0
	for _, q := range s.Names.numbers.All() {
		if q != nil {
			leased += int(q.Counts.Leased)
		}
	}
	s.Leases.reserve(leased)
	return store.ValidLeases(s.Store.DB(), func(seq uint64, h keys.LeaseHeader) *leaseRecord {
		return &leaseRecord{seq: seq, local: h.Local, deadline: h.Deadline, ends: h.Ends, process: h.Process, written: true}
	}, s.loadLease)
}

func (s *State) loadLease(r *leaseRecord, e *keys.LeaseEntry, head *record.Head) error {
	l, err := s.Names.laneNumbered(e.Lane)
	if err != nil {
		return err
	}
	if old := s.Leases.byID[e.ID]; old != nil { // r is newer: its deadline counts
		old.record.live--
		if old.suspect {
			s.Suspects.endSuspect(old)
		}
		s.Leases.removeLease(old)
		if old.ties.Limit != 0 {
			s.Ties.limits[old.ties.Limit].leased--
		}
	}
	ls := s.Leases.newLease()
	*ls = lease{
		id: e.ID, lane: l, since: e.Since, token: e.Token, leases: e.Leases, attempts: e.Attempts,
		local: r.local, duration: e.Duration, retention: head.Retention, record: r, rewritten: head.Rewritten,
		worker: e.Worker, suspect: head.Suspect, handled: r.local, // perhaps
		overdue: head.Attempts == e.Attempts,
	}
	if s.Leases.steps.HasAny() {
		s.Leases.stepsOf[ls.id] = leaseSteps{-1, record.HasSignals | record.HasCursors}
	}
	if ls.suspect {
		s.Suspects.countAtWork(ls, 1)
	}
	s.Ties.tieLease(ls, head)
	r.live++
	deadline := s.Now
	switch {
	case r.local && r.deadline == 0: // see keys.LeaseHeader
		ls.over = true
	case s.config.Replicated: // its worker may be alive, and the clocks of nodes differ
		deadline += s.Leases.clock.Left(r.ends, e.Duration, s.Now)
	case !r.local && !s.HasRoom(RoomScarce): // the time without room is unknown
		deadline += e.Duration
	case !r.local && r.deadline > s.Wall:
		deadline += min(r.deadline-s.Wall, e.Duration)
	default:
		ls.over = true
	}
	s.Leases.add(ls, deadline)
	return nil
}

// loadTimes finds the first scheduled tasks.
func (tm *times) loadTimes() (err error) {
	if tm.nextDue, err = tm.FirstDue([]byte{keys.Scheduled}, keys.ParseScheduled); err != nil {
		return err
	}
	if tm.nextWait = tm.nextDue; tm.periods.Waits > tm.nextDue.At {
		tm.nextWait, err = tm.FirstDue(keys.AppendScheduled(nil, tm.periods.Waits, keys.ID{}), keys.ParseScheduled)
	}
	return err
}

// loadBuckets reads how many ended tasks are kept, and counts of kinds.
func (tm *times) loadBuckets() error {
	return store.Scan(tm.Store.DB(), keys.Buckets, func(key, value []byte) error {
		prefix, number, until, err := keys.ParseBucket(key)
		q := tm.names.numbers.At(int(number))
		if err != nil || q == nil {
			return fmt.Errorf("%w: bucket key %x is malformed, or has no queue", base.ErrCorrupt, key)
		}
		b := tm.bucket(q, bucketKey{prefix, until})
		if b.BucketValue, err = keys.ParseBucketValue(value); err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		if prefix != keys.Dead {
			return nil
		}
		if b.Counted() < b.Size {
			tm.noteUncounted(b)
		}
		return q.kinds.Load(tm.Store.DB(), number, &b.BucketValue)
	})
}

// loadCaches reads the ties of tasks, as far as memory holds them.
func (ti *ties) loadCaches() error {
	err := errors.Join(ti.notices.load(ti.Store.DB()), ti.loadPins())
	for _, m := range ti.caches() {
		err = errors.Join(err, m.Load(ti.Store.DB()))
	}
	return err
}

// beginLanes prepares the windows of the lanes, once the leases are known.
func (ns *names) beginLanes() {
	for _, l := range ns.lanes.All() {
		if l != nil {
			ns.ready.Load(&l.tasks, l.queue.Counts.Ready)
		}
	}
}
