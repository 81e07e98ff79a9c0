package codeq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"codeq/internal/base"
	"codeq/internal/peer"
)

// Errors travel between nodes as a code and a text.

// remoteError is an error of another node. Its text begins with that of what it wraps.
type remoteError struct {
	text string
	is   []error
}

func (e *remoteError) Error() string   { return e.text }
func (e *remoteError) Unwrap() []error { return e.is }

// sentErrors are those that callers branch on, by code.
var sentErrors = [...]error{
	nil, ErrEmpty, ErrLeaseLost, ErrNotFound, ErrNotWaiting, ErrCanceled, ErrNotLeader, ErrUncertain, ErrCorrupt,
	ErrDiskFull,
}

const (
	codeLeaseCanceled = 100 + iota // ErrLeaseLost and ErrCanceled
	codeDuplicate
	codeInvalid
)

func encodeError(err error) (code byte, text string) {
	var duplicate *DuplicateError
	var invalid *InvalidError
	switch {
	case errors.As(err, &duplicate):
		return codeDuplicate, string(appendJSON(nil, duplicate))
	case errors.As(err, &invalid):
		sent := *invalid
		sent.Value = fmt.Sprint(sent.Value)
		return codeInvalid, string(appendJSON(nil, &sent))
	case errors.Is(err, ErrLeaseLost) && errors.Is(err, ErrCanceled):
		return codeLeaseCanceled, err.Error()
	case errors.Is(err, ErrClosed), errors.Is(err, ErrFailed): // another node will lead
		return encodeError(fmt.Errorf("%w: %v", ErrNotLeader, err))
	}
	for code, sentinel := range sentErrors {
		if sentinel != nil && errors.Is(err, sentinel) {
			return byte(code), err.Error()
		}
	}
	return 0, err.Error()
}

func decodeError(code byte, text string) error {
	switch {
	case code == codeDuplicate:
		err := new(DuplicateError)
		if json.Unmarshal([]byte(text), err) == nil {
			return err
		}
	case code == codeInvalid:
		err := new(InvalidError)
		if json.Unmarshal([]byte(text), err) == nil {
			return err
		}
	case code == codeLeaseCanceled:
		return &remoteError{text, []error{ErrLeaseLost, ErrCanceled}}
	case int(code) < len(sentErrors) && code > 0:
		return &remoteError{text, []error{sentErrors[code]}}
	}
	return &remoteError{text, nil}
}

// callError is the outcome of a call that has brought no reply.
func callError(ctx context.Context, err error) error {
	var remote *peer.RemoteError
	switch {
	case errors.As(err, &remote):
		return decodeError(remote.Code, remote.Text)
	case errors.Is(err, peer.ErrNotSent):
		return fmt.Errorf("%w: %w", ErrNotLeader, err)
	case ctx.Err() != nil:
		return fmt.Errorf("%w: %w", ErrUncertain, base.EndOf(ctx))
	}
	return fmt.Errorf("%w: %w", ErrUncertain, err)
}
