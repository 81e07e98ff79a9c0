package engine

import "time"

// Upkeep is the work without a request: work that has become due by time, or that an earlier group
// has left. However much there is, each group does a bounded part, and serves callers beside it.

// upkeep is one kind of upkeep.
type upkeep struct {
	kind  UpkeepKind
	room  Room              // the lowest level at which it goes on
	timed bool              // it is due because time has passed
	due   func(*State) bool // reads no clock and no disk: it is called before each group
	do    func(*State)      // calls Spent before each unit of work; the rest is due again
}

// UpkeepKind is a kind of upkeep.
type UpkeepKind uint8

// The kinds of upkeep, in their order.
const (
	UpkeepTrim UpkeepKind = iota
	UpkeepList
	UpkeepPromote
	UpkeepFreeKeys
	UpkeepForget
	UpkeepWake
	UpkeepTell
	UpkeepRecheck
	UpkeepSend
	UpkeepReap
	UpkeepTicks
	UpkeepTidy
)

// upkeepDone is upkeep of a kind that was done.
type upkeepDone struct {
	UpkeepKind
	At             time.Duration // when it ended, by Config.Elapsed
	Records, Bytes int           // State.Work at that time
}

// upkeeps lists all upkeep. The order matters: range reads come before the group writes its first
// key of their range, so they find the needed entries on disk.
var upkeeps = [...]upkeep{
	// first: the writes of the group come after its range deletions
	{UpkeepTrim, RoomNone, false, func(s *State) bool { return s.Times.trimIsDue() }, func(s *State) { s.Times.trim() }},
	{UpkeepList, RoomNone, false, func(s *State) bool { return s.Ties.listKeysIsDue() }, func(s *State) { s.Ties.listKeys() }}, // before changes of the caches
	// with freeKeys, before upkeep that may schedule a task, or end one that has a key
	{UpkeepPromote, RoomLow, true, func(s *State) bool { return s.Times.promoteIsDue() }, (*State).promoteDue},
	{UpkeepFreeKeys, RoomNone, true, func(s *State) bool { return s.Ties.freeKeysIsDue() }, func(s *State) { s.Ties.freeKeys() }},
	{UpkeepForget, RoomNone, true, func(s *State) bool { return s.Times.expireEndedIsDue() }, func(s *State) { s.Times.expireEnded() }},
	{UpkeepWake, RoomLow, false, func(s *State) bool { return s.Ties.wakeIsDue() }, (*State).wakeBlocked},
	{UpkeepTell, RoomLow, false, func(s *State) bool { return s.Ties.tellIsDue() }, (*State).tellMore},
	{UpkeepRecheck, RoomLow, false, func(s *State) bool { return s.Suspects.recheckIsDue() }, func(s *State) { s.Suspects.recheckLimits() }},
	{UpkeepSend, RoomLow, false, func(s *State) bool { return s.Mail.SendIsDue() }, func(s *State) { s.Mail.sendOut() }},
	{UpkeepReap, RoomScarce, true, func(s *State) bool { return s.Suspects.reapIsDue() }, (*State).reapLeases},
	{UpkeepTidy, RoomNone, false, func(s *State) bool { return s.Suspects.passSuspectsIsDue() }, func(s *State) { s.Suspects.passSuspects() }},
	{UpkeepTicks, Roomy, true, func(s *State) bool { return s.Times.TicksAreDue() }, (*State).produceTicks},
	{UpkeepTidy, RoomNone, false, func(s *State) bool { return s.Mail.ForgetIsDue() }, func(s *State) { s.Mail.forgetTaken() }},
	{UpkeepTidy, RoomNone, false, func(s *State) bool { return s.Names.sweepLanesIsDue() }, func(s *State) { s.Names.sweepLanes() }},
	{UpkeepTidy, RoomNone, false, func(s *State) bool { return s.Names.keepTotalsIsDue() }, func(s *State) { s.Names.keepTotals() }},
	{UpkeepTidy, Roomy, true, func(s *State) bool { return s.Times.countKindsIsDue() }, func(s *State) { s.Times.countKinds() }},
}

// KeepUp does the due upkeep, within a budget that begins at a time. All kinds that are due at the
// same time get equal shares of it, so that none waits for the end of another's backlog; others is
// the number of further shares. It returns the steps that it has taken, which are valid until the
// next call.
func (s *State) KeepUp(at time.Duration, others int) []upkeepDone {
	shares := others
	for i := range upkeeps {
		if s.isDue(&upkeeps[i]) {
			shares++
		}
	}
	s.steps = s.steps[:0]
	if shares == 0 {
		return s.steps
	}
	s.BeginBudget(UpkeepBudget, at)
	s.upkeepBudget = s.budget
	for i := range upkeeps {
		u := &upkeeps[i]
		if s.Broken != nil {
			break
		}
		if !s.isDue(u) {
			continue
		}
		s.BeginShare(max(shares, 1), at)
		u.do(s)
		at = s.config.Elapsed()
		records, bytes := s.Work()
		s.steps = append(s.steps, upkeepDone{u.kind, at, records, bytes})
		shares--
	}
	return s.steps
}

func (s *State) isDue(u *upkeep) bool {
	return !(u.timed && s.config.Untimed) && s.HasRoom(u.room) && u.due(s)
}

// HasWork reports whether there is work without a request: upkeep, reads of tasks into memory, or
// queues that may leave memory; or whether a lease may have expired, once the owner has decided the
// operations before that.
func (s *State) HasWork() bool {
	return s.Names.ready.WantsRefill() || s.upkeepIsDue() || s.Ties.hasDoubts() ||
		s.Suspects.leasesEnd(s.Now) && s.HasRoom(RoomScarce) && !s.config.Untimed
}

// upkeepIsDue reports whether there is upkeep to do.
func (s *State) upkeepIsDue() bool {
	for i := range upkeeps {
		if s.isDue(&upkeeps[i]) {
			return true
		}
	}
	return false
}

// NextDue returns when something is due by Uptime, by Now (the deadline of a lease, or that the
// clock of leases is stored), and by Wall; Never: nothing is.
func (s *State) NextDue() (uptime, now, wall uint64) {
	uptime, now, wall = Never, Never, Never
	if s.HasRoom(RoomNone) {
		uptime, wall = s.Names.ready.TrimAt(s.Tight), s.wallOf(min(s.Times.expiries.Next(), s.Ties.nextFreed.At))
	}
	if s.config.Untimed {
		return uptime, Never, Never
	}
	if at, ok := s.Leases.wheel.Next(); ok && s.HasRoom(RoomScarce) {
		if !s.Suspects.isClearing() {
			now = uint64(at)
		}
		if s.config.Replicated && s.Leases.all.Len() > 0 {
			now = min(now, s.Leases.clock.DueAt())
		}
	}
	if s.HasRoom(RoomNone) {
		now = min(now, s.Suspects.nextPass())
	}
	if s.HasRoom(RoomLow) {
		wall = min(wall, s.Times.nextDue.At, s.wallOf(s.Times.nextWait.At))
	}
	if s.HasRoom(Roomy) {
		wall = min(wall, s.Times.recurring.Due())
	}
	return uptime, now, wall
}
