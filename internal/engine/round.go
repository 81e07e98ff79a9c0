package engine

import (
	"time"

	"codeq/internal/store"
)

// round is the context of one group: the disk as it is before the group, the time, the room and the
// budget. It also collects the results: the Group to write, and the Effects to tell. All parts of
// the rules stand on it.
type round struct {
	store.Reads
	config Config
	Instant
	Format int
	Room   Room
	Tight  bool
	Wanted KindSet
	Judged uint64 // earliest time at which the operation under decision may have arrived, as Now

	mint    store.Minter
	periods store.PeriodClock
	begun   uint32 // groups

	Group   commitGroup
	Effects Effects

	budget       budget // of the work under way
	upkeepBudget budget // of KeepUp, and of the shares that follow it

	scratch, value []byte // for a key and a value before they are copied into the group
}

// Instant is the time at which a group is decided, ms.
type Instant struct {
	Now  uint64 // monotonic, without the time that does not count
	Wall uint64 // since 1970
	// Ahead is by how much Wall is ahead of the clocks of the other nodes; Never: that is not
	// known.
	Ahead  uint64
	Uptime uint64 // monotonic
	Reap   uint64 // leases with a deadline up to it may be taken back, as Now
}

// Start holds the inputs of a group that the owner gives.
type Start struct {
	Instant
	Format int     // that the shard may store; it may rise between two groups
	Room   Room    // on the disk
	Tight  bool    // space should be given back at once
	Wanted KindSet // the kinds that Effects should contain
}

// Judge sets the earliest time at which the operations that follow may have arrived, as Now: a
// lease that had expired by then is lost.
func (r *round) Judge(at uint64) { r.Judged = at }

// Want adds kinds to Wanted for the rest of the group.
func (r *round) Want(kinds KindSet) { r.Wanted |= kinds }

// Break ends the use of the rules: memory and disk may differ from now on.
func (r *round) Break(err error) { r.Broken = err }

// fails is Break if there is an error, and reports whether there is one.
func (r *round) fails(err error) bool {
	if err != nil {
		r.Broken = err
	}
	return err != nil
}

// Mend returns the failure of an operation that only reads, and allows other operations. The damage
// that it found remains.
func (r *round) Mend() (failure error) {
	failure, r.Broken = r.Broken, nil
	return failure
}

// TakeFed returns the queues that may have got claimable tasks since the last call. REQUIRES: the
// caller is done with each of them before it feeds more than one other.
func (r *round) TakeFed() []*Queue {
	fed := r.Effects.Fed
	r.Effects.Fed = fed[:0]
	for _, q := range fed {
		q.Fed = false
	}
	return fed
}

// budget bounds the work of a part of a group. Work that can be divided calls Spent before each
// unit: it may exceed the budget by one unit.
type budget struct {
	begun   bool          // one unit is always free, so that each kind of work makes progress
	records int           // entries read and written at which the budget is spent
	bytes   int           // size of the group, and bytes read, at which it is spent
	until   time.Duration // by Config.Elapsed
}

// budgetSize is how much a budget allows.
type budgetSize struct {
	Records  int
	Fraction int // its bytes are GroupBytes divided by this
	Time     time.Duration
}

// The budgets of a group. The time limits them on a slow machine, where each must stay below 10 ms,
// including the unit under way.
var (
	UpkeepBudget = budgetSize{Records: 2048, Fraction: 2, Time: 4 * time.Millisecond}
	CallerBudget = budgetSize{Records: 8192, Fraction: 1, Time: 5 * time.Millisecond}
)

// BeginBudget begins a budget, at a time.
func (r *round) BeginBudget(size budgetSize, at time.Duration) {
	records, bytes := r.Work()
	r.budget = budget{records: records + size.Records, bytes: bytes + r.config.GroupBytes/size.Fraction, until: at + size.Time}
}

// BeginShare begins, at a time, a budget that is one of n equal shares of the rest of that of
// KeepUp.
func (r *round) BeginShare(n int, at time.Duration) {
	records, bytes := r.Work()
	whole := &r.upkeepBudget
	until := at + (whole.until-at)/time.Duration(n)
	r.budget = budget{records: records + (whole.records-records)/n, bytes: bytes + (whole.bytes-bytes)/n, until: until}
}

// Spent reports whether the budget of the current work is used up.
func (r *round) Spent() bool {
	if !r.budget.begun {
		r.budget.begun = true
		return false
	}
	return r.isLate()
}

// isLate is Spent for work that can wait for the next group.
func (r *round) isLate() bool { return r.isUsedUp() || r.config.Elapsed() >= r.budget.until }

// isUsedUp is Spent without reading the clock.
func (r *round) isUsedUp() bool {
	records, bytes := r.Work()
	return records >= r.budget.records || bytes >= r.budget.bytes
}

// HasBudget reports whether the group has room for an operation, after n others since the budget
// began. Reading the clock each time would cost as much as deciding.
func (r *round) HasBudget(n int) bool {
	if r.Broken != nil {
		return false
	}
	return n == 0 || !r.isUsedUp() && (n%32 != 0 || r.config.Elapsed() < r.budget.until)
}

// Work returns how many entries, and how many bytes of them, the owner has read and added to the
// group so far.
func (r *round) Work() (records, bytes int) {
	return r.ReadEntries + r.Group.Entries(), r.ReadBytes + r.Group.Size()
}

// Room is the level of free space on the disk. Work that goes on at a level goes on at all levels
// above it. The work admitted at the levels above bounds the writes at a level, so that the reserve
// below MinFreeBytes is used up step by step: by claims, then by the ends of leases, then by work
// that frees space. The last half is for the resulting tables and compactions.
type Room uint8

const (
	Roomy      Room = iota
	RoomLow         // below MinFreeBytes: operations that add tasks are refused
	RoomScarce      // below 3/4 of it: leases are ended and extended, and none is granted
	RoomNone        // below 1/2: only writes that give space back are done
	RoomEmpty       // below 1/4: nothing is written
)

func (r Room) String() string {
	return [...]string{"enough", "low", "scarce", "none", "empty"}[r]
}

// HasRoom reports whether there is room for the work that goes on down to a level.
func (r *round) HasRoom(level Room) bool { return r.Room <= level }
