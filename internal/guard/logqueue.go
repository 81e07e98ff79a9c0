package guard

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// LogQueue is between the goroutines of a queue and the slog.Handler of its user, which may be
// slow, block, or panic: records wait in memory, and a goroutine that lives while records wait
// passes them to the handler. A goroutine that logs never waits. Records that come while too many
// wait are dropped; a record in their place counts them.
//
// All methods may be called concurrently; the user's handler is called on that goroutine only.
type LogQueue struct {
	user *logTarget // the handler that the user has given

	mu      sync.Mutex // guards the fields below
	waiting []logRecord
	lost    int           // records since the last one was added: dropped, or lost by a panic of the handler
	untold  bool          // the handler has not been told about lost yet
	writing bool          // the goroutine lives
	closed  bool          // no more records are accepted
	ended   chan struct{} // non-nil while Close waits; closed at the end of the goroutine
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

// NewLogQueue returns a logger whose records wait in the queue for a user's handler.
func NewLogQueue(user slog.Handler) (*slog.Logger, *LogQueue) {
	to := &logTarget{handler: user}
	q := &LogQueue{user: to}
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
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	if len(l.waiting) >= depth {
		l.lost, l.untold = l.lost+1, true
		return
	}
	r.lost, l.lost, l.untold = l.lost, 0, false
	l.waiting = append(l.waiting, r)
	if !l.writing {
		l.writing = true
		go Contain(silence, "log", l.write, nil)
	}
}

// write passes the waiting records to the handlers.
func (l *LogQueue) write() {
	ended := false
	defer func() {
		if !ended { // runtime.Goexit in a handler
			l.lose(1, true)
			go Contain(silence, "log", l.write, nil)
		}
	}()
	for {
		r, ok := l.next()
		if !ok {
			break
		}
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
	ended = true
}

// next takes the oldest record out. The record has no handler if only the count of lost records is
// left. It is false if nothing is left, and the goroutine ends.
func (l *LogQueue) next() (r logRecord, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 && l.untold {
		r.lost, l.lost, l.untold = l.lost, 0, false
		return r, true
	}
	if len(l.waiting) == 0 {
		l.waiting, l.writing = nil, false
		if l.ended != nil {
			close(l.ended)
			l.ended = nil
		}
		return r, false
	}
	r, l.waiting[0] = l.waiting[0], logRecord{}
	l.waiting = l.waiting[1:]
	return r, true
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
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost += count
	l.untold = l.untold || untold
}

// Close returns when the handler has taken the waiting records, or has not for grace: then the
// goroutine is left to the handler that blocks it, and ends with it. A nil LogQueue is empty.
func (l *LogQueue) Close() {
	if l == nil {
		return
	}
	l.mu.Lock()
	l.closed = true
	if !l.writing {
		l.mu.Unlock()
		return
	}
	ended := make(chan struct{})
	l.ended = ended
	l.mu.Unlock()
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case <-ended:
	case <-t.C:
		l.mu.Lock()
		defer l.mu.Unlock()
		l.waiting = nil
	}
}
