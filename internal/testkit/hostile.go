package testkit

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
)

// MyErr is an error type of a user. Every method of a nil *MyErr panics.
type MyErr struct{ text string }

func (e *MyErr) Error() string { return e.text }

// HostileErr panics in all its methods.
type HostileErr struct{}

func (HostileErr) Error() string        { panic("Error") }
func (HostileErr) Unwrap() error        { panic("Unwrap") }
func (HostileErr) Is(error) bool        { panic("Is") }
func (HostileErr) As(any) bool          { panic("As") }
func (HostileErr) String() string       { panic("String") }
func (HostileErr) LogValue() slog.Value { panic("LogValue") }

// UserHandler is a slog.Handler of a user.
type UserHandler struct {
	before func(message string) // each record
	mu     *sync.Mutex
	Seen   *[]string
}

func NewUserHandler(before func(message string)) UserHandler {
	return UserHandler{before, new(sync.Mutex), new([]string)}
}

func (h UserHandler) Enabled(context.Context, slog.Level) bool { return true }
func (h UserHandler) WithAttrs([]slog.Attr) slog.Handler       { return h }
func (h UserHandler) WithGroup(string) slog.Handler            { return h }

func (h UserHandler) Handle(_ context.Context, r slog.Record) error {
	h.before(r.Message)
	text := r.Message
	r.Attrs(func(a slog.Attr) bool { text += " " + a.String(); return true })
	h.mu.Lock()
	defer h.mu.Unlock()
	*h.Seen = append(*h.Seen, text)
	return nil
}

// About returns the records that begin with some text, sorted.
func (h UserHandler) About(text string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	records := slices.DeleteFunc(slices.Clone(*h.Seen), func(r string) bool { return !strings.HasPrefix(r, text) })
	slices.Sort(records)
	return records
}
