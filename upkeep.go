package codeq

import "codeq/internal/engine"

// upkeep is what the owner does beside what the rules have to do without being asked.
type ownUpkeep struct {
	kind StepKind
	room engine.Room       // the level down to which it goes on
	due  func(*shard) bool // reads no clock and no disk: it is asked before each group
	do   func(*shard)      // asks spent before each unit of work; what it leaves is due again
}

var ownUpkeeps = [...]ownUpkeep{
	{StepGates, engine.RoomLow, (*shard).gatesAreDue, (*shard).openGates},
	{StepTidy, engine.RoomEmpty, (*shard).sweepIsDue, (*shard).sweepTickets},
	{StepTidy, engine.RoomEmpty, (*shard).dropSetsIsDue, (*shard).dropSetsOn},
}

// stepOf is the kind of a step of upkeep.
var stepOf = [...]StepKind{
	engine.StepTrim: StepTrim, engine.StepList: StepList, engine.StepPromote: StepPromote, engine.StepFreeKeys: StepFreeKeys, engine.StepForget: StepForget, engine.StepWake: StepWake, engine.StepTell: StepTell,
	engine.StepRecheck: StepRecheck, engine.StepSend: StepSend, engine.StepReap: StepReap, engine.StepTicks: StepTicks, engine.StepTidy: StepTidy,
}

// keepUpAll does what is due.
func (s *shard) keepUpAll() {
	own := 0
	for i := range ownUpkeeps {
		if s.ownIsDue(&ownUpkeeps[i]) {
			own++
		}
	}
	if own == 0 && !s.UpkeepIsDue() {
		return
	}
	left, steps := s.KeepUp(s.steps.at, own)
	for _, done := range steps {
		s.endStepAt(stepOf[done.Step], stepMark{done.At, done.Records, done.Bytes})
	}
	for i := range ownUpkeeps {
		u := &ownUpkeeps[i]
		if s.Broken != nil {
			return
		}
		if s.ownIsDue(u) {
			s.Budget = s.Part(left, max(own, 1), s.steps.at)
			u.do(s)
			s.endStep(u.kind)
			own--
		}
	}
}

func (s *shard) ownIsDue(u *ownUpkeep) bool { return s.HasRoom(u.room) && u.due(s) }

// ownUpkeepIsDue reports whether the owner has upkeep of its own to do.
func (s *shard) ownUpkeepIsDue() bool {
	for i := range ownUpkeeps {
		if s.ownIsDue(&ownUpkeeps[i]) {
			return true
		}
	}
	return false
}
