package codeq

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"codeq/internal/base"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/entries"
	"codeq/internal/manifest"
	"codeq/internal/owner"
	"codeq/internal/store"
)

// shard is one independent part of a queue: a store, the memory that caches it, and the goroutine
// that owns both and decides everything. Callers reach it through its inbox: only run touches the
// fields below owned, and load before run starts.
type shard struct {
	index   int
	opts    *Options
	peers   []*shard // all shards of the queue, this one included; nil in a cluster
	node    *node    // nil: no cluster
	replica *replica
	epoch   uint64 // in a cluster, the log position at which the leader began; grows
	commit  committer
	hub     *entries.Hub           // for subscribers of events; nil in a cluster: the log publishes
	runs    *entries.Runs[*runner] // for notices of canceled leases; likewise
	inbox   *owner.Inbox[operation]
	origin  time.Time     // start of the durations of steps
	done    chan struct{} // closed when run has ended
	commits atomic.Uint64 // groups that began to commit

	rules   engine.State // owned, like the fields below
	start   engine.Start // of the next group
	clock   owner.Clock
	claims  *dispatch.Dispatcher
	permits *dispatch.Permits // in a cluster
	waiters
	undecided undecided
	callers   callers
	space     owner.DiskWatch
	upkeep    owner.UpkeepClock
	timer     *time.Timer
	panicked  bool // the reason why the owner has ended
}

func newShard(index int, opts *Options, st *store.Store, gates *dispatch.Gates) *shard {
	origin := time.Now()
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], rand.Uint64())
	binary.LittleEndian.PutUint64(seed[8:], rand.Uint64())
	s := &shard{
		index: index, opts: opts, commit: st, origin: origin, done: make(chan struct{}),
		inbox: owner.NewInbox(opts.InboxDepth, opts.private.Mono, comesOnLease),
		clock: owner.NewClock(), timer: time.NewTimer(time.Hour),
		space:   owner.NewDiskWatch(st, opts.MinFreeBytes, opts.Shards),
		upkeep:  owner.UpkeepClock{UpkeepTable: new(owner.UpkeepTable)},
		waiters: waiters{takers: entries.NewLines[*takenOp](opts.Shards)},
	}
	s.rules.Init(configOf(index, opts, seed, func() time.Duration { return time.Since(origin) }), st)
	s.claims = dispatch.New(&s.rules, dispatch.Config{Index: index, Shards: opts.Shards, BatchBytes: opts.Limits.BatchBytes, Port: ownerPort{s.inbox}, Gates: gates, Now: opts.private.Mono})
	s.permits = dispatch.NewPermits(s.claims, permitMail{s})
	return s
}

// join adds the shard to those of a queue. REQUIRES: all are loaded, and no other one runs.
func (s *shard) join(peers []*shard) {
	s.peers = peers
	s.claims.FeedAll()
	s.showAll()
}

// load builds the shard's memory from disk. clockAge is as in engine.State.Load.
func (s *shard) load(clockAge uint64) error {
	s.tick()
	s.look()
	s.rules.Update(s.start)
	if err := s.rules.Load(clockAge); err != nil {
		return err
	}
	for _, r := range s.rules.Effects.Resting {
		s.opts.log.Error("schedule rests", "schedule", r.Name, "err", r.Err)
	}
	s.rules.Effects.Resting = nil
	s.follow()
	return nil
}

// do hands an operation to the shard and waits for its outcome until ctx ends, or limit is over.
// settled is false when the operation still belongs to the shard.
func (s *shard) do(ctx context.Context, op operation, c *completion, limit *base.Limit) (settled bool, err error) {
	if _, ok := op.(*resumeOp); ok { // the owner waits for it, perhaps with a full inbox
		err = s.inbox.Pass(op)
	} else {
		err = s.inbox.Push(ctx, op, limit)
	}
	if err != nil {
		return true, err
	}
	settled, err = c.wait(ctx, limit)
	if err != nil && errors.Is(err, base.ErrLate) && s.inbox.Withdraw(func(o operation) bool { return o == op }) {
		return true, fmt.Errorf("%w: %w", ErrNotLeader, base.ErrLate)
	}
	return settled, err
}

func (s *shard) runGuarded() {
	contain(s.opts.log, "owner", s.run, s.crash)
	s.timer.Stop()
	contain(s.opts.log, "end of the owner", s.claims.LeaveSlowStart, nil)
	close(s.done)
}

// run is the owner: it takes waiting operations, decides and persists them, and wakes the callers,
// until the inbox is stopped and empty or the store fails.
func (s *shard) run() {
	if s.node != nil { // not before: a leader may be loaded and never run
		s.claims.Join(s.node.queue.heads, &s.node.queue.slow, s.opts.SuspectFor)
		s.join(nil)
	}
	for s.permits.Flush(); s.gather(); s.permits.Flush() {
		s.resolve()
		err := s.rules.Broken
		if err == nil {
			err = s.persist()
		}
		if err != nil {
			s.fail(err)
			return
		}
		s.callers.served = s.callers.count()
		s.claims.PublishAll()
		s.release(nil)
		s.endGroup(s.callers.served)
		s.rules.Tidy()
		s.showAll()
		s.forget()
		if b := s.undecided.barrier; b != nil {
			s.undecided.barrier = nil
			b.standStill(s)
		}
	}
	_, _, reason := s.inbox.Take(nil, false)
	s.claims.EndInOrder()
	s.dismiss(reason)
}

// gather returns when there is something to do; false when there will be nothing any more.
func (s *shard) gather() bool {
	for {
		s.tick()
		if s.undecided.HasTaken() || s.callers.count() > 0 {
			return true
		}
		deferred := s.undecided.HasDeferred() || len(s.undecided.batches) > 0
		busy := deferred || s.undecided.large.IsDue(s.rules.Now) ||
			s.claims.MayServe() && s.rules.HasRoom(engine.RoomLow) || s.due()
		if s.node != nil {
			s.inbox.Linger(s.callers.served * 3 / 4)
		}
		s.inbox.Yield()
		ops, late, refused := s.inbox.Take(s.undecided.Spare(), !busy)
		s.undecided.Take(ops)
		s.clock.Look(s.rules.Now, late.Taken, late.Left)
		switch {
		case len(ops) > 0 || deferred:
			return true
		case refused != nil && len(s.undecided.large.All()) == 0:
			return false
		case refused != nil: // nothing would wake the owner any more
			s.undecided.large.Rush()
			return true
		case busy:
			return true
		}
		s.sleep()
	}
}

func (s *shard) due() bool {
	if s.holdsBack() && s.space.Recheck <= s.rules.Uptime {
		return true
	}
	return s.rules.HasWork() || s.permits.UpkeepsDue() > 0
}

// wallCheck bounds the sleep towards a time of the wall clock, which may be set meanwhile.
const wallCheck = uint64(time.Minute / time.Millisecond)

// sleep waits for an operation or for the next deadline, if there is one.
func (s *shard) sleep() {
	wait := uint64(engine.Never)
	uptime, now, wall := s.rules.NextDue()
	if now != engine.Never {
		wait = now - s.rules.Now
	}
	if wall != engine.Never {
		wait = min(wait, wall-s.rules.Wall, wallCheck)
	}
	if at := s.claims.NextOpening(); at != engine.Never && s.rules.HasRoom(engine.RoomLow) {
		wait = min(wait, at-s.rules.Now)
	}
	if s.holdsBack() {
		wait = min(wait, s.space.Recheck-s.rules.Uptime)
	}
	if len(s.undecided.large.All()) > 0 {
		wait = min(wait, s.undecided.large.Recheck()-s.rules.Now)
	}
	if uptime = min(uptime, s.claims.NextDrop()); uptime != engine.Never {
		wait = min(wait, uptime-min(uptime, s.rules.Uptime))
	}
	if wait == engine.Never {
		s.clock.Sleep(engine.Never)
		<-s.inbox.Wake()
		s.clock.Wake(s.inbox.Woken())
		return
	}
	wait = min(wait, uint64(maxLease/time.Millisecond))
	s.clock.Sleep(wait)
	s.timer.Reset(time.Duration(wait) * time.Millisecond)
	select {
	case <-s.inbox.Wake():
		s.timer.Stop()
		s.clock.Wake(s.inbox.Woken())
	case <-s.timer.C:
		s.clock.Wake(s.inbox.Awake())
	}
}

// fail ends the shard: memory and disk may differ from now on. The callers of the group get an
// error: its outcome is unknown, or it was not applied. All other callers learn that nothing was
// done. Opening the queue again, or the next leader, loads the state from disk.
func (s *shard) fail(cause error) {
	defer s.rules.Close() // last: after a panic in Pebble its readers may panic again
	refusal := fmt.Errorf("%w: shard %d: %w", ErrFailed, s.index, cause)
	if s.node != nil {
		if s.rules.Broken != nil { // the stored state here is unusable
			s.replica.group.Fail(cause)
		}
		refusal = fmt.Errorf("%w: shard %d: %s", ErrNotLeader, s.index, cause.Error())
		s.node.log.Info("term ended", "shard", s.index, "cause", cause)
	} else {
		s.opts.log.Error("shard failed", "shard", s.index, "err", cause)
		s.replica.failed = refusal
	}
	s.inbox.Stop(refusal)
	outcome := fmt.Errorf("%w: shard %d: %w", ErrUncertain, s.index, cause)
	if errors.Is(cause, ErrNotLeader) {
		outcome = refusal
	}
	s.release(outcome)
	for _, op := range slices.Concat(s.undecided.Taken(), s.undecided.batched()) {
		refuse(op, refusal)
	}
	s.undecided.batches = nil
	late, _, _ := s.inbox.Take(nil, false)
	for _, op := range late {
		refuse(op, refusal)
	}
	s.dismiss(refusal)
}

func (s *shard) dismiss(reason error) {
	for _, op := range s.waiting() {
		op.settle(reason)
	}
	if s.undecided.barrier != nil {
		s.undecided.barrier.settle(reason)
	}
	for _, op := range s.undecided.large.All() {
		refuse(op, reason)
	}
	for _, op := range slices.Concat(s.undecided.Waiting(), s.undecided.batched()) {
		refuse(op, reason)
	}
	s.permits.Close(reason)
	local := reason
	if s.node != nil && errors.Is(reason, ErrNotLeader) { // claims of this node go on waiting, elsewhere
		local = nil
	}
	s.claims.Close(local, reason)
}

func (s *shard) crash(cause error) {
	s.panicked = true
	inHand := append(s.undecided.InHand(), s.callers.waking)
	s.collectServed()
	var taken *claimOp
	if c := s.claims.Serving(); c != nil {
		taken = c.Caller.(*claimOp)
	}
	contain(s.opts.log, "end of owner", func() { s.rescue(inHand, taken, cause) }, nil)
	fail := func() { s.fail(cause) }
	contain(s.opts.log, "end of shard", fail, func(error) { contain(s.opts.log, "end of shard", fail, nil) })
}

// rescue answers callers of operations in the owner's hands when it panicked; fail answers others.
func (s *shard) rescue(inHand []operation, taken *claimOp, cause error) {
	listed := make(map[operation]bool)
	u := &s.undecided
	for _, op := range slices.Concat(s.callers.settled, s.callers.answered, u.Waiting(), u.Taken(), u.batched(), s.waiting()) {
		listed[op] = true
	}
	outcome := fmt.Errorf("%w: shard %d: %w", ErrUncertain, s.index, cause)
	for _, op := range inHand {
		if op == nil || listed[op] {
			continue
		}
		listed[op] = true
		if shared, ok := op.(sharedOp); ok && op != operation(taken) && !shared.Take() { // it was served
			continue
		}
		contain(s.opts.log, "end of operation", func() { abandon(op, outcome) }, nil)
	}
	if taken != nil && !listed[operation(taken)] {
		abandon(taken, outcome)
	}
}

// tick reads the clocks. One reading serves a whole group.
func (s *shard) tick() {
	at := s.inbox.Now()
	to := &s.start
	to.Now = s.clock.Tick(at, !s.rules.HasRoom(engine.RoomScarce))
	to.Uptime, to.Wall, to.Reap = at, wallMillis(s.opts), s.clock.Reapable(s.undecided.HasTaken())
	if to.Format = manifest.Format; s.node != nil {
		to.Format, to.Ahead = s.replica.group.Format(), s.replica.group.LeaderAhead(to.Wall)
	}
	s.rules.Update(*to)
}

func wallMillis(o *Options) uint64 { return uint64(max(o.private.Wall().UnixMilli(), 0)) }

// An operation without room on the disk is refused before any of its writes: a store that cannot
// write its log fails. Memory, and the log by a reserve (failstop), have room for the group under
// way; the next one waits until Pebble, which tries again, has written the table.
//
// Invariant: while the room is RoomNone or RoomEmpty, the owner's clock stands still, since workers
// cannot extend their leases, and can end few of them.

func (s *shard) look() {
	d, before := &s.space, s.start.Room
	room, looked := d.Look(s.start.Uptime, !s.hasSpace())
	if !looked {
		return
	}
	s.start.Room = room
	if s.start.Tight = d.IsTight(s.start.Uptime); s.start.Tight {
		s.rules.Store.Reclaim(d.Free())
	}
	if room != before {
		s.opts.log.Warn("room on the disk", "shard", s.index, "free", d.Free(), "level", room.String())
	}
	if room < before {
		s.undecided.Unpark()
	}
	s.undecided.DropParked(func(op operation) bool {
		w, ok := op.(roomWaiter)
		gone := ok && !w.WaitsForRoom()
		if gone {
			refuse(op, d.Refusal(s.index))
		}
		return gone
	})
	if room > engine.RoomLow { // no message is sent or taken
		s.takers.Dismiss(func(t *takenOp) { t.settle(d.Refusal(s.index)) })
	}
}

func (s *shard) hasSpace() bool {
	return s.rules.Store.HasSpace() && (s.node == nil || s.node.HasSpace())
}

// holdsBack reports whether something waits for room, or may.
func (s *shard) holdsBack() bool {
	return !s.rules.HasRoom(engine.RoomLow) || !s.rules.HasRoom(engine.Roomy) && s.rules.Times.TicksAreDue() || s.takers.Wait()
}

// parkOrRefuse parks an operation that no caller would repeat, and refuses any other.
func (s *shard) parkOrRefuse(op operation) {
	if shared, ok := op.(sharedOp); ok {
		shared.noRoom(s)
		return
	}
	if w, ok := op.(roomWaiter); op.verb().is(waitsRoom) || ok && w.WaitsForRoom() {
		s.undecided.Park(op)
		return
	}
	refuse(op, s.space.Refusal(s.index))
}

// roomWaiter is an operation that waits for room as long as its caller does.
type roomWaiter interface {
	operation
	WaitsForRoom() bool
}
