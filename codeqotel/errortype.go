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

// sentinels maps the errors of codeq to the values of error.type.
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

// errorType returns the attribute error.type: the name of the matching sentinel, or else of the
// error's type. A wrapper of codeq, such as [codeq.RetryAfter], has the type of the wrapped error.
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

// textOf returns the text of an error. It leaves out the stack of a panic, which may contain user
// data. If the error's own method panics, such as for a nil pointer, it returns the name of the
// type.
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

// valid returns a text in UTF-8, as OpenTelemetry requires.
func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// isInternal reports whether the type of an error is one of codeq that users cannot name.
func isInternal(err error) bool {
	t := reflect.TypeOf(err)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	first, _ := utf8.DecodeRuneInString(t.Name())
	of := reflect.TypeFor[codeq.Queue]().PkgPath()
	return t.PkgPath() == of && !unicode.IsUpper(first) || strings.HasPrefix(t.PkgPath(), of+"/internal/")
}
