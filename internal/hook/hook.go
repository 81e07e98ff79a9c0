// Package hook is the way of codeqtest to what codeq does not export. codeq
// sets the variables when it is initialised, and never reads them: so codeqtest
// needs no exported options, and programs that do not test link none of it.
package hook

import "github.com/cockroachdb/pebble/v2/vfs"

var (
	// SetFS has the queues that are opened with opts, a *codeq.Options, lie in fs.
	SetFS func(opts any, fs vfs.FS)
	// Queues returns the names of the queues that mux, a *codeq.Mux, has
	// handlers for.
	Queues func(mux any) []string
)
