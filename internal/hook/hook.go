// Package hook gives codeqtest, and the programs below bench, access to what codeq does not export.
// codeq sets the variables when it is initialised, and never reads them: so codeq exports no
// options for these programs, and other programs link none of it.
package hook

import (
	"context"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// SetFS lets the queues that are opened with opts, a *codeq.Options, or verified with it, a
// *codeq.VerifyOptions, lie in fs.
var SetFS func(opts any, fs vfs.FS)

// SetWall gives the queues that are opened with opts, a *codeq.Options, a wall clock.
var SetWall func(opts any, wall func() time.Time)

// RunUntilEmpty is Queue.Run, for a *codeq.Queue with a *codeq.Mux and *codeq.RunOptions, but ends
// as well when nothing can be claimed at the moment and no handler runs. It returns how many tasks
// it has claimed. Messages of completions to other shards may not have arrived yet.
var RunUntilEmpty func(ctx context.Context, queue, mux, opts any) (claimed int, err error)

// Commits returns how many groups of operations the shards that a *codeq.Queue leads have begun to
// commit, each since it became the leader.
var Commits func(queue any) uint64
