package base

import (
	"fmt"
	"sync"
)

// Violated panics because an assertion does not hold. Callers write
//
//	if base.Invariants && n < 0 {
//		base.Violated("queue %q has %d leases", name, n)
//	}
//
// so that a build without the tag invariants evaluates nothing, and one with it allocates nothing.
func Violated(format string, args ...any) {
	panic("codeq: invariant violated: " + fmt.Sprintf(format, args...))
}

// AssertHeld panics unless a mutex is locked. The goroutine may be another one.
func AssertHeld(mu *sync.Mutex, name string) {
	if mu.TryLock() {
		Violated("%s is not locked", name)
	}
}
