package guard

import (
	"errors"
	"log/slog"
)

// Steps calls the steps one after the other, and returns their errors. After a panic, which caught
// turns into an error, a step is tried once more, as later steps may rely on it.
func Steps(log *slog.Logger, what string, steps []func() error, caught func(what string, value any, stack []byte) error) error {
	var errs []error
	for _, step := range steps {
		for left := 2; left > 0; left-- {
			Contain(log, what, func() {
				errs = append(errs, step())
				left = 0
			}, func(value any, stack []byte) { errs = append(errs, caught(what, value, stack)) })
		}
	}
	return errors.Join(errs...)
}
