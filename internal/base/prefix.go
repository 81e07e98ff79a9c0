package base

import "strings"

const prefix = "codeq: "

// Prefixed makes the text of an error begin with the name of the package, once, even if it wraps
// errors with that name. Joined errors are one line each, which begins with the name.
func Prefixed(err error) error {
	was := err.Error()
	lines := strings.Split(was, "\n")
	for i, line := range lines {
		bare, had := strings.CutPrefix(line, prefix)
		for _, before := range wrapping {
			bare = strings.ReplaceAll(bare, before+prefix, before)
		}
		if lines[i] = bare; had || i == 0 {
			lines[i] = prefix + bare
		}
	}
	if text := strings.Join(lines, "\n"); text != was {
		return &prefixed{text, err}
	}
	return err
}

// wrapping is the text before a wrapped error. Behind anything else the name is no prefix, but that
// of a file or directory.
var wrapping = []string{": ", "; ", ", ", "("}

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
