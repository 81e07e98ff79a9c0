package codeq

import (
	"context"
	"time"

	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/keys"
)

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
	return q.eachDead(ctx, which, engine.AlterRedrive)
}

// PurgeDead deletes dead letters, and returns how many. Tasks that wait for one of them are
// canceled. When it returns an error, such as that of ctx, some may have been deleted.
//
// Errors: [ErrInvalid], [ErrCorrupt], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrClosed], and that of ctx.
func (q *Queue) PurgeDead(ctx context.Context, which DeadFilter) (_ int, err error) {
	defer public(&err)
	return q.eachDead(ctx, which, engine.AlterPurge)
}

// bulkCap is how many tasks one call alters at the most.
const bulkCap = 256

// eachDead alters dead letters, as many at a time as the rate allows.
func (q *Queue) eachDead(ctx context.Context, which DeadFilter, how engine.Alteration) (n int, err error) {
	if err := q.checkCall(ctx); err != nil {
		return 0, err
	}
	if !(which.Rate >= 0 && which.Rate <= 1e9) {
		return 0, &InvalidError{"DeadFilter.Rate", which.Rate, "0 to 1e9"}
	}
	begin, err := q.clocks(ctx)
	if err != nil {
		return 0, err
	}
	bulks := newBulkSender(len(q.replicas), bulkCap, which.Rate, q.closing, func(shard int, ids []keys.ID) error {
		c := &call.Bulk{BulkAlteration: engine.BulkAlteration{IDs: ids, How: how}}
		settled, err := q.do(ctx, shard, rule(callBulk, c))
		if settled {
			n += c.N
		}
		return err
	})
	for t, err := range q.listBefore(ctx, ListOptions{
		State: Dead, Queue: which.Queue, Tenants: which.Tenants, From: which.From, To: which.To,
	}, begin) { // otherwise tasks that die again would be altered again without end
		if err != nil {
			return n, err
		}
		if which.Match != nil && !which.Match(t) {
			continue
		}
		if err := bulks.add(ctx, q.shardOf(t.ID), t.ID); err != nil {
			return n, err
		}
	}
	return n, bulks.flush(ctx)
}
