//go:build unix

package platform

import (
	"io/fs"
	"syscall"
)

// LinkCount returns how many names a file has; 0: unknown.
func LinkCount(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Nlink)
	}
	return 0
}

// InodeNumber returns the inode number of a file or a directory; 0: unknown.
func InodeNumber(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Ino)
	}
	return 0
}
