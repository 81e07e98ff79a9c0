package codeqsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"codeq"
)

const (
	maxBatch      = 256     // rows of a batch, a power of two
	maxBatchBytes = 4 << 20 // of its rows, beyond which it takes no further row
	maxBatches    = 1000    // of a pass that leaves rows behind: those committed late are before them
)

// pass moves the rows that wait, in the order of their numbers, batch by batch:
//
//	read -> mark sent_at -> ProduceBatch -> delete
//
// Each arrow is safe to be killed at, and each step safe to be repeated, by this relay or another
// one: a row without a mark was never sent; one with a mark is sent again with the same key until
// the key may end; one is deleted when the queue has acknowledged its task or has its key.
//
// Invariant: a task of a group is sent after all earlier ones of the group that were read were
// acknowledged or set aside. So another relay that sends the same rows, at any pace, cannot change
// their order.
type pass struct {
	*Relay
	held map[group]bool // groups with a row that stays
	err  error          // why rows stay; nil: none does
}

// group is a group of tasks that follow each other; the zero group: none.
type group struct{ queue, tenant, limitKey, group string }

func groupOf(t *codeq.Task) group {
	if t.Group == "" {
		return group{}
	}
	return group{t.Queue, t.Tenant, t.LimitKey, t.Group}
}

// row is a row of the outbox.
type row struct {
	id      int64
	format  int
	sent    sql.NullInt64 // when its sending began, in milliseconds
	encoded []byte
	task    codeq.Task
}

// read returns the next rows behind a number.
func (p *pass) read(ctx context.Context, after int64) (rows []row, err error) {
	size := 0
	err = p.tables.each(ctx, p.db, func(s *sql.Rows) (bool, error) {
		var r row
		if err := s.Scan(&r.id, &r.format, &r.sent, &r.encoded); err != nil {
			return false, err
		}
		rows = append(rows, r)
		size += len(r.encoded)
		return size < maxBatchBytes, nil
	}, "SELECT id, format, sent_at, task FROM {outbox} WHERE state = 0 AND id > ? ORDER BY id LIMIT ?", after, p.limit)
	if size < maxBatchBytes {
		p.limit = min(2*p.limit, maxBatch)
	} else {
		p.limit = max(1, len(rows)) // a driver reads the rest of a result before it can be closed
	}
	return rows, err
}

// move sends rows. An error ends the pass.
func (p *pass) move(ctx context.Context, rows []row) error {
	ready := rows[:0]
	for i := range rows {
		r := &rows[i]
		if err := r.check(); err != nil {
			if err := p.setAside(ctx, r, err); err != nil {
				return err
			}
		} else if !p.held[groupOf(&r.task)] {
			ready = append(ready, *r)
		}
	}
	if len(ready) == 0 {
		return nil
	}
	if err := p.mark(ctx, ready); err != nil {
		return err
	}
	return p.send(ctx, ready)
}

// check decodes a row, and returns why it must not be sent.
func (r *row) check() (err error) {
	if r.task, err = decode(r.format, r.encoded); err != nil {
		return err
	}
	r.encoded = nil
	if !r.sent.Valid {
		return nil
	}
	began := time.UnixMilli(r.sent.Int64).UTC()
	if limit := resendFor(&r.task); time.Since(began) >= limit {
		return fmt.Errorf("%w: its sending began at %s, more than %v ago", ErrStuck, began.Format(time.RFC3339), limit)
	}
	return nil
}

// resendFor is how long after its first sending a task may be sent again: an eighth less than its
// key lasts, since the clocks of relays and queue differ.
func resendFor(t *codeq.Task) time.Duration { return t.Unique.For - t.Unique.For/8 }

// mark stores that the sending of rows begins, unless it has begun.
func (p *pass) mark(ctx context.Context, rows []row) error {
	var ids []any
	for i := range rows {
		if !rows[i].sent.Valid {
			ids = append(ids, rows[i].id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	args := append([]any{time.Now().UnixMilli()}, padded(ids)...)
	_, err := p.tables.exec(ctx, p.db, "UPDATE {outbox} SET sent_at = ? WHERE id IN "+list(ids)+" AND sent_at IS NULL", args...)
	return err
}

// remove deletes rows after the queue has their tasks.
func (p *pass) remove(ctx context.Context, rows []row) error {
	ids := make([]any, len(rows))
	for i := range rows {
		ids[i] = rows[i].id
	}
	_, err := p.tables.exec(ctx, p.db, "DELETE FROM {outbox} WHERE id IN "+list(ids), padded(ids)...)
	return err
}

// send produces rows, in one call if it succeeds, and deletes them. An error ends the pass.
func (p *pass) send(ctx context.Context, rows []row) error {
	tasks := make([]codeq.Task, len(rows))
	for i := range rows {
		tasks[i] = rows[i].task
	}
	_, err := p.q.ProduceBatch(ctx, tasks)
	duplicates, stored := countDuplicates(err)
	switch {
	case stored:
		if err := p.remove(ctx, rows); err != nil {
			return err
		}
		p.produced.Add(uint64(len(rows) - duplicates))
		p.duplicates.Add(uint64(duplicates))
	case ctx.Err() != nil || errors.Is(err, codeq.ErrClosed) || errors.Is(err, codeq.ErrDiskFull):
		return err // which any other row would meet
	case len(rows) > 1:
		return p.sendEach(ctx, rows)
	case errors.Is(err, codeq.ErrInvalid) || errors.Is(err, codeq.ErrNotFound):
		return p.setAside(ctx, &rows[0], err)
	default:
		p.hold(&rows[0], err)
	}
	return nil
}

// sendEach sends rows one by one, so that one that fails stays, with those behind it of its group,
// and the others go.
func (p *pass) sendEach(ctx context.Context, rows []row) error {
	for i := range rows {
		if p.held[groupOf(&rows[i].task)] {
			continue
		}
		if err := p.send(ctx, rows[i:i+1]); err != nil {
			return err
		}
	}
	return nil
}

// hold makes a row, and its group, stay for the rest of the pass.
func (p *pass) hold(r *row, err error) {
	if p.err == nil {
		p.err = fmt.Errorf("row %d: %w", r.id, err)
	}
	if g := groupOf(&r.task); g != (group{}) {
		p.held[g] = true
	}
}

// countDuplicates returns how many tasks of a batch had keys that were taken. stored: the queue has
// all tasks of the batch. It is not if another error is joined to that of the batch.
func countDuplicates(err error) (n int, stored bool) {
	whole := err
	for errors.Unwrap(whole) != nil {
		whole = errors.Unwrap(whole)
	}
	batch, ok := any(whole).(*codeq.BatchError)
	if !ok {
		return 0, err == nil
	}
	for _, err := range batch.Errors {
		switch {
		case errors.Is(err, codeq.ErrDuplicate):
			n++
		case err != nil:
			return 0, false
		}
	}
	return n, true
}

// setAside keeps a row from being sent, and reports it, unless another relay has.
func (p *pass) setAside(ctx context.Context, r *row, why error) error {
	state := Refused
	if errors.Is(why, ErrStuck) {
		state = Stuck
	}
	n, err := p.tables.exec(ctx, p.db, "UPDATE {outbox} SET state = ?, cause = ? WHERE id = ? AND state = 0", int(state), causeOf(why), r.id)
	if err != nil || n == 0 {
		return err
	}
	p.Relay.setAside.Add(1)
	p.report(&RowError{ID: r.id, Task: r.task, Err: why})
	return nil
}

// causeOf is the text of an error, in at most 1,000 bytes that every database stores.
func causeOf(err error) string {
	text := strings.ReplaceAll(err.Error(), "\x00", "")
	if len(text) > 1000 {
		text = text[:1000]
	}
	return strings.ToValidUTF8(text, "")
}

// padded repeats the last ID of a list until its length is a power of two, so that a driver that
// prepares statements sees few.
func padded(ids []any) []any {
	length := 1
	for length < len(ids) {
		length *= 2
	}
	return append(slices.Clip(ids), slices.Repeat(ids[len(ids)-1:], length-len(ids))...)
}

// list is the list of placeholders for padded IDs.
func list(ids []any) string {
	return "(" + strings.Repeat("?, ", len(padded(ids))-1) + "?)"
}
