package codeq

import (
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/hook"
)

func init() {
	hook.SetFS = func(opts any, fs vfs.FS) { opts.(*Options).fs = fs }
}
