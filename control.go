package codeq

import (
	"context"
	"fmt"
	"slices"
	"time"

	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/keys"
)

// Cancel ends a task that has not been completed: the task is not delivered again, and is kept as
// [Canceled] for its retention. If a handler of [Queue.Run] is working on it, the handler's context
// is cancelled with the cause [ErrCanceled], and the handler's outcome has no effect. Any other
// worker gets an error that matches [ErrLeaseLost] and [ErrCanceled] when it next uses its receipt.
// Each shard remembers so its last 1,024 leases that were canceled, in memory: of earlier ones, and
// after an [Open] or a change of its leader, the error matches ErrLeaseLost alone. Tasks that wait
// for a canceled one are canceled too. A dead letter can be canceled as well.
//
// The idempotency key is free at once, or when [Unique.For] is over. [Settings.Concurrency],
// [Settings.ConcurrencyPerKey] and the turn of a [Task.Group] go to the next task when the handler
// has returned, or when its lease, which is no longer renewed, would have ended
// ([RunOptions.LeaseFor]): so no other begins beside it. They do not wait longer than until the
// next [Open] or change of the shard's leader, and not at all for leases of [Queue.Claim]. The same
// holds for a task that Run gives back at its end, and one that any verb ends by its
// [Lease.Receipt] while its handler goes on ([QueueInfo.Held]).
//
// Cancel returns [ErrNotFound] if the task does not exist, or is no longer kept, and
// [ErrNotWaiting] if it is completed or canceled already.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrNotWaiting], [ErrDiskFull], [ErrUncertain], [ErrFailed],
// [ErrNotLeader], [ErrClosed], and that of ctx.
func (q *Queue) Cancel(ctx context.Context, id ID) (err error) {
	defer public(&err)
	return q.alter(ctx, id, engine.AlterCancel, 0)
}

// SetPriority moves a waiting task (ready, scheduled or blocked) to another priority, 0 to 9. A
// ready task keeps its turn by age. SetPriority returns [ErrNotFound] if the task does not exist,
// and [ErrNotWaiting] if it is leased or has ended.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrNotWaiting], [ErrDiskFull], [ErrUncertain], [ErrFailed],
// [ErrNotLeader], [ErrClosed], and that of ctx.
func (q *Queue) SetPriority(ctx context.Context, id ID, priority int) (err error) {
	defer public(&err)
	if priority < MinPriority || priority > MaxPriority {
		return &InvalidError{"SetPriority priority", priority, "0 to 9"}
	}
	return q.alter(ctx, id, engine.AlterPriority, uint64(priority))
}

// SetRunAt changes when a waiting task (ready, scheduled or blocked) becomes ready; zero or past:
// now, unless something else holds it back. A task that was ready already goes behind the other
// ready tasks. Errors are those of [Queue.SetPriority].
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrNotWaiting], [ErrDiskFull], [ErrUncertain], [ErrFailed],
// [ErrNotLeader], [ErrClosed], and that of ctx.
func (q *Queue) SetRunAt(ctx context.Context, id ID, t time.Time) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	task := Task{Queue: "any", RunAt: t}
	if err := task.check(&q.opts.Limits, 0); err != nil {
		return err
	}
	return q.alter(ctx, id, engine.AlterRunAt, runAtMillis(t))
}

// Forget deletes a task that has ended: one that is kept ([Done] or [Canceled]) before its
// retention has passed, or a dead letter, as [Queue.PurgeDead] does. Its idempotency key stays
// taken for as long as before. If tasks that have it in [Task.After] have not ended, they still get
// its result: then it goes a second after the last of them has ended.
//
// Forget returns [ErrNotFound] if the task does not exist, or has not ended.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrClosed], and that of ctx.
func (q *Queue) Forget(ctx context.Context, id ID) (err error) {
	defer public(&err)
	return q.alter(ctx, id, engine.AlterForget, 0)
}

func (q *Queue) alter(ctx context.Context, id ID, how engine.Alteration, arg uint64) error {
	return q.doFor(ctx, id, rule(callAlter, &call.Alter{ID: id, How: how, Arg: arg}))
}

// DeadFilter selects the dead letters for [Queue.RedriveAllDead] and [Queue.PurgeDead]. The zero
// DeadFilter selects all that died before the call begins, by the clocks of their shards.
type DeadFilter struct {
	Queue   string   // "": of all queues
	Tenants []string // none: of all tenants; "" stands for tasks without one
	// From and To bound the time of death: at or after From, and before To. Zero: no bound.
	From, To time.Time
	// Match, if not nil, is called for each of them, and selects it by returning true. It must not
	// keep the [TaskInfo].
	Match func(*TaskInfo) bool
	// Rate is how many a second are redriven or purged, 0 to 1e9. 0: as fast as possible.
	Rate float64
}

// RedriveDead makes a dead letter ready again, behind the ready tasks of its lane, and its attempts
// are counted from 0 again. It keeps its LastError. A dead letter that holds the turn of its group
// ([Settings.HoldGroups]) goes first in the group; any other waits for its turn.
//
// RedriveDead returns [ErrNotFound] if there is no such dead letter, and a [*DuplicateError]
// ([ErrDuplicate]) if another task has taken its idempotency key.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrDuplicate], [ErrDiskFull], [ErrUncertain], [ErrFailed],
// [ErrNotLeader], [ErrClosed], and that of ctx.
func (q *Queue) RedriveDead(ctx context.Context, id ID) (err error) {
	defer public(&err)
	return q.alter(ctx, id, engine.AlterRedrive, 0)
}

// RedriveAllDead redrives dead letters and returns how many. They stay if another task has taken
// their idempotency key. When it returns an error, such as that of ctx, some may have been
// redriven.
//
// Errors: [ErrInvalid], [ErrCorrupt], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrClosed], and that of ctx.
func (q *Queue) RedriveAllDead(ctx context.Context, which DeadFilter) (_ int, err error) {
	defer public(&err)
	return q.alterDead(ctx, which, BulkRedrive)
}

// PurgeDead deletes dead letters, and returns how many. Tasks that wait for one of them are
// canceled. When it returns an error, such as that of ctx, some may have been deleted.
//
// Errors: [ErrInvalid], [ErrCorrupt], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrClosed], and that of ctx.
func (q *Queue) PurgeDead(ctx context.Context, which DeadFilter) (_ int, err error) {
	defer public(&err)
	return q.alterDead(ctx, which, BulkPurge)
}

func (q *Queue) alterDead(ctx context.Context, which DeadFilter, how BulkAction) (int, error) {
	if err := q.checkCall(ctx); err != nil {
		return 0, err
	}
	if !isRate(which.Rate) {
		return 0, &InvalidError{"DeadFilter.Rate", which.Rate, rates}
	}
	r, err := q.bulk(ctx, &BulkOptions{
		TaskFilter: TaskFilter{States: []State{Dead}, Queue: which.Queue, Tenants: which.Tenants, From: which.From, To: which.To},
		Action:     how, Match: which.Match, Rate: which.Rate,
	})
	return r.Changed, err
}

// BulkAction is the action of [Queue.Bulk] on tasks.
type BulkAction uint8

// The values of [BulkAction], with the allowed states of a task.
const (
	// BulkCancel is [Queue.Cancel]: [Ready], [Scheduled], [Blocked], [Leased] or [Dead].
	BulkCancel BulkAction = iota + 1
	// BulkRedrive is [Queue.RedriveDead]: [Dead].
	BulkRedrive
	// BulkPurge is [Queue.Forget]: [Dead], [Done] or [Canceled].
	BulkPurge
	// BulkSetPriority is [Queue.SetPriority], to [BulkOptions.Priority]: [Ready], [Scheduled] or
	// [Blocked].
	BulkSetPriority
	// BulkMove replaces a task by a new one in [BulkOptions.ToQueue], with everything that its
	// producer has set and its LastError, but with another ID and attempts that are counted from 0:
	// [Ready], [Scheduled] (it stays so until the same time) or [Dead] (it becomes ready). To
	// others the task is canceled, and it is not kept. Tasks with a Group, LimitKey, [Unique] or
	// After, and those that others have in After, cannot be moved.
	BulkMove
)

var bulkActions = newEnum[BulkAction]("BulkAction", "", "cancel", "redrive", "purge", "set-priority", "move")

// String returns "cancel", "redrive", "purge", "set-priority" or "move".
func (a BulkAction) String() string { return bulkActions.Text(a) }

// MarshalText returns the text of String, and [ErrInvalid] for any other value.
func (a BulkAction) MarshalText() ([]byte, error) { return bulkActions.Marshal(a) }

// UnmarshalText reads the text of MarshalText, and returns [ErrInvalid] for any other.
func (a *BulkAction) UnmarshalText(b []byte) error { return bulkActions.Unmarshal(a, b) }

// altering has the alteration of each action, and the allowed states of its tasks.
var altering = [...]struct {
	how    engine.Alteration
	states []State
}{
	BulkCancel:      {engine.AlterCancel, []State{Ready, Scheduled, Blocked, Leased, Dead}},
	BulkRedrive:     {engine.AlterRedrive, []State{Dead}},
	BulkPurge:       {engine.AlterForget, []State{Dead, Done, Canceled}},
	BulkSetPriority: {engine.AlterPriority, []State{Ready, Scheduled, Blocked}},
	BulkMove:        {engine.AlterMove, []State{Ready, Scheduled, Dead}},
}

// BulkOptions are the action of [Queue.Bulk], and its selection of tasks.
type BulkOptions struct {
	// [TaskFilter] selects the tasks. Its States must be ones that the Action allows; required for
	// [BulkCancel], [BulkPurge] and [BulkMove]. [Queue] is required for [BulkMove].
	TaskFilter
	Action   BulkAction // required
	Priority int        // for BulkSetPriority
	ToQueue  string     // for BulkMove; another one than Queue
	// Match, if not nil, is called for each of them, and selects it by returning true. It must not
	// keep the [TaskInfo].
	Match func(*TaskInfo) bool
	// Rate is how many a second are altered, 0 to 1e9. 0: as fast as possible.
	Rate float64
	// DryRun counts the tasks, and changes nothing.
	DryRun bool
	// Cursor is [BulkResult.Next] of a call that has ended with an error, with the same
	// [TaskFilter]. "": from the beginning.
	Cursor string
}

// BulkResult is the result of [Queue.Bulk]. After an error, up to 256 tasks for each shard may have
// been altered that are not in Changed.
type BulkResult struct {
	Matched int // that were selected
	Changed int // that were altered
	Skipped int // that had changed their state before their turn
	// Failed were refused: of [BulkRedrive], as another task has taken their idempotency key; of
	// [BulkMove], as they are tied to others.
	Failed int
	// Next is where another call goes on after an error. Without one it is "".
	Next string
}

// Bulk alters all tasks that are selected and were produced before it begins, and, if they are
// dead, died before it, by the clock of their shard. It reads them as by
// [Queue.ListPage], and alters those of a few pages before it reads the next ones, up to 256 in one
// commit. So it is not atomic; a task that changes its state before its turn is left out.
//
// When Bulk returns an error, such as that of ctx, some tasks were altered, as the result says.
// With its Next another call goes on, also after a restart or on another node: it does not alter
// again the tasks altered since, unless they have come back to their former state.
//
// Errors: [ErrInvalid], [ErrCorrupt], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrClosed], and that of ctx.
func (q *Queue) Bulk(ctx context.Context, opts BulkOptions) (r BulkResult, err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return r, err
	}
	if err := opts.check(&q.opts.Limits); err != nil {
		return r, err
	}
	if len(opts.States) == 0 {
		opts.States = altering[opts.Action].states
	}
	return q.bulk(ctx, &opts)
}

// bulkCap is how many tasks one call alters at the most.
const bulkCap = 256

// bulk is Bulk after its checks.
func (q *Queue) bulk(ctx context.Context, opts *BulkOptions) (r BulkResult, err error) {
	begin, err := q.clocks(ctx)
	if err != nil {
		return r, err
	}
	change := engine.BulkAlteration{How: altering[opts.Action].how, AlterTo: engine.AlterTo{Arg: uint64(opts.Priority), Queue: opts.ToQueue}}
	for _, s := range opts.States {
		change.States |= engine.SetOf(engine.TaskState(s))
	}
	bulks := call.NewBulkSender(len(q.replicas), bulkCap, opts.Rate, q.closing, func(shard int, ids []keys.ID) error {
		c := &call.AlterMany{BulkAlteration: change}
		c.IDs = ids
		settled, err := q.do(ctx, shard, rule(callAlterMany, c))
		if settled {
			r.Changed, r.Failed = r.Changed+c.N, r.Failed+c.Failed
			if err == nil {
				r.Skipped += len(ids) - c.N - c.Failed
			}
		}
		return err
	})
	page := PageOptions{TaskFilter: opts.TaskFilter, Cursor: opts.Cursor, Limit: bulkCap, NoPayload: opts.Match == nil}
	if opts.Rate > 0 { // tasks are altered within a second after they are read
		page.Limit = int(max(1, min(opts.Rate, bulkCap)))
	}
	r.Next = opts.Cursor
	for read := 1; ; read++ {
		p, err := q.listPage(ctx, "BulkOptions", &page, begin)
		if err != nil {
			return r, err
		}
		for _, t := range p.Tasks {
			late := !t.ID.Time().Before(begin[q.shardOf(t.ID)])
			same := opts.Action == BulkSetPriority && t.Priority == opts.Priority
			if late || same || opts.Match != nil && !opts.Match(t) {
				continue
			}
			if r.Matched++; opts.DryRun {
				continue
			}
			if err := bulks.Add(ctx, q.shardOf(t.ID), keys.ID(t.ID)); err != nil {
				return r, err
			}
		}
		page.Cursor = p.Next
		if p.Next != "" && opts.Rate == 0 && read%len(q.replicas) != 0 { // commits of about bulkCap tasks
			continue
		}
		if err := bulks.Flush(ctx); err != nil {
			return r, err
		}
		if r.Next = p.Next; r.Next == "" {
			return r, nil
		}
	}
}

// clocks returns for each shard a time after all stamps of its IDs and of the ends of its tasks.
func (q *Queue) clocks(ctx context.Context) ([]time.Time, error) {
	all := make([]time.Time, len(q.replicas))
	for i := range all {
		c := new(call.Clock)
		if err := q.ask(ctx, i, rule(callClock, c)); err != nil {
			return nil, err
		}
		all[i] = msTime(c.Time + 1)
	}
	return all, nil
}

func (o *BulkOptions) check(l *Limits) error {
	if !bulkActions.Valid(o.Action) {
		return &InvalidError{"BulkOptions.Action", uint8(o.Action), bulkActions.Allowed()}
	}
	allowed := altering[o.Action].states
	if len(o.States) == 0 && o.Action != BulkRedrive && o.Action != BulkSetPriority {
		return &InvalidError{"BulkOptions.States", "none", fmt.Sprint("some of ", allowed)}
	}
	for _, s := range o.States {
		if !slices.Contains(allowed, s) {
			return &InvalidError{"BulkOptions.States", s, fmt.Sprint("some of ", allowed)}
		}
	}
	if o.Priority < MinPriority || o.Priority > MaxPriority || o.Priority != 0 && o.Action != BulkSetPriority {
		return &InvalidError{"BulkOptions.Priority", o.Priority, "0 to 9, for BulkSetPriority"}
	}
	if !isRate(o.Rate) {
		return &InvalidError{"BulkOptions.Rate", o.Rate, rates}
	}
	if o.Action != BulkMove {
		if o.ToQueue != "" {
			return &InvalidError{"BulkOptions.ToQueue", o.ToQueue, `"", unless for BulkMove`}
		}
		return nil
	}
	if o.Queue == "" {
		return &InvalidError{"BulkOptions.Queue", `""`, "a name, for BulkMove"}
	}
	if o.ToQueue == "" || o.ToQueue == o.Queue {
		return &InvalidError{"BulkOptions.ToQueue", o.ToQueue, "a name, other than Queue, for BulkMove"}
	}
	return checkNewName("BulkOptions.ToQueue", o.ToQueue, l.Name)
}

const rates = "0 to 1e9"

func isRate(perSecond float64) bool { return perSecond >= 0 && perSecond <= 1e9 }
