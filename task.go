package codeq

import (
	"fmt"
	"math"
	"strconv"
	"time"
	"unicode/utf8"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// The range of task priorities: a claim takes the highest first.
const (
	MinPriority = 0
	MaxPriority = 9
)

// Forever is the retention of tasks that are kept without end.
const Forever time.Duration = -1

// Task is the input of a producer. Only Queue is required. Durations are rounded up to 1 ms.
type Task struct {
	// Queue is the name of the queue, which also selects the handler of [Queue.Run].
	Queue string `json:",omitzero"`
	// Kind selects, among the handlers of the queue, one by [HandleKind]. "": that by [Handle]. The
	// limit is [Limits.Name].
	Kind string `json:",omitzero"`
	// Payload is the data for the worker. [Queue.Produce] copies it; the Payload of a [Lease]
	// belongs to the worker.
	Payload []byte            `json:",omitempty"`
	Headers map[string]string `json:",omitempty"` // small attributes, such as a trace context
	// Priority is 0 to 9; 9 is claimed first.
	Priority int `json:",omitzero"`
	// Tenant is for fair sharing of a queue: claims take tasks of the same priority from the
	// tenants in turn, over all shards ([Settings.TenantWeights]).
	Tenant string `json:",omitzero"`
	// MaxAttempts is how often the task is tried before it becomes a dead letter. Crashes of its
	// process ([Queue.Run]) may add up to ten times as many tries. 0: by [Policy].
	MaxAttempts int `json:",omitzero"`
	// RunAt is when the task becomes ready. Zero or past: at once.
	RunAt time.Time `json:",omitzero"`
	// LeaseFor is how long each lease of this task lasts. 0: as the claim says. [Queue.Run] renews
	// its leases itself and ignores it.
	LeaseFor time.Duration `json:",omitzero"`
	// Timeout bounds one run of the handler: [Queue.Run] cancels its context after it. 0: by
	// [Policy]. If the handler goes on for as long again, or a second, its attempt counts, though
	// its task is given back or its process dies: see [RunOptions.OnError] and [Queue.Workers].
	Timeout time.Duration `json:",omitzero"`
	// Retention is how long the task is kept with its result after it was completed or canceled. It
	// is kept at least so long, and until the last task that waited for it (After) has ended; then
	// it is deleted within an eighth of Retention, or within a second if that is longer, by the
	// clock of [Backoff]. 0: by [Policy]; [Forever]: without end.
	Retention time.Duration `json:",omitzero"`

	// Unique prevents a second task with the same idempotency key.
	Unique Unique `json:",omitzero"`
	// Group makes tasks follow each other: among those with the same queue, tenant, LimitKey and
	// Group, only one has the turn, and the next one becomes ready when that one has ended after
	// all its attempts (completed, canceled, or dead; with [Settings.HoldGroups] the group waits
	// for a dead letter). The first to become due goes first; of several that wait, the one that
	// was produced first. A handler that goes on after a cancel is waited for: [Queue.Cancel].
	Group string `json:",omitzero"`
	// LimitKey counts the task against [Settings.ConcurrencyPerKey] of its queue. When a claim
	// finds a task that would exceed the limit, the task becomes [Blocked]; blocked tasks go on in
	// the order of their IDs, whatever their priorities and tenants. A handler that goes on after a
	// cancel keeps its place: [Queue.Cancel].
	LimitKey string `json:",omitzero"`
	// After lists the parents of the task: it waits until each of them is completed. A canceled
	// parent cancels the task; OnDead says what happens if a parent is a dead letter, and OnMissing
	// if one does not exist. [Nth] refers to tasks of the same batch. When the call that produces
	// the task has returned, all parents have noted it, even if they end at once; parents in other
	// shards note the task of a tick, or of a handler's output, a moment after it appears.
	// [Job].Parents returns the results of parents that have a Retention. Such a parent is kept
	// until its Retention has passed and this task has been completed, canceled or purged, or, as a
	// dead letter, deleted; if [Settings.DeadRetention] limits that time, a redrive makes it no
	// longer. This task is ready a moment after the call that completes the last parent.
	After []ID `json:",omitempty"`
	// OnDead is what happens to the task when one of After becomes a dead letter.
	OnDead OnDead `json:",omitzero"`
	// OnMissing is what happens to the task when one of After does not exist: it never has, or it
	// has ended and is no longer kept, so that its outcome is unknown.
	OnMissing OnMissing `json:",omitzero"`
}

// OnDead is what happens to a task when a parent becomes a dead letter.
type OnDead uint8

// The values of [OnDead].
const (
	// HoldOnDead makes the task wait: it goes on when the parent is redriven and completed, and is
	// canceled when the parent is purged or canceled. The default.
	HoldOnDead OnDead = iota
	// CancelOnDead cancels the task.
	CancelOnDead
	// RunOnDead runs the task as if the parent were completed.
	RunOnDead
)

var onDeads = newEnum[OnDead]("OnDead", "hold", "cancel", "run")

// String returns "hold", "cancel" or "run".
func (d OnDead) String() string { return onDeads.Text(d) }

// MarshalText returns the text of String, and [ErrInvalid] for any other value.
func (d OnDead) MarshalText() ([]byte, error) { return onDeads.Marshal(d) }

// UnmarshalText reads the text of MarshalText, and returns [ErrInvalid] for any other.
func (d *OnDead) UnmarshalText(b []byte) error { return onDeads.Unmarshal(d, b) }

// OnMissing is what happens to a task when a parent does not exist.
type OnMissing uint8

// The values of [OnMissing].
const (
	// RunOnMissing runs the task as if the parent were completed. The default.
	RunOnMissing OnMissing = iota
	// CancelOnMissing cancels the task.
	CancelOnMissing
	// RefuseOnMissing makes the call that produces the task, or sets a schedule with it, fail with
	// [ErrNotFound] before anything is stored. A parent that goes between that check and the moment
	// when it would note the task cancels the task, and so does one that is gone at a tick.
	RefuseOnMissing
)

var onMissings = newEnum[OnMissing]("OnMissing", "run", "cancel", "refuse")

// String returns "run", "cancel" or "refuse".
func (m OnMissing) String() string { return onMissings.Text(m) }

// MarshalText returns the text of String, and [ErrInvalid] for any other value.
func (m OnMissing) MarshalText() ([]byte, error) { return onMissings.Marshal(m) }

// UnmarshalText reads the text of MarshalText, and returns [ErrInvalid] for any other.
func (m *OnMissing) UnmarshalText(b []byte) error { return onMissings.Unmarshal(m, b) }

// MaxParents is the largest number of parents of a task.
const MaxParents = 10_000

// Nth refers, in [Task.After], to the i-th task (from 0) of the same [Queue.ProduceBatch], or of
// the follow-ups of the same completion: it must come before the task that waits for it.
func Nth(i int) ID { return keys.Nth(i) }

// State is the state of a task.
type State uint8

// The states of a task. It is in exactly one.
const (
	Ready     State = iota + 1 // may be claimed
	Scheduled                  // waits for its time: produced for later, or between two attempts
	Blocked                    // waits for its parents, its turn, the limit of its LimitKey, or its start as a suspect
	Leased                     // claimed by a worker
	Dead                       // a dead letter: out of attempts, or given up
	Done                       // completed, and kept with its result
	Canceled                   // canceled, and kept
)

var taskStates = newEnum[State]("State",
	"", "ready", "scheduled", "blocked", "leased", "dead", "done", "canceled",
)

// String returns the state in lower case.
func (s State) String() string { return taskStates.Text(s) }

// MarshalText returns the text of String, and [ErrInvalid] for any other value.
func (s State) MarshalText() ([]byte, error) { return taskStates.Marshal(s) }

// UnmarshalText reads the text of MarshalText, and returns [ErrInvalid] for any other.
func (s *State) UnmarshalText(b []byte) error { return taskStates.Unmarshal(s, b) }

// ClaimRequest says which tasks a [Queue.Claim] takes, and how.
type ClaimRequest struct {
	// Queues are searched in this order: [Queue.Claim] takes a task of the first one that has a
	// ready task. At least one is required.
	Queues []string
	// Weights, unless it is empty, makes the order random for each claim: a queue comes first with
	// a probability in proportion to its weight, 1 to 65,536. Queues that it does not name have
	// weight 1; it must not name others.
	Weights  map[string]int
	LeaseFor time.Duration // how long the lease lasts. 0: [Options.LeaseFor]
	Max      int           // how many tasks [Queue.ClaimBatch] takes at the most, and not [Queue.Claim]. 0: 1
	// Local binds the lease to this process, as [Queue.Run] does. [Queue.Extend] writes nothing. If
	// the process dies, the task comes back at the next [Open], as those of Run do, and if it
	// closes the queue, without counting the attempt; neither waits until the lease expires. So it
	// is for workers in this process, not for remote ones. [Task.LeaseFor] has no effect on it. In
	// a cluster, where another node may come to lead the shard, Extend is stored, and the lease
	// does not end with the process, but when it expires.
	Local bool
	// Worker is the name of who claims, for people: [TaskInfo.History] has it, as it has
	// [RunOptions.Name]. Up to 128 bytes. In a cluster, of claims that wait for tasks of other
	// nodes, those beyond 64 different names may get none. "": no name.
	Worker string
	NoWait bool // return [ErrEmpty] instead of waiting for a task
}

// Backoff determines the wait between two attempts: Base after the first attempt, for each further
// one multiplied by Factor, and Step more, at most Max, then varied by Jitter. So it grows
// exponentially, linearly with a Step, or not at all with Factor 1. Like retentions and the For of
// [Unique], the wait is by a clock of the shard, which follows the wall clock and never goes back:
// it ends earlier if the wall clock is set forward, and not later if it is set back, or if it was
// wrong in an earlier process, than its length after [Open] (in a cluster, after the shard has got
// its leader). [TaskInfo.At] tells when that is by the wall clock.
type Backoff struct {
	Base   time.Duration `json:",omitzero"` // after the first attempt. Default: 1 s
	Max    time.Duration `json:",omitzero"` // Default: 1 h
	Factor float64       `json:",omitzero"` // at least 1. Default: 2, with a Step 1
	Step   time.Duration `json:",omitzero"` // added for each attempt after the first. Default: 0
	// Jitter is the random part of the wait: the wait is drawn uniformly from [1-Jitter, 1+Jitter]
	// times its length. At most 1; default 0.2, negative for none.
	Jitter float64 `json:",omitzero"`
}

// Delay returns the wait after the given attempt (1 is the first), with the defaults of b. chance,
// a random number in [0, 1), decides the jitter.
func (b Backoff) Delay(attempt int, chance float64) time.Duration {
	of := (*base.Backoff)(&b)
	of.SetDefaults()
	return of.Delay(attempt, chance)
}

// check refuses a task that exceeds the limits, or waits for one of its batch that does not come
// before it. index is its place in the batch.
func (t *Task) check(l *Limits, index int) error {
	if err := checkNewName("Task.Queue", t.Queue, l.Name); err != nil {
		return err
	}
	if t.Queue == "" {
		return &InvalidError{"Task.Queue", `""`, "a name"}
	}
	if err := checkNewName("Task.Kind", t.Kind, l.Name); err != nil {
		return err
	}
	if err := checkNewName("Task.Tenant", t.Tenant, l.Name); err != nil {
		return err
	}
	if len(t.Payload) > l.Payload {
		return &InvalidError{"Task.Payload", bytesOf(len(t.Payload)), atMost(l.Payload)}
	}
	if len(t.Headers) > 0 {
		if size := record.HeaderBytes(t.Headers); size > l.Headers {
			return &InvalidError{"Task.Headers", bytesOf(size), atMost(l.Headers)}
		}
		for k, v := range t.Headers {
			if err := checkUTF8("Task.Headers", k, v); err != nil {
				return err
			}
		}
	}
	if t.Priority < MinPriority || t.Priority > MaxPriority {
		return &InvalidError{"Task.Priority", t.Priority, "0 to 9"}
	}
	if t.MaxAttempts < 0 || t.MaxAttempts > math.MaxInt32 {
		return &InvalidError{"Task.MaxAttempts", t.MaxAttempts, "0 to 2^31-1"}
	}
	if !t.RunAt.IsZero() {
		if year := t.RunAt.UTC().Year(); year < 0 || year > 9999 {
			return &InvalidError{"Task.RunAt", t.RunAt, "the years 0 to 9999 in UTC"}
		}
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
	if err := checkNewName("Task.Group", t.Group, l.Name); err != nil {
		return err
	}
	if err := checkNewName("Task.LimitKey", t.LimitKey, l.Name); err != nil {
		return err
	}
	if len(t.After) > MaxParents {
		return &InvalidError{"Task.After", len(t.After), atMostTasks(MaxParents)}
	}
	for _, id := range t.After {
		if i, ok := keys.NthOf(id); ok && (i < 0 || i >= index) {
			allowed := fmt.Sprintf("tasks of the batch before the task itself, %d", index)
			return &InvalidError{"Task.After", fmt.Sprintf("Nth(%d)", i), allowed}
		}
		if id == (ID{}) {
			return &InvalidError{"Task.After", id, "IDs of tasks"}
		}
	}
	if t.OnDead > RunOnDead {
		return &InvalidError{"Task.OnDead", t.OnDead, "HoldOnDead, CancelOnDead or RunOnDead"}
	}
	if t.OnMissing > RefuseOnMissing {
		return &InvalidError{"Task.OnMissing", t.OnMissing, "RunOnMissing, CancelOnMissing or RefuseOnMissing"}
	}
	return nil
}

// isPlain reports whether a task has no more than a lane and a payload, as most tasks.
func (t *Task) isPlain() bool {
	return t.RunAt.IsZero() && len(t.Headers) == 0 && t.MaxAttempts == 0 && t.LeaseFor == 0 && t.Timeout == 0 &&
		t.Retention == 0 && t.Kind == "" && !t.tied()
}

// tied reports whether the task is bound to others.
func (t *Task) tied() bool {
	return t.Unique.Key != "" || t.Group != "" || t.LimitKey != "" || len(t.After) != 0
}

// fill makes r, which is zero, the stored form of a new task.
func (t *Task) fill(r *record.Record) {
	r.MaxAttempts, r.RunAt = uint32(t.MaxAttempts), runAtMillis(t.RunAt)
	r.Lease, r.Timeout = record.Millis(t.LeaseFor), record.Millis(t.Timeout)
	r.Retention = record.Retention(t.Retention)
	r.Kind, r.Headers, r.Payload = t.Kind, t.Headers, t.Payload
	if t.tied() {
		t.tie(r)
	}
}

// tie adds the fields that bind the task to others to the stored form.
func (t *Task) tie(r *record.Record) {
	r.Limit, r.LimitKey = t.limitScope(), t.LimitKey
	r.Group, r.GroupKey = t.groupScope(), t.Group
	if t.Unique.Key != "" {
		r.Unique, r.UniqueKey = t.uniqueHash(), t.Unique.Key
		r.UniqueFor, r.MaxWait, r.Flags = record.Millis(t.Unique.For), record.Millis(t.Unique.MaxWait), t.Unique.flags()
	}
	for _, id := range t.After {
		r.Parents = append(r.Parents, id)
	}
	if len(t.After) != 0 {
		r.OnDead, r.OnMissing = uint8(t.OnDead), uint8(t.OnMissing)
	}
}

func runAtMillis(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(max(t.UnixMilli(), 0))
}

// task returns the input of the producer, as far as it is in the record.
func task(l engine.LaneKey, r *record.Record) Task {
	t := Task{
		Queue:       l.Queue,
		Kind:        r.Kind,
		Tenant:      l.Tenant,
		Priority:    int(l.Priority),
		Payload:     r.Payload,
		Headers:     r.Headers,
		MaxAttempts: int(r.MaxAttempts),
		LeaseFor:    record.Duration(r.Lease),
		Timeout:     record.Duration(r.Timeout),
		Retention:   Forever,
		Unique:      uniqueOf(r),
		Group:       r.GroupKey,
		LimitKey:    r.LimitKey,
		OnDead:      OnDead(r.OnDead),
		OnMissing:   OnMissing(r.OnMissing),
	}
	for _, id := range r.Parents {
		t.After = append(t.After, id)
	}
	if r.Retention >= 0 {
		t.Retention = record.Duration(uint64(r.Retention))
	}
	if r.RunAt != 0 {
		t.RunAt = msTime(r.RunAt)
	}
	return t
}

func checkName(field, name string, limit int) error {
	if len(name) > limit {
		return &InvalidError{field, bytesOf(len(name)), atMost(limit)}
	}
	return nil
}

// checkNewName is checkName for a name that is made. Verbs that read, or end what there is, take
// any name, since old ones may not be UTF-8.
func checkNewName(field, name string, limit int) error {
	if !utf8.ValidString(name) {
		return checkUTF8(field, name)
	}
	return checkName(field, name, limit)
}

// checkUTF8 refuses texts that JSON would change.
func checkUTF8(field string, texts ...string) error {
	for _, s := range texts {
		if !utf8.ValidString(s) {
			return &InvalidError{field, strconv.Quote(s), "UTF-8; a digest in hexadecimal"}
		}
	}
	return nil
}

func bytesOf(n int) string { return fmt.Sprintf("%d bytes", n) }
func atMost(n int) string  { return fmt.Sprintf("at most %d bytes", n) }

// newEnum makes the texts of a type, with the errors of this package.
func newEnum[T ~uint8](name string, texts ...string) base.Enum[T] {
	return base.Enum[T]{Name: name, Texts: texts, Refuse: func(value any, limit string) error { return &InvalidError{name, value, limit} }}
}

// ID identifies a task. It is a UUIDv7 (RFC 9562): the IDs of one shard sort in the order of their
// creation. No task has the zero ID.
//
//	bytes 0-5    milliseconds since 1970
//	bytes 6-7    version 7, and a 12-bit counter
//	byte  8      variant, 6 random bits
//	bytes 9-11   the lane of the task when it was produced
//	bytes 12-14  random
//	byte  15     chosen so that FNV-1a(ID) mod shards is the task's shard
type ID [keys.IDLen]byte

// String returns the canonical form of the UUID.
func (id ID) String() string { return keys.FormatID(id) }

// MarshalText returns the canonical form of the UUID.
func (id ID) MarshalText() ([]byte, error) { return keys.AppendIDText(nil, id), nil }

// UnmarshalText reads the canonical form of a UUID, and returns [ErrInvalid] for anything else.
func (id *ID) UnmarshalText(b []byte) error {
	read, ok := keys.ParseID(b)
	if !ok {
		return &InvalidError{"ID", string(b), "a UUID such as 0193b3c0-...."}
	}
	*id = read
	return nil
}

// ParseID reads the canonical form of a UUID.
//
// Errors: [ErrInvalid].
func ParseID(s string) (id ID, err error) {
	err = id.UnmarshalText([]byte(s))
	return id, err
}

// Time returns when the task was produced, to the millisecond, by the clock of its shard.
func (id ID) Time() time.Time { return msTime(keys.MintedAt(keys.ID(id))) }

// shard returns the number of the ID's shard.
func (id ID) shard(shards int) int { return keys.ShardOf(id, shards) }
