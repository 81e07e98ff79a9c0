package workerpool

import (
	"bytes"
	"context"
	"encoding"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// keptLog is a slog.Handler that passes records on, and also keeps those from a level on, as text.
// User code (values of attributes, the level) runs on the goroutine that logs.
type keptLog struct {
	next  slog.Handler
	level slog.Leveler
	keep  func(level slog.Level, text string)
	with  []func(slog.Handler) slog.Handler // the WithAttrs and WithGroup so far
}

// KeepLog returns a handler that passes all records on to next, and gives those from a level on to
// keep: the message with the attributes that follow, as name=value.
func KeepLog(next slog.Handler, level slog.Leveler, keep func(level slog.Level, text string)) slog.Handler {
	return &keptLog{next: next, level: level, keep: keep}
}

func (k *keptLog) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= k.level.Level() || k.next.Enabled(ctx, l)
}

func (k *keptLog) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= k.level.Level() {
		k.keep(r.Level, k.text(ctx, &r))
	}
	if !k.next.Enabled(ctx, r.Level) {
		return nil
	}
	return k.next.Handle(ctx, r)
}

func (k *keptLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	return k.and(func(h slog.Handler) slog.Handler { return h.WithAttrs(attrs) })
}

func (k *keptLog) WithGroup(name string) slog.Handler {
	return k.and(func(h slog.Handler) slog.Handler { return h.WithGroup(name) })
}

func (k *keptLog) and(with func(slog.Handler) slog.Handler) slog.Handler {
	c := *k
	c.next, c.with = with(k.next), append(slices.Clip(k.with), with)
	return &c
}

// emptyRecord is how a TextHandler begins a record without a time and a message.
const emptyRecord = `level=INFO msg=""`

// text returns a record as text.
func (k *keptLog) text(ctx context.Context, r *slog.Record) string {
	var b bytes.Buffer
	var h slog.Handler = slog.NewTextHandler(&b, &slog.HandlerOptions{ReplaceAttr: clipAttr})
	for _, with := range k.with {
		h = with(h)
	}
	attrs := slog.NewRecord(time.Time{}, slog.LevelInfo, "", 0)
	r.Attrs(func(a slog.Attr) bool {
		attrs.AddAttrs(a)
		return true
	})
	_ = h.Handle(ctx, attrs) // a buffer takes all
	text := strings.TrimSuffix(strings.TrimPrefix(b.String(), emptyRecord), "\n")
	return strings.ToValidUTF8(r.Message+text, "\ufffd")
}

// maxLogAttr limits an attribute, in bytes.
const maxLogAttr = 256

func clipAttr(_ []string, a slog.Attr) slog.Attr {
	switch a.Value.Kind() {
	case slog.KindString:
		a.Value = slog.StringValue(clip(a.Value.String()))
	case slog.KindAny:
		v := a.Value.Any()
		if _, ok := v.(encoding.TextMarshaler); ok {
			break // which a TextHandler calls, and contains
		}
		text, ok := v.([]byte)
		if !ok {
			text = fmt.Appendf(nil, "%+v", v)
		}
		a.Value = slog.StringValue(clip(string(text)))
	}
	return a
}

// clip cuts a text between two characters.
func clip(text string) string {
	if len(text) <= maxLogAttr {
		return text
	}
	n := maxLogAttr
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n]
}
