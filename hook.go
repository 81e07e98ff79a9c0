package codeq

import (
	"context"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/hook"
)

func init() {
	hook.SetFS = func(opts any, fs vfs.FS) { opts.(*Options).fs = fs }
	hook.SetWall = func(opts any, wall func() time.Time) { opts.(*Options).wall = wall }
	hook.RunUntilEmpty = func(ctx context.Context, queue, mux, opts any) (int, error) {
		return queue.(*Queue).runMux(ctx, mux.(*Mux), opts.(*RunOptions), true)
	}
	hook.Commits = func(queue any) (n uint64) {
		for _, r := range queue.(*Queue).replicas {
			if s := r.lead.Load(); s != nil {
				n += s.commits.Load()
			}
		}
		return n
	}
}
