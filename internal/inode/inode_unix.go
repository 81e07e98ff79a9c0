//go:build unix

// Package inode says what the file system knows of a file beside its name.
package inode

import (
	"io/fs"
	"syscall"
)

// Links is how many names a file has; 0: not known.
func Links(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Nlink)
	}
	return 0
}

// Number is the number by which the file system knows a file or a directory; 0: not known.
func Number(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Ino)
	}
	return 0
}
