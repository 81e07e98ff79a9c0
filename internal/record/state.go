package record

// TaskState is the state of a task.
type TaskState uint8

// The states of a task. A task is in exactly one.
const (
	Ready     TaskState = iota + 1 // may be claimed
	Scheduled                      // waits for its time: produced for later, or between attempts
	Blocked                        // waits for parents, its turn, room for a key, or the start of a suspect
	Leased                         // a worker holds it
	Dead                           // a dead letter: out of attempts, or given up
	Done                           // completed, and kept with its result
	Canceled                       // canceled, and kept
)

var stateTexts = [...]string{"", "ready", "scheduled", "blocked", "leased", "dead", "done", "canceled"}

func (s TaskState) String() string { return stateTexts[s] }

// StateSet has bit s for TaskState s.
type StateSet uint8

// SetOf returns the set of some states.
func SetOf(states ...TaskState) (set StateSet) {
	for _, s := range states {
		set |= 1 << s
	}
	return set
}

// Has reports whether a state is in the set.
func (set StateSet) Has(s TaskState) bool { return set&(1<<s) != 0 }
