package codeqsql

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"codeq"
)

// Producer is the part of a *codeq.Queue that a [Relay] uses.
type Producer interface {
	ProduceBatch(ctx context.Context, tasks []codeq.Task) ([]codeq.ID, error)
}

// RelayOptions are the options of a [Relay]. A zero field means its documented default.
type RelayOptions struct {
	// Poll is how often the relay looks for rows without [Relay.Wake], at least 1 ms. Default:
	// 50 ms.
	Poll time.Duration
	// OnError is called with a [*RowError] for each row that the relay sets aside, and by
	// [Relay.Run] with the error of each failed pass, which is repeated. The relay waits for it.
	// Default: they are only counted.
	OnError func(error)
}

const (
	defaultPoll = 50 * time.Millisecond
	minBackoff  = 50 * time.Millisecond // after a failed pass; doubled after each further one
	maxBackoff  = time.Second
)

// RelayStats counts the work of a [Relay].
type RelayStats struct {
	Produced   uint64 // tasks that are new in the queue
	Duplicates uint64 // rows with a taken key: produced before by this or another relay, or of another task
	SetAside   uint64 // rows that were refused or stuck
	Failed     uint64 // passes that ended with an error, other than the end of their ctx
}

// Relay moves tasks from the outbox into a queue. Its methods are safe for concurrent use.
// [Tables.NewRelay] makes it. Each process that has the queue open may run one, for the same
// database: all of them take all rows, so each costs the queue and the database as much as one.
type Relay struct {
	tables *Tables
	db     DB
	q      Producer
	opts   RelayOptions
	wake   chan struct{} // capacity 1; Wake sends, Run receives

	produced, duplicates, setAside, failed atomic.Uint64

	mu    sync.Mutex // held by the pass that goes on
	limit int        // rows of the next batch; guarded by mu
}

// NewRelay returns a relay from db into q, which starts with [Relay.Run]. db is a *sql.DB; each of
// the relay's statements is a transaction by itself. Nil opts mean all defaults.
//
// Errors: codeq.ErrInvalid.
func (t *Tables) NewRelay(db DB, q Producer, opts *RelayOptions) (*Relay, error) {
	r := &Relay{tables: t, db: db, q: q, wake: make(chan struct{}, 1), limit: maxBatch}
	if opts != nil {
		r.opts = *opts
	}
	switch {
	case db == nil:
		return nil, &codeq.InvalidError{Field: "NewRelay db", Value: "nil", Limit: "a database"}
	case q == nil:
		return nil, &codeq.InvalidError{Field: "NewRelay q", Value: "nil", Limit: "a queue"}
	case r.opts.Poll == 0:
		r.opts.Poll = defaultPoll
	case r.opts.Poll < time.Millisecond:
		return nil, &codeq.InvalidError{Field: "RelayOptions.Poll", Value: r.opts.Poll, Limit: "1ms or more"}
	}
	return r, nil
}

// Wake makes [Relay.Run] look for rows at once: call it after the commit. It does not wait, and
// cuts no wait after an error short.
func (r *Relay) Wake() {
	select {
	case r.wake <- struct{}{}:
	default: // the next look sees the caller's rows, too
	}
}

// Stats counts the relay's work so far.
func (r *Relay) Stats() RelayStats {
	return RelayStats{
		Produced: r.produced.Load(), Duplicates: r.duplicates.Load(),
		SetAside: r.setAside.Load(), Failed: r.failed.Load(),
	}
}

// Run moves rows until ctx ends, and then returns nil. After an error of the database or the queue
// it tries again, at first after 50 ms, later once a second. It may be killed at any moment.
//
// Errors: codeq.ErrClosed, when the queue is closed.
func (r *Relay) Run(ctx context.Context) error {
	for backoff := minBackoff; ; {
		err := r.Flush(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, codeq.ErrClosed):
			return err
		case err != nil:
			r.report(err)
			if !sleep(ctx, backoff, nil) {
				return nil
			}
			backoff = min(2*backoff, maxBackoff)
		default:
			backoff = minBackoff
			if !sleep(ctx, r.opts.Poll, r.wake) {
				return nil
			}
		}
	}
}

// sleep waits for d, or until woken. It returns false if ctx has ended.
func sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
	case <-wake:
	}
	return true
}

// Flush moves the rows that wait, once, and returns when none is left that can be produced. Run
// calls it again and again; a program that ends, or a test, may call it by itself.
//
// Errors: those of the database and of codeq.Queue.ProduceBatch, except for rows that it sets
// aside, and that of ctx.
func (r *Relay) Flush(ctx context.Context) (err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer func() {
		if err != nil && ctx.Err() == nil {
			r.failed.Add(1)
		}
		failed("relay "+r.tables.outbox, &err)
	}()
	p := pass{Relay: r, held: make(map[group]bool)}
	for after, n := int64(0), 0; ; n++ {
		rows, err := p.read(ctx, after)
		if err != nil {
			return err
		}
		if len(rows) == 0 || p.err != nil && n >= maxBatches {
			return p.err
		}
		if err := p.move(ctx, rows); err != nil {
			return err
		}
		if p.err != nil { // some rows stay: go on behind them
			after = rows[len(rows)-1].id
		}
	}
}

func (r *Relay) report(err error) {
	if r.opts.OnError != nil {
		r.opts.OnError(err)
	}
}

// ErrStuck: the sending of a row began so long ago that its key may have ended, and it is not known
// whether its task was produced. The row is kept ([Tables.List]), and not sent: [Tables.Resend] it
// if the queue has not had the task, else [Tables.Discard] it.
var ErrStuck = errors.New("codeqsql: too old to send again")

// RowError says why a row was set aside: [ErrStuck], or why the queue refused its task
// (codeq.ErrInvalid, or codeq.ErrNotFound for parents that must exist), or that another version of
// this package has written it.
type RowError struct {
	ID   int64      // of the row
	Task codeq.Task // zero if it could not be read
	Err  error
}

func (e *RowError) Error() string {
	return fmt.Sprintf("codeqsql: row %d of queue %q is set aside: %v", e.ID, e.Task.Queue, e.Err)
}

// Unwrap returns Err.
func (e *RowError) Unwrap() error { return e.Err }
