//go:build !unix

package platform

import "io/fs"

// InodeNumber returns 0: the number of a file is not known here, and copies cannot be recognized.
func InodeNumber(fs.FileInfo) uint64 { return 0 }

// LinkCount returns 0: unknown.
func LinkCount(fs.FileInfo) uint64 { return 0 }
