package codeq

import (
	"fmt"
	"time"

	"codeq/internal/engine"
	"codeq/internal/owner"
)

// StepKind is a kind of step of a shard's owner, the one goroutine that decides everything in the
// shard. While the owner takes a step, it serves no call.
type StepKind uint8

// The steps of a group, in their order. Those of upkeep, StepTrim to StepTidy, are taken only while
// they are due, and are bounded together.
const (
	StepRefill     StepKind = iota // reads ready tasks into memory
	StepTrim                       // deletes the consumed parts of lanes by range
	StepList                       // lists the keys, groups and parents that exist, after Open if they are many
	StepPromote                    // makes scheduled tasks ready whose time has come
	StepFreeKeys                   // frees idempotency keys whose time has passed
	StepForget                     // deletes ended tasks whose retention has passed
	StepWake                       // makes blocked tasks ready that need not wait any longer
	StepTell                       // tells the tasks that waited for a task that it has ended
	StepRecheck                    // finds the tasks that wait for limits that have been changed
	StepSend                       // sends messages to other shards
	StepGates                      // lets claims take the next tasks that rates allow
	StepReap                       // takes back tasks whose leases have expired; in a cluster, stores the clock of leases
	StepTicks                      // produces the tasks of schedules
	StepTidy                       // removes entries that are not needed any more
	StepOperations                 // decides the operations of callers
	StepServe                      // gives ready tasks to waiting claims
	StepSeal                       // completes and orders the commit
	StepCommit                     // writes the commit, in a cluster to a majority
	StepRelease                    // wakes the callers
	StepGroup                      // all of the steps above, from one reading of the inbox to the next
	endOfSteps
)

var stepNames = [endOfSteps]string{
	"refill", "trim", "list", "promote", "free-keys", "forget", "wake", "tell", "recheck", "send", "gates", "reap",
	"ticks", "tidy", "operations", "serve", "seal", "commit", "release", "group",
}

func (k StepKind) String() string {
	if k < endOfSteps {
		return stepNames[k]
	}
	return fmt.Sprintf("StepKind(%d)", uint8(k))
}

const stepBuckets = owner.UpkeepBuckets

var _ [owner.MaxUpkeepKinds - endOfSteps]struct{} // each kind has a place in a table

// StepStats describes the steps of one kind: how long they have taken, and how much the largest of
// them did.
type StepStats struct {
	Kind StepKind
	// Count is the number of steps that had something to do.
	Count int64
	// Total is how long all of them took, Max the longest.
	Total, Max time.Duration
	// MaxRecords is how many entries one step read and wrote at the most, MaxBytes how many bytes
	// it added to its commit at the most, keys included. For [StepCommit] they are those of the
	// whole commit; for [StepRelease], MaxRecords is the number of callers that it woke.
	MaxRecords, MaxBytes int64
	// Buckets counts the steps by duration: Buckets[0] those of less than 1 us, Buckets[i] those
	// from 2^(i-1) us to less than 2^i us, and the last one also all that took longer.
	Buckets [stepBuckets]int64
}

// Quantile returns a duration within which the fraction f of the steps ended, f from 0 to 1: the
// upper end of a bucket, or Max if that is less. It is 0 if there were no steps.
func (s *StepStats) Quantile(f float64) time.Duration {
	st := owner.UpkeepStats{Count: s.Count, Longest: s.Max, Buckets: s.Buckets}
	return st.Quantile(f)
}

// stepStats returns what a table holds, in the order of the kinds.
func stepStats(t *owner.UpkeepTable) []StepStats {
	all := make([]StepStats, endOfSteps)
	for kind := range all {
		st := t.Stats(uint8(kind))
		all[kind] = StepStats{
			Kind: StepKind(kind), Count: st.Count, Total: st.Total, Max: st.Longest, MaxRecords: st.Records, MaxBytes: st.Bytes, Buckets: st.Buckets,
		}
	}
	return all
}

func (s *shard) stepMark() owner.UpkeepMark {
	records, bytes := s.Work()
	return owner.UpkeepMark{At: time.Since(s.origin), Records: records, Bytes: bytes}
}

// endStep notes that a step ends here, and the next one begins.
func (s *shard) endStep(kind StepKind) { s.steps.End(uint8(kind), s.stepMark()) }

// endCommit is endStep for the commit, which writes the whole group.
func (s *shard) endCommit() {
	s.steps.EndOf(uint8(StepCommit), s.stepMark(), s.Group.Entries(), s.Group.Size())
}

// endGroup ends StepRelease, the last step of a group, and the group. woken is the number of
// callers woken.
func (s *shard) endGroup(woken int) {
	now := s.steps.UpkeepMark // the group has been cleared
	now.At = time.Since(s.origin)
	s.steps.EndOf(uint8(StepRelease), now, woken, 0)
	s.steps.EndRound(uint8(StepGroup))
}

// ownUpkeep is upkeep of the owner, in addition to that of the engine.
type ownUpkeep struct {
	kind StepKind
	room engine.Room       // the level of free space down to which it still runs
	due  func(*shard) bool // reads no clock and no disk: it is called before each group
	do   func(*shard)      // checks the budget before each unit of work; the rest is due again
}

var ownUpkeeps = [...]ownUpkeep{
	{
		StepGates, engine.RoomLow,
		func(s *shard) bool { return s.claims.NextOpening() <= s.Now },
		func(s *shard) { s.permits.OpenGates() },
	}, {
		StepTidy, engine.RoomEmpty,
		func(s *shard) bool { return s.claims.IsSweeping() },
		func(s *shard) { s.claims.SweepOn() },
	}, {
		StepTidy, engine.RoomEmpty,
		func(s *shard) bool { return s.claims.NextDrop() <= s.Uptime },
		func(s *shard) { s.claims.DropSetsOn() },
	},
}

// stepOf maps the steps of the engine's upkeep to their kinds.
var stepOf = [...]StepKind{
	engine.StepTrim: StepTrim, engine.StepList: StepList, engine.StepPromote: StepPromote,
	engine.StepFreeKeys: StepFreeKeys, engine.StepForget: StepForget, engine.StepWake: StepWake,
	engine.StepTell: StepTell, engine.StepRecheck: StepRecheck, engine.StepSend: StepSend,
	engine.StepReap: StepReap, engine.StepTicks: StepTicks, engine.StepTidy: StepTidy,
}

// keepUpAll does all upkeep that is due.
func (s *shard) keepUpAll() {
	own := s.ownUpkeepsDue()
	for _, done := range s.KeepUp(s.steps.At, own) {
		s.steps.End(uint8(stepOf[done.Step]), owner.UpkeepMark{At: done.At, Records: done.Records, Bytes: done.Bytes})
	}
	for i := range ownUpkeeps {
		u := &ownUpkeeps[i]
		if s.Broken != nil {
			return
		}
		if s.ownIsDue(u) {
			s.BeginShare(max(own, 1), s.steps.At)
			u.do(s)
			s.endStep(u.kind)
			own--
		}
	}
}

func (s *shard) ownIsDue(u *ownUpkeep) bool { return s.HasRoom(u.room) && u.due(s) }

// ownUpkeepsDue returns how many kinds of its own upkeep the owner has to do.
func (s *shard) ownUpkeepsDue() (n int) {
	for i := range ownUpkeeps {
		if s.ownIsDue(&ownUpkeeps[i]) {
			n++
		}
	}
	return n
}
