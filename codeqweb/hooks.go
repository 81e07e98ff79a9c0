package codeqweb

import (
	"fmt"
	"net/http"

	"codeq"
)

// contained calls a function of the application, which may panic.
func contained(what string, f func()) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &refusal{http.StatusInternalServerError, "internal", fmt.Sprint(what, " has panicked: ", v)}
		}
	}()
	f()
	return nil
}

// accessOf asks the application what a request may do.
func (d *Dashboard) accessOf(r *http.Request) (a Access, err error) {
	err = contained("Options.Access", func() { a = d.opts.Access(r) })
	return a, err
}

// redact lets the application alter a task before it is shown. If it panics, what it might have
// hidden is not shown.
func (d *Dashboard) redact(t *codeq.TaskInfo) {
	if d.opts.Redact == nil {
		return
	}
	before := *t
	if err := contained("Options.Redact", func() { d.opts.Redact(t) }); err != nil {
		*t = codeq.TaskInfo{
			ID: before.ID, State: before.State, At: before.At, Task: codeq.Task{Queue: before.Queue}, LastError: err.Error(),
		}
	}
}

// format asks the application for the text of a payload; "": it has none.
func (d *Dashboard) format(queue string, data []byte) (text string) {
	if d.opts.Format == nil {
		return ""
	}
	if err := contained("Options.Format", func() { text = d.opts.Format(queue, data) }); err != nil {
		return err.Error()
	}
	return text
}
