//go:build unix

package codeq

import (
	"io/fs"
	"syscall"
)

// linksOf is how many names a file has; 0: not known.
func linksOf(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Nlink)
	}
	return 0
}

// inodeOf is the number by which the file system knows a file or a directory; 0: not known.
func inodeOf(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Ino)
	}
	return 0
}
