package codeq

import (
	"fmt"
	"log/slog"

	"codeq/internal/guard"
)

// A panic in codeq is a bug of codeq, and does not end the host process. Every goroutine that codeq
// starts runs in a guard, which logs the panic with its stack and makes an error of it. The error
// ends only what depends on the goroutine:
//
//   - the call that the goroutine serves, if there is one;
//   - otherwise the shard, as if its storage had failed, though the error does not say that it has:
//     in a cluster the replica steps down, and another one leads.
//
// Invariant: every go statement has a guard (TestGoroutinesAreGuarded), and TestPanicOfAnyGoroutine
// finds the name given to the guard, except for the names that the test lists.

// ownPanic is the error of a goroutine of codeq that panicked. It matches *PanicError.
type ownPanic struct {
	what  string // the name of the goroutine
	cause *PanicError
}

// Error leaves out the stack, which has been logged.
func (p *ownPanic) Error() string { return fmt.Sprintf("panic in %s: %v", p.what, p.cause.Value) }
func (p *ownPanic) Unwrap() error { return p.cause }

// panicError makes an error of a panic of a goroutine of codeq.
func panicError(what string, value any, stack []byte) error {
	return &ownPanic{what, &PanicError{value, stack}}
}

// guarded calls f, and returns its error; a panic is logged, and becomes an *ownPanic.
func guarded(log *slog.Logger, what string, f func() error) (err error) {
	contain(log, what, func() { err = f() }, func(caught error) { err = caught })
	return err
}

// contain calls f; a panic is logged, and caught, which may be nil, gets it as an *ownPanic.
func contain(log *slog.Logger, what string, f func(), caught func(error)) {
	guard.Contain(log, what, f, func(value any, stack []byte) {
		if caught != nil {
			caught(panicError(what, value, stack))
		}
	})
}

// abandon answers the caller of an operation that may have been answered before. It does not
// release the references of a claim, since it is not known who holds them.
func abandon(op operation, reason error) {
	_, tells := op.(leaseEnd) // its runner, perhaps
	if b, ok := op.(interface{ base() *completion }); ok && !tells {
		b.base().settle(reason)
		return
	}
	op.settle(reason)
}
