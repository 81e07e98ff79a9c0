package guard

import (
	"context"
	"log/slog"
	"time"
)

// LogQueue is between the goroutines of a queue and the slog.Handler of its user, which may be
// slow, block, or panic: records wait in memory, and an Errand passes them to the handler. A
// goroutine that logs never waits. Records that come while too many wait are dropped; a record in
// their place counts them.
//
// All methods may be called concurrently; the user's handler is called on that goroutine only.
type LogQueue struct {
	user *logTarget // the handler that the user has given

	writing *Errand // its Mu guards the fields below
	waiting []logRecord
	lost    int  // records since the last one was added: dropped, or lost by a panic of the handler
	untold  bool // the handler has not been told about lost yet
	closed  bool // no more records are accepted
}

// logRecord is a record that waits, with its handler.
type logRecord struct {
	lost   int // before it
	to     *logTarget
	ctx    context.Context
	record slog.Record
}

// silence is the logger for problems of the log itself.
var silence = slog.New(slog.DiscardHandler)

const (
	depth = 1024        // largest number of records that wait
	grace = time.Second // for the handler, after the queue is closed, to take the waiting records
)

// logTarget is the user's handler, or one derived from it, which is made at its first record:
// deriving may block or panic as well.
type logTarget struct {
	parent  *logTarget
	derive  func(slog.Handler) slog.Handler
	handler slog.Handler // nil: not made yet; the goroutine of the queue uses it
}

func (t *logTarget) make() slog.Handler {
	if t.handler == nil {
		t.handler = t.derive(t.parent.make())
	}
	return t.handler
}

// handler is the slog.Handler of a LogQueue.
type handler struct {
	queue *LogQueue
	to    *logTarget
}

// NewLogQueue returns a logger. Its records wait in the queue for a user's handler.
func NewLogQueue(user slog.Handler) (*slog.Logger, *LogQueue) {
	to := &logTarget{handler: user}
	q := &LogQueue{user: to}
	q.writing = NewErrand("log", silence, q.next)
	q.writing.lost = func() { q.lose(1, true) }
	return slog.New(&handler{q, to}), q
}

// Enabled is true: the user's handler is asked later.
func (h *handler) Enabled(context.Context, slog.Level) bool { return true }

func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	h.queue.add(logRecord{to: h.to, ctx: context.WithoutCancel(ctx), record: r.Clone()})
	return nil
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return h.derive(func(to slog.Handler) slog.Handler { return to.WithAttrs(attrs) })
}

func (h *handler) WithGroup(name string) slog.Handler {
	return h.derive(func(to slog.Handler) slog.Handler { return to.WithGroup(name) })
}

func (h *handler) derive(f func(slog.Handler) slog.Handler) slog.Handler {
	return &handler{h.queue, &logTarget{parent: h.to, derive: f}}
}

func (l *LogQueue) add(r logRecord) {
	l.writing.Mu.Lock()
	defer l.writing.Mu.Unlock()
	if l.closed {
		return
	}
	if len(l.waiting) >= depth {
		l.lost, l.untold = l.lost+1, true
		return
	}
	r.lost, l.lost, l.untold = l.lost, 0, false
	l.waiting = append(l.waiting, r)
	l.writing.Wake()
}

// next takes the oldest record out, or the number of lost ones if only that is left.
func (l *LogQueue) next() (piece func(), wait time.Duration) {
	var r logRecord
	switch {
	case len(l.waiting) > 0:
		r, l.waiting[0] = l.waiting[0], logRecord{}
		l.waiting = l.waiting[1:]
	case l.untold:
		r.lost, l.lost, l.untold = l.lost, 0, false
	default:
		l.waiting = nil
		return nil, 0
	}
	return func() { l.write(r) }, 0
}

// write passes a record to its handler, and before it the number of lost ones.
func (l *LogQueue) write(r logRecord) {
	if r.lost > 0 {
		report := slog.NewRecord(time.Now(), slog.LevelWarn, "log records lost, as the handler did not take them", 0)
		report.Add("count", r.lost)
		if !hand(logRecord{to: l.user, ctx: context.Background(), record: report}) {
			l.lose(r.lost, false)
		}
	}
	if r.to != nil && !hand(r) {
		l.lose(1, true)
	}
}

// hand calls a user's handler. It is false if that panics.
func hand(r logRecord) (taken bool) {
	RunUser("slog.Handler", func() {
		h := r.to.make()
		if h.Enabled(r.ctx, r.record.Level) {
			_ = h.Handle(r.ctx, r.record) // slog.Logger drops its error, too
		}
		taken = true
	}, func(any, []byte) {})
	return taken
}

func (l *LogQueue) lose(count int, untold bool) {
	l.writing.Mu.Lock()
	defer l.writing.Mu.Unlock()
	l.lost += count
	l.untold = l.untold || untold
}

// Close returns when the handler has taken the waiting records, or after grace. A nil LogQueue is
// empty.
func (l *LogQueue) Close() {
	if l == nil {
		return
	}
	l.writing.Mu.Lock()
	l.closed = true
	l.writing.Mu.Unlock()
	if !l.writing.Await(grace) {
		l.writing.Mu.Lock()
		defer l.writing.Mu.Unlock()
		l.waiting = nil
	}
}
