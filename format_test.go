package codeq

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/failstop"
	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/simtest"
	"codeq/internal/store"
)

// ofOldFormat makes the directory of a closed node one of an older format.
func ofOldFormat(t *testing.T, disk vfs.FS, format int) {
	t.Helper()
	m, err := manifest.Read(disk, "queue")
	require.NoError(t, err)
	for i := range m.Shards {
		dir := manifest.ShardDir(disk, "queue", i)
		db, err := failstop.New(slog.New(slog.DiscardHandler), "store").Open(dir, &pebble.Options{FS: disk, FormatMajorVersion: store.Format})
		require.NoError(t, err)
		require.NoError(t, db.Set([]byte{keys.Meta}, []byte(manifest.ReplicaIdentity(format, i, m.Shards)), nil))
		require.NoError(t, errors.Join(db.Flush(), db.Close(), integrity.Seal(disk, dir)))
	}
	m.Format = format
	require.NoError(t, manifest.New(disk, "queue", *m).Write())
}

// TestRaiseOfNode: a node of a cluster of an older format is raised, and its leaders raise the
// shards.
func TestRaiseOfNode(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	disk, votes := crashfs.New(), simtest.NewVotes()
	q, err := oneNode(disk, votes)
	require.NoError(t, err)
	id, err := q.Produce(ctx, Task{Queue: "a"})
	require.NoError(t, errors.Join(err, q.Close()))
	ofOldFormat(t, disk, manifest.OldestOfNodes-1)
	_, err = oneNode(disk, votes)
	require.ErrorIs(t, err, ErrFormat)
	require.ErrorContains(t, err, "5 of a node, this version knows 6 to 7")
	ofOldFormat(t, disk, manifest.OldestOfNodes)
	r := verifyImage(t, disk, false)
	require.True(t, r.OK(), "%v", r.Problems)

	q, err = oneNode(disk, votes)
	require.NoError(t, err)
	info, err := q.Get(ctx, id)
	require.NoError(t, err)
	require.Equal(t, Ready, info.State)
	for i, r := range q.replicas {
		require.Eventually(t, func() bool { return formatOf(t, q, i) == manifest.Format }, 20*time.Second, time.Millisecond)
		got, err := store.Lookup(r.store.DB(), []byte{keys.Meta})
		require.NoError(t, err)
		require.Equal(t, manifest.ReplicaIdentity(manifest.Format, i, len(q.replicas)), string(got))
	}
	require.NoError(t, q.Close())
	m, err := manifest.Read(disk, "queue")
	require.NoError(t, err)
	require.Equal(t, manifest.Format, m.Format)
	r = verifyImage(t, disk, false)
	require.True(t, r.OK(), "%v", r.Problems)
}
