package codeq

import "time"

// Upkeep is what a shard's owner does without being asked: what has become due by
// time, or what an earlier group has left behind. However much of it there is,
// each group has a part of bounded size of it, and beside that a part that is
// the callers'.

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
	{StepReap, roomScarce, (*shard).reapIsDue, (*shard).reap},
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
	whole := s.newBudget(upkeepBudget)
	for i := range upkeeps {
		u := &upkeeps[i]
		if s.broken != nil {
			return
		}
		if !s.isDue(u) {
			continue
		}
		s.budget = s.part(whole, max(left, 1))
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

// budget bounds what a part of a group may do. Work that can be divided asks spent
// before each unit: it may exceed the budget by one.
type budget struct {
	begun   bool          // one unit is always free, so that everybody gets on
	records int           // entries read and written at which it is spent
	bytes   int           // size of the group, and what has been read, at which it is
	until   time.Duration // since the shard's origin
}

// budgetSize is how much a budget allows.
type budgetSize struct {
	records  int
	fraction int // its bytes are groupBytes divided by this
	time     time.Duration
}

// The budgets of a group. The time is what bounds them on a slow machine, where none
// of them is to take 10 ms with the unit that is under way.
var (
	upkeepBudget = budgetSize{records: 2048, fraction: 2, time: 4 * time.Millisecond}
	callerBudget = budgetSize{records: 8192, fraction: 1, time: 5 * time.Millisecond}
)

// newBudget returns a budget that begins now, at the end of the last step.
func (s *shard) newBudget(size budgetSize) budget {
	records, bytes := s.work()
	return budget{records: records + size.records, bytes: bytes + s.opts.groupBytes/size.fraction, until: s.steps.at + size.time}
}

// part is the n-th part of what is left of a budget at the end of the last step.
func (s *shard) part(whole budget, n int) budget {
	records, bytes := s.work()
	return budget{
		records: records + (whole.records-records)/n,
		bytes:   bytes + (whole.bytes-bytes)/n,
		until:   s.steps.at + (whole.until-s.steps.at)/time.Duration(n),
	}
}

// spent reports whether the budget of what is under way is used up.
func (s *shard) spent() bool {
	if !s.budget.begun {
		s.budget.begun = true
		return false
	}
	return s.isLate()
}

// isLate is spent for what can wait for the next group.
func (s *shard) isLate() bool { return s.laden() || time.Since(s.origin) >= s.budget.until }

// laden is spent without a look at the clock.
func (s *shard) laden() bool {
	records, bytes := s.work()
	return records >= s.budget.records || bytes >= s.budget.bytes
}
