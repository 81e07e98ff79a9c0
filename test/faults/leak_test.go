package faults_test

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/raftlog"
	"codeq/internal/simtest"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// countingFS counts the open handles by name.
type countingFS struct {
	vfs.FS
	mu   sync.Mutex // guards open
	open map[*countedHandle]string
}

type countedHandle struct {
	io.Closer
	fs *countingFS
}

func (h *countedHandle) Close() error {
	h.fs.mu.Lock()
	delete(h.fs.open, h)
	h.fs.mu.Unlock()
	return h.Closer.Close()
}

type countedFile struct {
	vfs.File
	handle *countedHandle
}

func (f countedFile) Close() error { return f.handle.Close() }

// left returns the names of the open handles.
func (fs *countingFS) left() []string {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return slices.Sorted(maps.Values(fs.open))
}

func (fs *countingFS) count(name string, c io.Closer) *countedHandle {
	h := &countedHandle{c, fs}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.open[h] = name
	return h
}

func (fs *countingFS) file(name string, f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return countedFile{f, fs.count(name, f)}, nil
}

func (fs *countingFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, c)
	return fs.file(name, f, err)
}

func (fs *countingFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := fs.FS.Open(name, opts...)
	return fs.file(name, f, err)
}

func (fs *countingFS) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := fs.FS.OpenReadWrite(name, c, opts...)
	return fs.file(name, f, err)
}

func (fs *countingFS) ReuseForWrite(oldname, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.ReuseForWrite(oldname, name, c)
	return fs.file(name, f, err)
}

func (fs *countingFS) OpenDir(name string) (vfs.File, error) {
	f, err := fs.FS.OpenDir(name)
	return fs.file(name, f, err)
}

func (fs *countingFS) Lock(name string) (io.Closer, error) {
	l, err := fs.FS.Lock(name)
	if err != nil {
		return nil, err
	}
	return fs.count(name, l), nil
}

func (fs *countingFS) Unwrap() vfs.FS { return fs.FS }

// failingAt fails one operation, given by its number. Only operations on names count: not reads,
// writes and syncs.
func failingAt(fs vfs.FS, fail int64) (failing vfs.FS, ops *atomic.Int64) {
	ops = new(atomic.Int64)
	return errorfs.Wrap(fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
		switch op.Kind {
		case errorfs.OpCreate, errorfs.OpOpen, errorfs.OpReuseForWrite, errorfs.OpOpenDir, errorfs.OpLock, errorfs.OpRemove,
			errorfs.OpRemoveAll, errorfs.OpRename, errorfs.OpMkdirAll, errorfs.OpList, errorfs.OpStat:
			if ops.Add(1) == fail {
				return queuetest.ErrBroken
			}
		}
		return nil
	})), ops
}

// TestNothingLeftOfOpen: any file operation of an Open may fail. The failed Open leaves only files
// that the next Open uses.
func TestNothingLeftOfOpen(t *testing.T) {
	testbase.SkipUnderRace(t)
	for name, makeOptions := range map[string]func(vfs.FS) *codeq.Options{
		"alone": func(fs vfs.FS) *codeq.Options {
			return inspect.With(&codeq.Options{Shards: 1}, inspect.Private{FS: fs})
		},
		"node": func(fs vfs.FS) *codeq.Options {
			network := simtest.NewNet(1, 0)
			host := network.Listen("n")
			votes := simtest.NewVotes()
			return inspect.With(&codeq.Options{Shards: 1, Cluster: inspect.With(&codeq.Cluster{
				Node: "n", Listener: host, HeartbeatTimeout: 20 * time.Millisecond,
			}, inspect.Private{
				Dial:  func(ctx context.Context, addr string) (net.Conn, error) { return network.Dial(ctx, host, addr) },
				Votes: func(string) (raftlog.Stables, error) { return votes, nil },
			})}, inspect.Private{FS: fs})
		},
	} {
		for _, existing := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, existing: %t", name, existing), func(t *testing.T) {
				before := testkit.WatchLeaks()
				failures := 0
				for fail := int64(1); ; fail++ {
					mem := crashfs.New()
					if existing {
						q, err := codeq.Open("q", makeOptions(mem))
						require.NoError(t, err)
						require.NoError(t, q.Close())
					}
					counting := &countingFS{FS: mem, open: make(map[*countedHandle]string)}
					fs, ops := failingAt(counting, fail)
					q, err := codeq.Open("q", makeOptions(fs))
					reached := ops.Load() >= fail
					if err == nil { // some failures are only logged, or tried again
						err = q.Close()
					} else {
						require.ErrorContains(t, err, queuetest.ErrBroken.Error(), "operation %d", fail)
						failures++
					}
					left := slices.DeleteFunc(counting.left(), func(name string) bool { // Pebble leaves a file open that it cannot write
						return err != nil && strings.Contains(name, "MANIFEST-")
					})
					require.Empty(t, left, "operation %d: %v", fail, err)
					before.Require(t, "operation %d", fail)
					if !reached {
						break
					}
				}
				t.Logf("%d operations fail Open", failures)
				require.Greater(t, failures, 20)
			})
		}
	}
}

// TestNothingLeft: after Close, no goroutine runs and no file is open, whatever was in use. For the
// iterators and snapshots of Pebble, the proof is that Close returns no error. In other tests, the
// bubble itself reports a leaked goroutine.
func TestNothingLeft(t *testing.T) {
	before := testkit.WatchLeaks()
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk, codeq.DurabilityNone} {
		q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 2, Durability: level, MemTableBytes: 256 << 10})
		require.NoError(t, err)
		wait := queuetest.UseEverything(t, q)
		require.NoError(t, q.Close())
		wait()
		before.Require(t, "at durability %s", level)
	}
}
