package store

import (
	"context"
	"log/slog"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/failstop"
)

// Scratch is a store that a repair writes once. It has no log: its content is complete once it was
// flushed.
type Scratch struct {
	db    *pebble.DB
	latch *failstop.Latch
}

// NewScratch creates a store in a directory that does not exist, with memtables of so many bytes.
func NewScratch(fsys vfs.FS, dir string, memTableBytes uint64) (*Scratch, error) {
	latch := failstop.New(slog.New(slog.DiscardHandler), "store")
	db, err := latch.Open(dir, &pebble.Options{
		FS: fsys, DisableWAL: true, FormatMajorVersion: Format, MemTableSize: memTableBytes,
	})
	if err != nil {
		return nil, err
	}
	return &Scratch{db, latch}, nil
}

// DB returns the Pebble store, for batches.
func (s *Scratch) DB() *pebble.DB { return s.db }

// Flush writes everything to tables. It returns the first error, such as that of a full disk.
func (s *Scratch) Flush() error { return Error(s.latch.Flush(context.Background(), s.db)) }

// Close closes the store, and returns why it has failed, if it has. It does not seal the store.
func (s *Scratch) Close() error { return s.latch.Close(s.db) }
