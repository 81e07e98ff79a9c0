package codeq

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/entries"
	"codeq/internal/keys"
	"codeq/internal/owner"
)

// The commit pipeline of a shard:
//
//	sequence   callers append operations to the inbox
//	resolve    the owner decides them one by one, and gathers their keys in a group
//	persist    the group is committed once
//	release    the callers of the group are woken
//
// Persist is one call and not a stage of its own goroutine: while a group persists the next one
// gathers in the inbox, and resolve reads the whole history from disk, with no write under way.
// With a second group in flight, resolve would need to know which of its reads are behind.
//
// The owner carries out the effects that the rules have collected: between two operations those
// that later operations of the group need (follow), before the commit those that concern stored
// data (sendAll), and after it the notifications (release).

// committer makes a batch durable. After an error it is unknown whether the batch was applied.
type committer interface {
	Commit(*pebble.Batch) error
	// Confirm makes sure that the reads of a group without a key still hold.
	Confirm() error
}

// undecided is the operations that a shard's owner has taken and not decided yet.
type undecided struct {
	taken    []operation // swapped with the inbox
	cursor   int         // in taken: operations before it are resolved
	deferred []operation // resolved again once disk, or memory, has the data they need
	again    []operation // memory for the next deferred
	retrying []operation // those of deferred that are about to be decided; nil: none
	deciding operation   // nil: none
	parked   []operation // wait for room on the disk
	large    owner.Line[*produceOp]
	barrier  *barrierOp // nothing else is decided before the owner has stood still for it; nil: none
}

// callers holds the decided operations of a group.
type callers struct {
	served   int         // number of operations in the last group
	settled  []operation // woken when the group has persisted
	answered []operation // likewise, of other nodes
	waking   operation   // its caller is being woken; nil: none
}

func (c *callers) count() int { return len(c.settled) + len(c.answered) }

// wake wakes a caller, unless that was done before the owner panicked.
func (c *callers) wake(op operation, err error) {
	if op != nil {
		c.waking = op
		op.settle(err)
	}
}

// wakeAll wakes all callers.
func (c *callers) wakeAll(err error) {
	if len(c.answered) > 0 {
		for i, op := range c.answered {
			c.answered[i] = nil
			c.wake(op, err)
		}
		c.answered = c.answered[:0]
		runtime.Gosched() // so that the answers are written before the callers here take the processor
	}
	for i, op := range c.settled {
		c.settled[i] = nil
		c.wake(op, err)
	}
	c.settled, c.waking = c.settled[:0], nil
}

// waiters is the calls that wait for an event in a shard.
type waiters struct {
	awaits entries.Waiting[*awaitOp] // for the end of a task
	idlers []*idleOp                 // for queues to become idle
	takers entries.Lines[*takenOp]   // until another shard has taken messages
}

// waiting returns the calls.
func (w *waiters) waiting() (all []operation) {
	for _, op := range w.idlers {
		all = append(all, op)
	}
	for op := range w.awaits.All {
		all = append(all, op)
	}
	for op := range w.takers.All {
		all = append(all, op)
	}
	return all
}

// resolve decides the next group. Reads of ranges come first: before the first key of the group,
// disk has the whole state.
func (s *shard) resolve() {
	s.look()
	s.note()
	s.upkeep.Begin(s.upkeepMark())
	s.rules.Begin(s.start)
	if s.rules.Refill() {
		s.showAll()
		s.endUpkeep(UpkeepRefill)
	}
	s.keepUpAll()
	s.follow()
	s.decideAll()
	s.endUpkeep(UpkeepOperations)
	if s.claims.FeedAll(); s.claims.MayServe() && s.rules.HasRoom(engine.RoomLow) {
		s.rules.BeginBudget(engine.CallerBudget, s.upkeep.At)
		s.claims.Serve()
		s.collectServed()
		s.endUpkeep(UpkeepServe)
	}
	s.sendAll()
	s.answerAll()
}

// note completes what the rules need to know for the next group.
func (s *shard) note() {
	s.start.Reap = s.clock.Reapable(s.undecided.cursor < len(s.undecided.taken))
	s.start.Wanted = s.rules.Mail.Interested
	if s.node == nil {
		s.start.Wanted = s.hub.Wanted() | engine.WantCancels
	}
	if s.opts.teller != nil {
		s.start.Wanted |= engine.WantCounts
	}
	if !s.awaits.IsEmpty() {
		s.start.Wanted |= engine.WantOutcomes
	}
}

// keepUpAll does all upkeep that is due.
func (s *shard) keepUpAll() {
	own := s.permits.UpkeepsDue()
	for _, done := range s.rules.KeepUp(s.upkeep.At, own) {
		s.upkeep.End(uint8(upkeepKindOf[done.UpkeepKind]), owner.UpkeepMark{At: done.At, Records: done.Records, Bytes: done.Bytes})
	}
	for i := range dispatch.Upkeeps {
		u := &dispatch.Upkeeps[i]
		if s.rules.Broken != nil {
			return
		}
		if u.IsDue(s.permits) {
			s.rules.BeginShare(max(own, 1), s.upkeep.At)
			u.Do(s.permits)
			s.endUpkeep([...]UpkeepKind{dispatch.OpensGates: UpkeepGates, dispatch.Tidies: UpkeepTidy}[u.Kind])
			own--
		}
	}
}

// upkeepKindOf maps the kinds of the engine's upkeep to those of the owner.
var upkeepKindOf = [...]UpkeepKind{
	engine.UpkeepTrim: UpkeepTrim, engine.UpkeepList: UpkeepList, engine.UpkeepPromote: UpkeepPromote,
	engine.UpkeepFreeKeys: UpkeepFreeKeys, engine.UpkeepForget: UpkeepForget, engine.UpkeepWake: UpkeepWake,
	engine.UpkeepTell: UpkeepTell, engine.UpkeepRecheck: UpkeepRecheck, engine.UpkeepSend: UpkeepSend,
	engine.UpkeepReap: UpkeepReap, engine.UpkeepTicks: UpkeepTicks, engine.UpkeepTidy: UpkeepTidy,
}

// decideAll decides callers' operations: first the deferred, then the new ones, each with a time
// budget of its own, so that both make progress.
func (s *shard) decideAll() {
	if retry := s.undecided.deferred; len(retry) > 0 {
		s.rules.BeginBudget(engine.CallerBudget, s.upkeep.At)
		s.undecided.deferred = s.undecided.again[:0]
		s.rules.Judge(s.clock.Retry())
		n := 0
		s.undecided.retrying = retry
		for ; n < len(retry) && s.mayDecide(n); n++ {
			op := retry[n]
			retry[n] = nil
			s.decide(op)
		}
		s.undecided.retrying = nil
		if n < len(retry) {
			s.clock.Defer(s.rules.Judged)
			s.undecided.deferred = slices.Insert(s.undecided.deferred, 0, retry[n:]...) // ahead of those deferred just now
		}
		clear(retry)
		s.undecided.again = retry[:0]
		s.endUpkeep(UpkeepOperations)
	}
	if s.undecided.cursor < len(s.undecided.taken) {
		s.rules.BeginBudget(engine.CallerBudget, s.upkeep.At)
		s.rules.Judge(s.clock.Taken())
		for n := 0; n < s.opts.GroupCap && s.undecided.cursor < len(s.undecided.taken) && s.mayDecide(n); n++ {
			op := s.undecided.taken[s.undecided.cursor]
			s.undecided.taken[s.undecided.cursor] = nil
			s.undecided.cursor++
			if !s.putInLine(op) {
				s.decide(op)
			}
		}
	}
	if s.undecided.barrier == nil {
		s.decideLarge(s.callers.count() > 0)
	}
}

// mayDecide reports whether the group may have an operation more, after n others.
func (s *shard) mayDecide(n int) bool { return s.undecided.barrier == nil && s.rules.HasBudget(n) }

// decide decides an operation, which is in the owner's hands meanwhile.
func (s *shard) decide(op operation) {
	s.undecided.deciding = op
	s.decideInRoom(op)
	s.undecided.deciding = nil
	s.follow()
}

// decideInRoom resolves an operation if there is room for its writes.
func (s *shard) decideInRoom(op operation) {
	if s.rules.HasRoom(engine.Roomy) || s.rules.HasRoom(op.verb().room(op)) {
		op.resolve(s)
		return
	}
	s.parkOrRefuse(op)
}

// checkCaller refuses a produce that would begin a session of a node that is no member: a removed
// node may not know that it was removed, and a message from before the removal may arrive late.
func (s *shard) checkCaller(call *keys.CallNumber) error {
	if call.Node == "" || s.rules.Mail.Sessions.Continues(call) {
		return nil
	}
	member, err := s.replica.group.HasMember(call.Node)
	if err == nil && !member {
		err = fmt.Errorf("%w: node %q, from which the call comes", ErrNotMember, call.Node)
	}
	return err
}

// largePart: a produce with records of at least groupBytes/largePart, 256 KiB, is large.
const largePart = 4

// recordBytes is the size of the records of the tasks.
func (op *produceOp) recordBytes() (n int) {
	for i := range op.Tasks {
		n += len(op.Tasks[i].Rec)
	}
	return n
}

// putInLine puts a produce in the line if it is large.
func (s *shard) putInLine(op operation) bool {
	p, ok := op.(*produceOp)
	if !ok || p.recordBytes() < s.opts.private.GroupBytes/largePart {
		return false
	}
	s.undecided.large.Add(p)
	return true
}

// decideLarge decides the first operation of the line, if it is its turn; others reports whether
// the group has other operations.
func (s *shard) decideLarge(others bool) {
	l := &s.undecided.large
	if s.rules.Broken != nil {
		return
	}
	op, patient, ok := l.First(s.rules.Now, others)
	if !ok {
		return
	}
	if patient && s.rules.HasRoom(op.verb().room(op)) && !s.rules.Store.Takes(op.recordBytes()) {
		l.Wait(s.rules.Now)
		return
	}
	l.Remove()
	s.rules.BeginBudget(engine.CallerBudget, s.upkeep.At)
	s.rules.Judge(s.clock.Taken())
	s.decide(op)
}

// deferOp resolves an operation again in the next group, when disk has the data it needs. REQUIRES:
// the operation has changed nothing yet.
func (s *shard) deferOp(op operation) {
	s.clock.Defer(s.rules.Judged)
	s.undecided.deferred = append(s.undecided.deferred, op)
}

// conclude wakes the caller of an operation that has been decided, and puts off any other.
func (s *shard) conclude(op operation, c *completion, v engine.Verdict, err error) {
	switch v {
	case engine.Again:
		s.deferOp(op)
	case engine.Full:
		s.parkOrRefuse(op)
	default:
		if err != nil {
			c.err = s.refusal(err)
		}
		s.settleAfterCommit(op)
	}
}

// refusal is an error of the rules for callers.
func (s *shard) refusal(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, engine.ErrNoRoom):
		return s.space.Refusal(s.index)
	case errors.Is(err, engine.ErrNoLanes):
		return &InvalidError{"Task", "one more combination of queue, tenant and priority", fmt.Sprintf("%d in a shard", keys.MaxLane)}
	}
	return translated(err)
}

// translated replaces the error types of the rules by those of this package. It is a function of
// its own, since its targets of errors.As are allocated.
func translated(err error) error {
	var duplicate *engine.Duplicate
	var invalid *base.Invalid
	var own, known error
	switch {
	case errors.As(err, &duplicate):
		own, known = duplicate, &DuplicateError{Key: duplicate.Key, ID: duplicate.ID}
	case errors.As(err, &invalid):
		own, known = invalid, &InvalidError{invalid.Field, invalid.Value, invalid.Limit}
	}
	if known == nil || own == err { //nolint:errorlint // not within an error with more text
		return cmp.Or(known, err)
	}
	return base.WithText(err.Error(), known) // with what failed
}

// settleAfterCommit wakes the caller of op when the group has persisted.
func (s *shard) settleAfterCommit(op operation) {
	if s.node != nil {
		if r, ok := op.(request); ok && r.base().reply != nil {
			s.callers.answered = append(s.callers.answered, op)
			return
		}
	}
	s.callers.settled = append(s.callers.settled, op)
}

// follow carries out the effects that the rest of the group depends on.
func (s *shard) follow() {
	if len(s.rules.Effects.Freed) > 0 { // first: they are of the gates from before
		s.claims.LeaveGates()
	}
	if len(s.rules.Effects.Configured) > 0 {
		s.followSettings()
	}
	if !s.rules.Effects.Suspects.IsZero() {
		s.claims.EndSuspects()
	}
}

// followSettings applies new settings of queues to the claims.
func (s *shard) followSettings() {
	for i, r := range s.rules.Effects.Configured {
		s.rules.Effects.Configured[i] = engine.Reconfigured{}
		s.permits.Limit(r)
	}
	s.rules.Effects.Configured = s.rules.Effects.Configured[:0]
}

// sendAll sends the messages that were on disk before the group.
func (s *shard) sendAll() {
	for i := range s.rules.Effects.Outgoing {
		s.deliver(&s.rules.Effects.Outgoing[i])
	}
	clear(s.rules.Effects.Outgoing)
	s.rules.Effects.Outgoing = s.rules.Effects.Outgoing[:0]
	if sw := s.rules.Effects.Sweep; sw != nil {
		s.rules.Effects.Sweep = nil
		s.startSweep(sw)
	}
}

// answerAll answers calls that wait for tasks that the group has ended, or for queues that have
// become idle.
func (s *shard) answerAll() {
	if !s.awaits.IsEmpty() {
		for i := range s.rules.Effects.Endings {
			e := &s.rules.Effects.Endings[i]
			for _, op := range s.awaits.Of(e.ID) {
				op.Outcome = entries.CloneOutcome(&e.Outcome) // the completion owns the result's memory
				s.settleAfterCommit(op)
			}
			s.awaits.Drop(e.ID)
		}
	}
	if len(s.idlers) > 0 {
		s.idlers = slices.DeleteFunc(s.idlers, func(op *idleOp) bool {
			if op.IsGone() {
				return true
			}
			if !s.rules.Idle(&op.Idleness) {
				return false
			}
			s.settleAfterCommit(op)
			return true
		})
	}
}

// collectServed settles the claims that have been served.
func (s *shard) collectServed() {
	for i, served := range s.claims.Served {
		s.claims.Served[i] = dispatch.Served{}
		op := served.Claim.Caller.(*claimOp)
		if served.Waited {
			for _, other := range op.shards {
				if other != s {
					other.claims.CountStale(op.Tickets())
				}
			}
		}
		s.settleAfterCommit(op)
	}
	s.claims.Served = s.claims.Served[:0]
}

// persist commits the group.
func (s *shard) persist() error {
	s.rules.Seal()
	s.endUpkeep(UpkeepSeal)
	var err error
	switch {
	case !s.rules.Group.Batch.Empty() || s.node != nil && len(s.rules.Effects.Events) > 0: // some change nothing
		s.commits.Add(1)
		s.space.Written += s.rules.Group.Batch.Len()
		if err = s.commit.Commit(s.rules.Group.Batch); s.rules.Group.Ranged && s.node == nil {
			s.rules.Store.DeletedRanges(s.rules.Group.Trimmed)
		}
	case s.callers.count() > 0:
		err = s.commit.Confirm()
	}
	s.endCommit()
	return err
}

// release wakes the callers and empties the group.
func (s *shard) release(err error) {
	if err == nil {
		if s.node == nil { // otherwise the log tells
			s.tell() // before waking callers, so that a caller sees its own event
		}
		if s.opts.teller != nil && !s.rules.Group.Batch.Empty() {
			s.observe()
		}
	}
	s.rules.Effects.Clear()
	s.callers.wakeAll(err)
	s.rules.Group.Clear()
}

// tell notifies subscribers and handlers of the group's changes. REQUIRES: it has persisted.
func (s *shard) tell() {
	if e := s.rules.Effects.Events; len(e) > 0 {
		s.hub.Publish(e)
	}
	for _, r := range s.rules.Effects.Canceled {
		s.runs.Cancel(r.Runner, r.Receipt)
	}
}

// observe reports the commit and its changes to the observer. REQUIRES: there is an observer, and
// the group has persisted.
func (s *shard) observe() {
	o := s.opts.teller.Begin()
	for i := range s.rules.Effects.Counted {
		c := &s.rules.Effects.Counted[i]
		if n := c.Events(); n != (keys.Totals{}) { // else only its counts have changed
			o.delta(c.Queue.Name).add(&n)
		}
	}
	o.addCommit(CommitSample{Shard: s.index, Operations: s.callers.count(), Took: s.upkeep.Took})
	s.opts.teller.End(o.isFull())
}

// showAll publishes the next tasks to claim to other shards. REQUIRES: the group is empty, so that
// everything published is on disk.
func (s *shard) showAll() {
	for i, q := range s.rules.Effects.Shown {
		s.rules.Effects.Shown[i] = nil
		s.claims.Publish(q)
	}
	s.rules.Effects.Shown = s.rules.Effects.Shown[:0]
}

// forget drops the queues that neither the rules nor the owner need.
func (s *shard) forget() {
	for _, q := range s.rules.Effects.Forgotten {
		if s.claims.Forget(q) { // else its last user makes it rest again
			s.rules.Names.Forget(q)
		}
	}
	clear(s.rules.Effects.Forgotten)
	s.rules.Effects.Forgotten = s.rules.Effects.Forgotten[:0]
}

func (s *shard) upkeepMark() owner.UpkeepMark {
	records, bytes := s.rules.Work()
	return owner.UpkeepMark{At: time.Since(s.origin), Records: records, Bytes: bytes}
}

// endUpkeep notes that upkeep of a kind ends here, and the next one begins.
func (s *shard) endUpkeep(kind UpkeepKind) { s.upkeep.End(uint8(kind), s.upkeepMark()) }

// endCommit is endUpkeep for the commit, which writes the whole group.
func (s *shard) endCommit() {
	s.upkeep.EndOf(uint8(UpkeepCommit), s.upkeepMark(), s.rules.Group.Entries(), s.rules.Group.Size())
}

// endGroup ends UpkeepRelease, the last one of a group, and the group. woken is the number of
// callers woken.
func (s *shard) endGroup(woken int) {
	now := s.upkeep.UpkeepMark // the group has been cleared
	now.At = time.Since(s.origin)
	s.upkeep.EndOf(uint8(UpkeepRelease), now, woken, 0)
	s.upkeep.EndRound(uint8(UpkeepGroup))
}
