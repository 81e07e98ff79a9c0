//go:build !linux && !darwin && !freebsd && !netbsd

package inode

import "os"

const bornIsFixed = false

// Identify returns the ID of a file or a directory. It does not follow a link.
func Identify(path string) (ID, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return ID{}, err
	}
	return ID{Number: Number(info)}, nil
}

// HasLastingDirectories returns true.
func HasLastingDirectories(string) bool { return true }
