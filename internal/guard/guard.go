// Package guard keeps a panic on one of codeq's goroutines from ending the process, and the user's
// functions from delaying it: functions that get notifications ([Teller]) and log handlers
// ([LogQueue]) run on goroutines of their own. It also detects when such a function calls back
// ([InCallback]).
package guard

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"sync/atomic"
)

// hook, if set, is called at the beginning of every guarded function; observer is called for panics
// of codeq itself.
var (
	hook     atomic.Pointer[func(what string)]
	observer atomic.Pointer[func(what string, value any, stack []byte)]
)

// SetHook sets a function that tests use to panic in the guarded functions that they name. A nil f
// removes it.
func SetHook(f func(what string)) {
	if f == nil {
		hook.Store(nil)
		return
	}
	hook.Store(&f)
}

// Observe sets a function for tests, which is called for each panic that Run reports, on the
// goroutine that has panicked. A nil f removes it.
func Observe(f func(what string, value any, stack []byte)) {
	if f == nil {
		observer.Store(nil)
		return
	}
	observer.Store(&f)
}

// Run calls f, a function of codeq, on the caller's goroutine. If f panics, caught is called with
// the value and the stack. what names f in tests and in messages.
func Run(what string, f func(), caught func(value any, stack []byte)) {
	RunUser(what, f, func(value any, stack []byte) {
		if o := observer.Load(); o != nil {
			(*o)(what, value, stack)
		}
		caught(value, stack)
	})
}

// Contain is Run that logs a panic before it calls caught, which is nil if nothing depends on f.
func Contain(log *slog.Logger, what string, f func(), caught func(value any, stack []byte)) {
	Run(what, f, func(value any, stack []byte) {
		log.Error("codeq has panicked; this is a bug of codeq", "in", what, "value", fmt.Sprint(value), "stack", string(stack))
		if caught != nil {
			caught(value, stack)
		}
	})
}

// RunUser is Run for a function of the user: its panic is no bug of codeq.
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

// EachUser calls a function of the user for each i below n, on a goroutine of its own, and waits.
// It returns the errors of those calls that panicked, as panicked makes them, or ended their
// goroutine, by i.
func EachUser(what string, n int, f func(i int), panicked func(value any, stack []byte) error, ended error) (failed map[int]error) {
	for i := 0; i < n; i++ { // once, unless calls fail
		err := ended
		done := make(chan struct{})
		go RunUser(what, func() {
			defer close(done) // after err is set
			RunUser(what, func() {
				for ; i < n; i++ {
					f(i)
				}
			}, func(value any, stack []byte) { err = panicked(value, stack) })
		}, nil)
		<-done
		if i < n {
			if failed == nil {
				failed = make(map[int]error)
			}
			failed[i] = err
		}
	}
	return failed
}

// Is is errors.Is for a user's error: its methods Is and Unwrap may panic.
func Is(err, target error) (is bool) {
	defer func() { _ = recover() }()
	return errors.Is(err, target)
}

// ErrorText returns the text of a user's error. The method Error may panic, as that of most types
// does when the error is a nil pointer.
func ErrorText(err error) (text string) {
	defer func() {
		if v := recover(); v != nil {
			text = fmt.Sprintf("error of type %T, whose method Error panics: %v", err, v)
		}
		text = strings.ToValidUTF8(text, "\ufffd")
	}()
	return err.Error()
}
