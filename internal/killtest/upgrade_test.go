package killtest

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/manifest"
	"codeq/internal/testkit"
)

// olderFile names the commit of the older build: the last one whose nodes know the format before
// this one, and no later. Its test binary runs nodes as this one does.
const olderFile = "testdata/older"

// olderBuild is the test binary of the older build. It is built from the history of this
// repository.
func olderBuild(t *testing.T) string {
	named, err := os.ReadFile(olderFile)
	require.NoError(t, err)
	commit := strings.TrimSpace(string(named))
	dir := t.TempDir()
	run := func(where string, command ...string) {
		cmd := exec.Command(command[0], command[1:]...)
		cmd.Dir = where
		cmd.Env = append(os.Environ(), "GIT_INDEX_FILE="+filepath.Join(dir, "index"))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("the older build, commit %s in %s, cannot be made; it needs git, and a clone with its history "+
				"(git fetch --unshallow): %s: %v\n%s", commit, olderFile, strings.Join(command, " "), err, out)
		}
	}
	source, build := filepath.Join(dir, "source"), filepath.Join(dir, "older.test")
	run("", "git", "read-tree", commit)
	run("../..", "git", "checkout-index", "--all", "--prefix="+source+"/")
	// Without their paths, packages are in the cache of builds the next time.
	run(source, "go", "test", "-c", "-trimpath", "-ldflags=-s -w", "-o", build, "./internal/killtest")
	return build
}

// TestOlderBuildBeside: the older build and this one exclude each other, whichever has a directory
// open first, also if its LOCK is removed.
func TestOlderBuildBeside(t *testing.T) {
	if testing.Short() {
		t.Skip("a build")
	}
	t.Parallel()
	older, dir := olderBuild(t), filepath.Join(t.TempDir(), "queue")
	owner := crashCommand(older, dir, codeq.DurabilityProcess)
	out, err := owner.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, owner.Start())
	defer func() { _ = owner.Process.Kill() }() // nothing if it has ended
	_, err = io.ReadFull(out, make([]byte, 100*crashEventLen))
	require.NoError(t, err)
	go func() { _, _ = io.Copy(io.Discard, out) }()
	refused := func() {
		t.Helper()
		_, err := codeq.Open(dir, nil)
		require.ErrorIs(t, err, codeq.ErrLocked)
		require.ErrorContains(t, err, fmt.Sprint("process ", owner.Process.Pid))
		_, err = codeq.OpenReadOnly(dir, nil)
		require.ErrorIs(t, err, codeq.ErrLocked)
	}
	refused()
	require.NoError(t, os.Remove(filepath.Join(dir, manifest.LockName)))
	refused()
	require.NoError(t, owner.Process.Kill())
	require.Error(t, owner.Wait())

	// This build reads the format of the older one; when it has opened the queue, it is another.
	r, err := codeq.OpenReadOnly(dir, nil)
	require.NoError(t, err)
	text, err := crashCommand(older, dir, codeq.DurabilityProcess).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(text), "directory is locked")
	require.NoError(t, r.Close())
	q, err := codeq.Open(dir, nil)
	require.NoError(t, err)
	text, err = crashCommand(older, dir, codeq.DurabilityProcess).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(text), "unknown storage format")
	require.NoError(t, q.Close())
}

// TestUpgrade: a cluster under load, whose nodes are replaced one after the other by those of this
// build, loses nothing. One of them goes back in between. When all have been replaced, the shards
// rise to the format of this build; then the older build refuses the directory of a node.
func TestUpgrade(t *testing.T) {
	if testing.Short() {
		t.Skip("a build, and many elections")
	}
	older, newer := olderBuild(t), thisBuild(t) // before other tests of failovers begin
	t.Parallel()
	c := startNodes(t, testkit.Seeded(t), codeq.DurabilityProcess, older)
	replace := func(node int, build string) {
		t.Helper()
		c.waitForLeaders()
		c.mu.Lock()
		before := c.caughtUp[node]
		c.mu.Unlock()
		c.miss(node, c.kill)
		c.build = build
		c.start(node)
		c.wait("the node has caught up", 20*time.Second, func() bool { return c.caughtUp[node] > before })
	}
	replace(0, newer)
	replace(0, older)
	for node := range c.processes {
		c.mu.Lock()
		for _, format := range c.formats {
			require.EqualValues(t, manifest.OldestOfNodes, format)
		}
		c.mu.Unlock()
		replace(node, newer)
	}
	c.wait("all shards have risen", 20*time.Second, func() bool {
		for node := range c.processes {
			if c.formats[node] != manifest.Format {
				return false
			}
		}
		return true
	})

	c.miss(0, c.kill)
	out, err := c.nodeCommand(older, c.config(0)).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), fmt.Sprintf("unknown storage format: %d, this version knows", manifest.Format))
	c.start(0)
	c.finish()
	t.Logf("%d elections, %d tasks acknowledged, %d completed", c.elections, len(c.produced), len(c.completed))
}
