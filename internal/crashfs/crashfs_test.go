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
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"
)

// files is what a file system holds: the contents of its files, and "directory", by path.
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
			require.NoError(t, errors.Join(err, f.Close()))
			require.EqualValues(t, len(b), info.Size())
			all[name] = string(b)
		}
	}
	visit("/")
	return all
}

// TestModel: a Disk does what vfs.MemFS does. Copies of a kill, which that one has otherwise, are
// what the disk was; the next steps go to one of the copies, and change none of the others.
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
			r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "content"), 0))
			b := make([]byte, n)
			for i := range b {
				b[i] = byte(r.Uint32())
			}
			return b
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
				if _, err := disk.Stat(disk.PathDir(to)); err == nil { // or the model loses the file
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
				lost := disk.CrashClone(vfs.CrashCloneCfg{})
				if want := files(t, model.CrashClone(vfs.CrashCloneCfg{})); true {
					require.Equal(t, want, files(t, lost))
					copies = append(copies, copyOf{lost, want})
				}
				killed := disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100})
				copies = append(copies, copyOf{killed, files(t, disk)})
			},
			"write to a copy": func(*rapid.T) {
				if len(copies) == 0 {
					return
				}
				c := copies[rapid.IntRange(0, len(copies)-1).Draw(t, "copy")]
				for _, name := range slices.Sorted(maps.Keys(c.want)) {
					if c.want[name] == "directory" {
						continue
					}
					f, err := c.disk.OpenReadWrite(name, "")
					require.NoError(t, err)
					_, err = f.Write([]byte(fmt.Sprint(len(c.want[name]))))
					require.NoError(t, errors.Join(err, f.Close()))
				}
				clear(c.want)
				maps.Copy(c.want, files(t, c.disk))
			},
			"": func(*rapid.T) {
				require.Equal(t, files(t, model), files(t, disk))
				for _, c := range copies {
					require.Equal(t, c.want, files(t, c.disk))
				}
			},
		})
	})
}

// TestPowerLoss: each block, and each name, of a copy is from before or from after a sync that did
// not come; the seed says which, and says the same again.
func TestPowerLoss(t *testing.T) {
	disk := New()
	write := func(name, content string, blocks int) {
		f, err := disk.OpenReadWrite(name, "")
		require.NoError(t, err)
		_, err = f.WriteAt([]byte(strings.Repeat(content, blocks*blockSize)), 0)
		require.NoError(t, err)
		if content == "a" {
			require.NoError(t, f.Sync())
		}
		require.NoError(t, f.Close())
	}
	const old = 100
	write("old", "a", old)
	dir, err := disk.OpenDir("/")
	require.NoError(t, err)
	require.NoError(t, errors.Join(dir.Sync(), dir.Close()))
	write("old", "b", 2*old)
	for i := range 40 {
		write(fmt.Sprint("new ", i), "a", 1)
	}
	require.NoError(t, disk.Remove("new 0"))

	lost := func(seed uint64) map[string]string {
		return files(t, disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: rand.New(rand.NewPCG(seed, 0))}))
	}
	got := lost(1)
	require.Equal(t, got, lost(1))
	require.NotEqual(t, got, lost(2))
	require.Greater(t, len(got), 10)
	require.Less(t, len(got), 30)
	require.NotContains(t, got, "/new 0")
	counts := make(map[byte]int)
	for block := range slices.Chunk([]byte(got["/old"]), blockSize) {
		require.Equal(t, strings.Repeat(string(block[:1]), blockSize), string(block))
		counts[block[0]]++
	}
	require.Greater(t, counts['a'], old/4)
	require.Greater(t, counts['b'], old/2)
	require.Greater(t, counts[0], old/4, "blocks that were lost before one that was not")
}

// TestCopiesWaitForNothing: a disk is copied whatever is done to it meanwhile.
func TestCopiesWaitForNothing(t *testing.T) {
	disk := New()
	stop := make(chan struct{})
	var work errgroup.Group
	for _, name := range []string{"a", "b"} {
		work.Go(func() error {
			for {
				select {
				case <-stop:
					return nil
				default:
				}
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
				if err = errors.Join(err, f.Sync(), f.Close(), disk.Remove(name+"3")); err != nil {
					return err
				}
			}
		})
	}
	for range 1000 {
		files(t, disk.CrashClone(vfs.CrashCloneCfg{}))
	}
	close(stop)
	require.NoError(t, work.Wait())
}

// TestWriteSpoils: who uses what it has written again is found out.
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
