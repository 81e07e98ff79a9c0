//go:build unix

package platform

import (
	"os"
	"syscall"
)

// openAtOnce opens a file, and does not wait for anybody, as for the other end of a FIFO.
func openAtOnce(name string, flag int) (*os.File, error) {
	return os.OpenFile(name, flag|syscall.O_NONBLOCK, 0)
}
