//go:build !unix

// Package inode returns what the file system knows of a file beside its name.
package inode

import "io/fs"

// Number returns 0: the number of a file is not known here, and copies cannot be recognized.
func Number(fs.FileInfo) uint64 { return 0 }

// Links returns 0: unknown.
func Links(fs.FileInfo) uint64 { return 0 }
