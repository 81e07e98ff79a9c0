package codeqweb

import (
	"fmt"
	"net/http"

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

// redact calls Options.Redact. After a panic, everything that it might have hidden is removed.
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
