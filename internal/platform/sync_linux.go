package platform

import (
	"os"

	"golang.org/x/sys/unix"
)

func syncFileSystem(f *os.File) error { return unix.Syncfs(int(f.Fd())) }
