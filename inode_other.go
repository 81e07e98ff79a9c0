//go:build !unix

package codeq

import "io/fs"

// inodeOf is 0: a file's number is not known here, and copies are not told from the original.
func inodeOf(fs.FileInfo) uint64 { return 0 }

func linksOf(fs.FileInfo) uint64 { return 0 }
