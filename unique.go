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
// A key is taken, also over restarts, until its task has ended, and at least for the time For.
type Unique struct {
	// Key is the idempotency key. "": none; the other fields must be zero.
	Key string `json:",omitzero"`
	// For is how long after its produce the key is taken at least, whatever happens to the task, by
	// the clock of [Backoff]. 0: until the task has ended.
	For time.Duration `json:",omitzero"`
	// MaxWait bounds how long tasks with Replace put one off: RunAt is at most MaxWait, that of the
	// last of them, after the first produce. One that has been leased is not put off: a task with
	// MaxWait changes its contents, and neither its attempts nor when it goes on. 0: no bound.
	MaxWait time.Duration `json:",omitzero"`
	// Replace makes the new task replace one that waits (ready, scheduled or blocked). The ID, the
	// History and the Logs stay, and After, [OnDead] and [OnMissing]; the rest is that of the new
	// task, without progress, metadata, cursors and signals of the former one: its attempts count
	// from 0, and it goes behind the others. So a task that is produced again and again for later
	// runs once, after the last produce. One that is leased, or has finished a [Step], is not
	// replaced ([ErrDuplicate]), unless ReleaseOnClaim frees the key.
	Replace bool `json:",omitzero"`
	// ReleaseOnClaim frees the key during each lease, and after a finished [Step], for a task that
	// has it as well. Else this task has the key while it waits for an attempt. Not with For.
	ReleaseOnClaim bool `json:",omitzero"`
	// ReleaseOnComplete and ReleaseOnDead end For when the task is completed, or a dead letter.
	ReleaseOnComplete bool `json:",omitzero"`
	ReleaseOnDead     bool `json:",omitzero"`
}

// DuplicateError says that an idempotency key is taken, or that a task has got a signal before. It
// matches [ErrDuplicate].
type DuplicateError struct {
	Key string
	// Signal is the name of the signal ([Queue.Signal]); then Key is "".
	Signal string `json:",omitzero"`
	// ID is that of the task that holds the key, or has got the signal. If only the key came by the
	// import of command codeq, it is one of the year 1970, which no task has.
	ID ID
	// Index is the index of the refused task in the batch.
	Index int
}

func (e *DuplicateError) Error() string {
	if e.Signal != "" {
		return fmt.Sprintf("codeq: task %s has got signal %q before", e.ID, e.Signal)
	}
	if keys.ID(e.ID) == keys.Gone {
		return fmt.Sprintf("codeq: idempotency key %q is taken by a task that is gone", e.Key)
	}
	return fmt.Sprintf("codeq: idempotency key %q is taken by task %s", e.Key, e.ID)
}

// Is reports that every [DuplicateError] is an [ErrDuplicate].
func (e *DuplicateError) Is(target error) bool { return target == ErrDuplicate }

// flags returns the flags of a new task, which is stored only if its key is free.
func (u *Unique) flags() (flags uint8) {
	for _, f := range [...]struct {
		has  bool
		flag uint8
	}{
		{u.Key != "" && !u.ReleaseOnClaim, record.HoldsKey}, {u.Replace, record.ReplaceWaiting}, {u.ReleaseOnClaim, record.ReleaseOnClaim},
		{u.ReleaseOnComplete, record.ReleaseOnComplete}, {u.ReleaseOnDead, record.ReleaseOnDead},
	} {
		if f.has {
			flags |= f.flag
		}
	}
	return flags
}

func uniqueOf(r *record.Record) Unique {
	if r.UniqueKey == "" {
		return Unique{}
	}
	return Unique{
		Key: r.UniqueKey, For: record.Duration(r.UniqueFor), MaxWait: record.Duration(r.MaxWait),
		Replace:           r.Flags&record.ReplaceWaiting != 0,
		ReleaseOnComplete: r.Flags&record.ReleaseOnComplete != 0,
		ReleaseOnDead:     r.Flags&record.ReleaseOnDead != 0,
		ReleaseOnClaim:    r.Flags&record.ReleaseOnClaim != 0,
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
	switch {
	case u.For < 0:
		return &InvalidError{"Task.Unique.For", u.For, "0 or more"}
	case u.MaxWait < 0, u.MaxWait > 0 && !u.Replace:
		return &InvalidError{"Task.Unique.MaxWait", u.MaxWait, "0 or more, with Replace"}
	case u.ReleaseOnClaim && u.For > 0:
		return &InvalidError{"Task.Unique.ReleaseOnClaim", "with For", "one of both"}
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
	for _, f := range [...][2]string{{"Queue", k.Queue}, {"Key", k.Key}, {"Tenant", k.Tenant}, {"Group", k.Group}, {"LimitKey", k.LimitKey}} {
		if f[1] == "" && (f[0] == "Queue" || f[0] == "Key") {
			return &InvalidError{"UniqueKey." + f[0], `""`, "not empty"}
		}
		if err := checkName("UniqueKey."+f[0], f[1], l.Name); err != nil {
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

// ReleaseKey frees an idempotency key; the task that has it may be in any state.
//
// Errors: [ErrNotFound] (no task has the key), those of changes (see [Queue]), and that of ctx.
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
