package codeq

import (
	"context"
	"errors"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// modelText is what is stored of an error that a user hands in, whose method Error may panic.
func modelText(err error) string {
	switch err := err.(type) {
	case *myErr:
		if err == nil {
			return "error of type *codeq.myErr, whose method Error panics: runtime error: invalid memory address or nil pointer dereference"
		}
	case hostileErr:
		return "error of type codeq.hostileErr, whose method Error panics: Error"
	}
	return err.Error()
}

// userCode is the action of functions of a user that fail within a call: the panic is the caller's,
// and nothing else changes.
func (m *model) userCode(*rapid.T) {
	ctx, failure := context.Background(), errors.New("of the user")
	queue := rapid.SampledFrom([]string{"a", "b"}).Draw(m.t, "queue")
	fail := rapid.SampledFrom([]struct {
		what string
		call func()
	}{
		{"configure", func() {
			_ = m.q.Configure(ctx, queue, func(s *Settings) {
				require.Equal(m.t, m.settings[queue], *s)
				require.ErrorIs(m.t, m.q.Pause(ctx, queue), ErrInvalid) // within another call
				s.Paused, s.Concurrency = true, 1
				panic(failure)
			})
		}},
		{"list", func() {
			for range m.q.List(ctx, ListOptions{State: Ready, Queue: queue}) {
				panic(failure)
			}
			panic(failure)
		}},
		{"ctx", func() {
			ctx, cancel := context.WithCancelCause(ctx)
			cancel(failure)
			_, err := m.q.Claim(ctx, ClaimRequest{Queues: []string{"no tasks"}})
			panic(err)
		}},
	}).Draw(m.t, "user code")
	func() {
		defer func() {
			v := recover()
			err, ok := v.(error)
			if !ok {
				panic(v) // a check of the model's
			}
			require.ErrorIs(m.t, err, failure, fail.what)
		}()
		fail.call()
	}()
	m.settle(true)
}
