package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/failstop"
)

// OpenForReading opens a store without changing it.
func OpenForReading(fsys vfs.FS, dir string) (db *pebble.DB, err error) {
	err = Protect(func() (err error) {
		db, err = pebble.Open(dir, &pebble.Options{
			FS: failstop.Tables(readOnlyFS{fsys}), ReadOnly: true, FormatMajorVersion: Format,
			LoggerAndTracer: failstop.New(slog.New(slog.DiscardHandler), "store"),
			EventListener:   &pebble.EventListener{DataCorruption: func(pebble.DataCorruptionInfo) {}},
		})
		return err
	})
	return db, err
}

// OpenTable opens a table without its store.
func OpenTable(fsys vfs.FS, path string) (*sstable.Reader, error) {
	f, err := failstop.Tables(fsys).Open(path, vfs.SequentialReadsOption)
	if err != nil {
		return nil, err
	}
	readable, err := sstable.NewSimpleReadable(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	opts := &pebble.Options{}
	opts.EnsureDefaults()
	// an error closes the file
	return sstable.NewReader(context.Background(), readable, opts.MakeReaderOptions())
}

// Protect turns a panic into an error: damaged data may make Pebble panic.
// REQUIRES: nothing else uses what do uses.
func Protect(do func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: panic: %v", base.ErrCorrupt, p)
		}
	}()
	return do()
}

// IsIOError reports whether the file system could not read a file, as opposed to a file with wrong
// content.
func IsIOError(err error) bool {
	path := (*fs.PathError)(nil)
	return errors.As(err, &path) && !errors.Is(err, fs.ErrNotExist)
}
