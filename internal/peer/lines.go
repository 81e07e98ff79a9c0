package peer

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"codeq/internal/guard"
)

// Lines logs problems with connections. Others may cause them as often as they like, so only the
// first logFull lines of the same event are logged, and then one for each logEvery, with the number
// of omitted lines, until the event has not come for so long. Its methods are safe for concurrent
// use.
type Lines struct {
	to *slog.Logger

	mu     sync.Mutex // guards the fields below
	events map[event]*count
	closed bool
}

const (
	logFull  = 10
	logEvery = time.Minute
)

// event identifies lines that count as the same.
type event struct {
	what string // the message
	of   string // the subject: names and addresses of members only, as their number is limited
}

// count is the number of lines of one event in the present interval.
type count struct {
	full  int // lines that were logged
	more  int // lines that were omitted
	level slog.Level
	last  []any       // arguments of the last omitted line
	timer *time.Timer // ends the interval
}

// NewLines returns a Lines that logs to a logger.
func NewLines(to *slog.Logger) *Lines { return &Lines{to: to, events: make(map[event]*count)} }

// Log logs a line, or counts it. of separates events of one message, and has few values.
func (l *Lines) Log(level slog.Level, what, of string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	e := event{what, of}
	c := l.events[e]
	if c == nil {
		c = &count{level: level}
		c.timer = time.AfterFunc(logEvery, func() {
			guard.Contain(l.to, "log of connections", func() { l.end(e) }, nil)
		})
		l.events[e] = c
	}
	if c.full == logFull {
		c.more, c.last = c.more+1, args
		return
	}
	c.full++
	l.to.Log(context.Background(), level, what, args...)
}

// end ends an interval, and begins the next one if lines were omitted.
func (l *Lines) end(e event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.events[e]
	switch {
	case l.closed:
	case c.more == 0:
		delete(l.events, e)
	default:
		l.tell(e, c)
		c.timer.Reset(logEvery)
	}
}

// tell logs the number of omitted lines. REQUIRES: mu is held.
func (l *Lines) tell(e event, c *count) {
	l.to.Log(context.Background(), c.level, e.what, append(c.last[:len(c.last):len(c.last)], "more", c.more)...)
	c.more, c.last = 0, nil
}

// Close logs the last omitted lines. Nothing is logged after it.
func (l *Lines) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for e, c := range l.events {
		c.timer.Stop()
		if c.more > 0 {
			l.tell(e, c)
		}
	}
	l.closed, l.events = true, nil
}
