package base

import "strings"

const prefix = "codeq: "

// Prefixed makes the text of an error begin with the name of the package, once, whatever errors are
// wrapped in it. Joined errors are one line each, which begins with the name.
func Prefixed(err error) error {
	text := err.Error()
	lines := 1 + strings.Count(text, "\n"+prefix)
	if strings.HasPrefix(text, prefix) && strings.Count(text, prefix) == lines {
		return err
	}
	return &prefixed{prefix + strings.ReplaceAll(text, prefix, ""), err}
}

// prefixed is an error with another text.
type prefixed struct {
	text string
	err  error
}

func (e *prefixed) Error() string { return e.text }
func (e *prefixed) Unwrap() error { return e.err }

// WithText returns an error with a text that matches some errors. The text begins with that of the
// first of them, or contains it if the error is from another node.
func WithText(text string, is ...error) error { return &textError{text, is} }

type textError struct {
	text string
	is   []error
}

func (e *textError) Error() string   { return e.text }
func (e *textError) Unwrap() []error { return e.is }
