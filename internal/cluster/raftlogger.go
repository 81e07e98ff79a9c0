package cluster

import (
	"context"
	"fmt"
	"log/slog"
	"slices"

	"github.com/hashicorp/go-hclog"
)

// raftLogger passes Raft's log messages to a logger, with their fields. Raft's errors, such as a
// node that cannot be reached, are no errors of the library; its warnings, such as an election, are
// ordinary events.
type raftLogger struct {
	hclog.Logger // logs nothing; for the methods that Raft does not use
	to           *slog.Logger
}

var raftLevels = map[hclog.Level]slog.Level{
	hclog.Error: slog.LevelWarn, hclog.Warn: slog.LevelInfo, hclog.Info: slog.LevelDebug,
	hclog.Debug: slog.LevelDebug - 4, hclog.Trace: slog.LevelDebug - 8,
}

func newRaftLogger(to *slog.Logger) hclog.Logger {
	return &raftLogger{hclog.NewNullLogger(), to.With("in", "raft")}
}

func (l *raftLogger) enabled(level hclog.Level) bool {
	return l.to.Enabled(context.Background(), raftLevels[level])
}

// Log implements hclog.Logger.
func (l *raftLogger) Log(level hclog.Level, msg string, args ...any) {
	if !l.enabled(level) {
		return
	}
	args = slices.Clone(args)
	for i, a := range args {
		if f, ok := a.(hclog.Format); ok && len(f) > 0 {
			args[i] = fmt.Sprintf(fmt.Sprint(f[0]), f[1:]...)
		}
	}
	l.to.Log(context.Background(), raftLevels[level], msg, args...)
}

func (l *raftLogger) Trace(msg string, args ...any) { l.Log(hclog.Trace, msg, args...) }
func (l *raftLogger) Debug(msg string, args ...any) { l.Log(hclog.Debug, msg, args...) }
func (l *raftLogger) Info(msg string, args ...any)  { l.Log(hclog.Info, msg, args...) }
func (l *raftLogger) Warn(msg string, args ...any)  { l.Log(hclog.Warn, msg, args...) }
func (l *raftLogger) Error(msg string, args ...any) { l.Log(hclog.Error, msg, args...) }

func (l *raftLogger) IsTrace() bool { return l.enabled(hclog.Trace) }
func (l *raftLogger) IsDebug() bool { return l.enabled(hclog.Debug) }
func (l *raftLogger) IsInfo() bool  { return l.enabled(hclog.Info) }
func (l *raftLogger) IsWarn() bool  { return l.enabled(hclog.Warn) }
func (l *raftLogger) IsError() bool { return l.enabled(hclog.Error) }

func (l *raftLogger) With(args ...any) hclog.Logger {
	return &raftLogger{l.Logger, l.to.With(args...)}
}

func (l *raftLogger) Named(name string) hclog.Logger      { return l.With("part", name) }
func (l *raftLogger) ResetNamed(name string) hclog.Logger { return l.Named(name) }
