package codeq

import (
	"fmt"
	"time"

	"codeq/internal/keys"
)

// XMaxPriority is the highest priority of a task; the lowest is 0.
const XMaxPriority = 9

// XTaskState is where a task is in its life.
type XTaskState uint8

// The states of a task. It is in exactly one.
const (
	XReady     XTaskState = iota + 1 // may be claimed
	XScheduled                       // waits for its time: produced for later, or between two attempts
	XBlocked                         // waits for others: its parents, its turn in its group, or room for its LimitKey
	XLeased                          // a worker has it
	XDead                            // a dead letter: out of attempts, or given up
	XDone                            // completed, and kept with its result
	XCanceled                        // canceled, and kept
)

var stateTexts = [...]string{"", "ready", "scheduled", "blocked", "leased", "dead", "done", "canceled"}

func (s XTaskState) String() string { return stateTexts[s] }

// XReceipt names one lease of one task.
type XReceipt struct {
	ID    keys.ID
	Token uint64 // larger with every lease of the task
}

// String returns the text form, ID.token.
func (r XReceipt) String() string { return fmt.Sprintf("%s.%016x", keys.FormatID(r.ID), r.Token) }

// XOutcome is how a task has ended.
type XOutcome struct {
	State     XTaskState // Done, Dead or Canceled
	Result    []byte     // of a completed task
	LastError string     // what the last failed attempt left behind; none if the task was completed
	Attempts  int
}

// XEnding is the end of a task.
type XEnding struct {
	ID      keys.ID
	Outcome XOutcome
}

// XOnDead is what the death of a parent means to a task.
type XOnDead uint8

const (
	XHoldOnDead   XOnDead = iota // it waits
	XCancelOnDead                // it is canceled
	XRunOnDead                   // the parent is taken for completed
)

// What becomes of ticks that are missed.
const (
	XMissedOnce uint8 = iota // the latest of them is made up for
	XMissedSkip              // none is
	XMissedAll               // all are
)

// XEventKind is what has happened to a task.
type XEventKind uint8

// The kinds of events.
const (
	XEventProduced XEventKind = iota + 1
	XEventClaimed
	XEventCompleted
	XEventRetried
	XEventReleased
	XEventDeadLettered
	XEventCanceled
	XEventExpired
	XEndOfEvents
)

// XKindSet has bit k for XEventKind k, and bits for other interests.
type XKindSet uint32

// What somebody may want to hear of beside events.
const (
	XWantOutcomes XKindSet = 1 << (XEndOfEvents + iota) // how tasks have ended
	XWantCancels                                        // which leases of Run cancels have ended
)

// XEvent is one change of a task's state.
type XEvent struct {
	Kind      XEventKind
	ID        keys.ID
	Queue     string
	Tenant    string
	Attempt   uint32
	Time      time.Time
	LastError string
}

// XDuplicate says that an idempotency key is taken.
type XDuplicate struct {
	Key string
	ID  keys.ID // of the task that has the key
}

func (d *XDuplicate) Error() string {
	return "idempotency key " + d.Key + " is taken by task " + keys.FormatID(d.ID)
}

// XRank is the rank of a task with a priority, 0 of none.
func XRank(priority uint8) uint64 { return uint64(priority) + 1 }
