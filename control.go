package codeq

import (
	"context"
	"fmt"
	"slices"
	"time"

	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// Cancel ends a task that has not been completed, a dead letter too: it is not delivered again, and
// kept as [Canceled] for its retention. The context of its handler of [Queue.Run] is cancelled with
// the cause [ErrCanceled], and the outcome has no effect. Any other worker gets an error that
// matches [ErrLeaseLost] and [ErrCanceled] when it next uses its receipt; ErrLeaseLost alone after
// an [Open], a change of the shard's leader, or 1,024 further canceled leases of the shard. Tasks
// that wait for a canceled one are canceled as well.
//
// The idempotency key is free at once, or when [Unique.For] is over. [Settings.Concurrency],
// [Settings.ConcurrencyPerKey] and the turn of a [Task.Group] go to the next task when the handler
// has returned, or when its lease, which is no longer renewed, would have ended
// ([RunOptions.LeaseFor]): no other begins beside it, except after an [Open] or a change of the
// shard's leader. They do not wait for leases of [Queue.Claim]. So it is for any task that ends, or
// is given back, while its handler goes on ([QueueInfo.Held]).
//
// Errors: [ErrNotFound] (no longer kept, too), [ErrNotWaiting] (it is completed or canceled), those
// of changes (see [Queue]), and that of ctx.
func (q *Queue) Cancel(ctx context.Context, id ID) (err error) {
	defer public(&err)
	return q.alter(ctx, id, engine.AlterCancel, engine.AlterTo{})
}

// SetPriority moves a waiting task (ready, scheduled or blocked) to another priority, 0 to 9. A
// ready task keeps its turn by age.
//
// Errors: [ErrNotFound], [ErrNotWaiting], those of changes (see [Queue]), and that of ctx.
func (q *Queue) SetPriority(ctx context.Context, id ID, priority int) (err error) {
	defer public(&err)
	if priority < MinPriority || priority > MaxPriority {
		return &InvalidError{"SetPriority priority", priority, "0 to 9"}
	}
	return q.alter(ctx, id, engine.AlterPriority, engine.AlterTo{Arg: uint64(priority)})
}

// SetRunAt changes when a waiting task (ready, scheduled or blocked) becomes ready; zero or past:
// now, unless something else holds it back. A task that was ready already goes behind the others.
//
// Errors: [ErrNotFound], [ErrNotWaiting], those of changes (see [Queue]), and that of ctx.
func (q *Queue) SetRunAt(ctx context.Context, id ID, t time.Time) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	task := Task{Queue: "any", RunAt: t}
	if err := task.check(&q.opts.Limits, 0); err != nil {
		return err
	}
	return q.alter(ctx, id, engine.AlterRunAt, engine.AlterTo{Arg: runAtMillis(t)})
}

// Forget deletes a task that has ended: one that is kept ([Done] or [Canceled]) before its
// retention has passed, or a dead letter, as [Queue.PurgeDead] does. Its idempotency key stays
// taken as before. Tasks with it in [Task.After] still get its result: it goes a second after they
// end.
//
// Errors: [ErrNotFound] (it has not ended, too), those of changes (see [Queue]), and that of ctx.
func (q *Queue) Forget(ctx context.Context, id ID) (err error) {
	defer public(&err)
	return q.alter(ctx, id, engine.AlterForget, engine.AlterTo{})
}

func (q *Queue) alter(ctx context.Context, id ID, how engine.Alteration, to engine.AlterTo) error {
	return q.doFor(ctx, id, rule(callAlter, &call.Alter{ID: id, How: how, AlterTo: to}))
}

// DeadFilter selects the dead letters for [Queue.RedriveAllDead] and [Queue.PurgeDead]. The zero
// DeadFilter selects all that died before the call begins, by the clocks of their shards.
type DeadFilter struct {
	Queue    string               // "": of all queues
	Tenants  []string             // none: of all tenants; "" stands for tasks without one
	From, To time.Time            // of death: at or after From, and before To. Zero: no bound.
	Match    func(*TaskInfo) bool // if not nil, selects by returning true; must not keep the [TaskInfo]
	Rate     float64              // how many a second are redriven or purged, 0 to 1e9. 0: as fast as possible.
}

// RedriveDead makes a dead letter ready again, behind the ready tasks of its lane, with its
// LastError and attempts counted from 0. One that holds the turn of its group
// ([Settings.HoldGroups]) goes first in it; any other waits for its turn. A [*DuplicateError]:
// another task has its idempotency key.
//
// Errors: [ErrNotFound], [ErrDuplicate], those of changes (see [Queue]), and that of ctx.
func (q *Queue) RedriveDead(ctx context.Context, id ID) (err error) {
	return q.RedriveDeadFrom(ctx, id, "")
}

// RedriveDeadFrom is [Queue.RedriveDead] for a dead letter with steps ([Step]): its handler runs
// the step of a name, and those after it, again; with "" it goes on after the last one.
// [Queue.Signal] can give a signal among them again. A [Child] among them stays the same: redrive
// it first. A name that no step of the task has is refused with [ErrInvalid].
//
// Errors: [ErrNotFound], [ErrDuplicate], those of changes (see [Queue]), and that of ctx.
func (q *Queue) RedriveDeadFrom(ctx context.Context, id ID, step string) (err error) {
	defer public(&err)
	if step != "" {
		if err := call.CheckName("RedriveDeadFrom step", step); err != nil {
			return translated(err)
		}
	}
	return q.alter(ctx, id, engine.AlterRedrive, engine.AlterTo{Step: step})
}

// RedriveAllDead redrives dead letters, except if another task has taken their idempotency key, and
// returns how many. After an error, such as that of ctx, some may have been redriven.
//
// Errors: [ErrCorrupt], those of changes (see [Queue]), and that of ctx.
func (q *Queue) RedriveAllDead(ctx context.Context, which DeadFilter) (_ int, err error) {
	defer public(&err)
	return q.alterDead(ctx, which, BulkRedrive)
}

// PurgeDead deletes dead letters, and returns how many. Tasks that wait for one of them are
// canceled. After an error, such as that of ctx, some may have been deleted.
//
// Errors: [ErrCorrupt], those of changes (see [Queue]), and that of ctx.
func (q *Queue) PurgeDead(ctx context.Context, which DeadFilter) (_ int, err error) {
	defer public(&err)
	return q.alterDead(ctx, which, BulkPurge)
}

func (q *Queue) alterDead(ctx context.Context, which DeadFilter, how BulkAction) (int, error) {
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
	BulkCancel      BulkAction = iota + 1 // [Queue.Cancel]: [Ready], [Scheduled], [Blocked], [Leased] or [Dead]
	BulkRedrive                           // [Queue.RedriveDead]: [Dead]
	BulkPurge                             // [Queue.Forget]: [Dead], [Done] or [Canceled]
	BulkSetPriority                       // [Queue.SetPriority], to [BulkOptions.Priority]: [Ready], [Scheduled] or [Blocked]
	// BulkMove replaces a task by a new one in [BulkOptions.ToQueue], with what its producer has
	// set, its LastError, another ID, attempts from 0, and no steps, signals and cursors: [Ready],
	// [Scheduled] (until the same time) or [Dead] (it becomes ready). To others the task is
	// canceled, and not kept. Not with a Group, LimitKey, [Unique], After or tasks that wait for
	// it.
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
	// [TaskFilter] selects the tasks. States must be ones that the Action allows; required for
	// [BulkCancel], [BulkPurge] and [BulkMove], as is [TaskFilter.Queue] for BulkMove.
	TaskFilter
	Action   BulkAction           // required
	Priority int                  // for BulkSetPriority
	ToQueue  string               // for BulkMove; another one than Queue
	Match    func(*TaskInfo) bool // if not nil, selects by returning true; must not keep the [TaskInfo]
	Rate     float64              // how many a second are altered, 0 to 1e9. 0: as fast as possible.
	DryRun   bool                 // counts the tasks, and changes nothing
	Progress func(BulkResult)     // if not nil, gets the result so far: often, at least once a page of tasks
	Cursor   string               // [BulkResult.Next] of a call with an error and the same [TaskFilter]. "": begin.
}

// BulkResult is the result of [Queue.Bulk]. After an error, Changed may lack 256 tasks a shard.
type BulkResult struct {
	Matched int    // that were selected
	Changed int    // that were altered
	Skipped int    // that had changed their state before their turn
	Failed  int    // refused: the idempotency key is taken ([BulkRedrive]), or tied to others ([BulkMove])
	Next    string // where another call goes on after an error; otherwise ""
}

// Bulk alters all selected tasks that were produced, and those that died, before it begins, by the
// clock of their shard. It reads pages as [Queue.ListPage] does, and alters the tasks of a few
// pages before it reads the next, up to 256 in one commit. So it is not atomic; a task that changes
// its state before its turn is left out. After an error, such as that of ctx, some tasks were
// altered, as the result says. With its Next another call goes on, also after a restart or on
// another node: it alters a task again only if that has come back to its former state.
//
// Errors: [ErrCorrupt], those of changes (see [Queue]), and that of ctx.
func (q *Queue) Bulk(ctx context.Context, opts BulkOptions) (r BulkResult, err error) {
	defer public(&err)
	return q.bulk(ctx, &opts)
}

// bulkCap is how many tasks one call alters at the most.
const bulkCap = 256

func (q *Queue) bulk(ctx context.Context, opts *BulkOptions) (r BulkResult, err error) {
	if err := q.checkCall(ctx); err != nil {
		return r, err
	}
	if err := opts.check(&q.opts.Limits); err != nil {
		return r, err
	}
	if len(opts.States) == 0 {
		opts.States = altering[opts.Action].states
	}
	begin, err := q.clocks(ctx)
	if err != nil {
		return r, err
	}
	change := engine.BulkAlteration{How: altering[opts.Action].how, AlterTo: engine.AlterTo{Arg: uint64(opts.Priority), Queue: opts.ToQueue}}
	for _, s := range opts.States {
		change.States |= record.SetOf(engine.TaskState(s))
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
		if p.Next == "" || opts.Rate > 0 || read%len(q.replicas) == 0 { // commits of about bulkCap tasks
			if err := bulks.Flush(ctx); err != nil {
				return r, err
			}
			r.Next = p.Next
		}
		if opts.Progress != nil {
			opts.Progress(r)
		}
		if p.Next == "" {
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
	switch moves := o.Action == BulkMove; {
	case o.Priority < MinPriority || o.Priority > MaxPriority || o.Priority != 0 && o.Action != BulkSetPriority:
		return &InvalidError{"BulkOptions.Priority", o.Priority, "0 to 9, for BulkSetPriority"}
	case !isRate(o.Rate):
		return &InvalidError{"BulkOptions.Rate", o.Rate, rates}
	case !moves && o.ToQueue != "":
		return &InvalidError{"BulkOptions.ToQueue", o.ToQueue, `"", unless for BulkMove`}
	case moves && o.Queue == "":
		return &InvalidError{"BulkOptions.Queue", `""`, "a name, for BulkMove"}
	case moves && (o.ToQueue == "" || o.ToQueue == o.Queue):
		return &InvalidError{"BulkOptions.ToQueue", o.ToQueue, "a name, other than Queue, for BulkMove"}
	}
	return checkNewName("BulkOptions.ToQueue", o.ToQueue, l.Name)
}

const rates = "0 to 1e9"

func isRate(perSecond float64) bool { return perSecond >= 0 && perSecond <= 1e9 }
