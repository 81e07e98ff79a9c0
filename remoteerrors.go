package codeq

import (
	"errors"
	"fmt"

	"codeq/internal/call"
	"codeq/internal/wire"
)

// Errors travel between nodes as a code and a text (call.EncodeError).

func encodeError(err error) (code byte, text string) {
	var duplicate *DuplicateError
	var invalid *InvalidError
	switch {
	case errors.As(err, &duplicate):
		return call.CodeDuplicate, string(wire.AppendJSON(nil, duplicate))
	case errors.As(err, &invalid):
		sent := *invalid
		sent.Value = fmt.Sprint(sent.Value)
		return call.CodeInvalid, string(wire.AppendJSON(nil, &sent))
	}
	return call.EncodeError(err)
}

// encodeOwnError is encodeError for a program that calls this process and no other.
func encodeOwnError(err error) (code byte, text string) {
	if !errors.Is(err, ErrInvalid) {
		if code, text = call.EncodeOwnError(err); code != 0 {
			return code, text
		}
	}
	return encodeError(err)
}

func decodeError(code byte, text string) error {
	switch code {
	case call.CodeDuplicate:
		return call.DecodeDetails(text, new(DuplicateError))
	case call.CodeInvalid:
		return call.DecodeDetails(text, new(InvalidError))
	}
	return call.DecodeError(code, text)
}
