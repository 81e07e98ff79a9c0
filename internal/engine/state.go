package engine

import (
	"math"
	"time"

	"codeq/internal/chunked"
	"codeq/internal/keys"
	"codeq/internal/recent"
	"codeq/internal/store"
	"codeq/internal/timeheap"
)

// State is the rules of one shard, and the memory that they go by: what each operation does to
// tasks, lanes, leases, groups, limits, flows, schedules and retention. It is deterministic given
// what disk has, the clock that it is given, and a seed. It reads the store as it is between two
// groups, gathers in group what is to be written, and in effects what the world is to learn of.
//
// Its owner alone uses it, and carries out the effects. After a failure, which is in broken, it is
// of no use any more: no operation can be undone.
type State struct {
	config Config
	Store  *store.Store
	Instant
	Room   Room // on the disk
	Tight  bool // space is to be given back at once
	Broken error

	Queues    map[string]*Queue
	handles   chunked.List[int]    // of queues that have left memory
	numbers   chunked.List[*Queue] // by number; 0 is nobody's; nil: not in memory
	lanes     chunked.List[*Lane]  // by number; nil: not in memory
	catalogue catalogue
	leases    leaseTable
	mint      minter

	windows  windowMemory
	refiller refiller
	trimmer  trimmer
	rings    []*ring // of no use, for others

	nextDue   dueCursor              // of the scheduled tasks
	nextFreed dueCursor              // of the idempotency keys that become free
	expiries  timeheap.Heap[*bucket] // of ended tasks

	recurring recurringTable
	uniques   uniqueCache
	groups    groupCache
	pending   pendingCache
	teller    teller
	pins      pins
	limits    limitTable
	rechecks  []*recheck // queues whose limits have changed
	wakeups   wakeupList // of blocked tasks that may go on
	cursors   scanCursors
	blocked   rangeReader
	children  rangeReader // who waits for a parent
	dead      rangeReader
	out       outbox
	inbound   []uint64 // by shard, the last message taken
	sessions  sessionTable
	interests map[string]KindSet // by node
	canceled  recent.Set[Receipt]

	resting  []*Queue             // may be of no more use
	doubtful chunked.List[*Queue] // resting, and perhaps with wakeups that are on disk only
	settled  chunked.List[*Queue] // have settings, and so stay in memory
	busy     int                  // queues with tasks that have not ended
	arrived  uint64               // tasks that have come from other shards since Open

	Interested KindSet // what any node wants to hear of; in a cluster only
	Wanted     KindSet // what effects is to have of what happens

	Group   commitGroup
	Effects Effects
	Budget  Budget // of what is under way
	steps   []StepDone
	reading reading
	walked  uint64 // keys that walk has stepped over, those that are deleted among them

	scratch, value []byte // for a key and a value on their way into the group
}

// Config is what the rules go by as long as the shard is open.
type Config struct {
	Shard, Shards int
	Replicated    bool // workers may be on other nodes, whose clocks differ
	Seed          [32]byte
	// Elapsed is how long ago some moment was. Budgets ask it, which bound the steps of the owner.
	Elapsed func() time.Duration

	WindowTasks, WindowBytes                               int
	MaxAttempts                                            int
	Backoff                                                func(attempt int, chance float64) time.Duration // the wait after an attempt; chance decides the jitter
	Retention                                              time.Duration
	IdleLanes, SweepLanes, GroupBytes, TrimBytes, TrimLane int
}

// Instant is the time by which a group is decided, ms.
type Instant struct {
	Now    uint64 // monotonic, less what does not count
	Wall   uint64 // since 1970
	Uptime uint64 // monotonic
	Judged uint64 // when what is being decided may have come, as now
	Reap   uint64 // leases with a deadline up to it may be taken back, as now
}

const Never = math.MaxUint64

// reading is how many entries of the store have been read, ever, and how many bytes of values.
type reading struct{ entries, bytes int }

// Effects is what the world is to learn of what has been decided. The owner empties it.
type Effects struct {
	Fed        []*Queue // of which more may be claimed than before
	Shown      []*Queue // of which something else is next to be claimed
	Freed      []*Queue // of those with gated: of each a lease has ended, or will not begin
	Configured []Reconfigured
	Forgotten  []*Queue        // that nobody needs, but perhaps the owner
	Outgoing   []Outgoing      // messages for other shards
	Sweep      *LaneSweep      // somebody is to read what disk has now
	Canceled   []CanceledLease // local leases that cancels have ended
	Events     []Event
	Endings    []Ending
	Resting    []*recurring // schedules of which it is not known when they tick
}

// Reconfigured is a queue that has got other settings.
type Reconfigured struct {
	Queue  *Queue
	Before *Settings
	Fresh  bool // it has been open since before
}

func NewState(c Config, st *store.Store) State {
	return State{
		config:    c,
		Store:     st,
		Queues:    make(map[string]*Queue),
		catalogue: newCatalogue(c.SweepLanes),
		windows:   windowMemory{limit: max(c.WindowBytes/c.Shards, 1)},
		rings:     make([]*ring, 0, spareRings),
		trimmer:   trimmer{since: Never},
		nextDue:   nothingDue,
		nextFreed: nothingDue,
		uniques:   newUniqueCache(),
		groups:    newGroupCache(),
		pending:   newPendingCache(),
		teller:    newTeller(),
		pins:      newPins(),
		limits:    make(limitTable),
		cursors:   scanCursors{group: 1},
		blocked:   rangeReader{prefix: keys.Blocked},
		children:  rangeReader{prefix: keys.Dependent},
		dead:      rangeReader{prefix: keys.Dead},
		Group:     commitGroup{Batch: st.DB().NewBatch()},
	}
}

// feed says that more may be claimed of a queue than before.
func (s *State) feed(q *Queue) {
	if !q.Fed {
		q.Fed = true
		s.Effects.Fed = append(s.Effects.Fed, q)
	}
}

// show says that a claim may get something else of a queue than before, though its counts are the
// same.
func (s *State) show(q *Queue) { s.Effects.Shown = append(s.Effects.Shown, q) }

// free says that a lease of a queue has ended, or will not begin after all.
func (s *State) free(q *Queue) {
	if q.Gated {
		s.Effects.Freed = append(s.Effects.Freed, q)
	}
}

// Seal adds to the group what is gathered beside it. Nothing is decided any more until tidy.
func (s *State) Seal() {
	for _, m := range s.caches() {
		m.seal(&s.Group)
	}
	s.sessions.seal(&s.Group)
	s.out.seal(&s.Group)
	s.noteTouched()
	s.dropEmpty()
	s.Group.seal(s.mint.clock, s.Store.DB())
}

// Tidy bounds the memory once the group has persisted.
func (s *State) Tidy() {
	for _, m := range s.caches() {
		m.trim()
	}
	s.cursors.next()
	s.forgetIdle()
}

// Close ends all reading.
func (s *State) Close() {
	s.CloseReaders()
	for _, m := range s.caches() {
		m.close()
	}
}

// Clear forgets what the group had to tell.
func (e *Effects) Clear() {
	clear(e.Events)
	clear(e.Endings)
	e.Events, e.Endings, e.Canceled = e.Events[:0], e.Endings[:0], e.Canceled[:0]
}

// SetClock goes by the Instant, which the owner has set anew.
func (s *State) SetClock() { s.mint.tick(s.Wall, s.Uptime) }

// BeginGroup begins a group. REQUIRES: the last one has persisted.
func (s *State) BeginGroup() { s.windows.next(s.Now) }

// GroupNumber counts the groups; it wraps around.
func (s *State) GroupNumber() uint32 { return s.windows.pass }

// WantsRefill reports whether ready tasks are to be read into memory before the next group: Refill.
func (s *State) WantsRefill() bool { return len(s.refiller.wants) > 0 }
