// Package hook is the way of codeqtest, and of the programs below bench, to what codeq does not
// export. codeq sets the variables when it is initialised, and never reads them: so these need no
// exported options, and other programs link none of it.
package hook

import (
	"context"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// SetFS has the queues that are opened with opts, a *codeq.Options, lie in fs.
var SetFS func(opts any, fs vfs.FS)

// SetWall gives the queues that are opened with opts, a *codeq.Options, a wall clock.
var SetWall func(opts any, wall func() time.Time)

// RunUntilEmpty is Queue.Run, of a *codeq.Queue with a *codeq.Mux and *codeq.RunOptions, that also
// ends when nothing can be claimed at the moment and no handler is at work. It returns how many
// tasks it has claimed. What completions have sent to other shards may still be on its way.
var RunUntilEmpty func(ctx context.Context, queue, mux, opts any) (claimed int, err error)

// Commits returns how many groups of operations the shards that a *codeq.Queue leads have begun to
// commit, each since it is led there.
var Commits func(queue any) uint64
