package call

import (
	"errors"
	"fmt"
	"time"

	"codeq/internal/engine"
	"codeq/internal/guard"
	"codeq/internal/record"
)

// Wish is the error of a handler that decides about its task.
type Wish struct {
	How   engine.Failure
	After time.Duration
	Err   error // nil: there is no cause
}

func (w *Wish) Error() string {
	switch {
	case w.Err != nil:
		return guard.ErrorText(w.Err)
	case w.How == engine.FailRelease:
		return fmt.Sprintf("codeq: snoozed for %v", w.After)
	default:
		return "codeq: given up by the handler"
	}
}

func (w *Wish) Unwrap() error { return w.Err }

// WishIn returns the wish in a handler's error; nil if there is none. The methods As and Unwrap of
// the error may panic.
func WishIn(err error) (w *Wish) {
	defer func() {
		if recover() != nil {
			w = nil
		}
	}()
	errors.As(err, &w)
	return w
}

// FailBy returns how an attempt ends whose handler has returned an error. It calls methods of the
// error, which may end the goroutine.
func FailBy(err error) Fail {
	f := Fail{How: engine.FailRetry, Wait: -1}
	w := WishIn(err)
	if w != nil {
		f.How, f.Wait = w.How, int64(record.Millis(w.After))
	}
	if w == nil || w.Err != nil {
		f.Cause = guard.ErrorText(err) // with the text of errors that wrap the wish
	}
	return f
}
