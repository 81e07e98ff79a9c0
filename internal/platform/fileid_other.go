//go:build !linux && !darwin && !freebsd && !netbsd

package platform

import "os"

const bornIsFixed = false

// IdentifyFile returns the ID of a file or a directory. It does not follow a link.
func IdentifyFile(path string) (FileID, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return FileID{}, err
	}
	return FileID{Number: InodeNumber(info)}, nil
}

// HasLastingDirectories returns true.
func HasLastingDirectories(string) bool { return true }
