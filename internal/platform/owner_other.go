//go:build !unix

package platform

import "os"

func giveLike(*os.File, string) {}

// GiveDirectory does nothing: there is no root.
func GiveDirectory(string) error { return nil }

// SyncAll does nothing: directories are opened by whoever may enter them.
func SyncAll(string) error { return nil }
