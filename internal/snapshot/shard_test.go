package snapshot

import (
	"codeq/internal/platform"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"
)

// shard is a Pebble store without a log. Its state is a function of its applied index: apply(n)
// puts it into state n.
type shard struct {
	mu sync.RWMutex // held for writing while db changes
	db *pebble.DB   // nil once closed
}

func openShard(t testing.TB, fs vfs.FS, dir string) *shard {
	t.Helper()
	db, err := pebble.Open(dir, &pebble.Options{
		FS:                 fs,
		DisableWAL:         true,
		FormatMajorVersion: pebble.FormatColumnarBlocks,
		MemTableSize:       64 << 10,
		Logger:             quiet{},
		EventListener: &pebble.EventListener{
			PossibleAPIMisuse: func(info pebble.PossibleAPIMisuseInfo) { t.Errorf("misuse of Pebble: %v", info) },
		},
	})
	require.NoError(t, err)
	s := &shard{db: db}
	t.Cleanup(s.close)
	return s
}

func (s *shard) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.db != nil {
		_ = s.db.Close()
		s.db = nil
	}
}

func (s *shard) Flush() error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.db == nil {
		return pebble.ErrClosed
	}
	return s.db.Flush()
}

func (s *shard) Checkpoint(dir string) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.db == nil {
		return pebble.ErrClosed
	}
	return s.db.Checkpoint(dir)
}

// step applies the entry with this index: it writes a key once, removes earlier ones by SINGLEDEL
// and by range, and overwrites one.
func step(index uint64, set func(k, v string), singleDelete func(k string), deleteRange func(from, to string)) {
	set(fmt.Sprintf("once/%06d", index), fmt.Sprint("v", index))
	set(fmt.Sprintf("range/%06d", index), fmt.Sprint("v", index))
	set("counter", fmt.Sprint(index))
	if index%3 != 0 && index > 7 {
		singleDelete(fmt.Sprintf("once/%06d", index-7))
	}
	if index%10 == 0 {
		deleteRange(fmt.Sprintf("range/%06d", index-9), fmt.Sprintf("range/%06d", index-2))
	}
}

func stateAt(index uint64) map[string]string {
	state := map[string]string{}
	for i := uint64(1); i <= index; i++ {
		step(i,
			func(k, v string) { state[k] = v },
			func(k string) { delete(state, k) },
			func(from, to string) {
				maps.DeleteFunc(state, func(k, _ string) bool { return k >= from && k < to })
			})
	}
	return state
}

const appliedKey = "~applied"

// apply does the remaining steps up to state index.
func (s *shard) apply(t testing.TB, index uint64) {
	t.Helper()
	for i := s.applied(t) + 1; i <= index; i++ {
		b := s.db.NewBatch()
		step(i,
			func(k, v string) { require.NoError(t, b.Set([]byte(k), []byte(v), nil)) },
			func(k string) { require.NoError(t, b.SingleDelete([]byte(k), nil)) },
			func(from, to string) { require.NoError(t, b.DeleteRange([]byte(from), []byte(to), nil)) })
		require.NoError(t, b.Set([]byte(appliedKey), binary.BigEndian.AppendUint64(nil, i), nil))
		require.NoError(t, b.Commit(pebble.NoSync))
		if i%16 == 0 {
			require.NoError(t, s.db.Flush())
		}
	}
}

func (s *shard) applied(t testing.TB) uint64 {
	t.Helper()
	v, closer, err := s.db.Get([]byte(appliedKey))
	if errors.Is(err, pebble.ErrNotFound) {
		return 0
	}
	require.NoError(t, err)
	defer closer.Close()
	return binary.BigEndian.Uint64(v)
}

// requireState returns the applied index, and fails unless the state is that of the index.
func (s *shard) requireState(t testing.TB) uint64 {
	t.Helper()
	index := s.applied(t)
	require.Equal(t, stateAt(index), s.dump(t), "state of index %d", index)
	return index
}

func (s *shard) dump(t testing.TB) map[string]string {
	t.Helper()
	it, err := s.db.NewIter(nil)
	require.NoError(t, err)
	state := map[string]string{}
	for it.First(); it.Valid(); it.Next() {
		if string(it.Key()) != appliedKey {
			state[string(it.Key())] = string(it.Value())
		}
	}
	require.NoError(t, it.Close())
	return state
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

type quiet struct{}

func (quiet) Infof(string, ...any)  {}
func (quiet) Errorf(string, ...any) {}
func (quiet) Fatalf(f string, a ...any) {
	panic(fmt.Sprintf(f, a...))
}
