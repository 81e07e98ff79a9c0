package codeqsql

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"
	"unicode/utf8"

	"codeq"
)

// KeyFor is how long the idempotency key of a task lasts that has none of its own.
const KeyFor = 7 * 24 * time.Hour

// MinKeyFor is the least codeq.Unique.For of a task that has a key of its own.
const MinKeyFor = 24 * time.Hour

// format is that of the column task: a codeq.Task as JSON, with its key.
const format = 1

// Enqueue writes a task into the outbox, in the transaction tx: the task is produced after the
// commit, and never if there is none. Call [Relay.Wake] after the commit. On a *sql.DB, or a
// *sql.Conn without a transaction, the row is committed when Enqueue returns. One connection does
// one thing at a time, so Enqueue is no safer for concurrent use than tx.
//
// The task gets an idempotency key, for [KeyFor]: codeq.Queue.Get shows it, and
// codeq.Queue.DeleteQueue refuses the queue as long. A task with a key of its own is produced with
// that, if its For is at least [MinKeyFor] and it has none of Replace, ReleaseOnComplete and
// ReleaseOnDead. If another task has the key, the row ends without a task.
//
// After must not contain codeq.Nth. Enqueue refuses a task that no queue takes; one that only its
// queue refuses, by a limit that [Options.Limits] does not have, is set aside by the relay.
//
// Errors: codeq.ErrInvalid, those of the database, and that of ctx.
func (t *Tables) Enqueue(ctx context.Context, tx Execer, task codeq.Task) error {
	if err := t.check(&task); err != nil {
		return err
	}
	if task.Unique.Key == "" {
		// Not the number of the row: a database that was restored gives out the same again.
		task.Unique = codeq.Unique{Key: "codeqsql:" + rand.Text(), For: KeyFor}
	}
	encoded, err := json.Marshal(&task)
	if err != nil {
		return fmt.Errorf("codeqsql: encode a task of queue %q: %w", task.Queue, err)
	}
	_, err = t.exec(ctx, tx, "INSERT INTO {outbox} (format, task, created_at) VALUES (?, ?, ?)", format, encoded, time.Now().UnixMilli())
	failed("write into "+t.outbox, &err)
	return err
}

// check refuses a task that no queue with these limits takes, as far as can be seen here, and one
// without a key that ends its duplicates.
func (t *Tables) check(task *codeq.Task) error {
	if task.Queue == "" {
		return &codeq.InvalidError{Field: "Task.Queue", Value: `""`, Limit: "a name"}
	}
	for _, f := range []struct{ name, value string }{
		{"Queue", task.Queue}, {"Tenant", task.Tenant}, {"Group", task.Group}, {"LimitKey", task.LimitKey}, {"Kind", task.Kind}, {"Unique.Key", task.Unique.Key},
	} {
		if err := checkText("Task."+f.name, f.value, t.limits.Name); err != nil {
			return err
		}
	}
	size := 0
	for k, v := range task.Headers {
		size += len(k) + len(v)
		for _, text := range []string{k, v} {
			if err := checkText("Task.Headers", text, t.limits.Headers); err != nil {
				return err
			}
		}
	}
	year := task.RunAt.UTC().Year()
	for _, f := range []struct {
		name  string
		ok    bool
		value any
		limit string
	}{
		{"Payload", len(task.Payload) <= t.limits.Payload, bytesOf(len(task.Payload)), atMost(t.limits.Payload)},
		{"Headers", size <= t.limits.Headers, bytesOf(size), atMost(t.limits.Headers)},
		{"Priority", task.Priority >= codeq.MinPriority && task.Priority <= codeq.MaxPriority, task.Priority, "0 to 9"},
		{"MaxAttempts", task.MaxAttempts >= 0, task.MaxAttempts, "0 or more"},
		{"RunAt", year >= 0 && year <= 9999, task.RunAt, "the years 0 to 9999 in UTC"},
		{"LeaseFor", task.LeaseFor >= 0, task.LeaseFor, "0 or more"},
		{"Timeout", task.Timeout >= 0, task.Timeout, "0 or more"},
		{"Retention", task.Retention >= 0 || task.Retention == codeq.Forever, task.Retention, "0 or more, or Forever"},
		{"After", len(task.After) <= codeq.MaxParents, len(task.After), fmt.Sprintf("at most %d", codeq.MaxParents)},
	} {
		if !f.ok {
			return &codeq.InvalidError{Field: "Task." + f.name, Value: f.value, Limit: f.limit}
		}
	}
	for _, id := range task.After {
		if [8]byte(id[:8]) == [8]byte{} { // the rows of a batch of the relay are of several transactions
			return &codeq.InvalidError{Field: "Task.After", Value: id, Limit: "IDs of tasks, and no codeq.Nth"}
		}
	}
	task.RunAt = task.RunAt.UTC() // a local year of 10,000 has no JSON
	return checkKey(&task.Unique)
}

// checkKey refuses a key that may end before the row does.
func checkKey(u *codeq.Unique) error {
	switch {
	case u.Key == "" && *u != codeq.Unique{}:
		return &codeq.InvalidError{Field: "Task.Unique.Key", Value: `""`, Limit: "a key, if other fields of Unique are set"}
	case u.Key != "" && u.For < MinKeyFor:
		return &codeq.InvalidError{Field: "Task.Unique.For", Value: u.For, Limit: MinKeyFor.String() + " or more in an outbox"}
	case u.Replace || u.ReleaseOnComplete || u.ReleaseOnDead || u.ReleaseOnClaim || u.MaxWait != 0:
		return &codeq.InvalidError{Field: "Task.Unique", Value: "Replace, MaxWait or one of Release", Limit: "none of them in an outbox"}
	}
	return nil
}

// checkText refuses a text that is too long, or that JSON would change.
func checkText(field, text string, limit int) error {
	switch {
	case !utf8.ValidString(text):
		return &codeq.InvalidError{Field: field, Value: strconv.Quote(text), Limit: "UTF-8; a digest in hexadecimal"}
	case len(text) > limit:
		return &codeq.InvalidError{Field: field, Value: bytesOf(len(text)), Limit: atMost(limit)}
	}
	return nil
}

func bytesOf(n int) string { return fmt.Sprintf("%d bytes", n) }
func atMost(n int) string  { return fmt.Sprintf("at most %d bytes", n) }

var errFormat = errors.New("codeqsql: written by another version of codeqsql")

// decode reads the task of a row. It refuses fields of a later version, which this one would lose.
func decode(f int, encoded []byte) (task codeq.Task, err error) {
	if f != format {
		return task, fmt.Errorf("%w: format %d, and not %d", errFormat, f, format)
	}
	d := json.NewDecoder(bytes.NewReader(encoded))
	d.DisallowUnknownFields()
	if err := d.Decode(&task); err != nil {
		return task, fmt.Errorf("%w: %w", errFormat, err)
	}
	return task, nil
}
