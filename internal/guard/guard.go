// Package guard keeps a panic on one of codeq's own goroutines from ending the process of its host.
package guard

import (
	"runtime/debug"
	"sync/atomic"
)

// hook, if it is set, is called at the beginning of whatever is guarded.
var hook atomic.Pointer[func(what string)]

// SetHook is for tests, which panic in f, for the guarded functions that they name. A nil f ends it.
func SetHook(f func(what string)) {
	if f == nil {
		hook.Store(nil)
		return
	}
	hook.Store(&f)
}

// Run calls f, on the goroutine of the caller. If f panics, caught learns with what, and where.
// what names f in tests and in messages.
func Run(what string, f func(), caught func(value any, stack []byte)) {
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
