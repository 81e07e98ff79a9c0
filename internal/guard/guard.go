// Package guard keeps a panic on one of codeq's own goroutines from ending the process of its host.
package guard

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
)

// hook, if it is set, is called at the beginning of whatever is guarded; observer learns of the
// panics of codeq's own.
var (
	hook     atomic.Pointer[func(what string)]
	observer atomic.Pointer[func(what string, value any, stack []byte)]
)

// SetHook is for tests, which panic in f, for the guarded functions that they name. A nil f ends
// it.
func SetHook(f func(what string)) {
	if f == nil {
		hook.Store(nil)
		return
	}
	hook.Store(&f)
}

// Observe is for tests: f learns of each panic of which Run tells, on the goroutine that has
// panicked. A nil f ends it.
func Observe(f func(what string, value any, stack []byte)) {
	if f == nil {
		observer.Store(nil)
		return
	}
	observer.Store(&f)
}

// Run calls f, a function of codeq's own, on the goroutine of the caller. If f panics, caught
// learns with what, and where. what names f in tests and in messages.
func Run(what string, f func(), caught func(value any, stack []byte)) {
	RunUser(what, f, func(value any, stack []byte) {
		if o := observer.Load(); o != nil {
			(*o)(what, value, stack)
		}
		caught(value, stack)
	})
}

// Contain is Run that logs a panic before caught learns of it. caught is nil if nothing depends on
// f.
func Contain(log *slog.Logger, what string, f func(), caught func(value any, stack []byte)) {
	Run(what, f, func(value any, stack []byte) {
		log.Error("codeq has panicked; this is a bug of codeq", "in", what, "value", fmt.Sprint(value), "stack", string(stack))
		if caught != nil {
			caught(value, stack)
		}
	})
}

// RunUser is Run for a function of the user's, whose panic is no bug of codeq.
func RunUser(what string, f func(), caught func(value any, stack []byte)) {
	defer func() {
		if v := recover(); v != nil {
			caught(v, debug.Stack())
		}
	}()
	if h := hook.Load(); h != nil {
		(*h)(what)
	}
	f()
}
