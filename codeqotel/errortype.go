package codeqotel

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.opentelemetry.io/otel/attribute"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"

	"codeq"
)

// sentinels are what errors of codeq match, by the names that error.type has for them.
var sentinels = []struct {
	err  error
	name string
}{
	{codeq.ErrInvalid, "codeq.ErrInvalid"},
	{codeq.ErrDuplicate, "codeq.ErrDuplicate"},
	{codeq.ErrDiskFull, "codeq.ErrDiskFull"},
	{codeq.ErrNotLeader, "codeq.ErrNotLeader"},
	{codeq.ErrUncertain, "codeq.ErrUncertain"},
	{codeq.ErrLeaseLost, "codeq.ErrLeaseLost"},
	{codeq.ErrCanceled, "codeq.ErrCanceled"},
	{codeq.ErrFailed, "codeq.ErrFailed"},
	{codeq.ErrClosed, "codeq.ErrClosed"},
	{context.DeadlineExceeded, "context.DeadlineExceeded"},
	{context.Canceled, "context.Canceled"},
}

// errorType is the attribute error.type: the name of what an error matches, or else of its type. An
// error that codeq has wrapped, such as that of [codeq.RetryAfter], has the type of what is in it.
func errorType(err error) (kind attribute.KeyValue) {
	defer func() {
		if recover() != nil {
			kind = semconv.ErrorTypeKey.String(fmt.Sprintf("%T", err))
		}
	}()
	for _, s := range sentinels {
		if errors.Is(err, s.err) {
			return semconv.ErrorTypeKey.String(s.name)
		}
	}
	for isInternal(err) && errors.Unwrap(err) != nil {
		err = errors.Unwrap(err)
	}
	return semconv.ErrorTypeKey.String(valid(semconv.ErrorType(err).Value.AsString()))
}

// textOf is the text of an error: of a panic without the stack, which may have what the program
// works on. An error whose own method panics, such as a nil pointer, has the name of its type.
func textOf(err error) (text string) {
	defer func() {
		if recover() != nil {
			text = fmt.Sprintf("%T", err)
		}
	}()
	if p, ok := errors.AsType[*codeq.PanicError](err); ok && p != nil {
		return fmt.Sprint("panic: ", p.Value)
	}
	return err.Error()
}

// valid is a text in UTF-8, as OpenTelemetry demands.
func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// isInternal reports whether the type of an error is one that codeq does not export.
func isInternal(err error) bool {
	t := reflect.TypeOf(err)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	first, _ := utf8.DecodeRuneInString(t.Name())
	return t.PkgPath() == reflect.TypeFor[codeq.Queue]().PkgPath() && !unicode.IsUpper(first)
}
