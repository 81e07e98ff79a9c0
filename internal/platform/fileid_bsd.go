//go:build darwin || freebsd || netbsd

package platform

import (
	"io/fs"
	"os"
	"syscall"
)

// bornIsFixed is false: who sets the time at which a file was modified to an earlier one than that
// at which it was made sets that, too.
const bornIsFixed = false

// IdentifyFile returns the ID of a file or a directory. It does not follow a link.
func IdentifyFile(path string) (FileID, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return FileID{}, err
	}
	return FileID{Number: InodeNumber(info), Born: born(info)}, nil
}

func born(info fs.FileInfo) int64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return int64(st.Birthtimespec.Sec)*1e9 + int64(st.Birthtimespec.Nsec)
	}
	return 0
}

// HasLastingDirectories returns true.
func HasLastingDirectories(string) bool { return true }
