package base_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"codeq/internal/base"
)

func TestEndOf(t *testing.T) {
	cause := errors.New("stop")
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Unix(0, 0))
	defer cancel()
	for _, ctx := range []context.Context{canceled, late} {
		if got := base.EndOf(ctx); got != ctx.Err() {
			t.Errorf("%v, expected %v", got, ctx.Err())
		}
	}
	because, cancelCause := context.WithCancelCause(t.Context())
	cancelCause(cause)
	lateBecause, cancel := context.WithDeadlineCause(t.Context(), time.Unix(0, 0), cause)
	defer cancel()
	for _, ctx := range []context.Context{because, lateBecause} {
		if got := base.EndOf(ctx); !errors.Is(got, ctx.Err()) || !errors.Is(got, cause) {
			t.Errorf("%v does not match %v and %v", got, ctx.Err(), cause)
		}
	}
}
