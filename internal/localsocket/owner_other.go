//go:build !unix

package localsocket

import "io/fs"

// socketType is what a socket is for Lstat: Windows has it as a reparse point.
const socketType = fs.ModeIrregular

// ownerOf returns the user to whom a file belongs; -1: the system has none.
func ownerOf(fs.FileInfo) int { return -1 }
