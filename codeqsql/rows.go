package codeqsql

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"codeq"
)

// RowState is the state of a row of the outbox.
type RowState uint8

// The states of a row.
const (
	Waiting RowState = iota // will be produced
	Refused                 // the queue refuses its task
	Stuck                   // may have been produced: ErrStuck
)

var rowStates = [...]string{Waiting: "waiting", Refused: "refused", Stuck: "stuck"}

// String returns the state in lower case.
func (s RowState) String() string {
	if s <= Stuck {
		return rowStates[s]
	}
	return fmt.Sprintf("RowState(%d)", uint8(s))
}

// Row is a row of the outbox.
type Row struct {
	ID      int64
	State   RowState
	Cause   string     // why it was set aside, at most 1,000 bytes
	Task    codeq.Task // with its key; zero if another version of this package has written it
	Created time.Time  // by the clock of the process that wrote it
	Sent    time.Time  // when its first sending began, by the clock of the relay; zero: never
}

// List returns the rows of a state, the lowest number first, from the one behind after on: at most
// limit, which is 1 to 1,000.
//
// Errors: codeq.ErrInvalid, those of the database, and that of ctx.
func (t *Tables) List(ctx context.Context, db DB, state RowState, after int64, limit int) (_ []Row, err error) {
	if state > Stuck {
		return nil, &codeq.InvalidError{Field: "List state", Value: state, Limit: "Waiting, Refused or Stuck"}
	}
	if limit < 1 || limit > 1000 {
		return nil, &codeq.InvalidError{Field: "List limit", Value: limit, Limit: "1 to 1000"}
	}
	defer failed("list "+t.outbox, &err)
	var rows []Row
	err = t.each(ctx, db, func(s *sql.Rows) (bool, error) {
		r := Row{State: state}
		var format int
		var created int64
		var sent sql.NullInt64
		var encoded []byte
		if err := s.Scan(&r.ID, &format, &created, &sent, &r.Cause, &encoded); err != nil {
			return false, err
		}
		if task, err := decode(format, encoded); err == nil {
			r.Task = task
		}
		r.Created = time.UnixMilli(created).UTC()
		if sent.Valid {
			r.Sent = time.UnixMilli(sent.Int64).UTC()
		}
		rows = append(rows, r)
		return true, nil
	}, "SELECT id, format, created_at, sent_at, cause, task FROM {outbox} WHERE state = ? AND id > ? ORDER BY id LIMIT ?", int(state), after, limit)
	return rows, err
}

// Resend makes a row that was set aside wait again, with the same key and, for one that was stuck,
// as if it had never been sent: if its task was produced, and its key has ended, it is produced a
// second time. Its place in its group may be lost.
//
// Errors: codeq.ErrNotFound if no row that was set aside has the number, those of the database, and
// that of ctx.
func (t *Tables) Resend(ctx context.Context, db Execer, id int64) error {
	return t.change(ctx, db, "UPDATE {outbox} SET state = 0, cause = '', sent_at = NULL WHERE id = ? AND state <> 0", id)
}

// Discard deletes a row that was set aside.
//
// Errors: codeq.ErrNotFound if no row that was set aside has the number, those of the database, and
// that of ctx.
func (t *Tables) Discard(ctx context.Context, db Execer, id int64) error {
	return t.change(ctx, db, "DELETE FROM {outbox} WHERE id = ? AND state <> 0", id)
}

func (t *Tables) change(ctx context.Context, db Execer, statement string, id int64) (err error) {
	defer failed(fmt.Sprintf("row %d of %s", id, t.outbox), &err)
	n, err := t.exec(ctx, db, statement, id)
	if err == nil && n == 0 {
		err = codeq.ErrNotFound
	}
	return err
}

// OutboxStats counts the rows of the outbox.
type OutboxStats struct {
	Waiting, Refused, Stuck int       // rows
	Oldest                  time.Time // when the row with the lowest number that waits was written; zero: none waits
}

// Stats counts the rows of the outbox, for metrics and alerts: rows that wait for long mean that no
// relay runs, or that it fails. It reads an index with all rows.
//
// Errors: those of the database, and that of ctx.
func (t *Tables) Stats(ctx context.Context, db DB) (s OutboxStats, err error) {
	defer failed("count "+t.outbox, &err)
	err = t.each(ctx, db, func(rows *sql.Rows) (bool, error) {
		var state RowState
		var n int
		if err := rows.Scan(&state, &n); err != nil {
			return false, err
		}
		switch state {
		case Waiting:
			s.Waiting = n
		case Refused:
			s.Refused = n
		case Stuck:
			s.Stuck = n
		}
		return true, nil
	}, "SELECT state, COUNT(*) FROM {outbox} GROUP BY state")
	if err != nil {
		return OutboxStats{}, err
	}
	err = t.each(ctx, db, func(rows *sql.Rows) (bool, error) {
		var created int64
		err := rows.Scan(&created)
		s.Oldest = time.UnixMilli(created).UTC()
		return false, err
	}, "SELECT created_at FROM {outbox} WHERE state = 0 ORDER BY id LIMIT 1")
	return s, err
}
