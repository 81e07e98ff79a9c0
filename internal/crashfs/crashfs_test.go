package crashfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"

	"codeq/internal/testbase"
)

// files returns the contents of a file system by path: the content of a file, or "directory".
func files(t require.TestingT, disk vfs.FS) map[string]string {
	all := make(map[string]string)
	var visit func(dir string)
	visit = func(dir string) {
		names, err := disk.List(dir)
		require.NoError(t, err)
		for _, name := range names {
			name = disk.PathJoin(dir, name)
			info, err := disk.Stat(name)
			require.NoError(t, err)
			if info.IsDir() {
				all[name] = "directory"
				visit(name)
				continue
			}
			f, err := disk.Open(name)
			require.NoError(t, err)
			b, err := io.ReadAll(f)
			require.NoError(t, err)
			require.EqualValues(t, len(b), info.Size())
			if part := make([]byte, len(b)/2); len(part) > 0 {
				_, err := f.ReadAt(part, int64(len(b)/3))
				require.NoError(t, err)
				require.Equal(t, string(b[len(b)/3:][:len(part)]), string(part))
			}
			require.NoError(t, f.Close())
			all[name] = string(b)
		}
	}
	visit("/")
	return all
}

// TestModel: a Disk behaves like vfs.MemFS, and a copy after a kill has the content of the disk. A
// write to one of them changes no other.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		disk, model := New(), vfs.NewCrashableMem()
		type copyOf struct {
			disk *Disk
			want map[string]string
		}
		var copies []copyOf
		open := make(map[int][2]vfs.File)
		both := func(do func(vfs.FS) (vfs.File, error)) (pair [2]vfs.File, failed bool) {
			f, err := do(disk)
			g, err2 := do(model)
			require.Equal(t, err2 == nil, err == nil, "%v, %v", err, err2)
			require.Equal(t, errors.Is(err2, fs.ErrNotExist), errors.Is(err, fs.ErrNotExist))
			return [2]vfs.File{f, g}, err != nil
		}
		name := rapid.Custom(func(t *rapid.T) string {
			return rapid.SampledFrom([]string{"", "d/", "d/e/"}).Draw(t, "dir") + rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
		})
		keep := func(p [2]vfs.File, failed bool) {
			if !failed {
				open[len(open)] = p
			}
		}
		step := func(do func(vfs.FS) error) {
			both(func(fs vfs.FS) (vfs.File, error) { return nil, do(fs) })
		}
		anOpen := func() ([2]vfs.File, bool) {
			if len(open) == 0 {
				return [2]vfs.File{}, false
			}
			return open[rapid.IntRange(0, len(open)-1).Draw(t, "file")], true
		}
		bytes := func() []byte {
			n := rapid.OneOf(rapid.IntRange(0, 100), rapid.IntRange(0, 3*chunkSize)).Draw(t, "bytes")
			return []byte(strings.Repeat(rapid.StringMatching("[a-z]{7}").Draw(t, "content"), n/7))
		}
		checkCopies := func() {
			for _, c := range copies {
				require.Equal(t, c.want, files(t, c.disk))
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"create": func(*rapid.T) {
				n := name.Draw(t, "name")
				keep(both(func(fs vfs.FS) (vfs.File, error) { return fs.Create(n, "") }))
			},
			"open": func(*rapid.T) {
				n := name.Draw(t, "name")
				keep(both(func(fs vfs.FS) (vfs.File, error) { return fs.OpenReadWrite(n, "") }))
			},
			"reuse": func(*rapid.T) {
				from, to := name.Draw(t, "from"), name.Draw(t, "to")
				// The model would lose the file in a missing directory.
				if _, err := disk.Stat(disk.PathDir(to)); err == nil {
					keep(both(func(fs vfs.FS) (vfs.File, error) { return fs.ReuseForWrite(from, to, "") }))
				}
			},
			"rename": func(*rapid.T) {
				from, to := name.Draw(t, "from"), name.Draw(t, "to")
				if _, err := disk.Stat(disk.PathDir(to)); err == nil {
					step(func(fs vfs.FS) error { return fs.Rename(from, to) })
				}
			},
			"link": func(*rapid.T) {
				from, to := name.Draw(t, "from"), name.Draw(t, "to")
				step(func(fs vfs.FS) error { return fs.Link(from, to) })
			},
			"remove": func(*rapid.T) {
				n := name.Draw(t, "name")
				step(func(fs vfs.FS) error { return fs.Remove(n) })
			},
			"mkdir": func(*rapid.T) {
				n := rapid.SampledFrom([]string{"d", "d/e"}).Draw(t, "name")
				step(func(fs vfs.FS) error { return fs.MkdirAll(n, 0o755) })
			},
			"sync directory": func(*rapid.T) {
				n := rapid.SampledFrom([]string{"/", "d", "d/e"}).Draw(t, "name")
				step(func(fs vfs.FS) error {
					f, err := fs.OpenDir(n)
					if err != nil {
						return err
					}
					return errors.Join(f.Sync(), f.Close())
				})
			},
			"write": func(*rapid.T) {
				if pair, ok := anOpen(); ok {
					b := bytes()
					for _, f := range pair {
						_, err := f.Write(slices.Clone(b))
						require.NoError(t, err)
					}
				}
			},
			"write at": func(*rapid.T) {
				if pair, ok := anOpen(); ok {
					b, off := bytes(), rapid.Int64Range(0, 4*chunkSize).Draw(t, "at")
					for _, f := range pair {
						n, err := f.WriteAt(b, off)
						require.NoError(t, err)
						require.Equal(t, len(b), n)
					}
				}
			},
			"sync": func(*rapid.T) {
				if pair, ok := anOpen(); ok {
					for _, f := range pair {
						require.NoError(t, f.Sync())
					}
				}
			},
			"copy": func(*rapid.T) {
				for _, percent := range []int{0, 100} {
					cfg := vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rand.New(rand.NewPCG(0, 0))} // the model asks for 100, too
					got := disk.CrashClone(cfg)
					want := files(t, model.CrashClone(cfg))
					require.Equal(t, want, files(t, got))
					copies = append(copies, copyOf{got, want})
				}
				copies = append(copies, copyOf{disk.Clone(), files(t, disk)})
			},
			"write to a copy": func(*rapid.T) {
				if len(copies) == 0 {
					return
				}
				checkCopies()
				c := copies[rapid.IntRange(0, len(copies)-1).Draw(t, "copy")]
				for _, name := range slices.Sorted(maps.Keys(c.want)) {
					if c.want[name] == "directory" {
						continue
					}
					f, err := c.disk.OpenReadWrite(name, "")
					require.NoError(t, err)
					off := rapid.IntRange(0, len(c.want[name])).Draw(t, "at")
					_, err = f.WriteAt([]byte("this is new"), int64(off))
					require.NoError(t, errors.Join(err, f.Close()))
				}
				clear(c.want)
				maps.Copy(c.want, files(t, c.disk))
				for _, percent := range []int{0, 100} { // none of this content is synced
					files(t, c.disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent}))
				}
			},
			"": func(*rapid.T) {
				require.Equal(t, files(t, model), files(t, disk))
			},
		})
		checkCopies()
	})
}

// TestPowerLoss: each block and each name of a copy has the state from before or from after the
// unsynced changes, and a block before a written one may be missing. The seed decides it, and each
// time in the same way.
func TestPowerLoss(t *testing.T) {
	testbase.SkipUnderRace(t)
	disk := New()
	write := func(name, content string, bytes int, sync bool) {
		f, err := disk.OpenReadWrite(name, "")
		require.NoError(t, err)
		_, err = f.WriteAt([]byte(strings.Repeat(content, bytes)), 0)
		require.NoError(t, err)
		if sync {
			require.NoError(t, f.Sync())
		}
		require.NoError(t, f.Close())
	}
	syncNames := func() {
		dir, err := disk.OpenDir("/")
		require.NoError(t, err)
		require.NoError(t, errors.Join(dir.Sync(), dir.Close()))
	}
	const before, after = 100*blockSize + 700, 200*blockSize + 300 // bytes
	write("old", "a", before, true)
	require.NoError(t, disk.MkdirAll("from", 0o755))
	write("from/file", "a", 1, true)
	write("gone", "a", 1, true)
	syncNames()
	write("old", "b", after, false)
	for i := range 40 {
		write(fmt.Sprint("new ", i), "a", 1, true)
	}
	require.NoError(t, disk.Remove("gone"))
	require.NoError(t, disk.Rename("from", "to"))

	cfg := func(seed uint64) vfs.CrashCloneCfg {
		return vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: rand.New(rand.NewPCG(seed, 0))}
	}
	require.Equal(t, files(t, disk.CrashClone(cfg(1))), files(t, disk.CrashClone(cfg(1))))
	counts := make(map[string]int) // of all seeds
	sizes := make(map[int]int)
	const seeds = 20
	for seed := range uint64(seeds) {
		got := files(t, disk.CrashClone(cfg(seed)))
		require.Contains(t, got, "/gone", "the directory was not synced")
		_, from := got["/from"]
		_, to := got["/to"]
		require.NotEqual(t, from, to, "it has one of both names")
		if to {
			counts["renamed"]++
		}
		for name := range got {
			if strings.HasPrefix(name, "/new") {
				counts["new"]++
			}
		}
		old := got["/old"]
		sizes[len(old)]++
		for off := 0; off < len(old); off += blockSize {
			block := old[off:min(off+blockSize, len(old))]
			was := strings.Repeat("a", max(min(before-off, len(block)), 0))
			was += strings.Repeat("\x00", len(block)-len(was))
			is := strings.Repeat("b", len(block))
			require.Contains(t, []string{was, is}, block, "at %d", off)
			counts["block "+block[:1]]++
		}
	}
	require.NotEqual(t, counts["block a"], counts["block b"])
	for what, of := range map[string]int{"renamed": 1, "new": 40, "block a": 100, "block b": 200, "block \x00": 90} {
		require.Greater(t, counts[what], seeds*of/4, what)
		require.Less(t, counts[what], seeds*of*3/4, what)
	}
	require.Greater(t, sizes[after], seeds/4)
	require.Greater(t, len(sizes), 2)

	// A copy does not lose its content in another crash.
	left := disk.CrashClone(cfg(1))
	require.Equal(t, files(t, left), files(t, left.CrashClone(vfs.CrashCloneCfg{})))
	killed := disk.Clone()
	require.Equal(t, files(t, disk), files(t, killed))
	require.Equal(t, files(t, disk), files(t, killed.CrashClone(vfs.CrashCloneCfg{})))
}

// TestNames: names are refused as an operating system refuses them.
func TestNames(t *testing.T) {
	disk := New()
	for _, dir := range []string{"./dir/full", "empty/", "/empty"} {
		require.NoError(t, disk.MkdirAll(dir, 0o755))
	}
	for _, name := range []string{"./file", "dir//full/../full/x"} {
		f, err := disk.Create(name, "")
		require.NoError(t, err)
		require.NoError(t, f.Close())
		require.Panics(t, func() { _ = f.Close() })
	}
	require.Equal(t, map[string]string{
		"/dir": "directory", "/dir/full": "directory", "/dir/full/x": "", "/empty": "directory", "/file": "",
	}, files(t, disk))
	_, err := disk.Create("empty", "")
	require.ErrorIs(t, err, syscall.EISDIR)
	_, err = disk.Lock("empty")
	require.ErrorIs(t, err, syscall.EISDIR)
	_, err = disk.Open("file/x")
	require.ErrorIs(t, err, syscall.ENOTDIR)
	require.ErrorIs(t, disk.MkdirAll("file/x", 0o755), syscall.ENOTDIR)
	require.ErrorIs(t, disk.Remove("dir/full"), syscall.ENOTEMPTY)
	require.ErrorIs(t, disk.Link("empty", "x"), syscall.EPERM)
	require.ErrorIs(t, disk.Link("file", "dir/full/x"), fs.ErrExist)
	require.ErrorIs(t, disk.Rename("file", "empty"), syscall.EISDIR)
	require.ErrorIs(t, disk.Rename("empty", "file"), syscall.ENOTDIR)
	require.ErrorIs(t, disk.Rename("empty", "dir/full"), syscall.ENOTEMPTY)
	require.NoError(t, disk.Rename("dir", "empty"))
	require.NoError(t, disk.RemoveAll("none/x"))
	require.NoError(t, disk.RemoveAll("empty/full"))
	require.Equal(t, map[string]string{"/empty": "directory", "/file": ""}, files(t, disk))
}

// TestCopiesWaitForNothing: a disk can be copied during any operation on it and on its copies.
func TestCopiesWaitForNothing(t *testing.T) {
	disk := New()
	content := strings.Repeat("content ", chunkSize/4+10)
	fill := func(disk *Disk, name string) error {
		f, err := disk.Create(name, "")
		if err != nil {
			return err
		}
		_, err = f.Write([]byte(content))
		dir, err2 := disk.OpenDir("/")
		return errors.Join(err, f.Sync(), f.Close(), err2, dir.Sync(), dir.Close())
	}
	require.NoError(t, fill(disk, "all"))
	stop := make(chan struct{})
	var work errgroup.Group
	goOn := func(do func() error) {
		work.Go(func() error {
			for {
				select {
				case <-stop:
					return nil
				default:
				}
				if err := do(); err != nil {
					return err
				}
			}
		})
	}
	for _, name := range []string{"a", "b"} {
		goOn(func() error {
			lock, err := disk.Lock(name)
			if err != nil {
				return err
			}
			if _, err := disk.Lock(name); err == nil {
				return errors.New("it was locked twice")
			}
			err = errors.Join(lock.Close(), disk.Link(name, name+"2"))
			f, err2 := disk.ReuseForWrite(name+"2", name+"3", "")
			if err = errors.Join(err, err2); err != nil {
				return err
			}
			_, err = f.Write(make([]byte, chunkSize+100))
			return errors.Join(err, f.Sync(), f.Close(), disk.Remove(name+"3"))
		})
	}
	overwrite := func(disk *Disk) error {
		f, err := disk.OpenReadWrite("all", "")
		if err != nil {
			return err
		}
		_, err = f.WriteAt([]byte("content "), 8*rand.Int64N(int64(len(content)/8)))
		return errors.Join(err, f.Sync(), f.Close())
	}
	goOn(func() error { return overwrite(disk) })
	for i := range 60 {
		copied := disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: i % 3 * 50, RNG: rand.New(rand.NewPCG(0, 0))})
		require.Equal(t, content, files(t, copied)["/all"])
		if i%20 == 0 {
			goOn(func() error { return overwrite(copied) })
		}
	}
	close(stop)
	require.NoError(t, work.Wait())
}

// TestWriteSpoils: a Write overwrites the caller's buffer, to detect callers that use it again.
func TestWriteSpoils(t *testing.T) {
	f, err := New().Create("a", "")
	require.NoError(t, err)
	b := []byte("content")
	_, err = f.Write(b)
	require.NoError(t, err)
	require.NotContains(t, string(b), "content"[:1])
	_, err = f.ReadAt(b, 0)
	require.NoError(t, err)
	require.Equal(t, "content", string(b))
}
