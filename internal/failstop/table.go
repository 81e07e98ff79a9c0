package failstop

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/integrity"
)

// Pebble has a checksum for each block of a table, but up to its table format 5 none for the footer
// with the format of the blocks. After one flipped bit there it reads the blocks in an older
// format: it panics, finds keys that do not exist, or misses keys that do. codeq has never written
// a format older than oldestTable. Newer footers have checksums.

// oldestTable is the oldest format of Pebble in tables written by codeq.
const oldestTable = pebble.FormatColumnarBlocks

// formatBytes is the length of the format at the end of a footer: a version and a magic.
const formatBytes = 4 + 8

// checkTable checks the format of a table opened for reading, and returns other files unchanged. If
// the format is unknown, or older than oldestTable, it closes the file, and the error matches
// pebble.ErrCorruption, so that Pebble also treats it as damage.
func checkTable(f vfs.File, name string) (vfs.File, error) {
	if !integrity.IsTable(name) {
		return f, nil
	}
	if err := checkFormat(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func checkFormat(f vfs.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size() < formatBytes {
		return fmt.Errorf("%w: a table of %d bytes", pebble.ErrCorruption, info.Size())
	}
	var b [formatBytes]byte
	if _, err := f.ReadAt(b[:], info.Size()-formatBytes); err != nil {
		return err
	}
	magic, oldest := oldestTable.MaxTableFormat().AsTuple()
	if version := binary.LittleEndian.Uint32(b[:]); string(b[4:]) != magic || version < oldest {
		return fmt.Errorf("%w: a table of format %d, magic %x", pebble.ErrCorruption, version, b[4:])
	}
	return nil
}

// Tables returns a file system that checks tables (checkTable) when it opens them.
func Tables(fs vfs.FS) vfs.FS { return tableFS{fs} }

type tableFS struct{ vfs.FS }

// Unwrap returns the base, for vfs.Root.
func (fs tableFS) Unwrap() vfs.FS { return fs.FS }

func (fs tableFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := fs.FS.Open(name, opts...)
	if err != nil {
		return nil, err
	}
	return checkTable(f, name)
}
