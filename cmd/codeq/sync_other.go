//go:build !windows

package main

import (
	"errors"
	"os"
)

// syncFile makes a file or a directory durable.
func syncFile(path string, _ bool) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
