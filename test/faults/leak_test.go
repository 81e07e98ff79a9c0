package faults_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/raftlog"
	"codeq/internal/simtest"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
)

// countingFS counts the open handles by name, and fails one operation, given by its number. Only
// operations on names count: not reads, writes and syncs.
type countingFS struct {
	vfs.FS
	mu   sync.Mutex // guards the fields below
	open map[*countedFile]string
	ops  int
	fail int // number of the operation that fails; 0: none
}

var errCounted = errors.New("this operation fails")

func (fs *countingFS) op() error {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.ops++
	if fs.ops == fs.fail {
		return errCounted
	}
	return nil
}

// reached reports whether the operation that fails was called.
func (fs *countingFS) reached() bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return fs.ops >= fs.fail
}

// left returns the names of the open handles.
func (fs *countingFS) left() []string {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return slices.Sorted(maps.Values(fs.open))
}

func (fs *countingFS) file(name string, open func() (vfs.File, error)) (vfs.File, error) {
	if err := fs.op(); err != nil {
		return nil, err
	}
	f, err := open()
	if err != nil {
		return nil, err
	}
	return fs.count(name, f), nil
}

func (fs *countingFS) count(name string, f vfs.File) *countedFile {
	c := &countedFile{f, fs}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.open[c] = name
	return c
}

func (fs *countingFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.file(name, func() (vfs.File, error) { return fs.FS.Create(name, c) })
}

func (fs *countingFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	return fs.file(name, func() (vfs.File, error) { return fs.FS.Open(name, opts...) })
}

func (fs *countingFS) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return fs.file(name, func() (vfs.File, error) { return fs.FS.OpenReadWrite(name, c, opts...) })
}

func (fs *countingFS) ReuseForWrite(oldname, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.file(name, func() (vfs.File, error) { return fs.FS.ReuseForWrite(oldname, name, c) })
}

func (fs *countingFS) OpenDir(name string) (vfs.File, error) {
	return fs.file(name, func() (vfs.File, error) { return fs.FS.OpenDir(name) })
}

func (fs *countingFS) Lock(name string) (io.Closer, error) {
	if err := fs.op(); err != nil {
		return nil, err
	}
	l, err := fs.FS.Lock(name)
	if err != nil {
		return nil, err
	}
	return &countedLock{fs.count(name, nil), l}, nil
}

func (fs *countingFS) Remove(name string) error {
	if err := fs.op(); err != nil {
		return err
	}
	return fs.FS.Remove(name)
}

func (fs *countingFS) RemoveAll(name string) error {
	if err := fs.op(); err != nil {
		return err
	}
	return fs.FS.RemoveAll(name)
}

func (fs *countingFS) Rename(oldname, newname string) error {
	if err := fs.op(); err != nil {
		return err
	}
	return fs.FS.Rename(oldname, newname)
}

func (fs *countingFS) MkdirAll(dir string, perm os.FileMode) error {
	if err := fs.op(); err != nil {
		return err
	}
	return fs.FS.MkdirAll(dir, perm)
}

func (fs *countingFS) List(dir string) ([]string, error) {
	if err := fs.op(); err != nil {
		return nil, err
	}
	return fs.FS.List(dir)
}

func (fs *countingFS) Stat(name string) (vfs.FileInfo, error) {
	if err := fs.op(); err != nil {
		return nil, err
	}
	return fs.FS.Stat(name)
}

func (fs *countingFS) Unwrap() vfs.FS { return fs.FS }

type countedFile struct {
	vfs.File
	fs *countingFS
}

func (f *countedFile) forget() {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	delete(f.fs.open, f)
}

func (f *countedFile) Close() error {
	f.forget()
	return f.File.Close()
}

type countedLock struct {
	*countedFile
	lock io.Closer
}

func (l *countedLock) Close() error {
	l.forget()
	return l.lock.Close()
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
				for fail := 1; ; fail++ {
					mem := crashfs.New()
					if existing {
						q, err := codeq.Open("q", makeOptions(mem))
						require.NoError(t, err)
						require.NoError(t, q.Close())
					}
					fs := &countingFS{FS: mem, open: make(map[*countedFile]string), fail: fail}
					q, err := codeq.Open("q", makeOptions(fs))
					reached := fs.reached()
					if err == nil { // some failures are only logged, or tried again
						err = q.Close()
					} else {
						require.ErrorContains(t, err, errCounted.Error(), "operation %d", fail)
						failures++
					}
					left := slices.DeleteFunc(fs.left(), func(name string) bool { // Pebble leaves a file open that it cannot write
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
