package faults_test

import (
	"errors"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/simtest"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// panickyFS panics at each read of a table, as Pebble does at some kinds of damage.
type panickyFS struct {
	vfs.FS
	armed *atomic.Bool
	hit   *atomic.Int64
}

type panickyFile struct {
	vfs.File
	fs panickyFS
}

func (fs panickyFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := fs.FS.Open(name, opts...)
	if err == nil && strings.HasSuffix(name, ".sst") {
		f = panickyFile{f, fs}
	}
	return f, err
}

func (f panickyFile) ReadAt(p []byte, off int64) (int, error) {
	if f.fs.armed.Load() && strings.Contains(string(debug.Stack()), "failstop.(*Latch).Read(") {
		f.fs.hit.Add(1)
		panic("slice bounds out of range")
	}
	return f.File.ReadAt(p, off)
}

// TestDamageThatPanics: if damage makes Pebble panic while a store opens, Open returns an error.
func TestDamageThatPanics(t *testing.T) {
	testkit.AbandonsStores(t)
	for name, open := range map[string]func(vfs.FS) (*codeq.Queue, error){
		"alone": func(fs vfs.FS) (*codeq.Queue, error) {
			return codeq.Open("queue", inspect.With(&codeq.Options{Shards: 1}, inspect.Private{FS: fs}))
		},
		"node": func() func(vfs.FS) (*codeq.Queue, error) {
			votes := simtest.NewVotes()
			return func(fs vfs.FS) (*codeq.Queue, error) { return queuetest.OneNode(fs, votes) }
		}(),
	} {
		t.Run(name, func(t *testing.T) {
			disk := panickyFS{crashfs.New(), new(atomic.Bool), new(atomic.Int64)}
			q, err := open(disk)
			require.NoError(t, err)
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			require.NoError(t, q.Close())
			disk.armed.Store(true)
			err = testkit.InTime(t, "Open", func() error {
				q, err := open(disk)
				if err == nil {
					err = errors.Join(err, q.Close())
				}
				return err
			})
			require.ErrorIs(t, err, codeq.ErrCorrupt)
			require.ErrorContains(t, err, "slice bounds")
			require.Positive(t, disk.hit.Load())
			disk.armed.Store(false)
			q, err = open(disk)
			require.NoError(t, err)
			queuetest.Claim(t, q, "a")
			require.NoError(t, q.Close())
		})
	}
}
