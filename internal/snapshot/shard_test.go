package snapshot

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/platform"
)

// shard is a store of files, which nothing else changes. Each file has the steps from one index
// through another, as its name says. Steps that are not flushed are lost with the process.
type shard struct {
	fs  vfs.FS
	dir string

	mu               sync.Mutex
	applied, flushed uint64 // indexes
	closed           bool
}

// openShard opens a shard. Files that a crash has left incomplete count for nothing.
func openShard(t testing.TB, fs vfs.FS, dir string) *shard {
	t.Helper()
	require.NoError(t, fs.MkdirAll(dir, 0o755))
	require.NoError(t, platform.SyncDirectory(fs, fs.PathDir(dir)))
	s := &shard{fs: fs, dir: dir}
	s.applied = s.stored(t)
	s.flushed = s.applied
	t.Cleanup(s.close)
	return s
}

// stepsOf returns the content of the file of some steps.
func stepsOf(from, through uint64) (name string, content []byte) {
	for i := from; i <= through; i++ {
		content = fmt.Appendf(content, "step %06d %0*d\n", i, i%50, i)
	}
	return fmt.Sprintf("%06d-%06d.sst", from, through), content
}

// stored returns the index through which complete files have all steps.
func (s *shard) stored(t testing.TB) (index uint64) {
	t.Helper()
	names, err := s.fs.List(s.dir)
	require.NoError(t, err)
	slices.Sort(names)
	for _, name := range names {
		var from, through uint64
		if n, _ := fmt.Sscanf(name, "%d-%d.sst", &from, &through); n != 2 || from > index+1 {
			continue
		}
		got, err := platform.ReadFile(s.fs, s.fs.PathJoin(s.dir, name))
		require.NoError(t, err)
		if _, want := stepsOf(from, through); bytes.Equal(want, got) {
			index = max(index, through)
		}
	}
	return index
}

func (s *shard) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}

func (s *shard) write(from, through uint64) (name string, err error) {
	name, content := stepsOf(from, through)
	f, err := s.fs.Create(s.fs.PathJoin(s.dir, name), vfs.WriteCategoryUnspecified)
	if err != nil {
		return "", err
	}
	_, err = f.Write(content)
	return name, errors.Join(err, f.Sync(), f.Close(), platform.SyncDirectory(s.fs, s.dir))
}

func (s *shard) Flush() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.flushed == s.applied {
		return s.err()
	}
	_, err := s.write(s.flushed+1, s.applied)
	s.flushed = s.applied
	return err
}

func (s *shard) err() error {
	if s.closed {
		return os.ErrClosed
	}
	return nil
}

func (s *shard) Checkpoint(dir string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	names, err := s.fs.List(s.dir)
	err = errors.Join(s.err(), err, s.fs.MkdirAll(dir, 0o755))
	for _, name := range names {
		err = errors.Join(err, s.fs.Link(s.fs.PathJoin(s.dir, name), s.fs.PathJoin(dir, name)))
	}
	return errors.Join(err, platform.SyncDirectory(s.fs, dir), platform.SyncDirectory(s.fs, s.fs.PathDir(dir)))
}

// compact replaces all files by one.
func (s *shard) compact(t testing.TB) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	old, err := s.fs.List(s.dir)
	require.NoError(t, err)
	name, err := s.write(1, s.flushed)
	require.NoError(t, err)
	for _, o := range old {
		if o != name {
			require.NoError(t, s.fs.Remove(s.fs.PathJoin(s.dir, o)))
		}
	}
}

// apply does the remaining steps up to an index.
func (s *shard) apply(t testing.TB, index uint64) {
	t.Helper()
	for s.applied < index {
		if s.applied++; s.applied%16 == 0 {
			require.NoError(t, s.Flush())
		}
	}
}

// requireState returns the applied index, and fails unless the files have all flushed steps.
func (s *shard) requireState(t testing.TB) uint64 {
	t.Helper()
	require.Equal(t, s.flushed, s.stored(t))
	return s.applied
}

// node is a shard with its snapshots in the directories queue/shard and queue/shard.raft.
type node struct {
	fs    vfs.FS
	store *Store

	mu    sync.Mutex
	shard *shard // nil while there is none
}

const (
	place   = "queue/shard"
	raftDir = "queue/shard.raft"
)

func openNode(t testing.TB, fs vfs.FS) *node {
	t.Helper()
	require.NoError(t, fs.MkdirAll("queue", 0o755))
	require.NoError(t, platform.SyncDirectory(fs, ""))
	n := &node{fs: fs}
	var err error
	n.store, err = Open(fs, raftDir, n.live, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	n.swap(t)
	return n
}

// openNodeAt opens a new node with a snapshot of the index.
func openNodeAt(t testing.TB, fs vfs.FS, index uint64) *node {
	t.Helper()
	n := openNode(t, fs)
	n.shard.apply(t, index)
	n.take(t, index)
	return n
}

// live never returns a nil *shard as a Live.
func (n *node) live() Live {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.shard == nil {
		return nil
	}
	return n.shard
}

// swap swaps in the installed state, and opens the shard if it is not open.
func (n *node) swap(t testing.TB) {
	t.Helper()
	n.mu.Lock()
	old := n.shard
	n.mu.Unlock()
	if dir, _, ok := n.store.Installed(); ok {
		n.mu.Lock()
		n.shard = nil
		n.mu.Unlock()
		if old != nil {
			old.close()
			old = nil
		}
		require.NoError(t, n.fs.RemoveAll(place))
		require.NoError(t, n.fs.Rename(dir, place))
		require.NoError(t, platform.SyncDirectory(n.fs, "queue"))
		require.NoError(t, n.store.Swapped())
	}
	if old == nil {
		s := openShard(t, n.fs, place)
		n.mu.Lock()
		n.shard = s
		n.mu.Unlock()
	}
}

var servers = raft.Configuration{Servers: []raft.Server{{Suffrage: raft.Voter, ID: "a", Address: "a:1"}}}

func (n *node) create(t testing.TB, index uint64) *Sink {
	t.Helper()
	sink, err := n.store.Create(raft.SnapshotVersionMax, index, 3, servers, 1, nil)
	require.NoError(t, err)
	return sink.(*Sink)
}

// take takes a local snapshot.
func (n *node) take(t testing.TB, index uint64) {
	t.Helper()
	sink := n.create(t, index)
	require.NoError(t, sink.Persist(n.live()))
	require.NoError(t, sink.Close())
}

// newest returns the newest snapshot, nil if there is none.
func (n *node) newest(t testing.TB) *raft.SnapshotMeta {
	t.Helper()
	list, err := n.store.List()
	require.NoError(t, err)
	if len(list) == 0 {
		return nil
	}
	require.Len(t, list, 1)
	return list[0]
}

// checkpoint returns a checkpoint of the newest snapshot.
func (n *node) checkpoint(t testing.TB) *Checkpoint {
	t.Helper()
	c, err := n.store.Checkpoint()
	require.NoError(t, err)
	require.Equal(t, n.newest(t), c.Meta)
	return c
}

// receive takes the missing bytes of the files of a checkpoint.
func (n *node) receive(t testing.TB, c *Checkpoint) error {
	t.Helper()
	a, err := n.store.receive(c.Manifest, time.Minute)
	if err != nil {
		return err
	}
	offset := a.offset()
	r, err := c.from(offset)
	require.NoError(t, err)
	for b := make([]byte, 1000); ; {
		got, err := r.Read(b)
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		if err := a.write(offset, b[:got]); err != nil {
			a.drop()
			return err
		}
		offset += int64(got)
	}
	if err := a.finish(); err != nil {
		a.drop()
		return err
	}
	return nil
}

// publish installs the files of a manifest.
func (n *node) publish(t testing.TB, index uint64, manifest []byte) (*Sink, error) {
	t.Helper()
	sink := n.create(t, index)
	for rest := manifest; len(rest) > 0; {
		piece := rest[:min(len(rest), 100)]
		_, err := sink.Write(piece)
		require.NoError(t, err)
		rest = rest[len(piece):]
	}
	return sink, sink.Close()
}

// install receives the files of a checkpoint, and installs them.
func (n *node) install(t testing.TB, index uint64, c *Checkpoint) (*Sink, error) {
	t.Helper()
	require.NoError(t, n.receive(t, c))
	return n.publish(t, index, c.Manifest)
}

// files lists the files and directories of the snapshots.
func (n *node) files(t testing.TB) []string {
	t.Helper()
	names, err := n.fs.List(raftDir)
	require.NoError(t, err)
	return names
}
