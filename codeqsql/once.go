package codeqsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"codeq"
)

// ErrAlreadyDone: a transaction of another attempt of the task was committed. The error is an
// [*AlreadyDoneError].
var ErrAlreadyDone = errors.New("codeqsql: already done")

// AlreadyDoneError says that the writes of a task were committed. It matches [ErrAlreadyDone].
type AlreadyDoneError struct {
	ID     codeq.ID
	Result []byte    // of [Tables.SaveResult] in that transaction; nil: none
	At     time.Time // of its [Tables.Once]
}

func (e *AlreadyDoneError) Error() string {
	return fmt.Sprintf("%v: task %s, at %s", ErrAlreadyDone, e.ID, e.At.Format(time.RFC3339))
}

// Is reports that every [AlreadyDoneError] is an [ErrAlreadyDone].
func (e *AlreadyDoneError) Is(target error) bool { return target == ErrAlreadyDone }

// Once makes the writes of a handler happen once. Call it at the beginning of the transaction tx
// with job.Lease, before any other write: it writes a row with the task's ID, which is committed
// with the handler's own writes. If an earlier attempt has committed its row, Once returns an
// [*AlreadyDoneError]: roll back, and complete the task with its Result, and with its follow-ups,
// which only a completion produces. This holds for all attempts, over crashes, lost leases and
// redrives.
//
// If another attempt is in its transaction now, as after a lease that was lost, Once waits for its
// end: PostgreSQL and MySQL for the row, SQLite for the lock of the database, as long as its busy
// timeout. Of two, one may get an error of the database that says so, such as a serialization
// failure: the attempt fails, and the task is tried again.
//
// It refuses a task with codeq.Unique.Replace: another one may have the same ID.
//
// Errors: [ErrAlreadyDone], codeq.ErrInvalid, those of the database, and that of ctx.
func (t *Tables) Once(ctx context.Context, tx DB, job *codeq.Lease) error {
	if job.Unique.Replace {
		return &codeq.InvalidError{Field: "Once task", Value: "Unique.Replace", Limit: "a task whose ID is its own"}
	}
	done, err := t.fence(ctx, tx, job.ID)
	failed("once task "+job.ID.String(), &err)
	if err == nil && done != nil {
		return done
	}
	return err
}

// fence writes the row of a task. It returns the committed row of another transaction, if any.
func (t *Tables) fence(ctx context.Context, tx DB, id codeq.ID) (done *AlreadyDoneError, err error) {
	// An error of a unique key would end a transaction of PostgreSQL.
	insert, lock := "INSERT INTO {once} (task_id, created_at) VALUES (?, ?) ON CONFLICT (task_id) DO NOTHING", ""
	if t.dialect == MySQL { // a read that takes no lock sees the database as of the transaction's first read
		insert, lock = "INSERT IGNORE INTO {once} (task_id, created_at) VALUES (?, ?)", " LOCK IN SHARE MODE"
	}
	n, err := t.exec(ctx, tx, insert, id[:], time.Now().UnixMilli())
	if err != nil || n > 0 {
		return nil, err
	}
	err = t.each(ctx, tx, func(rows *sql.Rows) (bool, error) {
		done = &AlreadyDoneError{ID: id}
		var at int64
		err := rows.Scan(&done.Result, &at)
		done.At = time.UnixMilli(at).UTC()
		return false, err
	}, "SELECT result, created_at FROM {once} WHERE task_id = ?"+lock, id[:])
	if err == nil && done == nil {
		err = errors.New("its row was deleted at this moment")
	}
	return done, err
}

// SaveResult stores the result of a task with the row of [Tables.Once], in the same transaction,
// for attempts that come later. Give the same one to codeq.Job.SetResult.
//
// Errors: codeq.ErrNotFound (Once has written no row), those of the database, and that of ctx.
func (t *Tables) SaveResult(ctx context.Context, tx DB, job *codeq.Lease, result []byte) (err error) {
	defer failed("save the result of task "+job.ID.String(), &err)
	n, err := t.exec(ctx, tx, "UPDATE {once} SET result = ? WHERE task_id = ?", result, job.ID[:])
	if err != nil || n > 0 {
		return err
	}
	found := false // MySQL does not count a row that has the result already
	err = t.each(ctx, tx, func(*sql.Rows) (bool, error) { found = true; return false, nil }, "SELECT 1 FROM {once} WHERE task_id = ?", job.ID[:])
	if err == nil && !found {
		err = fmt.Errorf("%w: no row of Once", codeq.ErrNotFound)
	}
	return err
}

// Getter is the part of a *codeq.Queue that [Tables.Sweep] uses.
type Getter interface {
	Get(ctx context.Context, id codeq.ID) (*codeq.TaskInfo, error)
}

// sweepPage is how many rows Sweep looks at in one query.
const sweepPage = 500

// Sweep deletes rows of [Tables.Once] that no attempt needs any more, and returns how many: those
// older than age, after the queue has completed, canceled or deleted the task. A dead letter, which
// may be redriven, keeps its row, and so does a task if its shard does not answer. Call it from a
// schedule, such as once a day. age must be more than that of any copy of the queue that may be
// restored: there the task may wait yet. It reads the whole table, in pages.
//
// Errors: codeq.ErrInvalid, codeq.ErrClosed, those of the database, and that of ctx.
func (t *Tables) Sweep(ctx context.Context, db DB, q Getter, age time.Duration) (deleted int, err error) {
	if age < 0 {
		return 0, &codeq.InvalidError{Field: "Sweep age", Value: age, Limit: "0 or more"}
	}
	defer failed("sweep "+t.once, &err)
	before := time.Now().Add(-age).UnixMilli()
	for after := []byte{}; ; {
		ids, err := t.fencesBehind(ctx, db, after, before)
		if err != nil || len(ids) == 0 {
			return deleted, err
		}
		for _, id := range ids {
			ended, err := hasEnded(ctx, q, id)
			if err != nil {
				return deleted, err
			}
			if !ended {
				continue
			}
			n, err := t.exec(ctx, db, "DELETE FROM {once} WHERE task_id = ?", id[:])
			if err != nil {
				return deleted, err
			}
			deleted += int(n)
		}
		after = ids[len(ids)-1][:]
	}
}

// fencesBehind returns the tasks of a page of rows.
func (t *Tables) fencesBehind(ctx context.Context, db DB, after []byte, before int64) (ids []codeq.ID, err error) {
	err = t.each(ctx, db, func(rows *sql.Rows) (bool, error) {
		var id []byte
		if err := rows.Scan(&id); err != nil {
			return false, err
		}
		if len(id) != len(codeq.ID{}) {
			return false, fmt.Errorf("task_id of %d bytes", len(id))
		}
		ids = append(ids, codeq.ID(id))
		return true, nil
	}, "SELECT task_id FROM {once} WHERE task_id > ? AND created_at <= ? ORDER BY task_id LIMIT ?", after, before, sweepPage)
	return ids, err
}

// hasEnded reports whether a task has ended for good. An error ends the sweep.
func hasEnded(ctx context.Context, q Getter, id codeq.ID) (bool, error) {
	info, err := q.Get(ctx, id)
	switch {
	case err == nil:
		return info.State == codeq.Done || info.State == codeq.Canceled, nil
	case errors.Is(err, codeq.ErrNotFound):
		return true, nil
	case ctx.Err() != nil || errors.Is(err, codeq.ErrClosed):
		return false, err
	}
	return false, nil
}
