package base

import (
	"fmt"
	"sync"
)

// Assert panics unless ok. Callers write
//
//	if base.Invariants {
//		base.Assert(n >= 0, "queue %q has %d leases", name, n)
//	}
//
// so that a build without the tag invariants evaluates no argument.
func Assert(ok bool, format string, args ...any) {
	if !ok {
		panic("codeq: invariant violated: " + fmt.Sprintf(format, args...))
	}
}

// AssertHeld panics unless a mutex is locked. The goroutine may be another one.
func AssertHeld(mu *sync.Mutex, name string) { Assert(!mu.TryLock(), "%s is not locked", name) }
