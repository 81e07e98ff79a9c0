//go:build !unix && !windows

package platform

import (
	"errors"
	"io"
	"os"
)

func lockFile(string, mode) (io.Closer, error) { return nil, errors.ErrUnsupported }

func openAtOnce(string, int) (*os.File, error) { return nil, errors.ErrUnsupported }

func setLock(*os.File, mode) error { return errors.ErrUnsupported }

func whoHolds(*os.File, mode) (reads bool, pid int) { return false, 0 }

func lockDirectory(string, mode) (io.Closer, error) { return nil, errors.ErrUnsupported }
