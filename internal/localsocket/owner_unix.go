//go:build unix

package localsocket

import (
	"io/fs"
	"syscall"
)

const socketType = fs.ModeSocket

// ownerOf returns the user that owns a file; -1: the system has none.
func ownerOf(info fs.FileInfo) int {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return int(st.Uid)
	}
	return -1
}
