package codeq

import (
	"math"
	"time"

	"codeq/internal/chunked"
	"codeq/internal/keys"
	"codeq/internal/recent"
	"codeq/internal/store"
	"codeq/internal/timeheap"
)

// state is the rules of one shard, and the memory that they go by: what each operation does to
// tasks, lanes, leases, groups, limits, flows, schedules and retention. It is deterministic given
// what disk has, the clock that it is given, and a seed. It reads the store as it is between two
// groups, gathers in group what is to be written, and in effects what the world is to learn of.
//
// Its owner alone uses it, and carries out the effects. After a failure, which is in broken, it
// is of no use any more: no operation can be undone.
type state struct {
	config config
	store  *store.Store
	instant
	room   room // on the disk
	tight  bool // space is to be given back at once
	broken error

	queues    map[string]*queueState
	handles   []int                     // of queues that have left memory
	numbers   chunked.List[*queueState] // by number; 0 is nobody's; nil: not in memory
	lanes     chunked.List[*lane]       // by number; nil: not in memory
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
	uniques   uniqueMirror
	groups    groupMirror
	pending   pendingMirror
	teller    teller
	pins      pins
	limits    limitTable
	rechecks  []*recheck // queues whose limits have changed
	marks     markList   // of blocked tasks that may go on
	fronts    frontTable
	blocked   rangeReader
	children  rangeReader // who waits for a parent
	dead      rangeReader
	out       outbox
	inbound   []uint64 // by shard, the last message taken
	sessions  sessionTable
	interests map[string]XKindSet // by node
	canceled  recent.Set[XReceipt]

	resting  []*queueState             // may be of no more use
	doubtful chunked.List[*queueState] // resting, and perhaps with marks that are on disk only
	settled  chunked.List[*queueState] // have settings, and so stay in memory
	busy     int                       // queues with tasks that have not ended
	arrived  uint64                    // tasks that have come from other shards since Open

	interested XKindSet // what any node wants to hear of; in a cluster only
	wanted     XKindSet // what effects is to have of what happens

	group   group
	effects effects
	budget  budget // of what is under way
	steps   []StepDone
	reading reading
	walked  uint64 // keys that walk has stepped over, those that are deleted among them

	scratch, value []byte // for a key and a value on their way into the group
}

// config is what the rules go by as long as the shard is open.
type config struct {
	shard, shards int
	replicated    bool // workers may be on other nodes, whose clocks differ
	seed          [32]byte
	// elapsed is how long ago some moment was. Budgets ask it, which bound the steps of the owner.
	elapsed func() time.Duration

	WindowTasks, WindowBytes                               int
	MaxAttempts                                            int
	Backoff                                                func(attempt int, chance float64) time.Duration // the wait after an attempt; chance decides the jitter
	Retention                                              time.Duration
	idleLanes, sweepLanes, groupBytes, trimBytes, trimLane int
}

// instant is the time by which a group is decided, ms.
type instant struct {
	now    uint64 // monotonic, less what does not count
	wall   uint64 // since 1970
	uptime uint64 // monotonic
	judged uint64 // when what is being decided may have come, as now
	reap   uint64 // leases with a deadline up to it may be taken back, as now
}

const never = math.MaxUint64

// reading is how many entries of the store have been read, ever, and how many bytes of values.
type reading struct{ entries, bytes int }

// effects is what the world is to learn of what has been decided. The owner empties it.
type effects struct {
	fed        []*queueState // of which more may be claimed than before
	shown      []*queueState // of which something else is next to be claimed
	freed      []*queueState // of those with gated: of each a lease has ended, or will not begin
	configured []reconfigured
	forgotten  []*queueState // that nobody needs, but perhaps the owner
	outgoing   []outgoing    // messages for other shards
	sweep      *laneSweep    // somebody is to read what disk has now
	canceled   []XReceipt    // leases of Run that cancels have ended
	events     []XEvent
	endings    []XEnding
	resting    []*recurring // schedules of which it is not known when they tick
}

// reconfigured is a queue that has got other settings.
type reconfigured struct {
	queue  *queueState
	before *XSettings
	fresh  bool // it has been open since before
}

func newState(c config, st *store.Store) state {
	return state{
		config:    c,
		store:     st,
		queues:    make(map[string]*queueState),
		catalogue: newCatalogue(c.sweepLanes),
		windows:   windowMemory{limit: max(c.WindowBytes/c.shards, 1)},
		rings:     make([]*ring, 0, spareRings),
		trimmer:   trimmer{since: never},
		nextDue:   nothingDue,
		nextFreed: nothingDue,
		uniques:   newUniqueMirror(),
		groups:    newGroupMirror(),
		pending:   newPendingMirror(),
		teller:    newTeller(),
		pins:      newPins(),
		limits:    make(limitTable),
		fronts:    frontTable{group: 1},
		blocked:   rangeReader{prefix: keys.Blocked},
		children:  rangeReader{prefix: keys.Dependent},
		dead:      rangeReader{prefix: keys.Dead},
		group:     group{batch: st.DB().NewBatch()},
	}
}

// feed says that more may be claimed of a queue than before.
func (s *state) feed(q *queueState) {
	if !q.fed {
		q.fed = true
		s.effects.fed = append(s.effects.fed, q)
	}
}

// show says that a claim may get something else of a queue than before, though its counts are the same.
func (s *state) show(q *queueState) { s.effects.shown = append(s.effects.shown, q) }

// free says that a lease of a queue has ended, or will not begin after all.
func (s *state) free(q *queueState) {
	if q.gated {
		s.effects.freed = append(s.effects.freed, q)
	}
}

// seal adds to the group what is gathered beside it. Nothing is decided any more until tidy.
func (s *state) seal() {
	for _, m := range s.mirrors() {
		m.seal(&s.group)
	}
	s.sessions.seal(&s.group)
	s.out.seal(&s.group)
	s.noteTouched()
	s.dropEmpty()
	s.group.seal(s.mint.clock, s.store.DB())
}

// tidy bounds the memory once the group has persisted.
func (s *state) tidy() {
	for _, m := range s.mirrors() {
		m.trim()
	}
	s.fronts.next()
	s.forgetIdle()
}

// close ends all reading.
func (s *state) close() {
	s.closeReaders()
	for _, m := range s.mirrors() {
		m.close()
	}
}
