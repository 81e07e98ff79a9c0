package engine

import "time"

// budget bounds what a part of a group may do. Work that can be divided calls Spent before each
// unit: it may exceed the budget by one unit.
type budget struct {
	begun   bool          // one unit is always free, so that everybody makes progress
	records int           // entries read and written at which the budget is spent
	bytes   int           // size of the group, and bytes read, at which it is spent
	until   time.Duration // by Config.Elapsed
}

// budgetSize is how much a budget allows.
type budgetSize struct {
	Records  int
	Fraction int // its bytes are GroupBytes divided by this
	Time     time.Duration
}

// The budgets of a group. The time limits them on a slow machine, where each must stay below 10 ms,
// including the unit under way.
var (
	UpkeepBudget = budgetSize{Records: 2048, Fraction: 2, Time: 4 * time.Millisecond}
	CallerBudget = budgetSize{Records: 8192, Fraction: 1, Time: 5 * time.Millisecond}
)

// BeginBudget begins a budget, at a time.
func (r *round) BeginBudget(size budgetSize, at time.Duration) {
	records, bytes := r.Work()
	r.budget = budget{records: records + size.Records, bytes: bytes + r.config.GroupBytes/size.Fraction, until: at + size.Time}
}

// BeginShare begins, at a time, a budget that is one of n equal shares of what is left of that of
// KeepUp.
func (r *round) BeginShare(n int, at time.Duration) {
	records, bytes := r.Work()
	whole := &r.upkeepBudget
	r.budget = budget{
		records: records + (whole.records-records)/n,
		bytes:   bytes + (whole.bytes-bytes)/n,
		until:   at + (whole.until-at)/time.Duration(n),
	}
}

// Spent reports whether the budget of the current work is used up.
func (r *round) Spent() bool {
	if !r.budget.begun {
		r.budget.begun = true
		return false
	}
	return r.isLate()
}

// isLate is Spent for work that can wait for the next group.
func (r *round) isLate() bool { return r.isUsedUp() || r.config.Elapsed() >= r.budget.until }

// isUsedUp is Spent without reading the clock.
func (r *round) isUsedUp() bool {
	records, bytes := r.Work()
	return records >= r.budget.records || bytes >= r.budget.bytes
}

// HasBudget reports whether the group has room for an operation, after n others since the budget
// began. Reading the clock each time would cost as much as deciding.
func (r *round) HasBudget(n int) bool {
	if r.Broken != nil {
		return false
	}
	return n == 0 || !r.isUsedUp() && (n%32 != 0 || r.config.Elapsed() < r.budget.until)
}

// Work returns how many entries, and how many bytes of them, the owner has read and added to the
// group so far.
func (r *round) Work() (records, bytes int) {
	return r.reading.entries + r.Group.Entries(), r.reading.bytes + r.Group.Size()
}

// noteRead counts an entry that the owner has read from its store.
func (r *round) noteRead(bytes int) {
	r.reading.entries++
	r.reading.bytes += bytes
}
