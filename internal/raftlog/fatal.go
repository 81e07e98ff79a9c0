package raftlog

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"
)

// fatalLogger keeps Pebble from ending the process: where Pebble's own logger
// exits, this one remembers the reason and returns. From then on the store is
// poisoned.
type fatalLogger struct {
	log    *slog.Logger
	reason atomic.Pointer[error]
	warned atomic.Int64 // when background last logged, in seconds since 1970
}

// err returns why the store is unfit for use, or nil.
func (l *fatalLogger) err() error {
	if p := l.reason.Load(); p != nil {
		return *p
	}
	return nil
}

// fail poisons the store, and logs why. The first reason stays.
func (l *fatalLogger) fail(err error) {
	err = fmt.Errorf("%w: %w", ErrFailed, err)
	if l.reason.CompareAndSwap(nil, &err) {
		l.log.Error("raft log failed", "err", err)
	}
}

// background logs an error of a flush or a compaction, which Pebble repeats
// until it succeeds: thousands of times a second while a disk is full.
func (l *fatalLogger) background(err error) {
	now := time.Now().Unix()
	if last := l.warned.Load(); now != last && l.warned.CompareAndSwap(last, now) {
		l.log.Error("background work of the Raft log failed", "err", err)
	}
}

func (l *fatalLogger) Infof(string, ...any) {}

func (l *fatalLogger) Errorf(format string, args ...any) {
	l.log.Warn("raft log: " + fmt.Sprintf(format, args...))
}

func (l *fatalLogger) Fatalf(format string, args ...any) {
	l.fail(fmt.Errorf(format, args...))
}

func (l *fatalLogger) Eventf(context.Context, string, ...any) {}

func (l *fatalLogger) IsTracingEnabled(context.Context) bool { return false }
