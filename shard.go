package codeq

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"codeq/internal/chunked"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/store"
	"codeq/internal/timeheap"
)

// shard is one independent part of a queue: a store, the memory that caches
// it, and the goroutine that owns both and decides everything.
//
// All fields below owned are touched by run alone, and by load before run
// starts. Callers reach a shard through its inbox only.
type shard struct {
	index   int
	opts    *Options
	peers   []*shard // all shards of the queue, this one included; nil in a cluster
	node    *node    // nil: no cluster
	replica *replica
	epoch   uint64 // in a cluster, where the log was when the leader began: each later one has a larger number
	commit  committer
	gates   *gateTable // of the process; nil: the shards of other processes count, too
	hub     *eventHub  // whose subscribers learn of events; nil in a cluster, where the log tells
	runs    *runTable  // who learns of canceled leases; likewise
	inbox   *inbox
	origin  time.Time     // zero of the monotonic clock
	done    chan struct{} // closed when run has ended
	board   *headBoard    // of the process; nil: the queue has one shard
	commits atomic.Uint64 // groups whose commit has begun
	stale   atomic.Int64  // tickets that others have made void since the last sweep, less those that it left

	// owned
	engine.State
	clock   ownerClock
	claims  chunked.List[*queueClaims] // by handle of the queue; nil: nobody has asked
	callers callers

	throttled   timeheap.Heap[*queueClaims] // held back by their rates; monotonic clock, ms
	dirty       []*queueClaims              // speak looks after their permits
	dirtyBefore []*queueClaims              // memory for the next attended
	reports     uint64                      // to permit allocators
	awaits      map[ID][]*awaitOp
	awaited     int // calls of Await since the last sweep, and those left by it
	sweepAt     int // the value of awaited at which the next sweep is due

	served       int         // callers that the last group has served
	taken        []operation // swapped with the inbox
	cursor       int         // of taken: what is before has been resolved
	deferred     []operation // claims to resolve again once lanes are refilled
	again        []operation // memory for the next deferred
	large        largeLine
	retrying     []operation    // deferred operations that are about to be decided; nil: none
	deciding     operation      // nil: none
	giving       *claimOp       // taken by this shard, and not settled yet; nil: none
	panicked     bool           // why the owner has ended
	hungry       []*queueClaims // have waiters, and perhaps ready tasks
	sets         map[[sha256.Size]byte]*claimSet
	setNames     int                        // queues in sets
	hungrySets   []*claimSet                // as hungry
	droppedSets  []*claimSet                // of which some queues still know
	droppedNames int                        // queues of droppedSets
	setsFirst    bool                       // serve has begun with sets
	listed       chunked.List[*queueClaims] // for which claims wait
	idlers       []*idleOp                  // wait for queues to become idle
	timer        *time.Timer
	space        diskSpace
	steps        stepClock

	sweeping             bool // void tickets are being dropped
	sweepLeft, sweepKept int  // of listed, to be looked at; good tickets found

	lots  []int    // for claimOrder
	order []string // likewise
}

func newShard(index int, opts *Options, st *store.Store, gates *gateTable) *shard {
	origin := time.Now()
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], rand.Uint64())
	binary.LittleEndian.PutUint64(seed[8:], rand.Uint64())
	return &shard{
		index:  index,
		opts:   opts,
		commit: st,
		gates:  gates,
		inbox:  newInbox(opts.InboxDepth, origin),
		origin: origin,
		done:   make(chan struct{}),
		State:  engine.NewState(configOf(index, opts, seed, func() time.Duration { return time.Since(origin) }), st),
		clock:  ownerClock{deferred: engine.Never},
		awaits: make(map[ID][]*awaitOp),
		timer:  time.NewTimer(time.Hour),
		space:  newDiskSpace(opts, st.Dir()),
		steps:  stepClock{table: new(stepTable)},
	}
}

// runGuarded is the owner's goroutine.
func (s *shard) runGuarded() {
	contain(s.opts.log, "owner", s.run, s.crash)
	s.timer.Stop()
	close(s.done)
}

// run is the owner: it takes what waits, decides it, persists it, and wakes
// the callers, until the inbox is stopped and empty or the store fails.
func (s *shard) run() {
	for s.flushReports(); s.gather(); s.flushReports() {
		s.resolve()
		err := s.Broken
		if err == nil {
			err = s.persist()
		}
		if err != nil {
			s.fail(err)
			return
		}
		s.served = s.callers.count()
		s.publishAll()
		s.release(nil)
		s.endGroup(s.served)
		s.Tidy()
		s.showAll()
		s.forget()
	}
	_, _, reason := s.inbox.take(nil, false)
	s.dismiss(reason)
}

// gather returns when there is something to do; false when there will be
// nothing any more.
func (s *shard) gather() bool {
	for {
		s.tick()
		if s.cursor < len(s.taken) {
			return true
		}
		busy := len(s.deferred) > 0 || s.largeIsDue() || s.WantsRefill() || s.areHungry() && s.HasRoom(engine.RoomLow) || s.due()
		if s.node != nil {
			s.linger()
		}
		s.yield()
		ops, late, refused := s.inbox.take(s.taken[:0], !busy)
		s.taken, s.cursor = ops, 0
		s.clock.look(s.Now, late)
		switch {
		case len(ops) > 0 || len(s.deferred) > 0:
			return true
		case refused != nil && len(s.large.ops) == 0:
			return false
		case refused != nil: // nothing would wake the owner any more
			s.large.rush()
			return true
		case busy:
			return true
		}
		s.sleep()
	}
}

// yields is how often the owner lets others run before it takes the inbox.
const yields = 4

// lingers is how often the owner of a replicated shard lets others run for those
// to come back that the last group has served.
const lingers = 256

// linger is yield for a shard whose commit takes the time of several messages:
// callers on other nodes, whose answers and next operations are messages as well,
// would miss the next group, and wait for another one.
func (s *shard) linger() {
	for i := 0; i < lingers && s.inbox.len() < s.served*3/4; i++ {
		runtime.Gosched()
	}
}

// yield lets the callers that the last group woke run, for as long as they
// come up with further operations: what they ask for next goes into one commit.
func (s *shard) yield() {
	for i, last := 0, -1; i < yields; i++ {
		runtime.Gosched()
		n := s.inbox.len()
		if n == last {
			return
		}
		last = n
	}
}

// due reports whether a deadline has passed.
func (s *shard) due() bool {
	if s.holdsBack() && s.space.recheck <= s.Uptime {
		return true
	}
	s.Reap = s.reapable()
	return s.UpkeepIsDue() || s.ownUpkeepIsDue() || s.HasDoubts() || s.LeasesEnd(s.Now) && s.HasRoom(engine.RoomScarce)
}

// wallCheck bounds how long a shard sleeps towards a time of the wall clock,
// which may be set meanwhile without waking anybody.
const wallCheck = uint64(time.Minute / time.Millisecond)

// sleep waits for an operation or for the next deadline. Without deadlines
// nothing wakes it but an operation.
func (s *shard) sleep() {
	wait := uint64(engine.Never)
	uptime, now := s.NextDue()
	if now != engine.Never {
		wait = now - s.Now
	}
	if at := s.NextTime(); at != engine.Never {
		wait = min(wait, at-s.Wall, wallCheck)
	}
	if at := s.throttled.Next(); at != engine.Never && s.HasRoom(engine.RoomLow) {
		wait = min(wait, at-s.Now)
	}
	if s.holdsBack() {
		wait = min(wait, s.space.recheck-s.Uptime)
	}
	if len(s.large.ops) > 0 {
		wait = min(wait, s.large.recheck-s.Now)
	}
	if uptime != engine.Never {
		wait = min(wait, uptime-min(uptime, s.Uptime))
	}
	if wait == engine.Never {
		s.clock.sleep(engine.Never)
		<-s.inbox.wake
		s.clock.wake(s.inbox.woken)
		return
	}
	wait = min(wait, uint64(maxLease/time.Millisecond))
	s.clock.sleep(wait)
	s.timer.Reset(time.Duration(wait) * time.Millisecond)
	select {
	case <-s.inbox.wake:
		s.timer.Stop()
		s.clock.wake(s.inbox.woken)
	case <-s.timer.C:
		s.clock.wake(s.inbox.awake())
	}
}

// resolve decides the next group. Whatever reads ranges of the store comes
// first: before the first key of the group, disk is the whole truth.
func (s *shard) resolve() {
	s.look()
	s.note()
	s.beginSteps()
	s.BeginGroup()
	if s.WantsRefill() {
		s.Refill()
		s.showAll()
		s.endStep(StepRefill)
	}
	s.keepUpAll()
	s.follow()
	s.decideAll()
	s.CloseReaders()
	s.endStep(StepOperations)
	if s.feedAll(); s.areHungry() && s.HasRoom(engine.RoomLow) {
		s.Budget = s.NewBudget(engine.CallerBudget, s.steps.at)
		s.serve()
		s.endStep(StepServe)
	}
	s.answerAll()
	s.sendAll()
	s.settleIdlers()
}

// decideAll decides what callers ask for: first what has been put off, then what
// has come, each of them for a time of its own, so that both get on.
func (s *shard) decideAll() {
	if retry := s.deferred; len(retry) > 0 {
		s.Budget = s.NewBudget(engine.CallerBudget, s.steps.at)
		s.deferred = s.again[:0]
		s.Judged, s.clock.deferred = min(s.clock.deferred, s.clock.taken), engine.Never
		n := 0
		s.retrying = retry
		for ; n < len(retry) && s.mayDecide(n); n++ {
			op := retry[n]
			retry[n] = nil
			s.decide(op)
		}
		s.retrying = nil
		if n < len(retry) {
			s.clock.putOff(s.Judged)
			s.deferred = slices.Insert(s.deferred, 0, retry[n:]...) // before what has had its part and wants more
		}
		clear(retry)
		s.again = retry[:0]
		s.endStep(StepOperations)
	}
	if s.cursor < len(s.taken) {
		s.Budget = s.NewBudget(engine.CallerBudget, s.steps.at)
		s.Judged = s.clock.taken
		for n := 0; n < s.opts.GroupCap && s.cursor < len(s.taken) && s.mayDecide(n); n++ {
			op := s.taken[s.cursor]
			s.taken[s.cursor] = nil
			s.cursor++
			if !s.putInLine(op) {
				s.decide(op)
			}
		}
	}
	s.decideLarge(s.callers.count() > 0)
}

// mayDecide reports whether the group has room for an operation, after n others.
// Reading the clock each time would cost as much as deciding.
func (s *shard) mayDecide(n int) bool {
	if s.Broken != nil {
		return false
	}
	return n == 0 || !s.Laden() && (n%32 != 0 || time.Since(s.origin) < s.Budget.Until)
}

// decide decides an operation, which is in the owner's hands meanwhile.
func (s *shard) decide(op operation) {
	s.deciding = op
	s.decideInRoom(op)
	s.deciding = nil
	s.follow()
}

// decideInRoom resolves an operation if there is room for what it writes.
func (s *shard) decideInRoom(op operation) {
	if s.HasRoom(engine.Roomy) || s.HasRoom(op.verb().room(op)) {
		op.resolve(s)
		return
	}
	s.putOff(op)
}

// persist commits the group.
func (s *shard) persist() error {
	s.Seal()
	s.endStep(StepSeal)
	var err error
	switch {
	case !s.Group.Batch.Empty():
		s.commits.Add(1)
		s.space.written += s.Group.Batch.Len()
		if err = s.commit.Commit(s.Group.Batch); s.Group.Ranged && s.node == nil {
			s.Store.DeletedRanges(s.Group.Trimmed)
		}
	case s.callers.count() > 0:
		err = s.commit.Confirm()
	}
	s.endCommit()
	return err
}

// postponeOp resolves an operation again in the next group, when disk has what
// it asks for. REQUIRES: the operation has changed nothing yet.
func (s *shard) postponeOp(op operation) {
	s.clock.putOff(s.Judged)
	s.deferred = append(s.deferred, op)
}

// conclude has the caller of an operation woken that has been decided, and puts off any other.
func (s *shard) conclude(op request, v engine.Verdict, err error) {
	switch v {
	case engine.Again:
		s.postponeOp(op)
	case engine.Full:
		s.putOff(op)
	default:
		op.base().err = s.refusal(err)
		s.settle(op)
	}
}

// refusal is an error of the rules for callers.
func (s *shard) refusal(err error) error {
	switch err {
	case nil:
		return nil
	case engine.ErrNoRoom:
		return s.errNoRoom()
	case engine.ErrNoLanes:
		return &InvalidError{"Task", "one more combination of queue, tenant and priority", fmt.Sprintf("%d in a shard", keys.MaxLane)}
	}
	return translated(err)
}

// translated replaces the error types of the rules by those of this package. It is apart, since what it
// looks for is allocated.
func translated(err error) error {
	var duplicate *engine.Duplicate
	var invalid *engine.Invalid
	var own, known error
	switch {
	case errors.As(err, &duplicate):
		own, known = duplicate, &DuplicateError{Key: duplicate.Key, ID: duplicate.ID}
	case errors.As(err, &invalid):
		own, known = invalid, &InvalidError{invalid.Field, invalid.Value, invalid.Limit}
	}
	if known == nil || own == err {
		return cmp.Or(known, err)
	}
	return &textError{err.Error(), []error{known}} // with what failed
}

// settle has the caller of op woken when the group has persisted.
func (s *shard) settle(op operation) {
	if s.node != nil {
		if r, ok := op.(request); ok && r.base().reply != nil {
			s.callers.answered = append(s.callers.answered, op)
			return
		}
	}
	s.callers.settled = append(s.callers.settled, op)
}

// fail ends the shard: memory and disk may differ from now on. The callers of
// the group learn that its outcome is unknown, or that it was not applied, and
// everybody else that nothing was done. Opening the queue again, or the next
// leader, loads what is on disk.
func (s *shard) fail(cause error) {
	defer s.State.Close() // last: a panic of Pebble's may have left its readers so that they panic again
	refusal := fmt.Errorf("%w: shard %d: %w", ErrFailed, s.index, cause)
	if s.node != nil {
		if s.Broken != nil { // what is stored here is of no use to anybody
			s.replica.group.Fail(cause)
		}
		refusal = notLed(s.index, ErrNotLeader)
		s.node.log.Info("term ended", "shard", s.index, "cause", cause)
	} else {
		s.opts.log.Error("shard failed", "shard", s.index, "err", cause)
	}
	s.inbox.stop(refusal)
	outcome := fmt.Errorf("%w: shard %d: %w", ErrUncertain, s.index, cause)
	if errors.Is(cause, ErrNotLeader) {
		outcome = refusal
	}
	s.release(outcome)
	for _, op := range s.taken[s.cursor:] {
		refuse(op, refusal)
	}
	late, _, _ := s.inbox.take(nil, false)
	for _, op := range late {
		refuse(op, refusal)
	}
	s.dismiss(refusal)
}

// dismiss refuses what waits.
func (s *shard) dismiss(reason error) {
	for _, op := range s.idlers {
		op.settle(reason)
	}
	for _, ops := range s.awaits {
		for _, op := range ops {
			op.settle(reason)
		}
	}
	for _, op := range s.large.ops {
		refuse(op, reason)
	}
	for _, op := range append(s.deferred, s.space.parked...) {
		refuse(op, reason)
	}
	s.closePermits(reason)
	refuseLines := func(c *claimLines) {
		c.waiters.drain(func(t ticket) {
			if s.node == nil || !errors.Is(reason, ErrNotLeader) { // else it goes on waiting, elsewhere
				t.refuse(reason)
			}
		})
		c.remote.drain(func(t ticket) { t.refuse(reason) })
	}
	for _, c := range s.claims.All() {
		if c != nil {
			s.unpublish(c)
			refuseLines(&c.claimLines)
		}
	}
	for _, set := range s.sets {
		refuseLines(&set.claimLines)
	}
}

// ownerClock is the time by which a shard's owner judges leases, such that nobody
// loses one because the owner had other things to do.
//
// An operation on a lease counts from when it came, not from when the owner gets to
// it. The owner knows between which two looks at its inbox it came, and goes by the
// first. For the same reason it takes no lease back whose deadline is later than
// what an operation that it has not decided yet may have come at.
//
// And while the owner stalls, because its disk or its process does, no lease can be
// renewed, and nobody hears of one that was granted: of such a time no more than
// stallAfter counts. While there is no room on the disk for what ends or renews a
// lease, no time counts at all.
//
// All times are of the shard's monotonic clock, in ms since its origin. But for due, they are
// less what did not count.
type ownerClock struct {
	stalled uint64 // ms that did not count
	due     uint64 // when the owner was to read the clock again; never: when somebody wakes it

	taken    uint64 // when what was taken from the inbox may have come
	waiting  uint64 // likewise, what is in the inbox; not before taken
	deferred uint64 // likewise, what is put off to the next group; never: nothing is
}

// stallAfter is how much of a stall counts, in ms. Groups of a slow disk take less,
// so that the leases of those who have died still end in time.
const stallAfter = 250

// tick reads the clocks. One reading serves a whole group.
func (s *shard) tick() {
	c := &s.clock
	at := millisSince(s.origin)
	switch {
	case !s.HasRoom(engine.RoomScarce):
		c.stalled += at - s.Uptime
	case c.due != engine.Never && at > c.due+stallAfter:
		c.stalled += at - c.due - stallAfter
	}
	s.Uptime, c.due = at, at
	s.Now = at - c.stalled
	c.waiting = min(c.waiting, s.Now)
	s.Wall = wallMillis(s.opts)
	s.SetClock()
}

// look is when the owner has taken what is in its inbox, no sooner than now.
// REQUIRES: what it took before is decided, or put off.
func (c *ownerClock) look(now uint64, late lateness) {
	c.taken = min(c.waiting, c.counted(late.taken))
	c.waiting = min(now, c.counted(late.left))
}

// counted is a time less what does not count, or a time before it.
func (c *ownerClock) counted(at uint64) uint64 {
	if at == engine.Never {
		return engine.Never
	}
	return at - min(at, c.stalled)
}

// sleep is before the owner sleeps for so many ms after the last tick; never: until
// somebody wakes it.
func (c *ownerClock) sleep(ms uint64) {
	if ms == engine.Never {
		c.due = engine.Never
	} else {
		c.due += ms
	}
}

// wake is the end of the sleep; nothing has come before the time at, which is with
// what does not count.
func (c *ownerClock) wake(at uint64) { c.waiting = c.counted(at) }

// putOff is for an operation that is decided in the next group, and may have come at a time.
func (c *ownerClock) putOff(came uint64) { c.deferred = min(c.deferred, came) }

// reapable returns the time up to which leases may be taken back: nothing that came
// before it is undecided.
func (s *shard) reapable() uint64 {
	if s.cursor < len(s.taken) {
		return min(s.clock.taken, s.clock.deferred)
	}
	return min(s.clock.waiting, s.clock.deferred)
}

func millisSince(origin time.Time) uint64 { return uint64(time.Since(origin) / time.Millisecond) }

func wallMillis(o *Options) uint64 { return uint64(max(o.wall().UnixMilli(), 0)) }
