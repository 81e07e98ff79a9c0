package testkit

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"testing"

	"codeq/internal/guard"
)

// Injected is the value of panics that tests inject into codeq. All other panics in codeq's own
// code are bugs, although it recovers them: Main fails for them in any test.
type Injected string

func (p Injected) Error() string { return isInjected + string(p) }

const isInjected = "injected: "

// wasInjected recognizes an injected panic, also if another goroutine has wrapped it.
func wasInjected(value string) bool { return strings.Contains(value, isInjected) }

// panicList has the panics in codeq's own code that no test has injected.
type panicList struct {
	mu    sync.Mutex // guards found
	found []string
}

var ownPanics panicList

// Main runs the tests of a package that opens queues; TestMain calls it. The program fails if codeq
// has panicked.
func Main(m *testing.M) {
	guard.Observe(ownPanics.add)
	flag.Parse()
	// Tests allocate many queues and disks in memory: frequent collections would take much of the
	// time. The race detector takes as much memory again, beyond the limit.
	debug.SetGCPercent(800)
	debug.SetMemoryLimit(3 << 30)
	overlapWaits()
	code := m.Run()
	if !ownPanics.report() {
		code = max(code, 1)
	}
	os.Exit(code)
}

// overlapWaits runs two more tests in parallel than there are processors, unless -parallel is set:
// nodes on real sockets mostly wait for elections.
func overlapWaits() {
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		if err := f.Value.Set(strconv.Itoa(runtime.GOMAXPROCS(0) + 2)); err != nil {
			panic(err)
		}
	}
}

func (l *panicList) add(what string, value any, stack []byte) {
	text := fmt.Sprint(value)
	if wasInjected(text) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.found = append(l.found, fmt.Sprintf("%s: %s\n%s", what, text, stack))
}

// report prints the panics, and returns true if there are none.
func (l *panicList) report() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.found {
		fmt.Fprintln(os.Stderr, "codeq has panicked in", p)
	}
	return len(l.found) == 0
}

// PanicHandler fails its test when codeq logs a panic in its own code that was not injected. It
// passes records on to Next, which may be nil.
type PanicHandler struct {
	T    *testing.T
	Next slog.Handler
}

func (h PanicHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelError || h.Next != nil && h.Next.Enabled(ctx, level)
}

func (h PanicHandler) Handle(ctx context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, "codeq has panicked") {
		text := r.Message
		r.Attrs(func(a slog.Attr) bool { text += "\n" + a.String(); return true })
		if !wasInjected(text) {
			h.T.Error(text)
		}
	}
	if h.Next == nil {
		return nil
	}
	return h.Next.Handle(ctx, r)
}

func (h PanicHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	if h.Next != nil {
		h.Next = h.Next.WithAttrs(attrs)
	}
	return h
}

func (h PanicHandler) WithGroup(name string) slog.Handler {
	if h.Next != nil {
		h.Next = h.Next.WithGroup(name)
	}
	return h
}
