package codeq

import (
	"fmt"
	"log/slog"

	"codeq/internal/guard"
)

// A panic of codeq's own is a bug of codeq, and does not end the process of its host. Every
// goroutine that codeq starts runs in a guard, which logs the panic with its stack and
// makes an error of it. The error ends as little as is known to depend on the goroutine:
//
//   - the call for which it works, if there is one;
//   - otherwise the shard, as if its storage had failed, but without a claim that the
//     storage has: in a cluster the replica steps down, and another one leads.
//
// Invariant: no go statement is without a guard (TestGoroutinesAreGuarded), and the name that
// it gives is found by TestPanicOfAnyGoroutine.

// ownPanic is the error of a goroutine of codeq that has panicked. It matches *PanicError.
type ownPanic struct {
	what  string // the name of the goroutine
	cause *PanicError
}

// Error leaves out the stack, which has been logged.
func (p *ownPanic) Error() string { return fmt.Sprintf("panic in %s: %v", p.what, p.cause.Value) }
func (p *ownPanic) Unwrap() error { return p.cause }

// guarded calls f, and returns its error; a panic is logged, and becomes an *ownPanic.
func guarded(log *slog.Logger, what string, f func() error) (err error) {
	guard.Run(what, func() { err = f() }, func(value any, stack []byte) {
		log.Error("codeq has panicked; this is a bug of codeq", "in", what, "value", fmt.Sprint(value), "stack", string(stack))
		err = &ownPanic{what, &PanicError{value, stack}}
	})
	return err
}

// contain is guarded for what returns no error. caught is nil if nothing depends on f.
func contain(log *slog.Logger, what string, f func(), caught func(error)) {
	err := guarded(log, what, func() error { f(); return nil })
	if err != nil && caught != nil {
		caught(err)
	}
}

// containUser calls a function of the user's that must not panic.
func containUser(log *slog.Logger, what string, f func()) (ok bool) {
	guard.Run(what, func() { f(); ok = true }, func(value any, stack []byte) {
		log.Error(what+" has panicked", "value", fmt.Sprint(value), "stack", string(stack))
	})
	return ok
}
