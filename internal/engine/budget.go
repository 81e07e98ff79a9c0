package engine

import "time"

// Upkeep is what a shard's owner does without being asked: what has become due by
// time, or what an earlier group has left behind. However much of it there is,
// each group has a part of bounded size of it, and beside that a part that is
// the callers'.

// budget bounds what a part of a group may do. Work that can be divided asks spent
// before each unit: it may exceed the budget by one.
type Budget struct {
	begun   bool          // one unit is always free, so that everybody gets on
	records int           // entries read and written at which it is spent
	bytes   int           // size of the group, and what has been read, at which it is
	Until   time.Duration // by config.elapsed
}

// BudgetSize is how much a budget allows.
type BudgetSize struct {
	Records  int
	Fraction int // its bytes are groupBytes divided by this
	Time     time.Duration
}

// The budgets of a group. The time is what bounds them on a slow machine, where none
// of them is to take 10 ms with the unit that is under way.
var (
	UpkeepBudget = BudgetSize{Records: 2048, Fraction: 2, Time: 4 * time.Millisecond}
	CallerBudget = BudgetSize{Records: 8192, Fraction: 1, Time: 5 * time.Millisecond}
)

// NewBudget returns a budget that begins at a moment.
func (s *State) NewBudget(size BudgetSize, at time.Duration) Budget {
	records, bytes := s.Work()
	return Budget{records: records + size.Records, bytes: bytes + s.config.GroupBytes/size.Fraction, Until: at + size.Time}
}

// Part is the n-th part of what is left of a budget at the end of the last step.
func (s *State) Part(whole Budget, n int, at time.Duration) Budget {
	records, bytes := s.Work()
	return Budget{
		records: records + (whole.records-records)/n,
		bytes:   bytes + (whole.bytes-bytes)/n,
		Until:   at + (whole.Until-at)/time.Duration(n),
	}
}

// Spent reports whether the budget of what is under way is used up.
func (s *State) Spent() bool {
	if !s.Budget.begun {
		s.Budget.begun = true
		return false
	}
	return s.isLate()
}

// isLate is spent for what can wait for the next group.
func (s *State) isLate() bool { return s.Laden() || s.config.Elapsed() >= s.Budget.Until }

// Laden is spent without a look at the clock.
func (s *State) Laden() bool {
	records, bytes := s.Work()
	return records >= s.Budget.records || bytes >= s.Budget.bytes
}

// HasBudget reports whether the group has room for an operation, after n others since the budget
// began. Reading the clock each time would cost as much as deciding.
func (s *State) HasBudget(n int) bool {
	if s.Broken != nil {
		return false
	}
	return n == 0 || !s.Laden() && (n%32 != 0 || s.config.Elapsed() < s.Budget.Until)
}

// Work is how many entries, and how many bytes of them, the owner has read so far,
// and those that it has added to the group.
func (s *State) Work() (records, bytes int) {
	return s.reading.entries + s.Group.Entries(), s.reading.bytes + s.Group.Size()
}

// noteRead counts an entry that the owner has read from its store.
func (s *State) noteRead(bytes int) {
	s.reading.entries++
	s.reading.bytes += bytes
}
