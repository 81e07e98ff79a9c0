//go:build solaris && !illumos

package platform

import "io"

func lockFile(name string, m mode) (io.Closer, error) { return lockInProcess(name, m) }

// lockDirectory does nothing: the only locks are of processes.
func lockDirectory(string, mode) (io.Closer, error) { return io.NopCloser(nil), nil }
