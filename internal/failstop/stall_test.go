package failstop

import (
	"bytes"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/testkit"
)

// TestWatch: an operation over its time limit makes its part stalled, and no other part, until it
// returns. The watch logs the begin and the end of the stall once, and reports both to waiting
// callers.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		w := NewWatch(time.Second, slog.New(slog.NewTextHandler(&text, nil)), "log", "shard 0")
		log, shard := w.Part(0), w.Part(1)
		hang := func(p *Part, d time.Duration) {
			go func() { _ = p.Do("sync", "a", func() error { time.Sleep(d); return nil }) }()
			synctest.Wait()
		}
		stalled := func() string {
			p, _ := w.Stalled()
			if p == nil {
				return ""
			}
			return p.Name()
		}
		for range 3 { // short ones, one after the other
			hang(shard, 900*time.Millisecond)
			time.Sleep(900 * time.Millisecond)
		}
		synctest.Wait()
		require.Empty(t, stalled())
		require.Zero(t, shard.Age())
		require.Empty(t, text.String())

		change := w.Changed()
		hang(shard, 3*time.Second)
		hang(log, 500*time.Millisecond)
		time.Sleep(999 * time.Millisecond)
		require.Empty(t, stalled())
		time.Sleep(time.Millisecond)
		<-change
		change = w.Changed()
		require.Equal(t, "shard 0", stalled())
		require.True(t, shard.IsUnsteady())
		require.False(t, log.IsUnsteady())
		require.Zero(t, log.Stalled())
		require.Equal(t, time.Second, shard.Stalled())
		hang(shard, 3500*time.Millisecond) // the stall goes on with this operation
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Equal(t, 2*time.Second, shard.Stalled())
		time.Sleep(1500 * time.Millisecond)
		<-change
		require.Empty(t, stalled())
		require.True(t, shard.IsUnsteady(), "it ended a moment ago")
		time.Sleep(2 * time.Second)
		require.False(t, shard.IsUnsteady())
		require.Equal(t, 1, strings.Count(text.String(), "disk does not answer"), text.String())
		require.Equal(t, 1, strings.Count(text.String(), "disk answers again"), text.String())
		require.Contains(t, text.String(), `store="shard 0" operation=sync file=a`)
	})
}

// TestWatchRests: a watch at rest has no timer, unless an operation is under way. The next one
// is watched again.
func TestWatchRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWatch(time.Second, slog.New(slog.DiscardHandler), "log", "shard 0")
		log, shard := w.Part(0), w.Part(1)
		free := make(chan struct{})
		hang := func(p *Part) {
			go func() { _ = p.Do("sync", "a", func() error { <-free; return nil }) }()
			synctest.Wait()
		}
		require.NoError(t, log.Do("sync", "a", func() error { return nil }))
		hang(shard)
		require.True(t, log.armed)
		w.Rest()
		require.False(t, log.armed)
		require.True(t, shard.armed)
		hang(log)
		change := w.Changed()
		time.Sleep(time.Second)
		<-change
		close(free)
	})
}

// TestWatchAwaits: if an operation does not return, a caller that waits for something waits at most
// twice the time limit of an operation.
func TestWatchAwaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWatch(time.Second, slog.New(slog.DiscardHandler), "log")
		done, release := make(chan struct{}), make(chan struct{})
		time.AfterFunc(time.Hour, func() { close(done) })
		began := time.Now()
		p, _ := w.Await(done)
		require.Nil(t, p)
		require.Equal(t, time.Hour, time.Since(began), "nothing hangs")

		go func() { _ = w.Part(0).Do("sync", "a", func() error { <-release; return nil }) }()
		time.Sleep(time.Minute)
		began = time.Now()
		p, age := w.Await(make(chan struct{}))
		require.Equal(t, w.Part(0), p)
		require.Equal(t, time.Minute+2*time.Second, age)
		require.Equal(t, 2*time.Second, time.Since(began))
		close(release)
		p, _ = (*Watch)(nil).Await(done)
		require.Nil(t, p)
	})
}

// TestWatchFS: the watch observes each kind of operation for the part of its file, and does not
// observe operations in other directories.
func TestWatchFS(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var over chan struct{} // nil: nothing hangs
		base := &testkit.HookFS{FS: crashfs.New(), Before: func(string, string) error {
			if over != nil {
				<-over
			}
			return nil
		}}
		w := NewWatch(time.Second, slog.New(slog.DiscardHandler), "log", "shard 0", "checkpoint")
		fs := w.FS(base, map[string]*Part{"dir": w.Part(0), "dir/shard-000": w.Part(1)}, w.Part(2))
		require.Equal(t, base.FS, vfs.Root(fs))
		require.NoError(t, fs.MkdirAll("dir/shard-000", 0o700))
		require.NoError(t, fs.MkdirAll("copy", 0o700))
		create := func(name string) vfs.File {
			f, err := fs.Create(name, vfs.WriteCategoryUnspecified)
			require.NoError(t, err)
			return f
		}
		files := map[string]vfs.File{"": create("copy/a"), "log": create("dir/a"), "shard 0": create("dir/shard-000/a")}
		for part, f := range files {
			for what, do := range map[string]func() error{
				"write":    func() error { _, err := f.Write([]byte("a")); return err },
				"sync":     f.Sync,
				"syncdata": f.SyncData,
				"syncto":   func() error { _, err := f.SyncTo(1); return err },
			} {
				over = make(chan struct{})
				done := make(chan error, 1)
				go func() { done <- do() }()
				time.Sleep(2 * time.Second)
				p, age := w.Stalled()
				if part == "" {
					require.Nil(t, p, what)
				} else {
					require.Equal(t, part, p.Name(), what)
					require.Equal(t, 2*time.Second, age)
				}
				close(over)
				require.NoError(t, <-done)
			}
			over = nil
			require.NoError(t, f.Close())
		}
		for what, do := range map[string]func() error{
			"create": func() error { create("dir/shard-000/b"); return nil },
			"rename": func() error { return fs.Rename("dir/shard-000/a", "dir/shard-000/c") },
			"remove": func() error { return fs.Remove("dir/shard-000/c") },
			"open":   func() error { _, err := fs.OpenDir("dir/shard-000"); return err },
		} {
			over = make(chan struct{})
			done := make(chan error, 1)
			go func() { done <- do() }()
			time.Sleep(2 * time.Second)
			p, _ := w.Stalled()
			require.Equal(t, w.Part(1), p, what)
			close(over)
			err := <-done
			require.True(t, err == nil || what == "remove", err) // a removal may come first
		}
		stalls := func(want *Part, name string) {
			over = make(chan struct{})
			done := make(chan error, 1)
			go func() { done <- fs.Remove(name) }()
			time.Sleep(2 * time.Second)
			p, _ := w.Stalled()
			require.Equal(t, want, p, name)
			close(over)
			require.NoError(t, <-done)
			over = nil
		}
		end := WatchAlso(fs, "copy")
		create("copy/b")
		stalls(w.Part(2), "copy/a")
		WatchAlso(fs, "dir")()
		stalls(w.Part(0), "dir/a")
		_, _ = fs.GetDiskUsage("copy")
		require.Len(t, w.Part(2).usages, 1)
		end()
		require.Empty(t, w.Part(2).usages)
		stalls(nil, "copy/b")
		WatchAlso(base, "copy")()
	})
}

// BenchmarkWatch: the cost of the watch for an operation.
func BenchmarkWatch(b *testing.B) {
	p := NewWatch(time.Second, slog.New(slog.DiscardHandler), "log").Part(0)
	b.ReportAllocs()
	for b.Loop() {
		p.end(p.begin("write", "a"))
	}
}

// TestFreeSpaceOfHungDisk: a caller that asks a hung disk for its free space gets the last answer,
// if there is one, when the question has been under way for a second.
func TestFreeSpaceOfHungDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := newUsageDisk()
		w := NewWatch(time.Minute, slog.New(slog.DiscardHandler), "log")
		fs := w.FS(disk, map[string]*Part{"dir": w.Part(0)}, nil)
		ask := func() (uint64, time.Duration, error) {
			began := time.Now()
			u, err := fs.GetDiskUsage("dir")
			return u.AvailBytes, time.Since(began), err
		}
		hang := disk.hang()
		_, took, err := ask()
		require.ErrorIs(t, err, vfs.ErrUnsupported, "there is no answer yet")
		require.Equal(t, time.Second, took)
		close(hang)
		synctest.Wait()
		free, took, err := ask()
		require.NoError(t, err)
		require.EqualValues(t, 2, free)
		require.Zero(t, took)
		hang = disk.hang()
		go func() { _, _ = fs.GetDiskUsage("dir/raft") }() // possibly another file system
		synctest.Wait()
		for i := range 3 {
			free, took, err = ask()
			require.NoError(t, err)
			require.EqualValues(t, 2, free)
			require.Equal(t, i == 0, took == time.Second, "%v", took)
		}
		require.EqualValues(t, 4, disk.asked.Load())
		time.Sleep(time.Minute)
		p, _ := w.Stalled()
		require.Equal(t, w.Part(0), p)
		close(hang)
		w.End()
		p, _ = w.Stalled()
		require.Nil(t, p)
	})
}

// usageDisk counts the questions for its free space.
type usageDisk struct {
	vfs.FS
	asked atomic.Int64
	over  atomic.Pointer[chan struct{}] // nil: it does not hang
}

func newUsageDisk() *usageDisk { return &usageDisk{FS: crashfs.New()} }

func (d *usageDisk) hang() (over chan struct{}) {
	over = make(chan struct{})
	d.over.Store(&over)
	return over
}

func (d *usageDisk) GetDiskUsage(string) (vfs.DiskUsage, error) {
	n := d.asked.Add(1)
	if over := d.over.Load(); over != nil {
		<-*over
	}
	return vfs.DiskUsage{AvailBytes: uint64(n)}, nil
}
