//go:build !unix

package platform

import "os"

func giveLike(*os.File, string) {}

// GiveDirectory does nothing: there is no root.
func GiveDirectory(string) error { return nil }

// SyncAll does nothing: a process may open each directory that it may enter.
func SyncAll(string) error { return nil }
