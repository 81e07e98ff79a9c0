package dispatch

import "codeq/internal/engine"

// Upkeep is work for claims that becomes due without a claim, in addition to that of the rules.
type Upkeep struct {
	Kind UpkeepKind
	room engine.Room         // the lowest level of free space at which it still runs
	due  func(*Permits) bool // reads no clock and no disk: it is called before each group
	do   func(*Permits)      // checks the budget before each unit of work; the rest is due again
}

// UpkeepKind is a kind of upkeep.
type UpkeepKind uint8

// The kinds.
const (
	OpensGates UpkeepKind = iota // of rates
	Tidies
)

// Upkeeps are all kinds, in the order of the work.
var Upkeeps = [...]Upkeep{
	{
		OpensGates, engine.RoomLow,
		func(t *Permits) bool { return t.claims.NextOpening() <= t.claims.rules.Now },
		(*Permits).openGates,
	}, {
		Tidies, engine.RoomEmpty,
		func(t *Permits) bool { return t.claims.sweep.on },
		func(t *Permits) { t.claims.sweepOn() },
	}, {
		Tidies, engine.RoomEmpty,
		func(t *Permits) bool { return t.claims.NextDrop() <= t.claims.rules.Uptime },
		func(t *Permits) { t.claims.dropSetsOn() },
	},
}

// IsDue reports whether a shard has such work.
func (u *Upkeep) IsDue(t *Permits) bool { return t.claims.rules.HasRoom(u.room) && u.due(t) }

// Do does the work, within the budget of the rules.
func (u *Upkeep) Do(t *Permits) { u.do(t) }

// UpkeepsDue returns how many of Upkeeps are due.
func (t *Permits) UpkeepsDue() (n int) {
	for i := range Upkeeps {
		if Upkeeps[i].IsDue(t) {
			n++
		}
	}
	return n
}
