package codeq

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// Priorities of a task: a claim takes the highest first.
const (
	MinPriority = 0
	MaxPriority = 9
)

// Forever keeps a result until the queue's directory is deleted.
const Forever time.Duration = -1

// Task is what a producer hands in. Only Queue is required. Durations are kept
// to the millisecond, rounded up.
type Task struct {
	// Queue names where the task waits and which handler of Run works on it.
	Queue string `json:",omitzero"`
	// Payload is for the worker. Produce copies it; the one that a Lease
	// carries belongs to the worker.
	Payload []byte `json:",omitempty"`
	// Headers are small attributes that travel with the task, such as a trace
	// context.
	Headers map[string]string `json:",omitempty"`
	// Priority is 0 to 9; 9 is claimed first.
	Priority int `json:",omitzero"`
	// Tenant shares a queue fairly: claims take turns over the tenants that
	// have ready tasks of the same priority.
	Tenant string `json:",omitzero"`
	// MaxAttempts is how often the task is tried before it becomes a dead
	// letter. 0: Options.MaxAttempts.
	MaxAttempts int `json:",omitzero"`
	// RunAt is when the task becomes ready. Zero or past: at once.
	RunAt time.Time `json:",omitzero"`
	// LeaseFor is how long each lease of this task lasts. 0: as the claim says.
	// Run keeps its leases alive by itself and does not heed it.
	LeaseFor time.Duration `json:",omitzero"`
	// Timeout bounds one run of the handler: Run cancels its context after it.
	// 0: no bound.
	Timeout time.Duration `json:",omitzero"`
	// Retention is how long the task is kept after it was completed or
	// canceled, with its result: at least so long, and at most an eighth of it,
	// or a second, longer, and until the last task that waited for it (After) has ended. 0: Settings.Retention of the queue, or else
	// Options.Retention; Forever: without end.
	Retention time.Duration `json:",omitzero"`

	// Unique keeps a second task of the same idempotency key out of the queue.
	Unique Unique `json:",omitzero"`
	// Group names tasks that follow each other: of those with the same queue,
	// tenant, LimitKey and group, one is worked on at a time, and the next one becomes
	// ready when it has ended (completed, canceled, or dead; Settings.HoldGroups has the
	// group wait for a dead letter), with all its attempts. The first to become due goes first; of several that wait, the
	// one that was produced first.
	Group string `json:",omitzero"`
	// LimitKey counts the task against Settings.ConcurrencyPerKey of its queue. A task that a claim
	// has found without room waits; tasks that wait go on in the order of their IDs, whatever
	// their priorities.
	LimitKey string `json:",omitzero"`
	// After names the parents of the task: it waits until each of them is
	// completed. A parent that no longer exists counts as completed; one that
	// is canceled cancels the task; one that is a dead letter is met as OnDead
	// says. Nth names tasks of the same batch. What parents leave behind is
	// read by Get if they have a Retention: it ends when its time has passed and this task has
	// been completed, canceled or purged, not before. Dead, this task holds them as long as the dead
	// letter is kept; redriven after that time was limited by Settings.DeadRetention, no longer. A moment may pass between the
	// return of the call that completes the last parent and the task's being ready.
	After []ID `json:",omitempty"`
	// OnDead is what becomes of the task when one of After becomes a dead letter.
	OnDead OnDead `json:",omitzero"`
}

// OnDead is what the death of a parent means to a task.
type OnDead uint8

// What becomes of a task when a parent becomes a dead letter.
const (
	// HoldOnDead has it wait: when the parent is redriven and completed, it
	// goes on; when the parent is purged or canceled, it is canceled. The default.
	HoldOnDead OnDead = iota
	// CancelOnDead cancels it.
	CancelOnDead
	// RunOnDead takes the parent for completed.
	RunOnDead
)

var onDeads = enum[OnDead]{"OnDead", []string{"hold", "cancel", "run"}}

// String returns "hold", "cancel" or "run".
func (d OnDead) String() string { return onDeads.text(d) }

// MarshalText returns the same as String, and an error that matches [ErrInvalid] for what is none
// of them.
func (d OnDead) MarshalText() ([]byte, error) { return onDeads.marshal(d) }

// UnmarshalText reads what MarshalText returns, and returns an error that matches [ErrInvalid] for
// anything else.
func (d *OnDead) UnmarshalText(b []byte) error { return onDeads.unmarshal(d, b) }

// MaxParents is how many tasks a task can wait for.
const MaxParents = 10_000

// Nth names, in [Task.After], the i-th task (from 0) of the batch in which the
// task is produced: of a ProduceBatch, or of the follow-ups of a completion. It
// must come before the task. All tasks of such a batch lie in one shard: with
// several shards, those that have a LimitKey, Group or [Unique.Key] may not be
// among them unless they all lead to the same one.
func Nth(i int) ID { return keys.Nth(i) }

// State is where a task is in its life.
type State uint8

// The states of a task. It is in exactly one.
const (
	Ready     State = iota + 1 // may be claimed
	Scheduled                  // waits for its time: produced for later, or between two attempts
	Blocked                    // waits for others: its parents, its turn in its group, or room for its LimitKey
	Leased                     // a worker has it
	Dead                       // a dead letter: out of attempts, or given up
	Done                       // completed, and kept with its result
	Canceled                   // canceled, and kept
)

var taskStates = enum[State]{"State", []string{"", "ready", "scheduled", "blocked", "leased", "dead", "done", "canceled"}}

// String returns the state in lower case.
func (s State) String() string { return taskStates.text(s) }

// MarshalText returns the same as String, and an error that matches [ErrInvalid] for what is no
// state.
func (s State) MarshalText() ([]byte, error) { return taskStates.marshal(s) }

// UnmarshalText reads what MarshalText returns, and returns an error that matches [ErrInvalid] for
// anything else.
func (s *State) UnmarshalText(b []byte) error { return taskStates.unmarshal(s, b) }

// ClaimRequest says what a Claim takes.
type ClaimRequest struct {
	// Queues are asked in this order: a task of the first that has one ready is
	// taken. At least one is required.
	Queues []string
	// Weights, unless it is empty, lets a lot decide the order of each claim: a queue comes
	// first in proportion to its weight, 1 to 65,536. Those of Queues that it does not name
	// have weight 1; it names no others.
	Weights map[string]int
	// LeaseFor is how long the lease lasts. 0: Options.LeaseFor.
	LeaseFor time.Duration
	// Max is how many tasks ClaimBatch takes at the most. 0: 1. Claim ignores it.
	Max int
	// Local binds the lease to this process, as Run does: Extend writes nothing, and if the
	// process ends before the task does, the task is ready again soon after the next Open, with
	// the attempt counted, and does not wait until the lease expires. It is for workers
	// that live in the process, and not for remote ones, which outlive it.
	// Task.LeaseFor has no effect then. In a cluster, a lease also lasts LeaseFor from
	// when another node comes to lead its shard.
	Local bool
	// NoWait returns ErrEmpty instead of waiting for a task.
	NoWait bool
}

// Backoff is the wait between two attempts: Base doubled (or multiplied by
// Factor) for each attempt already made, at most Max, then spread by Jitter.
type Backoff struct {
	Base   time.Duration // after the first attempt. Default: 1 s
	Max    time.Duration // Default: 1 h
	Factor float64       // at least 1. Default: 2
	// Jitter is the part of the wait that is left to chance: the wait is drawn
	// evenly from [1-Jitter, 1+Jitter] times its length. 0 to 1; default 0.2,
	// negative for none.
	Jitter float64
}

// Delay is the wait after the given attempt (1 is the first). chance is in
// [0, 1) and decides the jitter.
func (b Backoff) Delay(attempt int, chance float64) time.Duration {
	d := float64(b.Base) * math.Pow(b.Factor, float64(max(attempt, 1)-1))
	d = min(d, float64(b.Max))
	if b.Jitter > 0 {
		d *= 1 + b.Jitter*(2*chance-1)
	}
	if d >= math.MaxInt64 {
		return math.MaxInt64
	}
	return time.Duration(d)
}

// check refuses a task that exceeds the limits.
func (t *Task) check(l *Limits) error {
	if err := checkName("Task.Queue", t.Queue, l.Name); err != nil {
		return err
	}
	if t.Queue == "" {
		return &InvalidError{"Task.Queue", `""`, "a name"}
	}
	if err := checkName("Task.Tenant", t.Tenant, l.Name); err != nil {
		return err
	}
	if len(t.Payload) > l.Payload {
		return &InvalidError{"Task.Payload", bytesOf(len(t.Payload)), atMost(l.Payload)}
	}
	if headers := headerBytes(t.Headers); headers > l.Headers {
		return &InvalidError{"Task.Headers", bytesOf(headers), atMost(l.Headers)}
	}
	if t.Priority < MinPriority || t.Priority > MaxPriority {
		return &InvalidError{"Task.Priority", t.Priority, "0 to 9"}
	}
	if t.MaxAttempts < 0 || t.MaxAttempts > math.MaxInt32 {
		return &InvalidError{"Task.MaxAttempts", t.MaxAttempts, "0 to 2^31-1"}
	}
	if year := t.RunAt.UTC().Year(); !t.RunAt.IsZero() && (year < 0 || year > 9999) {
		return &InvalidError{"Task.RunAt", t.RunAt, "the years 0 to 9999"}
	}
	if t.LeaseFor != 0 && (t.LeaseFor < minLease || t.LeaseFor > maxLease) {
		return &InvalidError{"Task.LeaseFor", t.LeaseFor, fmt.Sprint("0, or ", minLease, " to ", maxLease)}
	}
	if t.Timeout < 0 {
		return &InvalidError{"Task.Timeout", t.Timeout, "0 or more"}
	}
	if t.Retention < 0 && t.Retention != Forever {
		return &InvalidError{"Task.Retention", t.Retention, "0 or more, or Forever"}
	}
	if err := t.Unique.check(l); err != nil {
		return err
	}
	if err := checkName("Task.Group", t.Group, l.Name); err != nil {
		return err
	}
	if err := checkName("Task.LimitKey", t.LimitKey, l.Name); err != nil {
		return err
	}
	if len(t.After) > MaxParents {
		return &InvalidError{"Task.After", len(t.After), atMostTasks(MaxParents)}
	}
	if t.OnDead > RunOnDead {
		return &InvalidError{"Task.OnDead", t.OnDead, "HoldOnDead, CancelOnDead or RunOnDead"}
	}
	return nil
}

// tied reports whether the task has to do with others.
func (t *Task) tied() bool {
	return t.Unique.Key != "" || t.Group != "" || t.LimitKey != "" || len(t.After) != 0
}

// headerBytes is what Limits.Headers bounds.
func headerBytes(headers map[string]string) int {
	n := 0
	for k, v := range headers {
		n += len(k) + len(v)
	}
	return n
}

// record returns the stored form of a new task.
func (t *Task) record() record.Record {
	r := record.Record{
		Head: record.Head{
			MaxAttempts: uint32(t.MaxAttempts),
			Lease:       millis(t.LeaseFor),
			Timeout:     millis(t.Timeout),
			Retention:   retentionMillis(t.Retention),
		},
		Headers: t.Headers,
		Payload: t.Payload,
	}
	r.RunAt = runAtMillis(t.RunAt)
	if t.tied() {
		t.tie(&r)
	}
	return r
}

// tie adds to the stored form what binds the task to others.
func (t *Task) tie(r *record.Record) {
	r.Limit, r.LimitKey = t.limitScope(), t.LimitKey
	r.Group, r.GroupKey = t.groupScope(), t.Group
	if t.Unique.Key != "" {
		r.Unique, r.UniqueKey = t.uniqueHash(), t.Unique.Key
		r.UniqueFor, r.Flags = millis(t.Unique.For), t.Unique.flags()
	}
	for _, id := range t.After {
		r.Parents = append(r.Parents, id)
	}
	if len(t.After) != 0 {
		r.OnDead = uint8(t.OnDead)
	}
}

func runAtMillis(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(max(t.UnixMilli(), 0))
}

// task returns what a producer handed in, as far as the record says it.
func task(l engine.LaneKey, r *record.Record) Task {
	t := Task{
		Queue:       l.Queue,
		Tenant:      l.Tenant,
		Priority:    int(l.Priority),
		Payload:     r.Payload,
		Headers:     r.Headers,
		MaxAttempts: int(r.MaxAttempts),
		LeaseFor:    duration(r.Lease),
		Timeout:     duration(r.Timeout),
		Retention:   Forever,
		Unique:      uniqueOf(r),
		Group:       r.GroupKey,
		LimitKey:    r.LimitKey,
		OnDead:      OnDead(r.OnDead),
	}
	for _, id := range r.Parents {
		t.After = append(t.After, id)
	}
	if r.Retention >= 0 {
		t.Retention = duration(uint64(r.Retention))
	}
	if r.RunAt != 0 {
		t.RunAt = time.UnixMilli(int64(r.RunAt))
	}
	return t
}

// millis rounds a duration up to milliseconds: what is asked for is the least
// that is given.
func millis(d time.Duration) uint64 {
	ms := uint64(d / time.Millisecond)
	if d%time.Millisecond != 0 {
		ms++
	}
	return ms
}

// duration is the inverse of millis; the longest duration, rounded up, is
// itself again.
func duration(ms uint64) time.Duration {
	if ms > uint64(math.MaxInt64/time.Millisecond) {
		return math.MaxInt64
	}
	return time.Duration(ms) * time.Millisecond
}

func retentionMillis(d time.Duration) int64 {
	if d == Forever {
		return -1
	}
	return int64(millis(d))
}

func checkName(field, name string, limit int) error {
	if len(name) > limit {
		return &InvalidError{field, bytesOf(len(name)), atMost(limit)}
	}
	return nil
}

func bytesOf(n int) string { return fmt.Sprintf("%d bytes", n) }
func atMost(n int) string  { return fmt.Sprintf("at most %d bytes", n) }

// enum is the texts of a type's values; one without a text is not a value.
type enum[T ~uint8] struct {
	name  string // of the type
	texts []string
}

func (e *enum[T]) valid(v T) bool { return int(v) < len(e.texts) && e.texts[v] != "" }

// text returns the text of a value, and the type and number of anything else.
func (e *enum[T]) text(v T) string {
	if e.valid(v) {
		return e.texts[v]
	}
	return fmt.Sprintf("%s(%d)", e.name, uint8(v))
}

func (e *enum[T]) marshal(v T) ([]byte, error) {
	if !e.valid(v) {
		return nil, &InvalidError{e.name, uint8(v), e.allowed()}
	}
	return []byte(e.texts[v]), nil
}

func (e *enum[T]) unmarshal(v *T, text []byte) error {
	i := slices.Index(e.texts, string(text))
	if i < 0 || !e.valid(T(i)) {
		return &InvalidError{e.name, fmt.Sprintf("%q", text), e.allowed()}
	}
	*v = T(i)
	return nil
}

// allowed is all texts, such as "a, b or c".
func (e *enum[T]) allowed() string {
	texts := slices.DeleteFunc(slices.Clone(e.texts), func(s string) bool { return s == "" })
	last := len(texts) - 1
	return strings.Join(texts[:last], ", ") + " or " + texts[last]
}
