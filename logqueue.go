package codeq

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// logQueue is between the goroutines of a queue and the slog.Handler of its user, which may
// be slow, block, or panic: what is logged waits in memory, and a goroutine that lives
// while something waits hands it to the handler. Nobody who logs waits. What comes while too much
// waits is dropped; a record in its place counts it.
//
// All methods may be called concurrently; the user's handler is called on that goroutine only.
type logQueue struct {
	user *logTarget // the handler that the user has given

	mu      sync.Mutex // guards what follows
	waiting []logRecord
	lost    int           // since the last record was added: it was dropped, or the handler panicked
	untold  bool          // nobody has tried to tell the handler of lost
	writing bool          // the goroutine lives
	closed  bool          // nothing is taken any more
	ended   chan struct{} // non-nil while close waits; closed at the end of the goroutine
}

// logRecord is what is to be logged, and by which handler.
type logRecord struct {
	lost   int // before it
	to     *logTarget
	ctx    context.Context
	record slog.Record
}

const (
	logDepth = 1024        // records that wait at the most
	logGrace = time.Second // for the handler, after the queue is closed, to take what waits
)

// logTarget is the user's handler, or one that it derives, which is made when something is logged
// to it: deriving may block or panic as well.
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

// logHandler is the slog.Handler of a logQueue.
type logHandler struct {
	queue *logQueue
	to    *logTarget
}

func newLogHandler(h slog.Handler) *logHandler {
	to := &logTarget{handler: h}
	return &logHandler{&logQueue{user: to}, to}
}

// Enabled leaves it to the user's handler, which is asked later.
func (h *logHandler) Enabled(context.Context, slog.Level) bool { return true }

func (h *logHandler) Handle(ctx context.Context, r slog.Record) error {
	h.queue.add(logRecord{to: h.to, ctx: context.WithoutCancel(ctx), record: r.Clone()})
	return nil
}

func (h *logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return h.derive(func(to slog.Handler) slog.Handler { return to.WithAttrs(attrs) })
}

func (h *logHandler) WithGroup(name string) slog.Handler {
	return h.derive(func(to slog.Handler) slog.Handler { return to.WithGroup(name) })
}

func (h *logHandler) derive(f func(slog.Handler) slog.Handler) slog.Handler {
	return &logHandler{h.queue, &logTarget{parent: h.to, derive: f}}
}

func (l *logQueue) add(r logRecord) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	if len(l.waiting) >= logDepth {
		l.lost, l.untold = l.lost+1, true
		return
	}
	r.lost, l.lost, l.untold = l.lost, 0, false
	l.waiting = append(l.waiting, r)
	if !l.writing {
		l.writing = true
		go contain(silence, "log", l.write, nil)
	}
}

// write hands what waits to the handlers.
func (l *logQueue) write() {
	ended := false
	defer func() {
		if !ended { // runtime.Goexit in a handler
			l.lose(1, true)
			go contain(silence, "log", l.write, nil)
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

// next takes the oldest record out, which is one without a handler if all that is left to tell
// is what was lost. It is false if nothing is left, and the goroutine ends.
func (l *logQueue) next() (r logRecord, ok bool) {
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
func hand(r logRecord) bool {
	return containUser(silence, "slog.Handler", func() {
		h := r.to.make()
		if h.Enabled(r.ctx, r.record.Level) {
			_ = h.Handle(r.ctx, r.record) // slog.Logger drops its error, too
		}
	})
}

func (l *logQueue) lose(count int, untold bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost += count
	l.untold = l.untold || untold
}

// close returns when the handler has taken what waits, or has not for logGrace: then the
// goroutine is left to the handler that blocks it, and ends with it.
func (l *logQueue) close() {
	l.mu.Lock()
	l.closed = true
	if !l.writing {
		l.mu.Unlock()
		return
	}
	ended := make(chan struct{})
	l.ended = ended
	l.mu.Unlock()
	if !within(ended, logGrace) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.waiting = nil
	}
}
