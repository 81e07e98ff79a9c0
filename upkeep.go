package codeq

import (
	"fmt"
	"time"

	"codeq/internal/engine"
	"codeq/internal/owner"
)

// UpkeepKind is a kind of work of a shard's owner, the one goroutine that decides everything in the
// shard. While the owner does it, it serves no call.
type UpkeepKind uint8

// The work of a group, in its order. UpkeepTrim to UpkeepTidy are done only while they are due, and
// are bounded together.
const (
	UpkeepRefill     UpkeepKind = iota // reads ready tasks into memory
	UpkeepTrim                         // deletes the consumed parts of lanes by range
	UpkeepList                         // lists the keys, groups and parents that exist, after Open if they are many
	UpkeepPromote                      // makes scheduled tasks ready whose time has come
	UpkeepFreeKeys                     // frees idempotency keys whose time has passed
	UpkeepForget                       // deletes ended tasks whose retention has passed
	UpkeepWake                         // makes blocked tasks ready that need not wait any longer
	UpkeepTell                         // tells the tasks that waited for a task that it has ended
	UpkeepRecheck                      // finds the tasks that wait for limits that have been changed
	UpkeepSend                         // sends messages to other shards
	UpkeepGates                        // lets claims take the next tasks that rates allow
	UpkeepReap                         // takes back tasks whose leases have expired; in a cluster, stores the clock of leases
	UpkeepTicks                        // produces the tasks of schedules
	UpkeepTidy                         // removes entries that are not needed any more
	UpkeepOperations                   // decides the operations of callers
	UpkeepServe                        // gives ready tasks to waiting claims
	UpkeepSeal                         // completes and orders the commit
	UpkeepCommit                       // writes the commit, in a cluster to a majority
	UpkeepRelease                      // wakes the callers
	UpkeepGroup                        // all of the above, from one reading of the inbox to the next
	endOfUpkeepKinds
)

var upkeepNames = [endOfUpkeepKinds]string{
	"refill", "trim", "list", "promote", "free-keys", "forget", "wake", "tell", "recheck", "send", "gates", "reap",
	"ticks", "tidy", "operations", "serve", "seal", "commit", "release", "group",
}

func (k UpkeepKind) String() string {
	if k < endOfUpkeepKinds {
		return upkeepNames[k]
	}
	return fmt.Sprintf("UpkeepKind(%d)", uint8(k))
}

const upkeepBuckets = owner.UpkeepBuckets

var _ [owner.MaxUpkeepKinds - endOfUpkeepKinds]struct{} // each kind has a place in a table

// UpkeepStats describes the upkeep of one kind: how often it was done, how long that took, and how
// much was done at once.
type UpkeepStats struct {
	Kind UpkeepKind
	// Count is how many times there was something to do.
	Count int64
	// Total is how long all of them took together, Max the longest.
	Total, Max time.Duration
	// MaxRecords is how many entries were read and written at once at the most, MaxBytes how many
	// bytes were added to a commit, keys included. For [UpkeepCommit] they are those of the
	// whole commit; for [UpkeepRelease], MaxRecords is the number of callers that it woke.
	MaxRecords, MaxBytes int64
	// Buckets counts them by duration: Buckets[0] those of less than 1 us, Buckets[i] those
	// from 2^(i-1) us to less than 2^i us, and the last one also all that took longer.
	Buckets [upkeepBuckets]int64
}

// Quantile returns a duration within which the fraction f of them ended, f from 0 to 1: the upper
// end of a bucket, or Max if that is less. It is 0 if there were none.
func (s *UpkeepStats) Quantile(f float64) time.Duration {
	st := owner.UpkeepStats{Count: s.Count, Longest: s.Max, Buckets: s.Buckets}
	return st.Quantile(f)
}

// upkeepStats returns what a table holds, in the order of the kinds.
func upkeepStats(t *owner.UpkeepTable) []UpkeepStats {
	all := make([]UpkeepStats, endOfUpkeepKinds)
	for kind := range all {
		st := t.Stats(uint8(kind))
		all[kind] = UpkeepStats{
			Kind: UpkeepKind(kind), Count: st.Count, Total: st.Total, Max: st.Longest, MaxRecords: st.Records, MaxBytes: st.Bytes, Buckets: st.Buckets,
		}
	}
	return all
}

func (s *shard) upkeepMark() owner.UpkeepMark {
	records, bytes := s.Work()
	return owner.UpkeepMark{At: time.Since(s.origin), Records: records, Bytes: bytes}
}

// endUpkeep notes that upkeep of a kind ends here, and the next one begins.
func (s *shard) endUpkeep(kind UpkeepKind) { s.upkeep.End(uint8(kind), s.upkeepMark()) }

// endCommit is endUpkeep for the commit, which writes the whole group.
func (s *shard) endCommit() {
	s.upkeep.EndOf(uint8(UpkeepCommit), s.upkeepMark(), s.Group.Entries(), s.Group.Size())
}

// endGroup ends UpkeepRelease, the last one of a group, and the group. woken is the number of
// callers woken.
func (s *shard) endGroup(woken int) {
	now := s.upkeep.UpkeepMark // the group has been cleared
	now.At = time.Since(s.origin)
	s.upkeep.EndOf(uint8(UpkeepRelease), now, woken, 0)
	s.upkeep.EndRound(uint8(UpkeepGroup))
}

// ownUpkeep is upkeep of the owner, in addition to that of the engine.
type ownUpkeep struct {
	kind UpkeepKind
	room engine.Room       // the level of free space down to which it still runs
	due  func(*shard) bool // reads no clock and no disk: it is called before each group
	do   func(*shard)      // checks the budget before each unit of work; the rest is due again
}

var ownUpkeeps = [...]ownUpkeep{
	{
		UpkeepGates, engine.RoomLow,
		func(s *shard) bool { return s.claims.NextOpening() <= s.Now },
		func(s *shard) { s.permits.OpenGates() },
	}, {
		UpkeepTidy, engine.RoomEmpty,
		func(s *shard) bool { return s.claims.IsSweeping() },
		func(s *shard) { s.claims.SweepOn() },
	}, {
		UpkeepTidy, engine.RoomEmpty,
		func(s *shard) bool { return s.claims.NextDrop() <= s.Uptime },
		func(s *shard) { s.claims.DropSetsOn() },
	},
}

// upkeepKindOf maps the kinds of the engine's upkeep to those of the owner.
var upkeepKindOf = [...]UpkeepKind{
	engine.UpkeepTrim: UpkeepTrim, engine.UpkeepList: UpkeepList, engine.UpkeepPromote: UpkeepPromote,
	engine.UpkeepFreeKeys: UpkeepFreeKeys, engine.UpkeepForget: UpkeepForget, engine.UpkeepWake: UpkeepWake,
	engine.UpkeepTell: UpkeepTell, engine.UpkeepRecheck: UpkeepRecheck, engine.UpkeepSend: UpkeepSend,
	engine.UpkeepReap: UpkeepReap, engine.UpkeepTicks: UpkeepTicks, engine.UpkeepTidy: UpkeepTidy,
}

// keepUpAll does all upkeep that is due.
func (s *shard) keepUpAll() {
	own := s.ownUpkeepsDue()
	for _, done := range s.KeepUp(s.upkeep.At, own) {
		s.upkeep.End(uint8(upkeepKindOf[done.UpkeepKind]), owner.UpkeepMark{At: done.At, Records: done.Records, Bytes: done.Bytes})
	}
	for i := range ownUpkeeps {
		u := &ownUpkeeps[i]
		if s.Broken != nil {
			return
		}
		if s.ownIsDue(u) {
			s.BeginShare(max(own, 1), s.upkeep.At)
			u.do(s)
			s.endUpkeep(u.kind)
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
