package engine

import "time"

// Upkeep is what is to be done without being asked: what has become due by time, or what an earlier
// group has left behind. However much of it there is, each group has a part of bounded size of it,
// and beside that a part that is the callers'.

// upkeep is one kind of it.
type upkeep struct {
	step Step
	room Room              // the level down to which it goes on
	due  func(*State) bool // reads no clock and no disk: it is asked before each group
	do   func(*State)      // asks spent before each unit of work; what it leaves is due again
}

// Step is a kind of upkeep.
type Step uint8

// The steps of upkeep, in their order.
const (
	StepTrim Step = iota
	StepList
	StepPromote
	StepFreeKeys
	StepForget
	StepWake
	StepTell
	StepRecheck
	StepSend
	StepReap
	StepTicks
	StepTidy
)

// StepDone is a step of upkeep that has been taken.
type StepDone struct {
	Step
	At             time.Duration // when it ended, by Config.Elapsed
	Records, Bytes int           // State.Work then
}

// upkeeps is all upkeep, in an order in which the range reads of each find on disk what they ask
// for: before the first key of the group that is of their range.
var upkeeps = [...]upkeep{
	{StepTrim, RoomNone, (*State).trimIsDue, (*State).trim},            // first: what the group writes comes after its range deletions
	{StepList, RoomNone, (*State).listKeysIsDue, (*State).listKeys},    // before what changes them
	{StepPromote, RoomLow, (*State).promoteIsDue, (*State).promoteDue}, // with freeKeys, before what may schedule a task, or end one with a key
	{StepFreeKeys, RoomNone, (*State).freeKeysIsDue, (*State).freeKeys},
	{StepForget, RoomNone, (*State).expireEndedIsDue, (*State).expireEnded},
	{StepWake, RoomLow, (*State).wakeIsDue, (*State).wakeBlocked},
	{StepTell, RoomLow, (*State).tellIsDue, (*State).tellOn},
	{StepRecheck, RoomLow, (*State).recheckIsDue, (*State).recheckLimits},
	{StepSend, RoomLow, (*State).sendIsDue, (*State).sendOut},
	{StepReap, RoomScarce, (*State).expireLeasesIsDue, (*State).expireLeases},
	{StepTicks, Roomy, (*State).TicksAreDue, (*State).produceTicks},
	{StepTidy, RoomNone, (*State).sweepLanesIsDue, (*State).sweepLanes},
}

// KeepUp does what is due, within a budget that begins at a moment. What is due at the same time
// shares it evenly, so that none of it waits for the end of another's backlog: others says how many
// more shares there are to be. It returns what is left of the budget, and the steps that it has
// taken, which are good until the next call.
func (s *State) KeepUp(at time.Duration, others int) (left Budget, steps []StepDone) {
	left = s.NewBudget(UpkeepBudget, at)
	shares := others
	for i := range upkeeps {
		if s.isDue(&upkeeps[i]) {
			shares++
		}
	}
	s.steps = s.steps[:0]
	for i := range upkeeps {
		u := &upkeeps[i]
		if s.Broken != nil {
			break
		}
		if !s.isDue(u) {
			continue
		}
		s.Budget = s.Part(left, max(shares, 1), at)
		u.do(s)
		at = s.config.Elapsed()
		records, bytes := s.Work()
		s.steps = append(s.steps, StepDone{u.step, at, records, bytes})
		shares--
	}
	return left, s.steps
}

func (s *State) isDue(u *upkeep) bool { return s.HasRoom(u.room) && u.due(s) }

// UpkeepIsDue reports whether there is upkeep to do.
func (s *State) UpkeepIsDue() bool {
	for i := range upkeeps {
		if s.isDue(&upkeeps[i]) {
			return true
		}
	}
	return false
}
