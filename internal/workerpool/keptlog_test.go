package workerpool

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

type panicking struct{}

func (panicking) MarshalText() ([]byte, error) { panic("of a test") }
func (panicking) LogValue() slog.Value         { panic("of a test") }

type marshaler struct{}

func (marshaler) MarshalText() ([]byte, error) { panic("of a test") }

// TestKeptLog: a record is kept as its message and attributes, from a level on, whatever the next
// handler takes, and passed on. Long and invalid texts are cut, and user code that panics is
// contained.
func TestKeptLog(t *testing.T) {
	var next bytes.Buffer
	type line struct {
		level slog.Level
		text  string
	}
	var kept []line
	keep := func(level slog.Level, text string) { kept = append(kept, line{level, text}) }
	withoutTime := func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}
	l := slog.New(KeepLog(slog.NewTextHandler(&next, &slog.HandlerOptions{Level: slog.LevelWarn, ReplaceAttr: withoutTime}).
		WithAttrs([]slog.Attr{slog.String("task", "1")}), slog.LevelInfo, keep))
	require.False(t, l.Enabled(t.Context(), slog.LevelDebug))
	require.True(t, l.Enabled(t.Context(), slog.LevelInfo))

	long := strings.Repeat("é", 10_000)
	for _, c := range []struct {
		log  func()
		want string
	}{
		{func() { l.Info("plain text") }, "plain text"},
		{func() { l.Info("a", "n", 1, "s", "two words", "b", []byte("raw"), "ip", netip.IPv6Loopback()) }, `a n=1 s="two words" b=raw ip=::1`},
		{func() { l.With("x", 1).WithGroup("g").With("y", 2).Info("a", "z", 3) }, "a x=1 g.y=2 g.z=3"},
		{func() { l.With("x", 1).Info("a") }, "a x=1"},
		{func() { l.Info("a", "level", "l", "msg", "m", "time", "t") }, "a level=l msg=m time=t"},
		{func() { l.Info("a", "err", errors.New("no answer"), "of", struct{ N int }{7}) }, `a err="no answer" of={N:7}`},
		{func() { l.Info("a", "long", long, "next", 1) }, "a long=" + long[:maxLogAttr] + " next=1"},
		{func() { l.Info("a", "long", errors.New(long), "next", 1) }, "a long=" + long[:maxLogAttr] + " next=1"},
		{func() { l.Info(long) }, long},
		{func() { l.Info("\xff", "k", "\xfe") }, `"?`},
	} {
		kept = nil
		c.log()
		require.Len(t, kept, 1)
		require.Equal(t, slog.LevelInfo, kept[0].level)
		if c.want == `"?` {
			require.True(t, strings.HasPrefix(kept[0].text, "\ufffd k="), kept[0].text)
			require.Equal(t, strings.ToValidUTF8(kept[0].text, ""), kept[0].text)
			continue
		}
		require.Equal(t, c.want, kept[0].text)
	}
	require.Zero(t, next.String(), "its level is higher")
	kept = nil
	l.Info("a", "k", panicking{}, "m", marshaler{})
	require.Len(t, kept, 1)
	require.Contains(t, kept[0].text, "a k=")

	l.Debug("nothing")
	require.Len(t, kept, 1)
	l.With("x", 1).Warn("both", "y", 2)
	require.Equal(t, line{slog.LevelWarn, "both x=1 y=2"}, kept[1])
	require.Equal(t, "level=WARN msg=both task=1 x=1 y=2\n", next.String())
	require.NoError(t, l.Handler().Handle(context.Background(), slog.Record{Level: slog.LevelError, Message: "no time"}))
	require.Equal(t, line{slog.LevelError, "no time"}, kept[2])
}
