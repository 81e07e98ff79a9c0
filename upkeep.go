package codeq

// upkeep is one kind of it.
type upkeep struct {
	kind StepKind
	room room              // the level down to which it goes on
	due  func(*shard) bool // reads no clock and no disk: it is asked before each group
	do   func(*shard)      // asks spent before each unit of work; what it leaves is due again
}

// upkeeps is all upkeep, in an order in which the range reads of each find on disk
// what they ask for: before the first key of the group that is of their range.
var upkeeps = [...]upkeep{
	{StepTrim, roomNone, (*shard).trimIsDue, (*shard).trim},            // first: what the group writes comes after its range deletions
	{StepList, roomNone, (*shard).listKeysIsDue, (*shard).listKeys},    // before what changes them
	{StepPromote, roomLow, (*shard).promoteIsDue, (*shard).promoteDue}, // with freeKeys, before what may schedule a task, or end one with a key
	{StepFreeKeys, roomNone, (*shard).freeKeysIsDue, (*shard).freeKeys},
	{StepForget, roomNone, (*shard).expireEndedIsDue, (*shard).expireEnded},
	{StepWake, roomLow, (*shard).wakeIsDue, (*shard).wakeBlocked},
	{StepTell, roomLow, (*shard).tellIsDue, (*shard).tellOn},
	{StepRecheck, roomLow, (*shard).recheckIsDue, (*shard).recheckLimits},
	{StepSend, roomLow, (*shard).sendIsDue, (*shard).sendOut},
	{StepGates, roomLow, (*shard).gatesAreDue, (*shard).openGates},
	{StepReap, roomScarce, (*shard).expireLeasesIsDue, (*shard).expireLeases},
	{StepTicks, roomy, (*shard).ticksAreDue, (*shard).produceTicks},
	{StepTidy, roomEmpty, (*shard).sweepIsDue, (*shard).sweepTickets},
	{StepTidy, roomEmpty, (*shard).dropSetsIsDue, (*shard).dropSetsOn},
	{StepTidy, roomNone, (*shard).sweepLanesIsDue, (*shard).sweepLanes},
}

// keepUp does what is due. What is due at the same time shares the budget evenly,
// so that none of it waits for the end of another's backlog.
func (s *shard) keepUp() {
	left := 0
	for i := range upkeeps {
		if s.isDue(&upkeeps[i]) {
			left++
		}
	}
	if left == 0 {
		return
	}
	whole := s.newBudget(upkeepBudget, s.steps.at)
	for i := range upkeeps {
		u := &upkeeps[i]
		if s.broken != nil {
			return
		}
		if !s.isDue(u) {
			continue
		}
		s.budget = s.part(whole, max(left, 1), s.steps.at)
		u.do(s)
		s.endStep(u.kind)
		left--
	}
}

func (s *shard) isDue(u *upkeep) bool { return s.hasRoom(u.room) && u.due(s) }

// upkeepIsDue reports whether there is upkeep to do.
func (s *shard) upkeepIsDue() bool {
	for i := range upkeeps {
		if s.isDue(&upkeeps[i]) {
			return true
		}
	}
	return false
}
