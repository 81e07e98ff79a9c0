package raftlog

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"
)

func testStables(t *testing.T, reopen func() Stables) {
	key, other := []byte("CurrentTerm"), []byte("LastVoteCand")
	s := reopen()
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

	s = reopen()
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
}

func TestMemStable(t *testing.T) {
	var s MemStable
	testStables(t, func() Stables { return &s })
}

func TestStable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "stable")
	require.NoError(t, os.WriteFile(path+".new", []byte("half a file"), 0o600)) // of a crash
	testStables(t, func() Stables {
		s, err := OpenStable(path)
		require.NoError(t, err)
		return s
	})
	require.NoFileExists(t, path+".new")

	s, err := OpenStable(path)
	require.NoError(t, err)
	_, err = OpenStable(path)
	require.ErrorContains(t, err, path, "in use")
	g := s.Group(0)
	require.NoError(t, s.Close())
	require.Error(t, g.SetUint64([]byte("CurrentTerm"), 9))
	_, err = g.Get([]byte("CurrentTerm"))
	require.Error(t, err)

	_, err = OpenStable(filepath.Join(path, "not a directory"))
	require.Error(t, err)
}
