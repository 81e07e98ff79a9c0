package codeq

import (
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/hook"
)

func init() {
	hook.SetFS = func(opts any, fs vfs.FS) { opts.(*Options).fs = fs }
	hook.SetWall = func(opts any, wall func() time.Time) { opts.(*Options).wall = wall }
	hook.Commits = func(queue any) (n uint64) {
		for _, r := range queue.(*Queue).replicas {
			if s := r.lead.Load(); s != nil {
				n += s.commits.Load()
			}
		}
		return n
	}
}
