package codeq

import (
	"context"
	"fmt"
	"time"

	"codeq/internal/call"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// Unique is the idempotency key of a task. Among the tasks of a queue and tenant (and of a Group
// and LimitKey, if they have one) only one holds a key at a time. A produce of another task with
// the same key returns the ID of the holder, with [ErrDuplicate], or replaces the holder.
//
// A key is taken as long as its task is ready, scheduled, blocked or leased, and at least for the
// time For. It is stored, and so restarts do not free it.
type Unique struct {
	// Key is the idempotency key. "": the task has none, and the other fields have no meaning.
	Key string `json:",omitzero"`
	// For is how long after its produce the key is taken at least, whatever happens to the task. A
	// wall clock that is set forward makes it shorter; one that is set back does not make it
	// longer, and after a start with a wrong clock it ends at the latest For after the next [Open]
	// or change of the leader. 0: until the task has ended.
	For time.Duration `json:",omitzero"`
	// Replace makes the new task replace one that still waits (ready, scheduled or blocked). The ID
	// stays, and so do After and [OnDead]; everything else is that of the new task: its attempts
	// count from 0, it waits from the beginning, and when it is ready it goes behind the others. So
	// a task that is produced again and again for a moment later runs once, after the last produce.
	// A leased task is not replaced: the new one is refused with [ErrDuplicate]. In a batch, the
	// last of several wins: see [Queue.ProduceBatch].
	Replace bool `json:",omitzero"`
	// ReleaseOnComplete and ReleaseOnDead end For when the task is completed, or becomes a dead
	// letter.
	ReleaseOnComplete bool `json:",omitzero"`
	ReleaseOnDead     bool `json:",omitzero"`
}

// DuplicateError says that an idempotency key is taken. It matches [ErrDuplicate].
type DuplicateError struct {
	Key string
	// ID is that of the task that holds the key. If only the key came by the import of command
	// codeq, it is one of the year 1970, which no task has.
	ID ID
	// Index is the index of the refused task in the batch.
	Index int
}

func (e *DuplicateError) Error() string {
	if keys.ID(e.ID) == keys.Gone {
		return fmt.Sprintf("codeq: idempotency key %q is taken by a task that is gone", e.Key)
	}
	return fmt.Sprintf("codeq: idempotency key %q is taken by task %s", e.Key, e.ID)
}

// Is reports that every [DuplicateError] is an [ErrDuplicate].
func (e *DuplicateError) Is(target error) bool { return target == ErrDuplicate }

// flags returns the flags of a new task, which is stored only if its key is free.
func (u *Unique) flags() (f uint8) {
	if u.Key != "" {
		f = record.HoldsKey
	}
	if u.ReleaseOnComplete {
		f |= record.ReleaseOnComplete
	}
	if u.ReleaseOnDead {
		f |= record.ReleaseOnDead
	}
	if u.Replace {
		f |= record.ReplaceWaiting
	}
	return f
}

func uniqueOf(r *record.Record) Unique {
	if r.UniqueKey == "" {
		return Unique{}
	}
	return Unique{
		Key: r.UniqueKey, For: record.Duration(r.UniqueFor),
		Replace:           r.Flags&record.ReplaceWaiting != 0,
		ReleaseOnComplete: r.Flags&record.ReleaseOnComplete != 0,
		ReleaseOnDead:     r.Flags&record.ReleaseOnDead != 0,
	}
}

func (u *Unique) check(l *Limits) error {
	if u.Key == "" {
		if *u != (Unique{}) {
			return &InvalidError{"Task.Unique.Key", `""`, "a key, if other fields of Unique are set"}
		}
		return nil
	}
	if err := checkNewName("Task.Unique.Key", u.Key, l.Name); err != nil {
		return err
	}
	if u.For < 0 {
		return &InvalidError{"Task.Unique.For", u.For, "0 or more"}
	}
	return nil
}

func (t *Task) limitScope() uint64 { return keys.LimitScope(t.Queue, t.LimitKey) }

func (t *Task) groupScope() uint64 { return keys.GroupScope(t.Queue, t.Tenant, t.LimitKey, t.Group) }

func (t *Task) uniqueHash() [keys.UniqueLen]byte {
	return keys.UniqueHash(t.Queue, t.Tenant, t.LimitKey, t.Group, t.Unique.Key)
}

// UniqueKey identifies an idempotency key by the fields of the task that has it: tasks that differ
// in one of them do not share a key.
type UniqueKey struct {
	Queue    string // Task.Queue. Required
	Tenant   string // Task.Tenant
	Group    string // Task.Group
	LimitKey string // Task.LimitKey
	Key      string // Task.Unique.Key. Required
}

func (k *UniqueKey) check(l *Limits) error {
	for _, f := range []struct {
		name, value string
		required    bool
	}{
		{"UniqueKey.Queue", k.Queue, true},
		{"UniqueKey.Tenant", k.Tenant, false},
		{"UniqueKey.Group", k.Group, false},
		{"UniqueKey.LimitKey", k.LimitKey, false},
		{"UniqueKey.Key", k.Key, true},
	} {
		if f.required && f.value == "" {
			return &InvalidError{f.name, `""`, "not empty"}
		}
		if err := checkName(f.name, f.value, l.Name); err != nil {
			return err
		}
	}
	return nil
}

func (k *UniqueKey) hash() [keys.UniqueLen]byte {
	return keys.UniqueHash(k.Queue, k.Tenant, k.LimitKey, k.Group, k.Key)
}

// home returns the shard that stores the key, which is that of its tasks.
func (k *UniqueKey) home(shards int) int {
	t := Task{Queue: k.Queue, Tenant: k.Tenant, Group: k.Group, LimitKey: k.LimitKey}
	ties := record.Ties{Limit: t.limitScope(), Group: t.groupScope(), Unique: k.hash()}
	shard, _ := ties.Home(shards)
	return shard
}

// ReleaseKey frees an idempotency key; the task that has it may be in any state. It returns
// [ErrNotFound] if no task has the key, and [ErrDiskFull] if the task has not ended and there is no
// room to store the task without the key.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrClosed], and that of ctx.
func (q *Queue) ReleaseKey(ctx context.Context, k UniqueKey) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	if err := k.check(&q.opts.Limits); err != nil {
		return err
	}
	op := rule(callReleaseKey, &call.ReleaseKey{Hash: k.hash(), Key: k.Key})
	_, err = q.do(ctx, k.home(len(q.replicas)), op)
	return err
}
