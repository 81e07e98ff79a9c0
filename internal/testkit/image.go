package testkit

import (
	"errors"
	"io"
	"path"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
)

// Image is a disk with nonempty files, to flip their bits.
type Image struct {
	Disk    *crashfs.Disk
	Files   []string          // in their order
	Content map[string][]byte // by file
}

// ImageOf reads the files below a directory. REQUIRES: they do not change meanwhile.
func ImageOf(t testing.TB, disk *crashfs.Disk, dir string) *Image {
	t.Helper()
	i := &Image{Disk: disk, Content: make(map[string][]byte)}
	i.add(t, dir)
	return i
}

func (i *Image) add(t testing.TB, dir string) {
	t.Helper()
	names, err := i.Disk.List(dir)
	require.NoError(t, err)
	slices.Sort(names)
	for _, name := range names {
		name = path.Join(dir, name)
		info, err := i.Disk.Stat(name)
		require.NoError(t, err)
		if info.IsDir() {
			i.add(t, name)
			continue
		}
		if info.Size() == 0 {
			continue
		}
		f, err := i.Disk.Open(name)
		require.NoError(t, err)
		content, err := io.ReadAll(f)
		require.NoError(t, errors.Join(err, f.Close()))
		i.Files, i.Content[name] = append(i.Files, name), content
	}
}

// Flip returns a copy of the disk with one bit of a file changed. Hard links to the file, such as
// those of checkpoints, keep the old content.
func (i *Image) Flip(t testing.TB, name string, bit int) *crashfs.Disk {
	t.Helper()
	disk := i.Disk.Clone()
	content := slices.Clone(i.Content[name])
	content[bit/8] ^= 1 << (bit % 8)
	f, err := disk.Create(name, vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	_, err = f.Write(content)
	require.NoError(t, errors.Join(err, f.Sync(), f.Close()))
	dir, err := disk.OpenDir(path.Dir(name))
	require.NoError(t, err)
	require.NoError(t, errors.Join(dir.Sync(), dir.Close()))
	return disk
}
