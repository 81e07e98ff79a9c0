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

// The commit pipeline of a shard (docs/architecture/1-overview.md): callers append operations to
// the inbox; the owner decides them one by one and gathers their keys in a group (resolve), commits
// it once (persist), and wakes its callers (release). It carries out the effects that the rules
// have collected: between two operations those that later ones of the group need (follow), before
// the commit those that concern stored data (sendAll), and after it the notifications (release).

// committer makes a batch durable. After an error it is unknown whether the batch was applied.
type committer interface {
	Commit(*pebble.Batch) error
	// Confirm makes sure that the reads of a group without a key still hold.
	Confirm() error
}

type undecided struct {
	owner.Undecided[operation]
	large   owner.Line[*produceOp]
	batches []*leaseOps // their operations come after those of other callers
	barrier *barrierOp  // nothing else is decided before the owner has stood still for it; nil: none
}

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

type waiters struct {
	awaits entries.Waiting[*awaitOp] // for the end of a task
	idlers []*idleOp                 // for queues to become idle
	takers entries.Lines[*takenOp]   // until another shard has taken messages
}

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

// resolve decides the next group. Reads of ranges come first, while disk has the whole state.
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

func (s *shard) note() {
	s.start.Reap = s.clock.Reapable(s.undecided.HasTaken())
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

var upkeepKindOf = [...]UpkeepKind{
	engine.UpkeepTrim: UpkeepTrim, engine.UpkeepList: UpkeepList, engine.UpkeepPromote: UpkeepPromote,
	engine.UpkeepFreeKeys: UpkeepFreeKeys, engine.UpkeepForget: UpkeepForget, engine.UpkeepWake: UpkeepWake,
	engine.UpkeepTell: UpkeepTell, engine.UpkeepRecheck: UpkeepRecheck, engine.UpkeepSend: UpkeepSend,
	engine.UpkeepReap: UpkeepReap, engine.UpkeepTicks: UpkeepTicks, engine.UpkeepTidy: UpkeepTidy,
}

// batched returns the operations of batches that are not decided yet.
func (u *undecided) batched() (ops []operation) {
	for _, b := range u.batches {
		for _, op := range b.ops[b.next:] {
			ops = append(ops, op)
		}
	}
	return ops
}

// decideAll decides callers' operations: first the deferred, then the new ones, then those of
// batches, each with a time budget of its own, so that all make progress.
func (s *shard) decideAll() {
	if s.undecided.HasDeferred() {
		s.rules.BeginBudget(engine.CallerBudget, s.upkeep.At)
		all, n := s.undecided.BeginRetry(), 0
		s.rules.Judge(s.clock.Retry())
		for ; n < all && s.mayDecide(n); n++ {
			s.decide(s.undecided.Retry(n))
		}
		if s.undecided.EndRetry(n) {
			s.clock.Defer(s.rules.Judged)
		}
		s.endUpkeep(UpkeepOperations)
	}
	if s.undecided.HasTaken() {
		s.rules.BeginBudget(engine.CallerBudget, s.upkeep.At)
		s.rules.Judge(s.clock.Taken())
		for n := 0; n < s.opts.GroupCap && s.undecided.HasTaken() && s.mayDecide(n); n++ {
			if op := s.undecided.Next(); !s.putInLine(op) {
				s.decide(op)
			}
		}
	}
	if len(s.undecided.batches) > 0 {
		s.rules.BeginBudget(engine.CallerBudget, s.upkeep.At)
	}
	for n := 0; n < s.opts.GroupCap && len(s.undecided.batches) > 0 && s.mayDecide(n); n++ {
		b := s.undecided.batches[0]
		s.rules.Judge(b.judged)
		op := b.ops[b.next]
		if b.next++; b.next == len(b.ops) {
			s.undecided.batches = slices.Delete(s.undecided.batches, 0, 1)
		}
		s.decide(op)
	}
	if s.undecided.barrier == nil {
		s.decideLarge(s.callers.count() > 0)
	}
}

func (s *shard) mayDecide(n int) bool { return s.undecided.barrier == nil && s.rules.HasBudget(n) }

// decide decides an operation, which is in the owner's hands meanwhile.
func (s *shard) decide(op operation) {
	s.undecided.Decide(op)
	s.decideInRoom(op)
	s.undecided.Decide(nil)
	s.follow()
}

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

func (op *produceOp) recordBytes() (n int) {
	for i := range op.Tasks {
		n += len(op.Tasks[i].Rec)
	}
	return n
}

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
	s.undecided.Defer(op)
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
		own, known = duplicate, &DuplicateError{Key: duplicate.Key, Signal: duplicate.Signal, ID: duplicate.ID}
	case errors.As(err, &invalid):
		own, known = invalid, &InvalidError{invalid.Field, invalid.Value, invalid.Limit}
	}
	if known == nil || own == err { //nolint:errorlint // not within an error with more text
		return cmp.Or(known, err)
	}
	return base.WithText(err.Error(), known) // with what failed
}

func (s *shard) settleAfterCommit(op operation) {
	if s.node != nil {
		if r, ok := op.(request); ok && r.base().reply != nil {
			s.callers.answered = append(s.callers.answered, op)
			return
		}
	}
	s.callers.settled = append(s.callers.settled, op)
}

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

// answerAll answers calls that wait for tasks that have ended, or for queues that are idle now.
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

// observe reports the commit to the observer. REQUIRES: there is one, and the group has persisted.
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

// showAll shows other shards the next tasks to claim. REQUIRES: the group is empty: all is on disk.
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

func (s *shard) endUpkeep(kind UpkeepKind) { s.upkeep.End(uint8(kind), s.upkeepMark()) }

// endCommit is endUpkeep for the commit, which writes the whole group.
func (s *shard) endCommit() {
	s.upkeep.EndOf(uint8(UpkeepCommit), s.upkeepMark(), s.rules.Group.Entries(), s.rules.Group.Size())
}

// endGroup ends the group, with UpkeepRelease, which has woken so many callers.
func (s *shard) endGroup(woken int) {
	now := s.upkeep.UpkeepMark // the group has been cleared
	now.At = time.Since(s.origin)
	s.upkeep.EndOf(uint8(UpkeepRelease), now, woken, 0)
	s.upkeep.EndRound(uint8(UpkeepGroup))
}
