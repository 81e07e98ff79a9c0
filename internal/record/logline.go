package record

import (
	"encoding/binary"
	"fmt"
	"slices"
	"unicode/utf8"

	"codeq/internal/wire"
)

// LogLine is one message of a handler to its logger.
type LogLine struct {
	At      uint64 // ms since 1970
	Level   int    // a slog.Level
	Attempt uint32 // of the handler
	Text    string
}

// The bounds of the lines that are kept with a task.
const (
	MaxLogLines = 64
	MaxLogBytes = 8 << 10 // of all texts
	MaxLogLine  = 1 << 10 // bytes of a text
)

// Log adds a line, and drops the oldest ones if there are too many. Earlier Notes may share the
// memory before it: only the newest Notes are added to.
func (n *Notes) Log(l LogLine) {
	l.Text = Clip(l.Text, MaxLogLine)
	n.Logs = append(n.Logs, l)
	size, keep := 0, len(n.Logs)
	for keep > 0 && len(n.Logs)-keep < MaxLogLines && size+len(n.Logs[keep-1].Text) <= MaxLogBytes {
		keep--
		size += len(n.Logs[keep].Text)
	}
	n.Logs = n.Logs[keep:]
}

// WithoutLogs returns the notes without lines; n may be nil.
func (n *Notes) WithoutLogs() *Notes {
	if n == nil || len(n.Logs) == 0 {
		return n
	}
	c := *n
	c.Logs = nil
	return &c
}

// AppendLogs appends the form in which lines are stored, and sent between nodes, after the notes.
func AppendLogs(b []byte, lines []LogLine) []byte {
	b = wire.AppendUint(b, uint64(len(lines)))
	for i := range lines {
		l := &lines[i]
		b = wire.AppendInt(wire.AppendUint(b, l.At), int64(l.Level))
		b = wire.AppendBytes(wire.AppendUint(b, uint64(l.Attempt)), l.Text)
	}
	return b
}

// leastLogLine is how many bytes a line takes at least.
const leastLogLine = 4

// ReadLogs reads the result of AppendLogs. It refuses no lines at all.
func ReadLogs(r *wire.Reader) []LogLine {
	lines := make([]LogLine, r.Count(leastLogLine))
	for i := range lines {
		lines[i] = LogLine{At: r.Uint(), Level: int(r.Int()), Attempt: r.Uint32(), Text: r.String()}
	}
	if len(lines) == 0 {
		r.Fail()
	}
	return lines
}

// SoundLogs returns an error if no handler writes such lines.
func SoundLogs(lines []LogLine) error {
	size := 0
	for i := range lines {
		size += len(lines[i].Text)
	}
	if len(lines) > MaxLogLines || size > MaxLogBytes {
		return fmt.Errorf("%d lines of log of %d bytes", len(lines), size)
	}
	if i := slices.IndexFunc(lines, func(l LogLine) bool { return len(l.Text) > MaxLogLine || !utf8.ValidString(l.Text) }); i >= 0 {
		return fmt.Errorf("line of log %q", Clip(lines[i].Text, 2*MaxLogLine))
	}
	return nil
}

// maxLogSize returns an upper bound of the bytes of the stored lines.
func maxLogSize(lines []LogLine) int {
	n := binary.MaxVarintLen32
	for i := range lines {
		n += 4*binary.MaxVarintLen64 + len(lines[i].Text)
	}
	return n
}
