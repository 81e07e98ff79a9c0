package snapshot

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/platform"
)

// source returns a node with a snapshot of the index and a state that is ahead of it.
func source(t testing.TB, index, state uint64) *node {
	t.Helper()
	n := openNodeAt(t, crashfs.New(), index)
	n.shard.apply(t, state)
	return n
}

func TestLocalSnapshotFlushesTheStoreAndSurvivesAPowerLoss(t *testing.T) {
	fs := crashfs.New()
	n := openNode(t, fs)
	require.Nil(t, n.newest(t))
	n.shard.apply(t, 41)
	n.take(t, 41)
	want := n.newest(t)
	require.Equal(t, uint64(41), want.Index)
	require.Equal(t, uint64(3), want.Term)
	require.Equal(t, servers, want.Configuration)
	require.Equal(t, uint64(1), want.ConfigurationIndex)

	again := openNode(t, fs.CrashClone(vfs.CrashCloneCfg{}))
	require.Equal(t, want, again.newest(t))
	require.Equal(t, uint64(41), again.shard.requireState(t))
}

func TestInstallGivesTheStateOfTheSender(t *testing.T) {
	from := source(t, 100, 150)
	c := from.checkpoint(t)
	require.Equal(t, uint64(100), c.Meta.Index)

	to := openNodeAt(t, crashfs.New(), 20)
	sink, err := to.install(t, 100, c)
	require.NoError(t, err)
	require.NoError(t, sink.Close(), "closed again")
	c.Remove()
	require.Equal(t, []string{recordName}, from.files(t))
	require.NoError(t, sink.Cancel())

	// As Raft does before it calls FSM.Restore.
	require.Equal(t, sink.ID(), to.newest(t).ID)
	meta, r, err := to.store.Open(sink.ID())
	require.NoError(t, err)
	require.Equal(t, uint64(100), meta.Index)
	data, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Empty(t, data)
	require.NoError(t, r.Close())
	_, index, ok := to.store.Installed()
	require.True(t, ok)
	require.Equal(t, uint64(100), index)

	require.ErrorContains(t, to.store.Swapped(), "not been renamed")
	to.swap(t)
	_, _, ok = to.store.Installed()
	require.False(t, ok)
	require.ErrorContains(t, to.store.Swapped(), "nothing is installed")
	got := to.shard.requireState(t)
	require.GreaterOrEqual(t, got, uint64(100))
	require.LessOrEqual(t, got, uint64(150))
	to.shard.apply(t, 170)
	require.Equal(t, uint64(170), to.shard.requireState(t))

	// A received state can be sent on, and be replaced by a local snapshot.
	c = to.checkpoint(t)
	third := openNode(t, crashfs.New())
	_, err = third.install(t, 100, c)
	require.NoError(t, err)
	third.swap(t)
	require.GreaterOrEqual(t, third.shard.requireState(t), uint64(100))
	to.take(t, 170)
	require.Equal(t, uint64(170), to.newest(t).Index)
}

func TestInstalledSurvivesARestart(t *testing.T) {
	c := source(t, 100, 130).checkpoint(t)
	fs := crashfs.New()
	to := openNodeAt(t, fs, 20)
	_, err := to.install(t, 100, c)
	require.NoError(t, err)
	to.shard.close()

	store, err := Open(fs, raftDir, nil, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	_, index, ok := store.Installed()
	require.True(t, ok)
	require.Equal(t, uint64(100), index)

	list, err := store.List()
	require.NoError(t, err)
	for range 5 {
		sink, err := store.Create(raft.SnapshotVersionMax, 100, 3, servers, 1, nil)
		require.NoError(t, err)
		require.NotEqual(t, list[0].ID, sink.ID(), "two snapshots would share a directory")
	}

	again := openNode(t, fs)
	require.GreaterOrEqual(t, again.shard.requireState(t), uint64(100))
	require.Equal(t, []string{recordName}, again.files(t))
}

// TestReceived: the state that will replace the live store is found, without a change, until it has
// replaced it.
func TestReceived(t *testing.T) {
	received := func(fs vfs.FS) string {
		t.Helper()
		dir, err := Received(fs, raftDir)
		require.NoError(t, err)
		return dir
	}
	c := source(t, 100, 100).checkpoint(t)
	fs := crashfs.New()
	require.Empty(t, received(fs))
	to := openNode(t, fs)
	require.Empty(t, received(fs))
	_, err := to.install(t, 100, c)
	require.NoError(t, err)
	to.shard.close()
	dir, _, ok := to.store.Installed()
	require.True(t, ok)
	require.Equal(t, dir, received(fs))
	require.NoError(t, fs.RemoveAll(place))
	require.NoError(t, fs.Rename(dir, place))
	require.Empty(t, received(fs))
	require.NoError(t, to.store.Swapped())
	require.Empty(t, received(fs))

	require.NoError(t, platform.WriteFile(fs, fs.PathJoin(raftDir, recordName), nil))
	_, err = Received(fs, raftDir)
	require.ErrorIs(t, err, ErrDamaged)
}

// The process dies between the rename and Swapped.
func TestOpenRecordsASwap(t *testing.T) {
	c := source(t, 100, 100).checkpoint(t)
	fs := crashfs.New()
	to := openNode(t, fs)
	_, err := to.install(t, 100, c)
	require.NoError(t, err)
	to.shard.close()
	dir, _, _ := to.store.Installed()
	require.NoError(t, fs.RemoveAll(place))
	require.NoError(t, fs.Rename(dir, place))
	require.NoError(t, platform.SyncDirectory(fs, "queue"))

	store, err := Open(fs, raftDir, nil, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	_, _, ok := store.Installed()
	require.False(t, ok)
	current, err := readRecord(fs.CrashClone(vfs.CrashCloneCfg{}), raftDir)
	require.NoError(t, err)
	require.False(t, current.Installed)

	again := openNode(t, fs)
	require.Equal(t, uint64(100), again.newest(t).Index)
	require.Equal(t, uint64(100), again.shard.requireState(t))
}

func TestOpenMakesItsDirectoryDurable(t *testing.T) {
	fs := crashfs.New()
	live := new(idleLive)
	store, err := Open(fs, "raft", func() Live { return live }, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	sink, err := store.Create(raft.SnapshotVersionMax, 7, 1, servers, 1, nil)
	require.NoError(t, err)
	require.NoError(t, sink.(*Sink).Persist(live))
	require.NoError(t, sink.Close())
	current, err := readRecord(fs.CrashClone(vfs.CrashCloneCfg{}), "raft")
	require.NoError(t, err)
	require.NotNil(t, current)
}

type idleLive struct{ _ byte }

func (*idleLive) Flush() error            { return nil }
func (*idleLive) Checkpoint(string) error { return errBroken }

func TestRefusedInstallLeavesNothing(t *testing.T) {
	c := source(t, 100, 100).checkpoint(t)
	other := source(t, 100, 100).checkpoint(t)
	damaged := bytes.Clone(c.Manifest)
	damaged[len(damaged)/2] ^= 1
	for name, bad := range map[string][]byte{
		"empty":     {},
		"damaged":   damaged,
		"truncated": c.Manifest[:len(c.Manifest)-1],
		"too long":  append(bytes.Clone(c.Manifest), 1),
		"of others": other.Manifest,
	} {
		t.Run(name, func(t *testing.T) {
			to := openNodeAt(t, crashfs.New(), 20)
			require.NoError(t, to.receive(t, c))
			before := to.newest(t)
			sink, err := to.publish(t, 100, bad)
			require.ErrorIs(t, err, ErrDamaged)
			require.Error(t, sink.Close(), "closed again")
			_, err = to.publish(t, 101, c.Manifest)
			require.ErrorIs(t, err, ErrDamaged, "of another index")
			require.Equal(t, before, to.newest(t))
			_, _, ok := to.store.Installed()
			require.False(t, ok)
			to.store.Close()
			require.Equal(t, []string{recordName}, to.files(t))
			_, err = to.publish(t, 100, c.Manifest)
			require.ErrorIs(t, err, ErrDamaged, "of no files")
		})
	}
}

// Raft installs nothing that lacks a part, and a sink that is not closed publishes nothing.
func TestIncompleteFilesAreNotInstalled(t *testing.T) {
	c := source(t, 100, 100).checkpoint(t)
	to := openNode(t, crashfs.New())
	a, err := to.store.receive(c.Manifest, time.Minute)
	require.NoError(t, err)
	_, err = to.publish(t, 100, c.Manifest)
	require.ErrorIs(t, err, ErrDamaged)
	require.ErrorIs(t, a.finish(), ErrDamaged)
	require.NoError(t, to.receive(t, c))
	sink := to.create(t, 100)
	_, err = sink.Write(c.Manifest)
	require.NoError(t, err)
	require.NoError(t, sink.Cancel())
	require.Error(t, sink.Close())
	_, err = sink.Write(c.Manifest)
	require.Error(t, err)
	require.Nil(t, to.newest(t))
	_, err = to.publish(t, 100, c.Manifest)
	require.NoError(t, err)
}

func TestFailedFlushPublishesNothing(t *testing.T) {
	broken := brokenLive{}
	store, err := Open(crashfs.New(), "r", func() Live { return broken }, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	sink, err := store.Create(raft.SnapshotVersionMax, 7, 1, servers, 1, nil)
	require.NoError(t, err)
	require.ErrorIs(t, sink.(*Sink).Persist(broken), errBroken)
	require.NoError(t, sink.Cancel())
	list, err := store.List()
	require.NoError(t, err)
	require.Empty(t, list)
}

var errBroken = errors.New("broken")

type brokenLive struct{}

func (brokenLive) Flush() error            { return errBroken }
func (brokenLive) Checkpoint(string) error { return errBroken }

func TestOlderSnapshotIsRefused(t *testing.T) {
	c := source(t, 100, 100).checkpoint(t)
	n := openNode(t, crashfs.New())
	n.shard.apply(t, 60)
	late := n.create(t, 50)
	require.NoError(t, late.Persist(n.live()))
	old := source(t, 50, 50).checkpoint(t)
	require.NoError(t, n.receive(t, old))
	lateInstall := n.create(t, 50)
	_, err := lateInstall.Write(old.Manifest)
	require.NoError(t, err)
	n.take(t, 60)

	require.ErrorIs(t, late.Close(), errSuperseded)
	require.ErrorIs(t, lateInstall.Close(), errSuperseded)
	_, err = n.store.Create(raft.SnapshotVersionMax, 59, 3, servers, 1, nil)
	require.ErrorIs(t, err, errSuperseded)
	require.Equal(t, uint64(60), n.newest(t).Index)
	require.Equal(t, []string{recordName}, n.files(t))

	// The leader repeats an install without an answer.
	_, err = n.install(t, 100, c)
	require.NoError(t, err)
	_, err = n.install(t, 100, c)
	require.NoError(t, err)
	require.Len(t, n.files(t), 2, "metadata, and one directory")
	n.swap(t)
	require.Equal(t, uint64(100), n.shard.requireState(t))
}

// A local snapshot promises the state of the store that FSM.Snapshot saw, which may have been
// replaced by an older state when Persist or Close is called.
func TestLocalSnapshotOfAReplacedStoreIsRefused(t *testing.T) {
	c := source(t, 80, 80).checkpoint(t)
	begin := func(t *testing.T) (*node, Live) {
		n := openNode(t, crashfs.New())
		n.shard.apply(t, 100)
		return n, n.live()
	}
	t.Run("persisted before the install", func(t *testing.T) {
		n, live := begin(t)
		sink := n.create(t, 100)
		require.NoError(t, sink.Persist(live))
		_, err := n.install(t, 80, c)
		require.NoError(t, err)
		n.swap(t)
		require.ErrorIs(t, sink.Close(), errSuperseded)
		require.Equal(t, uint64(80), n.newest(t).Index)
	})
	t.Run("persisted before the swap", func(t *testing.T) {
		n, live := begin(t)
		_, err := n.install(t, 80, c)
		require.NoError(t, err)
		sink := n.create(t, 100)
		require.ErrorIs(t, sink.Persist(live), errSuperseded)
		require.NoError(t, sink.Cancel())
	})
	t.Run("persisted after the swap", func(t *testing.T) {
		n, live := begin(t)
		_, err := n.install(t, 80, c)
		require.NoError(t, err)
		n.swap(t)
		sink := n.create(t, 100)
		require.ErrorIs(t, sink.Persist(live), errSuperseded)
		require.NoError(t, sink.Cancel())
	})
}

func TestSeveralGetTheSameFiles(t *testing.T) {
	from := source(t, 100, 100)
	c := from.checkpoint(t)
	nodes, errs := make([]*node, 6), make([]error, 6)
	var wg sync.WaitGroup
	for i := range nodes {
		nodes[i] = openNode(t, crashfs.New())
		wg.Go(func() { errs[i] = nodes[i].receive(t, c) })
	}
	// The store works meanwhile: compactions remove files that are being sent.
	from.shard.apply(t, 300)
	from.shard.compact(t)
	wg.Wait()
	c.Remove()
	require.Equal(t, []string{recordName}, from.files(t))
	require.NoError(t, errors.Join(errs...))
	for _, to := range nodes {
		_, err := to.publish(t, 100, c.Manifest)
		require.NoError(t, err)
		to.swap(t)
		require.Equal(t, uint64(100), to.shard.requireState(t))
	}
}

func TestOpenOfASnapshot(t *testing.T) {
	n := openNode(t, crashfs.New())
	_, _, err := n.store.Open("1-2-3")
	require.ErrorIs(t, err, errUnknown)
	n.shard.apply(t, 5)
	n.take(t, 5)
	old := n.newest(t).ID
	n.take(t, 5)
	require.NotEqual(t, old, n.newest(t).ID)
	_, _, err = n.store.Open(old)
	require.ErrorIs(t, err, errUnknown)
	n.mu.Lock()
	n.shard = nil
	n.mu.Unlock()
	_, err = n.store.Checkpoint()
	require.ErrorIs(t, err, ErrNotLive)
	require.ErrorIs(t, n.create(t, 9).Persist(n.live()), ErrNotLive)

	broken, err := Open(crashfs.New(), "r", func() Live { return brokenLive{} }, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	_, _, err = broken.Open("")
	require.ErrorIs(t, err, errUnknown)
	_, err = broken.Checkpoint()
	require.ErrorIs(t, err, errUnknown)
}

func TestOpenRemovesLeftovers(t *testing.T) {
	c := source(t, 100, 100).checkpoint(t)
	fs := crashfs.New()
	n := openNodeAt(t, fs, 20)
	n.checkpoint(t) // never removed
	_, err := n.install(t, 100, c)
	require.NoError(t, err)
	_, err = n.store.receive(source(t, 100, 100).checkpoint(t).Manifest, time.Minute)
	require.NoError(t, err)
	require.NoError(t, platform.WriteFile(fs, fs.PathJoin(raftDir, recordTemp), nil))
	require.Len(t, n.files(t), 5)
	installed, _, _ := n.store.Installed()

	_, err = Open(fs, raftDir, n.live, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.ElementsMatch(t, []string{recordName, fs.PathBase(installed)}, n.files(t))
}

func TestDamagedMetadataIsNotTakenForNone(t *testing.T) {
	fs := crashfs.New()
	n := openNodeAt(t, fs, 20)
	name := fs.PathJoin(raftDir, recordName)
	data, err := platform.ReadFile(fs, name)
	require.NoError(t, err)
	for i := range data {
		for _, bad := range [][]byte{data[:i], append(append(bytes.Clone(data[:i]), data[i]^4), data[i+1:]...)} {
			require.NoError(t, platform.WriteFile(fs, name, bytes.Clone(bad)))
			_, err = Open(fs, raftDir, n.live, slog.New(slog.DiscardHandler))
			require.ErrorIs(t, err, ErrDamaged, "byte %d", i)
		}
	}
}

func TestUnsupportedVersionIsRefused(t *testing.T) {
	n := openNode(t, crashfs.New())
	_, err := n.store.Create(0, 1, 1, servers, 1, nil)
	require.ErrorContains(t, err, "unsupported version 0")
}
