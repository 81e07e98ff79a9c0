package codeqweb

import (
	"net/http"

	"codeq"
)

// workersPage shows the workers and their tasks.
func (d *Dashboard) workersPage(w http.ResponseWriter, r *request) error {
	workers, err := d.q.Workers(r.Context())
	if err != nil {
		return err
	}
	v := struct {
		Workers           []codeq.WorkerInfo
		AnyQuiet, AnyNode bool
	}{Workers: workers}
	for _, worker := range workers {
		v.AnyQuiet, v.AnyNode = v.AnyQuiet || worker.Quiet, v.AnyNode || worker.Node != ""
	}
	return d.show(w, r, page{Title: "Workers", Screen: "workers", Refresh: 2, Body: v})
}
