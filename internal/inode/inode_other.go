//go:build !unix

// Package inode says what the file system knows of a file beside its name.
package inode

import "io/fs"

// Number is 0: a file's number is not known here, and copies are not told from the original.
func Number(fs.FileInfo) uint64 { return 0 }

// Links is 0: not known.
func Links(fs.FileInfo) uint64 { return 0 }
