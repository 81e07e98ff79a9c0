package raftlog

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/platform"
	"codeq/internal/testkit"
)

func TestStable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "stable")
	// like the file after a crash
	require.NoError(t, os.WriteFile(path+".new", []byte("half a file"), 0o600))
	open := func() Stables {
		s, err := OpenStable(platform.FS, path)
		require.NoError(t, err)
		return s
	}
	key, other := []byte("CurrentTerm"), []byte("LastVoteCand")
	s := open()
	a, b := s.Group(0), s.Group(1<<24)
	for _, g := range []raft.StableStore{a, b} {
		v, err := g.Get(other)
		require.NoError(t, err)
		require.Empty(t, v)
		n, err := g.GetUint64(key)
		require.NoError(t, err)
		require.Zero(t, n)
	}
	value := []byte("node1")
	require.NoError(t, a.Set(other, value))
	value[4] = '2'
	require.NoError(t, a.SetUint64(key, 7))
	require.NoError(t, a.SetUint64(key, 1<<60))
	require.NoError(t, b.SetUint64(key, 8))
	require.NoError(t, s.Close())

	s = open()
	a, b = s.Group(0), s.Group(1<<24)
	n, err := a.GetUint64(key)
	require.NoError(t, err)
	require.EqualValues(t, uint64(1<<60), n)
	n, err = b.GetUint64(key)
	require.NoError(t, err)
	require.EqualValues(t, 8, n)
	v, err := a.Get(other)
	require.NoError(t, err)
	require.Equal(t, "node1", string(v))
	v, err = b.Get(other)
	require.NoError(t, err)
	require.Empty(t, v)
	_, err = a.GetUint64(other)
	require.ErrorIs(t, err, ErrCorrupt)
	require.NoError(t, s.Close())
	require.NoFileExists(t, path+".new")

	s = open()
	_, err = OpenStable(platform.FS, path)
	require.ErrorContains(t, err, path, "in use")
	g := s.Group(0)
	require.NoError(t, s.Close())
	require.ErrorIs(t, g.SetUint64([]byte("CurrentTerm"), 9), ErrClosed)
	_, err = g.Get([]byte("CurrentTerm"))
	require.ErrorIs(t, err, ErrClosed)

	_, err = OpenStable(platform.FS, filepath.Join(path, "not a directory"))
	require.Error(t, err)
}

// TestStableDamage flips bits of a closed file, and of its seal.
func TestStableDamage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "stable")
	s, err := OpenStable(platform.FS, path)
	require.NoError(t, err)
	require.NoError(t, s.Group(1).SetUint64([]byte("CurrentTerm"), 7))
	require.NoError(t, s.Close())
	require.NoError(t, CheckStable(vfs.Default, path))
	rng := testkit.Seeded(t)
	for _, name := range []string{path, path + ".seal"} {
		good, err := os.ReadFile(name)
		require.NoError(t, err)
		for range 100 {
			bad := append([]byte(nil), good...)
			bit := rng.IntN(8 * len(bad))
			bad[bit/8] ^= 1 << (bit % 8)
			require.NoError(t, os.WriteFile(name, bad, 0o600))
			_, err := OpenStable(platform.FS, path)
			require.ErrorIs(t, err, ErrCorrupt, "bit %d of %s", bit, name)
			require.ErrorContains(t, err, filepath.Base(path))
			require.ErrorIs(t, CheckStable(vfs.Default, path), ErrCorrupt)
		}
		require.NoError(t, os.WriteFile(name, good, 0o600))
	}
	s, err = OpenStable(platform.FS, path)
	require.NoError(t, err)
	term, err := s.Group(1).GetUint64([]byte("CurrentTerm"))
	require.NoError(t, err)
	require.Equal(t, uint64(7), term)
	require.NoFileExists(t, path+".seal", "a crash must not meet it")
	require.NoError(t, s.Close())
}
