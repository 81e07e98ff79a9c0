// Package hook is the way of codeqtest to what codeq does not export. codeq
// sets the variable when it is initialised, and never reads it: so codeqtest
// needs no exported options, and programs that do not test link none of it.
package hook

import "github.com/cockroachdb/pebble/v2/vfs"

// SetFS has the queues that are opened with opts, a *codeq.Options, lie in fs.
var SetFS func(opts any, fs vfs.FS)
