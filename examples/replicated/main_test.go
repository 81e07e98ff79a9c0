package main

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/testkit"
)

// childEnv makes the test binary the command itself.
const childEnv = "REPLICATED_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) == "" {
		os.Exit(m.Run())
	}
	main()
}

func TestKills(t *testing.T) {
	t.Setenv(childEnv, "1")
	var out bytes.Buffer
	c := config{
		dir: filepath.Join(t.TempDir(), "new"), port: testkit.FreePorts(t, rand.IntN, nodes), rate: 100, workers: 8,
		length: 3 * time.Second, kill: time.Second,
	}
	lost, err := run(t.Context(), c, &out)
	require.NoError(t, err, out.String())
	require.False(t, lost, out.String())
	require.Regexp(t, `killed node-\d; all shards were served again after`, out.String())
	first, err := compare(&c)
	require.NoError(t, err)
	require.Greater(t, first.acked, 200, out.String())

	// The nodes go on with what they have.
	c.length, c.kill = time.Second, 0
	lost, err = run(t.Context(), c, &out)
	require.NoError(t, err, out.String())
	require.False(t, lost, out.String())
	both, err := compare(&c)
	require.NoError(t, err)
	require.Greater(t, both.acked, first.acked)
}

func TestNodeEnds(t *testing.T) {
	t.Setenv(childEnv, "1")
	c := config{dir: t.TempDir(), port: testkit.FreePorts(t, rand.IntN, nodes), rate: 1, workers: 1, length: time.Second}
	require.NoError(t, os.WriteFile(c.path(2, ""), nil, 0o666), "a file in the place of a directory")
	_, err := run(t.Context(), c, new(bytes.Buffer))
	require.ErrorContains(t, err, "node-2 has ended")
}

func TestCompare(t *testing.T) {
	c := config{dir: t.TempDir()}
	note := func(i int, what string, lines ...string) {
		n, err := openNotes(c.path(i, what))
		require.NoError(t, err)
		for _, line := range lines {
			require.NoError(t, n.add(line))
		}
		require.NoError(t, n.Close())
	}
	note(1, ackedNotes, "a", "b")
	note(2, ackedNotes, "c")
	note(2, doneNotes, "a", "c", "d")
	note(3, doneNotes, "c", "c")
	got, err := compare(&c)
	require.NoError(t, err)
	require.Equal(t, tally{acked: 3, lost: 1, first: "b", done: 3, again: 2, unacked: 1}, got)
	require.Equal(t, "3 tasks acknowledged: 1 lost (such as b); "+
		"3 done, of which 1 were not acknowledged; 2 times one was done again", got.String())
}
