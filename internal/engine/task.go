package engine

import (
	"fmt"
	"strings"
	"time"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
	"codeq/internal/wire"
)

// maxPriority is the highest priority of a task; the lowest one is 0.
const maxPriority = keys.MaxPriority

// TaskState is the state of a task.
type TaskState = record.TaskState

// The states of a task. A task is in exactly one.
const (
	Ready     = record.Ready
	Scheduled = record.Scheduled
	Blocked   = record.Blocked
	Leased    = record.Leased
	Dead      = record.Dead
	Done      = record.Done
	Canceled  = record.Canceled
)

// Receipt names one lease of one task.
type Receipt = keys.Receipt

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

// EventKind is the kind of an event of a task.
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
	endOfEvents
)

// More kinds of events. The other bits of KindSet take the numbers before them.
const (
	EventProgress  EventKind = iota + 11 // a handler has said how far it is, which changes no state
	eventSuspended                       // the task waits between two steps; Totals do not count it
	eventUnhandled                       // no handler knows its kind; in Totals it is keys.Unhandled
)

// KindSet has bit k for EventKind k, and bits for the other interests.
type KindSet uint32

// Interests beside events.
const (
	WantOutcomes KindSet = 1 << (endOfEvents + iota) // how tasks have ended
	WantCancels                                      // which leases of Run cancels have ended
)

// WantCounts adds event counts of queues to Effects. It is of a process, and never stored.
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

// Duplicate says that an idempotency key is taken, or that a task has got a signal before.
type Duplicate = keys.Duplicate

// Rank returns the rank of a task with a priority; 0 is the rank of no task.
func Rank(priority uint8) uint64 { return uint64(priority) + 1 }

// NewTask is a task to be taken in, as the caller's goroutine has prepared it, perhaps on another
// node or in another shard.
type NewTask struct {
	Key   LaneKey
	RunAt uint64 // wall clock, ms; 0: at once
	Rec   []byte // stored form; the shard keeps it
	Tied  *Tied  // nil: it has no ties
}

// Tied holds the ties of a new task in the form that the shard needs.
type Tied struct {
	record.Ties
	Parents [][record.IDLen]byte // as in Task.After
	Twin    int                  // index of the task of the batch with the same key; negative: none
	Refuses bool                 // it is not stored if a parent is missing
	MaxWait uint64               // as in record.Head
	policy  store.ParentPolicy
	done    keys.ID // the parent that was completed in the commit of its follow-up; zero: none

	// siblings are those of its parents, in ascending order, that are of its batch and in another
	// shard.
	siblings []keys.ID
}

func TiedOf(rec *record.Record) *Tied {
	return &Tied{
		Ties: rec.Ties, Parents: rec.Parents, Twin: -1, Refuses: rec.OnMissing == keys.RefuseOnMissing, MaxWait: rec.MaxWait, policy: store.ParentPolicyOf(rec),
	}
}

// Home returns the shard of a task; bound is false if the task may be in any shard.
func (t *NewTask) Home(shards int) (shard int, bound bool) {
	if t.Tied == nil {
		return 0, false
	}
	return t.Tied.Ties.Home(shards)
}

// message asks another shard to take in the task.
func (t *NewTask) message() *keys.Message {
	m := &keys.Message{
		Kind: keys.MsgAdmit, Queue: t.Key.Queue, Tenant: t.Key.Tenant, Priority: t.Key.Priority, Record: t.Rec,
	}
	if t.Tied.done != (keys.ID{}) && t.Tied.policy != t.Tied.policy.OnDead() {
		m.Kind, m.Parent = keys.MsgFollow, t.Tied.done
	}
	return m
}

// NewTasksOf returns the tasks in a message: several for MsgFlow.
func NewTasksOf(m *keys.Message) ([]NewTask, error) {
	if m.Kind != keys.MsgFlow {
		t, err := newTaskOf(m, &keys.MessageTask{Queue: m.Queue, Tenant: m.Tenant, Priority: m.Priority, Record: m.Record}, 0)
		return []NewTask{t}, err
	}
	tasks := make([]NewTask, len(m.Tasks))
	holders := make(map[[keys.UniqueLen]byte]bool)
	for i := range tasks {
		var err error
		if tasks[i], err = newTaskOf(m, &m.Tasks[i], i); err != nil {
			return nil, err
		}
		if key := tasks[i].Tied.Unique; key != [keys.UniqueLen]byte{} {
			if holders[key] { // of twins, only the first is sent
				return nil, fmt.Errorf("%w: message with two tasks of one idempotency key", wire.ErrMalformed)
			}
			holders[key] = true
		}
	}
	return tasks, nil
}

// newTaskOf returns the n-th task of a message.
func newTaskOf(m *keys.Message, of *keys.MessageTask, n int) (NewTask, error) {
	rec, err := record.Decode(of.Record)
	if err != nil {
		return NewTask{}, err
	}
	t := NewTask{
		Key:   LaneKey{Queue: of.Queue, Tenant: of.Tenant, Priority: of.Priority},
		RunAt: rec.RunAt, Rec: of.Record, Tied: TiedOf(&rec),
	}
	t.Tied.done, t.Tied.siblings = m.Parent, m.Siblings
	if !t.Valid(&rec, n) {
		return NewTask{}, fmt.Errorf("%w: message with a task of queue %q", wire.ErrMalformed, of.Queue)
	}
	return t, nil
}

// Valid reports whether a shard can take in a task from another node as the n-th of a batch: a
// sound node refuses anything else before it sends it.
func (t *NewTask) Valid(rec *record.Record, n int) bool {
	for _, p := range rec.Parents {
		if at, sibling := keys.NthOf(p); sibling && (at < 0 || at >= n) {
			return false
		}
	}
	return t.Key.Priority <= maxPriority && rec.OnDead <= keys.RunOnDead && rec.OnMissing <= keys.RefuseOnMissing
}

// Encode sets all but the Key of a new task by its record, which it encodes into buf.
func (t *NewTask) Encode(rec *record.Record, buf []byte) {
	t.RunAt, t.Rec, t.Tied = rec.RunAt, rec.Append(buf), nil
	if rec.Ties != (record.Ties{}) || len(rec.Parents) > 0 {
		t.Tied = TiedOf(rec)
	}
}

// emit counts an event of a task, and adds it to the effects for subscribers, if its kind is
// wanted. attempt is the task's count after the change.
func (ns *names) emit(kind EventKind, l *Lane, id keys.ID, attempt uint32, cause string) {
	ns.count(l.queue, kind)
	if ns.Wanted>>kind&1 != 0 {
		ns.collect(kind, l, id, attempt, cause)
	}
}

func (r *round) collect(kind EventKind, l *Lane, id keys.ID, attempt uint32, cause string) {
	r.Effects.Events = append(r.Effects.Events, Event{
		Kind: kind, ID: id, Queue: l.queue.Name, Tenant: l.Tenant, Attempt: attempt, Time: time.UnixMilli(int64(r.Wall)).UTC(),
		LastError: strings.Clone(cause), // it may be a part of a long string
	})
}
