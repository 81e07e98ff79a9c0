package codeq

import (
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/hook"
)

func init() {
	hook.SetFS = func(opts any, fs vfs.FS) { opts.(*Options).fs = fs }
	hook.Commits = func(queue any) (n uint64) {
		for _, r := range queue.(*Queue).replicas {
			if s := r.lead.Load(); s != nil {
				n += s.commits.Load()
			}
		}
		return n
	}
}
