package testkit

import (
	"errors"
	"testing"

	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// Blocks returns the offsets of the blocks of a table: of its entries, and of its index. It closes
// the table.
func Blocks(t testing.TB, table *sstable.Reader) (data, index []int64) {
	t.Helper()
	layout, err := table.Layout()
	require.NoError(t, errors.Join(err, table.Close()))
	for _, b := range layout.Data {
		data = append(data, int64(b.Offset))
	}
	for _, b := range layout.Index {
		index = append(index, int64(b.Offset))
	}
	return data, index
}

// Overwrite changes a part of a file.
func Overwrite(t testing.TB, disk vfs.FS, path string, at int64, with string) {
	t.Helper()
	f, err := disk.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	_, err = f.WriteAt([]byte(with), at)
	require.NoError(t, errors.Join(err, f.Close()))
}
