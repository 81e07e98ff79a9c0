package engine

import (
	"sync/atomic"
	"time"

	"codeq/internal/keys"
	"codeq/internal/ready"
	"codeq/internal/recurrence"
	"codeq/internal/store"
)

// State is the rules of one shard, with the memory that they use: the effects of each operation on
// tasks, lanes, leases, groups, limits, flows, schedules and retention. It is deterministic given
// the disk, the clock, and a seed. It reads the store as it is between two groups, and collects
// writes in Group, and notifications in Effects.
//
// Only its owner uses it, and carries out the effects. After a failure, which is in Broken, it must
// not be used any more: no operation can be undone.
type State struct {
	round

	Names    names
	Mail     mail
	Leases   leases
	Times    times
	Ties     ties
	Suspects suspects

	dead    store.RangeReader
	endings endings

	steps []upkeepDone
}

// Config is constant while the shard is open.
type Config struct {
	Shard, Shards int
	Replicated    bool // workers may be on other nodes with other clocks
	Untimed       bool // nothing happens because its time has come: it waits for the next owner
	Seed          [32]byte
	// Elapsed returns the time since some fixed moment. It is used for budgets, which limit the
	// owner's steps.
	Elapsed func() time.Duration

	WindowTasks, WindowBytes int
	MaxAttempts              int
	SuspectFor               uint64 // how long a suspect is at work until it passes, ms
	// Backoff is the wait after an attempt; chance decides the jitter.
	Backoff                                                func(attempt int, chance float64) time.Duration
	Retention                                              time.Duration
	IdleLanes, SweepLanes, GroupBytes, TrimBytes, TrimLane int
}

const Never = ready.Never

// Effects lists the notifications that the owner sends for a group. The owner empties it.
type Effects struct {
	Fed        []*Queue // they have more to claim than before
	Shown      []*Queue // a claim may get something else than before
	Freed      []*Queue // Gated queues: each entry is a lease that has ended, or will not begin
	Configured []Reconfigured
	Forgotten  []*Queue        // the rules do not need them any more; the owner may
	Outgoing   []Outgoing      // messages to other shards
	Sweep      *LaneSweep      // a reader must read the present disk
	Canceled   []CanceledLease // local leases that ended because of cancels
	Events     []Event
	Counted    []Counted // if WantCounts; each queue of Touched once
	Endings    []Ending
	Resting    []*recurrence.Schedule // schedules without known ticks
	Suspects   suspectEffects
}

// Reconfigured is a queue that has got other settings.
type Reconfigured struct {
	Queue     *Queue
	AfterOpen bool // the settings have changed after Open
}

// Init prepares a new State for Load. It must not be copied afterwards: its parts lead to others.
func (s *State) Init(c Config, st *store.Store) {
	*s = State{
		round:    round{config: c, Reads: store.Reads{Store: st}, Group: commitGroup{Writes: store.NewWrites(st)}},
		Names:    names{round: &s.round, Queues: make(map[string]*Queue), catalogue: newCatalogue(c.SweepLanes), totals: totals{daily: store.NewDaily(&s.Reads)}},
		Mail:     mail{round: &s.round},
		Leases:   leases{round: &s.round, names: &s.Names, steps: store.NewSteps(&s.Reads), stepsOf: make(map[keys.ID]leaseSteps)},
		Times:    times{round: &s.round, names: &s.Names, nextDue: store.NothingDue, nextWait: store.NothingDue},
		Suspects: suspects{round: &s.round, names: &s.Names, leases: &s.Leases, ties: &s.Ties},
		dead:     s.Range(keys.Dead),
	}
	s.Ties = newTies(&s.round, &s.Names, &s.Mail, &s.Leases) // reads the configuration of the round
}

// feed notes that a queue has more to claim than before.
func (r *round) feed(q *Queue) {
	if !q.Fed {
		q.Fed = true
		r.Effects.Fed = append(r.Effects.Fed, q)
	}
}

// show notes that claims may get something else of a queue, though its counts are the same.
func (r *round) show(q *Queue) { r.Effects.Shown = append(r.Effects.Shown, q) }

// free notes that a lease of a queue has ended, or will not begin after all.
func (r *round) free(q *Queue) {
	if q.Gated {
		r.Effects.Freed = append(r.Effects.Freed, q)
	}
}

// Seal adds to the group the changes that were collected beside it. Nothing is decided any more
// until Tidy.
func (s *State) Seal() {
	s.closeReaders()
	for _, m := range s.Ties.caches() {
		m.Seal(&s.Group.Writes)
	}
	s.Mail.Sessions.Seal(&s.Group.Writes)
	s.Mail.Outbox.Seal(&s.Group.Writes)
	s.Times.sealPeriodClock()
	s.sealClockSets()
	s.sealNextFormat()
	s.Leases.storeLeaseClock() // the group may have granted the first leases
	s.Names.noteTouched()
	s.Times.dropEmpty()
	s.Group.seal(s.mint.Clock)
}

// Tidy limits the memory once the group has persisted.
func (s *State) Tidy() {
	for _, m := range s.Ties.caches() {
		m.Trim()
	}
	s.Ties.blocked.Next()
	s.forgetIdle()
}

// Close closes all readers.
func (s *State) Close() {
	s.closeReaders()
	for _, m := range s.Ties.caches() {
		m.Close()
	}
}

// Clear empties the effects that concern others: events, endings, counts and cancels. The owner
// empties each of the others when it has carried it out.
func (e *Effects) Clear() {
	clear(e.Events)
	clear(e.Endings)
	clear(e.Counted)
	e.Counted = e.Counted[:0]
	e.Events, e.Endings, e.Canceled = e.Events[:0], e.Endings[:0], e.Canceled[:0]
}

// Update sets the inputs between two groups. HasWork and NextDue answer by it. REQUIRES for Load:
// it was called.
func (s *State) Update(to Start) {
	s.Instant, s.Format, s.Room, s.Tight, s.Wanted = to.Instant, to.Format, to.Room, to.Tight, to.Wanted
	s.tick(s.Uptime)
}

// Begin begins a group. REQUIRES: the last one has persisted.
func (s *State) Begin(start Start) {
	s.Group.assertEmpty()
	s.Update(start)
	s.begun++
	s.Names.ready.Begin(s.Now, s.Uptime)
}

// agreed returns the wall clock on which the nodes of a cluster agree, ms; 0: it is not known.
func (r *round) agreed() uint64 {
	if r.Ahead == Never && r.mint.Clock == 0 { // there is nothing to go on with
		return r.Wall
	}
	return r.Wall - min(r.Ahead, r.Wall)
}

// Clock returns the clocks of the shard.
func (r *round) Clock() store.Clock {
	c := store.Clock{Wall: r.agreed(), Stamps: r.mint.Now(), Periods: r.periods.Now, Sets: r.mint.Sets}
	if c.Wall == 0 {
		c.Wall = c.Periods
	}
	return c
}

func (s *State) tick(uptime uint64) {
	agreed := s.agreed()
	s.mint.Tick(agreed, uptime)
	s.periods.Tick(agreed, uptime)
	s.Names.totals.today = uint32(s.mint.Time / dayMillis)
}

// Refill reads the ready tasks into memory that claims need next, as far as one pass goes.
// It returns false if none are missing.
// REQUIRES: the group is empty, so that disk has every task.
func (s *State) Refill() bool {
	s.Group.assertEmpty()
	if !s.Names.ready.WantsRefill() {
		return false
	}
	done, err := s.Names.ready.Refill()
	if err != nil {
		s.Broken = err
	}
	s.ReadEntries += done.Entries
	s.ReadBytes += done.Bytes
	for _, of := range done.Shown {
		if q := s.Names.queueOf(of); q != nil {
			s.show(q)
		}
	}
	for _, of := range done.Fed {
		if q := s.Names.queueOf(of); q != nil {
			s.feed(q)
			s.show(q)
		}
	}
	return true
}

// forgetQueues reports the queues that the rules no longer need: the owner drops them, unless it
// needs them itself. A queue with wakeups in memory stays until they are applied. While wakeups are
// on disk only, a queue that may have some of them is doubtful, and stays as well.
func (s *State) forgetQueues() {
	if !s.Ties.wakeups.onDisk {
		for range min(s.Names.doubtful.Len(), doubtsAtOnce) {
			s.Names.resting = append(s.Names.resting, s.Names.doubtful.Pop())
		}
	}
	var awakened map[*Queue]bool
	for _, q := range s.Names.resting {
		if q.hasWakeups && s.Ties.wakeups.onDisk {
			s.Names.doubtful.Append(q)
			continue
		}
		if q.resting = false; q.hasWakeups {
			if awakened == nil {
				awakened = s.Ties.wakeups.queues()
			}
			if q.hasWakeups = awakened[q]; q.hasWakeups {
				continue // applying the last of them calls Rest
			}
		}
		if q.Suspects != 0 && q.Counts.Blocked == 0 { // they were canceled
			s.Suspects.forgetSuspects(q)
		}
		if s.Names.isUnknown(q) && s.Names.isFiled(q) {
			s.Effects.Forgotten = append(s.Effects.Forgotten, q)
		}
	}
	clear(s.Names.resting)
	s.Names.resting = s.Names.resting[:0]
}

// forgetIdle drops from memory the lanes that have been idle longest, beyond those that may stay,
// and reports the queues that are no longer needed. Its cost grows with the changes of the group,
// and with doubtsAtOnce.
// REQUIRES: the group is empty.
func (s *State) forgetIdle() {
	for idle := s.Names.ready.Idle(); idle != nil; idle = s.Names.ready.Idle() {
		l := s.Names.laneOf(idle)
		s.Names.dropLane(l)
		s.Names.catalogue.formerLanes.Add(formerLane{l.queue.Number, laneName{l.Tenant, l.Priority}}, l.number, s.Names.formerMost())
	}
	s.forgetQueues()
}

// closeReaders closes the readers of ranges as they were before the group. Write-back caches close
// theirs when they are sealed.
func (s *State) closeReaders() {
	s.Ties.blocked.Close()
	s.Ties.children.Close()
	s.dead.Close()
	s.Leases.steps.Close()
	s.Names.totals.daily.Close()
}

// Share begins to count the turns of tenants, and the suspects at work, in tables of all shards of
// the process. Without the first the shard has no turns any more; without the second it goes on.
func (s *State) Share(t tenantTable, suspects suspectTable) {
	if suspects != nil {
		s.Suspects.shareSuspects(suspects)
	}
	if t == nil {
		s.Names.ready.Hold = nil
		for _, l := range s.Names.lanes.All() {
			if l != nil {
				s.Names.ready.Weigh(&l.tasks, l.tasks.Weight)
			}
		}
		return
	}
	// lanes in rings are counted at their next turns
	s.Names.ready.Hold = func(of *ready.Lane) *atomic.Int32 {
		l := s.Names.laneOf(of)
		return t.Hold(l.queue, l.Tenant, l.Priority)
	}
	s.Names.ready.Release = func(of *ready.Lane) {
		l := s.Names.laneOf(of)
		t.Drop(l.queue, l.Tenant, l.Priority)
	}
}

// Probe is for tests.
func (s *State) Probe() Probe { return Probe{s} }
