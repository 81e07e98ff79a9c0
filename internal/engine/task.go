package engine

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"time"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// maxPriority is the highest priority of a task; the lowest one is 0.
const maxPriority = keys.MaxPriority

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

// Receipt names one lease of one task.
type Receipt struct {
	ID    keys.ID
	Token uint64 // larger with every lease of the task
}

// String returns the text form, ID.token.
func (r Receipt) String() string { return fmt.Sprintf("%s.%016x", keys.FormatID(r.ID), r.Token) }

// ParseReceipt reads the text form.
func ParseReceipt(text []byte) (r Receipt, ok bool) {
	var token [8]byte
	if len(text) != keys.IDTextLen+1+2*len(token) || text[keys.IDTextLen] != '.' {
		return r, false
	}
	id, ok := keys.ParseID(text[:keys.IDTextLen])
	_, err := hex.Decode(token[:], text[keys.IDTextLen+1:])
	return Receipt{id, binary.BigEndian.Uint64(token[:])}, ok && err == nil
}

// Outcome is how a task has ended.
type Outcome struct {
	State     TaskState // Done, Dead or Canceled
	Result    []byte    // of a completed task
	LastError string    // of the last failed attempt; none if the task was completed
	Attempts  int
}

// Ending is the end of a task.
type Ending struct {
	ID      keys.ID
	Outcome Outcome
}

// What a task does when a parent dies.
const (
	holdOnDead   = iota // it waits
	cancelOnDead        // it is canceled
	runOnDead           // it goes on as if the parent were completed
)

// What a task does if a parent is gone before it knows of the task.
const (
	runOnMissing    = iota // it goes on as if the parent were completed
	cancelOnMissing        // it is canceled
	refuseOnMissing        // it is not stored if its producer finds so, and canceled otherwise
)

// What is done about missed ticks.
const (
	MissedOnce uint8 = iota // the latest of them is produced
	MissedSkip              // none is produced
	MissedAll               // all are produced
)

// EventKind is what has happened to a task.
type EventKind uint8

// The kinds of events.
const (
	EventProduced EventKind = iota + 1
	EventClaimed
	EventCompleted
	EventRetried
	EventReleased
	EventDeadLettered
	EventCanceled
	EventExpired
	EndOfEvents
)

// EventProgress: a handler has said how far it is, which changes no state. The numbers before it
// are taken by what KindSet has beside events.
const EventProgress EventKind = 11

// KindSet has bit k for EventKind k, and bits for what else may be of interest.
type KindSet uint32

// What somebody may want to know beside events.
const (
	WantOutcomes KindSet = 1 << (EndOfEvents + iota) // how tasks have ended
	WantCancels                                      // which leases of Run cancels have ended
)

// WantCounts lets Effects tell the events of each queue. It is of a process, and never stored.
const WantCounts KindSet = 1 << 31

// Counted is a queue that a group has changed, and its totals before.
type Counted struct {
	Queue  *Queue
	before keys.Totals
}

// Events returns how many events of each kind the queue has had since. REQUIRES: the next group has
// not begun.
func (c *Counted) Events() keys.Totals {
	n := c.Queue.totals.All
	for i := range n {
		n[i] -= c.before[i]
	}
	return n
}

// Event is one change of a task's state.
type Event struct {
	Kind      EventKind
	ID        keys.ID
	Queue     string
	Tenant    string
	Attempt   uint32
	Time      time.Time
	LastError string
	Progress  *record.Notes // of EventProgress
}

// Duplicate says that an idempotency key is taken.
type Duplicate struct {
	Key string
	ID  keys.ID // of the task that has the key
}

func (d *Duplicate) Error() string {
	return "idempotency key " + d.Key + " is taken by task " + keys.FormatID(d.ID)
}

// Rank returns the rank of a task with a priority; 0 is the rank of no task.
func Rank(priority uint8) uint64 { return uint64(priority) + 1 }
