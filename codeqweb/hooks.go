package codeqweb

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"codeq"
)

// contained calls a function of the application, and returns its panic as an error.
func contained(what string, f func()) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &refusal{http.StatusInternalServerError, "internal", fmt.Sprint(what, " has panicked: ", v)}
		}
	}()
	f()
	return nil
}

// accessOf calls Options.Access.
func (d *Dashboard) accessOf(r *http.Request) (a Access, err error) {
	err = contained("Options.Access", func() { a = d.opts.Access(r) })
	return a, err
}

// redact calls Options.Redact. After a panic, everything that it might have hidden is removed. The
// attempts have copies of errors: if Redact changes LastError, those that it leaves are hidden.
func (d *Dashboard) redact(t *codeq.TaskInfo) {
	if d.opts.Redact == nil {
		return
	}
	before := *t
	t.History = slices.Clone(t.History)
	if err := contained("Options.Redact", func() { d.opts.Redact(t) }); err != nil {
		*t = codeq.TaskInfo{
			ID: before.ID, State: before.State, At: before.At, Task: codeq.Task{Queue: before.Queue}, LastError: err.Error(),
		}
	}
	if t.LastError == before.LastError {
		return
	}
	for i := range t.History {
		a := &t.History[i]
		left := slices.ContainsFunc(before.History, func(b codeq.Attempt) bool { return b.Error == a.Error })
		switch {
		case a.Error == "" || !left:
		case isBeginning(a.Error, before.LastError):
			a.Error = t.LastError
		default:
			a.Error = redactedError
		}
	}
}

// attemptText is the size from that on the error of an attempt may be cut: it is 256 bytes, without
// a part of a character at the end.
const attemptText = 256 - 3

// isBeginning reports whether the error of an attempt is the beginning of a last error.
func isBeginning(text, last string) bool {
	return text == last || len(text) >= attemptText && strings.HasPrefix(last, text)
}

// format calls Options.Format; "": use the default.
func (d *Dashboard) format(queue string, data []byte) (text string) {
	if d.opts.Format == nil {
		return ""
	}
	if err := contained("Options.Format", func() { text = d.opts.Format(queue, data) }); err != nil {
		return err.Error()
	}
	return text
}
