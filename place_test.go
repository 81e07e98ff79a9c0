package codeq_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/manifest"
	"codeq/internal/testkit"
)

func copyDirectory(t *testing.T, from, to string) {
	t.Helper()
	require.NoError(t, os.CopyFS(to, os.DirFS(from)))
}

// leaveOpen makes the directory of a closed queue look as after the end of its process.
func leaveOpen(t *testing.T, dir, node string) {
	t.Helper()
	d, err := manifest.Open(vfs.Default, dir, manifest.Want{Node: node})
	require.NoError(t, err)
	require.NoError(t, d.Begin())
	require.NoError(t, d.Close())
}

// TestCopyOfOpenQueue: files that are copied while the queue is open, or after its process
// has died, are refused until somebody accepts them; what is renamed is not.
func TestCopyOfOpenQueue(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("copies are not recognized")
	}
	root := t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	q, err := codeq.Open(at("queue"), &codeq.Options{Shards: 2})
	require.NoError(t, err)
	var tasks []codeq.ID
	for shard := range 2 {
		id, err := startingAt(q, shard).Produce(context.Background(), codeq.Task{Queue: "a"})
		require.NoError(t, err)
		tasks = append(tasks, id)
	}
	copyDirectory(t, at("queue"), at("live"))
	require.NoError(t, q.Checkpoint(context.Background(), at("checkpoint")))
	require.NoError(t, q.Close())

	before := testkit.RecursiveListing(t, root)
	content := testkit.ReadFile(t, filepath.Join(at("live"), manifest.Name))
	for range 2 {
		_, err = codeq.Open(at("live"), nil)
		require.ErrorIs(t, err, codeq.ErrCopied)
		require.ErrorContains(t, err, "Checkpoint")
		for _, repair := range []bool{false, true} {
			_, err = codeq.Verify(at("live"), &codeq.VerifyOptions{Repair: repair})
			require.ErrorIs(t, err, codeq.ErrCopied)
		}
	}
	require.Equal(t, before, testkit.RecursiveListing(t, root))
	require.Equal(t, content, testkit.ReadFile(t, filepath.Join(at("live"), manifest.Name)))
	r, err := codeq.Verify(at("live"), &codeq.VerifyOptions{AcceptCopy: true})
	require.NoError(t, err)
	require.True(t, r.OK(), "%v", r.Problems)
	requireTasks(t, at("live"), &codeq.Options{AcceptCopy: true}, tasks)
	requireTasks(t, at("live"), nil, tasks) // is a queue of its own

	for _, from := range []string{"queue", "checkpoint", "live"} { // closed
		copyDirectory(t, at(from), at(from+" copied"))
		r, err := codeq.Verify(at(from+" copied"), nil)
		require.NoError(t, err)
		require.True(t, r.OK(), "%v", r.Problems)
		requireTasks(t, at(from+" copied"), nil, tasks)
	}

	leaveOpen(t, at("queue"), "")
	require.NoError(t, os.Rename(at("queue"), at("renamed")))
	copyDirectory(t, at("renamed"), at("moved"))
	requireTasks(t, at("renamed"), nil, tasks)
	_, err = codeq.Open(at("moved"), nil)
	require.ErrorIs(t, err, codeq.ErrCopied)

	// Into the directory in which the files were, or another root of a volume: its inode is the
	// same.
	leaveOpen(t, at("renamed"), "")
	path := filepath.Join(at("renamed"), manifest.Name)
	open := testkit.ReadFile(t, path)
	testkit.WriteFile(t, path+".copy", open)
	require.NoError(t, os.Rename(path+".copy", path))
	_, err = codeq.Open(at("renamed"), nil)
	require.ErrorIs(t, err, codeq.ErrCopied)
	requireTasks(t, at("renamed"), &codeq.Options{AcceptCopy: true}, tasks)
}

// TestCopyOfOpenNode: the directory of a node is as that of a queue, whatever opens it.
func TestCopyOfOpenNode(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("copies are not recognized")
	}
	root := t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	options := func(accept bool) *codeq.Options {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { _ = l.Close() })
		return &codeq.Options{Shards: 2, AcceptCopy: accept, Cluster: &codeq.Cluster{
			Node: "a", Listener: l, Advertise: "a:1", HeartbeatTimeout: 50 * time.Millisecond,
		}}
	}
	isOpen := func(name string) bool {
		m, err := manifest.Read(vfs.Default, at(name))
		require.NoError(t, err)
		return m.Open != nil
	}
	refused := func(name string) {
		before := testkit.RecursiveListing(t, at(name))
		for range 2 {
			_, err := codeq.Open(at(name), options(false))
			require.ErrorIs(t, err, codeq.ErrCopied)
			require.ErrorContains(t, err, "Checkpoint")
			require.ErrorIs(t, codeq.RecoverCluster(at(name), options(false)), codeq.ErrCopied)
			for _, repair := range []bool{false, true} {
				_, err = codeq.Verify(at(name), &codeq.VerifyOptions{Repair: repair})
				require.ErrorIs(t, err, codeq.ErrCopied)
			}
		}
		require.Equal(t, before, testkit.RecursiveListing(t, at(name)))
	}
	requireTask := func(name string, opts *codeq.Options, id codeq.ID) {
		q, err := codeq.Open(at(name), opts)
		require.NoError(t, err)
		require.Equal(t, codeq.Ready, infoOf(t, q, id).State)
		require.NoError(t, q.Close())
	}

	q, err := codeq.Open(at("node"), options(false))
	require.NoError(t, err)
	id := produce(t, q, codeq.Task{Queue: "a"})[0]
	copyDirectory(t, at("node"), at("live"))
	require.True(t, isOpen("node"))
	require.NoError(t, q.Close())
	require.False(t, isOpen("node"))
	refused("live")

	copyDirectory(t, at("node"), at("closed"))
	requireTask("closed", options(false), id)

	leaveOpen(t, at("node"), "a")
	copyDirectory(t, at("node"), at("moved"))
	refused("moved")
	require.NoError(t, codeq.RecoverCluster(at("moved"), options(true)))
	requireTask("moved", options(false), id) // is a node of its own
	copyDirectory(t, at("node"), at("moved again"))
	requireTask("moved again", options(true), id)
	require.False(t, isOpen("moved again"))
	requireTask("node", options(false), id)
}

// TestOpenThatFails leaves a closed queue closed, so that it may be copied to where it is looked
// at.
func TestOpenThatFails(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dir := filepath.Join(root, "queue")
	closedQueue(t, dir, 2)
	missing := manifest.ShardDir(vfs.Default, dir, 0)
	require.NoError(t, os.Rename(missing, filepath.Join(root, "aside")))
	_, err := codeq.Open(dir, nil)
	require.ErrorIs(t, err, codeq.ErrCorrupt)
	require.NoError(t, os.Rename(filepath.Join(root, "aside"), missing))
	q, err := codeq.Open(dir, nil)
	require.NoError(t, err)
	require.NoError(t, q.Close())
	m, err := manifest.Read(vfs.Default, dir)
	require.NoError(t, err)
	require.Nil(t, m.Open)
	_, err = codeq.Open(dir, &codeq.Options{Shards: 3})
	require.ErrorIs(t, err, codeq.ErrShardCount)
	m, err = manifest.Read(vfs.Default, dir)
	require.NoError(t, err)
	require.Nil(t, m.Open)
}
