package raftlog

import (
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// logFS hides errors of the write-ahead log from Pebble and poisons the store
// instead, before the commit returns that they concern. Pebble would report
// some of these commits as a success, panic with its locks locked at others, and
// end the process if the error comes up while it begins a new log.
//
// Once the store is poisoned nothing more is written: what the log has is a
// prefix of the commits.
type logFS struct {
	vfs.FS
	fatal *fatalLogger
}

func (fs logFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, c)
	return fs.wrap(f, err, name, c)
}

func (fs logFS) ReuseForWrite(old, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.ReuseForWrite(old, name, c)
	return fs.wrap(f, err, name, c)
}

// Unwrap returns the base, for vfs.Root.
func (fs logFS) Unwrap() vfs.FS { return fs.FS }

func (fs logFS) wrap(f vfs.File, err error, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if c != "pebble-wal" || !strings.HasSuffix(name, ".log") {
		return f, err
	}
	if err != nil {
		fs.fatal.fail(err)
		if f, err = vfs.NewMem().Create("log", c); err != nil { // a file that nobody finds
			return nil, err
		}
	}
	return logFile{f, fs.fatal}, nil
}

type logFile struct {
	vfs.File
	fatal *fatalLogger
}

func (f logFile) Write(p []byte) (int, error) {
	f.try(func() error {
		_, err := f.File.Write(p)
		return err
	})
	return len(p), nil
}

func (f logFile) Sync() error     { return f.try(f.File.Sync) }
func (f logFile) SyncData() error { return f.try(f.File.SyncData) }

func (f logFile) SyncTo(length int64) (full bool, err error) {
	err = f.try(func() (err error) {
		full, err = f.File.SyncTo(length)
		return err
	})
	return full, err
}

func (f logFile) Close() error {
	if err := f.File.Close(); err != nil {
		f.fatal.fail(err)
	}
	return nil
}

// try returns nil.
func (f logFile) try(do func() error) error {
	if f.fatal.err() == nil {
		if err := do(); err != nil {
			f.fatal.fail(err)
		}
	}
	return nil
}
