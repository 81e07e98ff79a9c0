//go:build unix

// Package inode returns what the file system knows of a file beside its name.
package inode

import (
	"io/fs"
	"syscall"
)

// Links returns how many names a file has; 0: unknown.
func Links(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Nlink)
	}
	return 0
}

// Number returns the inode number of a file or a directory; 0: unknown.
func Number(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Ino)
	}
	return 0
}
