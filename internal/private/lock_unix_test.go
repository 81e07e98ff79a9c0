//go:build unix

package private

import "syscall"

func init() { mkfifo = func(name string) error { return syscall.Mkfifo(name, 0o600) } }
