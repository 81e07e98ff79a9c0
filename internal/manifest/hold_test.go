package manifest

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/integrity"
	"codeq/internal/platform"
	"codeq/internal/testkit"
)

// openedHere begins an opening of a new directory with a store of one log.
func openedHere(t *testing.T) (d *Directory, store string) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("an open directory cannot be moved, and copies are not recognized")
	}
	d, err := Open(platform.FS, filepath.Join(t.TempDir(), "queue"), Want{Shards: 1})
	require.NoError(t, err)
	require.NoError(t, d.FinishCreation())
	store = ShardDir(d.FS, d.Path, 0)
	require.NoError(t, d.FS.MkdirAll(store, platform.DirMode))
	require.NoError(t, d.Begin())
	create(t, d.FS, filepath.Join(store, "000001.log"))
	return d, store
}

func create(t *testing.T, fs vfs.FS, path string) {
	t.Helper()
	f, err := fs.Create(path, vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

// TestLostDirectory: once its path leads to another directory, all operations by this path fail.
// Operations by other paths do not.
func TestLostDirectory(t *testing.T) {
	t.Parallel()
	d, store := openedHere(t)
	name, outside := filepath.Join(store, "000001.log"), filepath.Join(filepath.Dir(d.Path), "outside")
	operations := map[string]func() error{
		"create": func() error {
			_, err := d.FS.Create(filepath.Join(store, "a"), vfs.WriteCategoryUnspecified)
			return err
		},
		"create above": func() error {
			_, err := d.FS.Create(filepath.Join(d.Path, "a"), vfs.WriteCategoryUnspecified)
			return err
		},
		"open": func() error { _, err := d.FS.Open(name); return err },
		"open for writing": func() error {
			_, err := d.FS.OpenReadWrite(name, vfs.WriteCategoryUnspecified)
			return err
		},
		"reuse": func() error {
			_, err := d.FS.ReuseForWrite(name, filepath.Join(store, "000002.log"), vfs.WriteCategoryUnspecified)
			return err
		},
		"open a directory": func() error { _, err := d.FS.OpenDir(store); return err },
		"list":             func() error { _, err := d.FS.List(store); return err },
		"list above":       func() error { _, err := d.FS.List(d.Path); return err },
		"link":             func() error { return d.FS.Link(name, filepath.Join(store, "b")) },
		"link out":         func() error { return d.FS.Link(name, outside) },
		"remove":           func() error { return d.FS.Remove(name) },
		"remove all":       func() error { return d.FS.RemoveAll(store) },
		"remove itself":    func() error { return d.FS.RemoveAll(d.Path) },
		"rename":           func() error { return d.FS.Rename(name, filepath.Join(store, "b")) },
		"rename out":       func() error { return d.FS.Rename(name, outside) },
		"make":             func() error { return d.FS.MkdirAll(filepath.Join(store, "c"), platform.DirMode) },
		"lock":             func() error { _, err := d.FS.Lock(filepath.Join(store, LockName)); return err },
		"usage":            func() error { _, err := d.FS.GetDiskUsage(store); return err },
		"manifest":         d.Write,
		"check":            d.Check,
	}
	require.NoError(t, d.Check())
	require.NoError(t, os.Rename(d.Path, d.Path+".moved"))
	require.NoError(t, os.CopyFS(d.Path, os.DirFS(d.Path+".moved")))
	before := testkit.RecursiveListing(t, filepath.Dir(d.Path))
	for name, do := range operations {
		err := do()
		require.ErrorIs(t, err, integrity.ErrLost, name)
		require.ErrorIs(t, err, base.ErrFailed, name)
	}
	require.Equal(t, before, testkit.RecursiveListing(t, filepath.Dir(d.Path)))
	create(t, d.FS, outside)
	require.NoError(t, os.RemoveAll(d.Path))
	require.NoError(t, os.Rename(d.Path+".moved", d.Path))
	require.NoError(t, d.Check(), "it is back")
	create(t, d.FS, filepath.Join(store, "a"))
	require.NoError(t, d.Close())
}

// TestStoreIsSwapped: a directory that the process itself puts in the place of a store is its own.
func TestStoreIsSwapped(t *testing.T) {
	t.Parallel()
	d, store := openedHere(t)
	received := MetaDir(d.FS, d.Path, 0)
	require.NoError(t, d.FS.MkdirAll(received, platform.DirMode))
	create(t, d.FS, filepath.Join(received, "000007.log"))
	require.NoError(t, d.FS.RemoveAll(store))
	require.NoError(t, d.FS.Rename(received, store))
	create(t, d.FS, filepath.Join(store, "000008.log"))
	what, err := d.copied()
	require.NoError(t, err)
	require.Empty(t, what)
	require.NoError(t, d.Close())
}

// TestOldRecordIsWrittenAnew: while a store is written, its record moves to a new file now and
// then. So if an older record is written back, it names another file.
func TestOldRecordIsWrittenAnew(t *testing.T) {
	t.Parallel()
	d, store := openedHere(t)
	path := filepath.Join(store, placeName)
	record := testkit.ReadFile(t, path)
	look := func() {
		t.Helper()
		_, err := d.FS.GetDiskUsage(store)
		require.NoError(t, err)
	}
	look()
	require.Equal(t, record, testkit.ReadFile(t, path))
	held := d.hold.dirs[filepath.Base(store)]
	held.written = held.written.Add(-renewEvery)
	look()
	what, err := d.copied()
	require.NoError(t, err)
	require.Empty(t, what)
	require.NotEqual(t, record, testkit.ReadFile(t, path))
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	require.NoError(t, err)
	_, err = f.WriteString(record)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.ErrorIs(t, d.RefuseCopy(), base.ErrCopied)
	require.NoError(t, d.Close())
}

// TestCrashIsNoted: the manifest notes the death of a process until an application has taken back
// its leases. A failed Open, an Open that is closed before, a tool and a repair do not remove the
// note.
func TestCrashIsNoted(t *testing.T) {
	t.Parallel()
	yes, no := func() bool { return true }, func() bool { return false }
	d, _ := openedHere(t)
	path := d.Path
	require.NoError(t, d.Close()) // the process has died
	for i, life := range []struct {
		opened    bool
		recovered func() bool
		tool      bool
		repair    bool
		killed    bool
	}{
		{repair: true}, // Open fails
		{killed: true},
		{opened: true, recovered: no, killed: true},
		{opened: true, recovered: yes, tool: true},
		{opened: true, recovered: yes, killed: true},
		{opened: true, recovered: yes},
	} {
		d, err := Open(vfs.Default, path, Want{})
		require.NoError(t, err, i)
		if d.Tool = life.tool; life.repair {
			require.NoError(t, d.Begin(), i)
			require.NoError(t, d.Begin(), i, "for one more shard")
		} else {
			require.NoError(t, d.Take(true, "", nil), i)
		}
		require.Equal(t, life.killed, d.Killed() && !life.repair, i)
		if life.opened {
			d.Opened(life.recovered)
		}
		for _, dir := range d.stores() {
			require.NoError(t, integrity.Seal(d.FS, dir), i)
		}
		require.NoError(t, d.End(), i)
		require.Nil(t, d.Open, i)
		require.NoError(t, d.Close(), i)
	}
}

func TestDiffers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		a, b    platform.FileID
		differs bool
	}{
		{platform.FileID{}, platform.FileID{Number: 1, Born: 1}, false},
		{platform.FileID{Number: 1}, platform.FileID{Number: 2}, true},
		{platform.FileID{Number: 1}, platform.FileID{Number: 1, Born: 1}, false},
		{platform.FileID{Number: 1, Born: 1}, platform.FileID{Number: 1, Born: 2}, true},
		{platform.FileID{Number: 1, Born: 1}, platform.FileID{Number: 1, Born: 1}, false},
		{platform.FileID{Born: 1}, platform.FileID{Number: 1, Born: 1}, false},
	} {
		require.Equal(t, c.differs, c.a.Differs(c.b), "%+v %+v", c.a, c.b)
	}
	before := time.Now()
	path := filepath.Join(t.TempDir(), "a")
	testkit.WriteFile(t, path, "")
	id, err := platform.IdentifyFile(path)
	require.NoError(t, err)
	if id.Born != 0 {
		require.WithinDuration(t, before, time.Unix(0, id.Born), time.Minute)
	}
}
