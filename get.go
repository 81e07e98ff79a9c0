package codeq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/listing"
	"codeq/internal/record"
	"codeq/internal/store"
)

// TaskInfo is a stored task and its state.
type TaskInfo struct {
	ID ID `json:",omitzero"`
	Task
	State State `json:",omitzero"`
	// Attempts is the number of attempts so far; for a leased task, the running one included.
	Attempts int `json:",omitzero"`
	// Crashes is how often its process has died with the task at work, without counting as an
	// attempt, and Suspect whether the task may be the reason, and starts slowly ([Queue.Run]).
	Crashes   int    `json:",omitzero"`
	Suspect   bool   `json:",omitzero"`
	LastError string `json:",omitzero"` // of the last failed attempt
	// At is a time that depends on the state, by the wall clock. [Ready]: since when it is ready. A
	// task keeps this time if its lease has expired for the first time or ended by a restart, or if
	// [Queue.Run] gives it back unstarted, and gets a new one if it comes back in any other way.
	// [Scheduled]: when it becomes ready. [Blocked]: when it was produced. [Leased]: when the lease
	// expires; for a task of Run, when it would expire if Run did not renew it any more. [Dead],
	// [Done], [Canceled]: since when it is. A past time is by the wall clock as it was set last.
	At     time.Time `json:",omitzero"`
	Until  time.Time `json:",omitzero"`  // when a [Dead], [Done] or [Canceled] task is deleted; zero: never
	Result []byte    `json:",omitempty"` // of a completed task
	// FirstReady is when the task became ready for its first attempt; zero if it was not ready yet,
	// or that is not known. [ID.Time] says when it was produced.
	FirstReady time.Time `json:",omitzero"`
	// History are the attempts of the task, the oldest first: at most the first two and the last
	// eight that have ended, and the one that goes on. The number of each attempt is that of its
	// [Lease]; after one that did not count, or a redrive, the next has the same or a smaller
	// number. It is stored with the end of an attempt: that of a task which is completed or
	// canceled is gone with the task unless that is kept ([Task.Retention]).
	History []Attempt `json:",omitempty"`
	// HistoryDropped is how many attempts are left out after the first two of History.
	HistoryDropped int `json:",omitzero"`
	// Progress is the handler's last [ReportProgress], and Metadata has the values that handlers
	// have set by [SetMetadata]. They are kept from attempt to attempt.
	Progress Progress          `json:",omitzero"`
	Metadata map[string]string `json:",omitempty"`
	// Steps are the finished steps of its handler ([Step]), in order. Lists leave them out.
	Steps []StepInfo `json:",omitempty"`
	// Cursors are the encoded values of its handlers ([SetCursor]), by name; not in lists.
	Cursors map[string][]byte `json:",omitempty"`
	// Logs are the newest lines that handlers have written to their loggers, with
	// [RunOptions].KeepLogs, the oldest first: at most 64, and 8 KiB, over all attempts. They are
	// shown and stored like Progress. Lists leave them out.
	Logs []LogLine `json:",omitempty"`
}

// LogLine is one message of a handler to its logger.
type LogLine struct {
	At      time.Time `json:",omitzero"`
	Level   slog.Level
	Attempt int `json:",omitzero"` // of the handler, as in [Lease.Attempt]
	// Text is the message with the attributes, as name=value: at most 1 KiB, 256 bytes each.
	Text string `json:",omitzero"`
}

// Attempt is an attempt of a task: from a lease to its end.
type Attempt struct {
	Number int `json:",omitzero"` // [Lease.Attempt]
	// Start is when the lease was granted, by the clock that orders the tasks of its shard.
	Start time.Time `json:",omitzero"`
	End   time.Time `json:",omitzero"` // zero: it goes on
	// Outcome is how: [EventCompleted], [EventRetried], [EventReleased], [EventDeadLettered],
	// [EventCanceled], [EventExpired], or [EventSuspended] or [EventUnhandled], which stand for all
	// that follow each other; 0: it goes on.
	Outcome EventKind `json:",omitzero"`
	// Worker is [RunOptions.Name], or [ClaimRequest.Worker]; "" if there was none.
	Worker string `json:",omitzero"`
	Error  string `json:",omitzero"` // of a failed attempt, at most its first 256 bytes
}

// Progress is how far the handler of a task has come, as it says.
type Progress struct {
	Done  int64     `json:",omitzero"`
	Total int64     `json:",omitzero"`
	Note  string    `json:",omitzero"`
	At    time.Time `json:",omitzero"` // when it said so; zero: never
}

// Get returns a task in any state. It returns [ErrNotFound] if the task never existed, or has ended
// and is no longer kept. It is linearizable, with and without a cluster: it sees what any call had
// done that returned before Get began.
//
// Errors: [ErrNotFound], those of reads (see [Queue]), and that of ctx.
func (q *Queue) Get(ctx context.Context, id ID) (_ *TaskInfo, err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return nil, err
	}
	l := listing.NewOne(false, taskInfo)
	l.ID = keys.ID(id)
	if err := q.read(ctx, q.shardOf(id), callRead, l); err != nil {
		return nil, err
	}
	return l.Task, nil
}

// FindByKey returns the task that has an idempotency key, in any state; it has ended if the key is
// taken for a time (For of [Unique]). It returns [ErrNotFound] if no task has the key, or the one
// that has it has ended and is no longer kept. It is linearizable, as [Queue.Get] is, and costs two
// reads in a queue of any size.
//
// Errors: [ErrNotFound], those of reads (see [Queue]), and that of ctx.
func (q *Queue) FindByKey(ctx context.Context, k UniqueKey) (_ *TaskInfo, err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return nil, err
	}
	if err := k.check(&q.opts.Limits); err != nil {
		return nil, err
	}
	l := listing.NewOne(true, taskInfo)
	l.Key = k.hash()
	if err := q.read(ctx, k.home(len(q.replicas)), callFind, l); err != nil {
		return nil, fmt.Errorf("idempotency key %q: %w", k.Key, err)
	}
	return l.Task, nil
}

// Parents returns the parents of the task ([Task].After), in their order, with their results
// ([ResultAs]), and as lists have them; nil for one that is not kept, or has never existed. It
// reads those of each shard at the same time, in one message for each 1,024, and about 4 MiB.
//
// Errors: those of reads (see [Queue]), [ErrFormat] (in a cluster, of nodes that do not know it
// yet), and that of ctx.
func (j *Job[T]) Parents(ctx context.Context) (_ []*TaskInfo, err error) {
	defer public(&err)
	if !j.isMade() {
		return nil, errJobNotMade
	}
	q := j.taskCtx.runner.queue
	if ctx, err = q.begin(ctx); err != nil {
		return nil, err
	}
	all := listing.NewParts(j.After, len(q.replicas), taskInfo)
	err = q.inParallel("reading of parents", len(q.replicas), func(shard int) error {
		return all.Read(shard, func(part *listing.Many[TaskInfo]) error { return q.read(ctx, shard, callMany, part) })
	})
	if err != nil {
		return nil, err
	}
	return all.Tasks, nil
}

// read makes a shard look something up.
func (q *Queue) read(ctx context.Context, shard int, kind callKind, l lookup) error {
	return q.ask(ctx, shard, &readOp{completion: newCompletion(kind), lookup: l})
}

// lookup reads a task, a page of a list, or the use of a queue.
type lookup interface {
	listing.Lookup
	call.Wire
}

// readOp makes a lookup. The owner takes a snapshot between two commits; no other goroutine could,
// since Pebble shows a batch to readers before it has persisted. The owner also adds which of the
// requested tasks are leased, so that the stored leases need not be scanned. Another goroutine
// reads the snapshot; for a page of tasks in lanes the operation is resolved twice.
type readOp struct {
	completion
	lookup
	shard *shard // the one that resolves it
}

func (op *readOp) resolve(s *shard) {
	op.shard = s
	if use, ok := op.lookup.(*listing.Use); ok {
		use.Claims = s.claims.Waiting(use.Queue)
	}
	s.settleAfterCommit(op)
}

// settle is called by the owner between two commits, unless the operation is refused.
func (op *readOp) settle(err error) {
	if err != nil {
		op.completion.settle(err)
		return
	}
	v := op.shard.replica.slot.View()
	op.Visit(&op.shard.rules, v.Snapshot)
	go op.readView(v)
}

// readView reads in a view, and answers, or sends the operation to be resolved again.
func (op *readOp) readView(v *store.View) {
	again := false
	err := guarded(op.shard.opts.log, "read", func() (err error) {
		again, err = op.answer(v)
		return err
	})
	v.Done() // the store waits for this before it closes
	if op.err = err; !again {
		op.completion.settle(nil)
	} else if err := op.shard.inbox.Pass(op); err != nil {
		op.completion.settle(err)
	}
}

// answer reads in a view. again: the operation has to be resolved again.
func (op *readOp) answer(v *store.View) (again bool, err error) {
	again, err = op.Look(v.Snapshot, op.shard.hasEnded)
	if err != nil && !errors.Is(err, ErrNotFound) {
		if reason := v.Failure(); reason != nil {
			err = reason // the cause of the error
		}
		err = fmt.Errorf("codeq: read shard %d: %w", op.shard.index, err)
	}
	return again && err == nil, err
}

// taskInfo converts a stored task. The result shares no memory with it.
func taskInfo(t *store.Task) *TaskInfo {
	l, r := t.Lane, &t.Record
	info := &TaskInfo{
		ID: t.ID, State: State(engine.StateIn(t.Range)), Cursors: t.Cursors,
		Task:     task(engine.LaneKey{Queue: l.Queue, Tenant: l.Tenant, Priority: l.Priority}, r),
		Attempts: int(r.Attempts), LastError: r.Error, Result: t.Ended.Result, Crashes: int(r.Crashes), Suspect: r.Suspect, Until: msTime(t.Until()),
	}
	at, _ := t.Shown()
	if info.At = msTime(at); t.Lease != nil {
		info.State, info.Attempts = Leased, int(t.Lease.Attempts)
	}
	info.addHistory(t)
	for i := range t.Steps {
		s := &t.Steps[i]
		info.Steps = append(info.Steps, StepInfo{s.Name, StepKind(s.Kind), msTime(t.ByWall(s.At)), s.Result})
		if s.Kind == record.StepChild {
			info.Steps[i].Result = []byte(ID(s.Result).String())
		}
	}
	return info
}

// addHistory adds the attempts of a stored task, and what its handlers have said.
func (info *TaskInfo) addHistory(t *store.Task) {
	notes := t.Record.Notes
	if h := t.Record.History; h != nil {
		info.HistoryDropped = int(h.Dropped)
		if h.FirstReady != 0 {
			info.FirstReady = msTime(t.ByWall(h.FirstReady))
		}
		for i := range h.Attempts {
			a := &h.Attempts[i]
			info.History = append(info.History, Attempt{
				int(a.Number), msTime(t.ByWall(a.Start)), msTime(t.ByWall(a.End)), eventKindOf(engine.EventKind(a.How)), a.Worker, a.Error,
			})
		}
	}
	if t.Range == keys.Task && t.Record.Leases == 0 {
		info.FirstReady = msTime(t.ByWall(keys.SinceMillis(t.At)))
	}
	if e := t.Lease; e != nil {
		info.History = append(info.History, Attempt{Number: int(e.Attempts), Start: msTime(t.ByWall(keys.GrantedAt(e.Token))), Worker: e.Worker})
		if e.Notes != nil {
			notes = e.Notes.After(notes)
		}
	}
	if notes != nil {
		info.Metadata, info.Progress = maps.Clone(notes.Metadata), progressOf(notes)
		for _, l := range notes.Logs {
			info.Logs = append(info.Logs, LogLine{msTime(l.At), slog.Level(l.Level), int(l.Attempt), l.Text})
		}
	}
}

// progressOf converts the notes of a handler; nil: none.
func progressOf(n *record.Notes) (p Progress) {
	if n != nil && n.At != 0 {
		p = Progress{n.Done, n.Total, n.Text, msTime(n.At)}
	}
	return p
}

// msTime returns the time of a stored number of milliseconds, in UTC: JSON has no years after 9999,
// as other zones may. Zero if it is later, such as the expiry of a task that is kept for ever.
func msTime(ms uint64) time.Time {
	if ms > record.LastTime {
		return time.Time{}
	}
	return time.UnixMilli(int64(ms)).UTC()
}
