package codeq

// upkeep is what the owner does beside what the rules have to do without being asked.
type ownUpkeep struct {
	kind StepKind
	room room              // the level down to which it goes on
	due  func(*shard) bool // reads no clock and no disk: it is asked before each group
	do   func(*shard)      // asks spent before each unit of work; what it leaves is due again
}

var ownUpkeeps = [...]ownUpkeep{
	{StepGates, roomLow, (*shard).gatesAreDue, (*shard).openGates},
	{StepTidy, roomEmpty, (*shard).sweepIsDue, (*shard).sweepTickets},
	{StepTidy, roomEmpty, (*shard).dropSetsIsDue, (*shard).dropSetsOn},
}

// stepOf is the kind of a step of upkeep.
var stepOf = [...]StepKind{
	Trim: StepTrim, List: StepList, Promote: StepPromote, FreeKeys: StepFreeKeys, Forget: StepForget, Wake: StepWake, Tell: StepTell,
	Recheck: StepRecheck, Send: StepSend, Reap: StepReap, Ticks: StepTicks, Tidy: StepTidy,
}

// keepUpAll does what is due.
func (s *shard) keepUpAll() {
	own := 0
	for i := range ownUpkeeps {
		if s.ownIsDue(&ownUpkeeps[i]) {
			own++
		}
	}
	if own == 0 && !s.upkeepIsDue() {
		return
	}
	left, steps := s.keepUp(s.steps.at, own)
	for _, done := range steps {
		s.endStepAt(stepOf[done.Step], stepMark{done.At, done.Records, done.Bytes})
	}
	for i := range ownUpkeeps {
		u := &ownUpkeeps[i]
		if s.broken != nil {
			return
		}
		if s.ownIsDue(u) {
			s.budget = s.part(left, max(own, 1), s.steps.at)
			u.do(s)
			s.endStep(u.kind)
			own--
		}
	}
}

func (s *shard) ownIsDue(u *ownUpkeep) bool { return s.hasRoom(u.room) && u.due(s) }

// ownUpkeepIsDue reports whether the owner has upkeep of its own to do.
func (s *shard) ownUpkeepIsDue() bool {
	for i := range ownUpkeeps {
		if s.ownIsDue(&ownUpkeeps[i]) {
			return true
		}
	}
	return false
}
