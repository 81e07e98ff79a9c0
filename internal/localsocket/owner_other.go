//go:build !unix

package localsocket

import "io/fs"

// socketType is the type of a socket for Lstat: on Windows, a reparse point.
const socketType = fs.ModeIrregular

// ownerOf returns the user that owns a file; -1: the system has none.
func ownerOf(fs.FileInfo) int { return -1 }
