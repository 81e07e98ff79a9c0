package main

import (
	"errors"
	"os"
)

// syncFile makes a file durable. Directories cannot be synced here, and need not be.
func syncFile(path string, dir bool) error {
	if dir {
		return nil
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
