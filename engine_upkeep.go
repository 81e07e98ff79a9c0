package codeq

import "time"

// Upkeep is what is to be done without being asked: what has become due by
// time, or what an earlier group has left behind. However much of it there is,
// each group has a part of bounded size of it, and beside that a part that is
// the callers'.

// upkeep is one kind of it.
type upkeep struct {
	step Step
	room room              // the level down to which it goes on
	due  func(*state) bool // reads no clock and no disk: it is asked before each group
	do   func(*state)      // asks spent before each unit of work; what it leaves is due again
}

// Step is a kind of upkeep.
type Step uint8

// The steps of upkeep, in their order.
const (
	Trim Step = iota
	List
	Promote
	FreeKeys
	Forget
	Wake
	Tell
	Recheck
	Send
	Reap
	Ticks
	Tidy
)

// StepDone is a step of upkeep that has been taken.
type StepDone struct {
	Step
	At             time.Duration // when it ended, by Config.Elapsed
	Records, Bytes int           // State.Work then
}

// upkeeps is all upkeep, in an order in which the range reads of each find on disk
// what they ask for: before the first key of the group that is of their range.
var upkeeps = [...]upkeep{
	{Trim, roomNone, (*state).trimIsDue, (*state).trim},            // first: what the group writes comes after its range deletions
	{List, roomNone, (*state).listKeysIsDue, (*state).listKeys},    // before what changes them
	{Promote, roomLow, (*state).promoteIsDue, (*state).promoteDue}, // with freeKeys, before what may schedule a task, or end one with a key
	{FreeKeys, roomNone, (*state).freeKeysIsDue, (*state).freeKeys},
	{Forget, roomNone, (*state).expireEndedIsDue, (*state).expireEnded},
	{Wake, roomLow, (*state).wakeIsDue, (*state).wakeBlocked},
	{Tell, roomLow, (*state).tellIsDue, (*state).tellOn},
	{Recheck, roomLow, (*state).recheckIsDue, (*state).recheckLimits},
	{Send, roomLow, (*state).sendIsDue, (*state).sendOut},
	{Reap, roomScarce, (*state).expireLeasesIsDue, (*state).expireLeases},
	{Ticks, roomy, (*state).ticksAreDue, (*state).produceTicks},
	{Tidy, roomNone, (*state).sweepLanesIsDue, (*state).sweepLanes},
}

// keepUp does what is due, within a budget that begins at a moment. What is due at the same time shares it
// evenly, so that none of it waits for the end of another's backlog: others says how many more shares
// there are to be. It returns what is left of the budget, and the steps that it has taken, which are good until the next call.
func (s *state) keepUp(at time.Duration, others int) (left budget, steps []StepDone) {
	left = s.newBudget(upkeepBudget, at)
	shares := others
	for i := range upkeeps {
		if s.isDue(&upkeeps[i]) {
			shares++
		}
	}
	s.steps = s.steps[:0]
	for i := range upkeeps {
		u := &upkeeps[i]
		if s.broken != nil {
			break
		}
		if !s.isDue(u) {
			continue
		}
		s.budget = s.part(left, max(shares, 1), at)
		u.do(s)
		at = s.config.elapsed()
		records, bytes := s.work()
		s.steps = append(s.steps, StepDone{u.step, at, records, bytes})
		shares--
	}
	return left, s.steps
}

func (s *state) isDue(u *upkeep) bool { return s.hasRoom(u.room) && u.due(s) }

// upkeepIsDue reports whether there is upkeep to do.
func (s *state) upkeepIsDue() bool {
	for i := range upkeeps {
		if s.isDue(&upkeeps[i]) {
			return true
		}
	}
	return false
}
