package cluster

import (
	"errors"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/snapshot"
)

// oneFile is a store of one file.
type oneFile struct{ vfs.FS }

func (*oneFile) Flush() error { return nil }

func (s *oneFile) Checkpoint(dir string) error {
	if err := s.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := s.Create(s.PathJoin(dir, "000001.sst"), vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write([]byte("content"))
	return errors.Join(err, f.Close())
}

// A node that has sent files, got a later snapshot from the next leader, and leads again sends the
// files of that one.
func TestFilesOfAnEarlierSnapshotAreGivenUp(t *testing.T) {
	disk := newSizedDisk(1 << 30)
	live := &oneFile{disk}
	g := loneGroup(disk, &notes{live: live})
	require.NoError(t, disk.MkdirAll("dir", 0o700))
	var err error
	g.snapshots, err = snapshot.Open(disk, "dir/raft", g.machine.Live, g.node.log)
	require.NoError(t, err)
	take := func(index uint64) {
		sink, err := g.snapshots.Create(raft.SnapshotVersionMax, index, 1, raft.Configuration{}, 1, nil)
		require.NoError(t, err)
		require.NoError(t, sink.(*snapshot.Sink).Persist(live))
		require.NoError(t, sink.Close())
	}
	take(7)
	files, err := g.filesFor("b", 7)
	require.NoError(t, err)
	take(9)
	_, err = g.filesFor("c", 7) // Raft has not seen the later one
	require.NoError(t, err)
	g.sender.release(files)
	g.sender.release(files)

	later, err := g.filesFor("b", 9)
	require.NoError(t, err)
	require.EqualValues(t, 9, later.Meta.Index)
	require.Equal(t, map[raft.ServerID]bool{"b": false}, g.sender.behind)
	g.sender.release(later)
	require.True(t, g.sender.end())
	names, err := disk.List("dir/raft")
	require.NoError(t, err)
	require.Equal(t, []string{"snapshot"}, names)
}
