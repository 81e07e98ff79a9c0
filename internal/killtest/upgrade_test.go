//go:build !nextformat

package killtest

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/manifest"
	"codeq/internal/testkit"
)

// nextBuild is the test binary of a build with the next format.
func nextBuild(t *testing.T) string {
	build := filepath.Join(t.TempDir(), "next.test")
	out, err := exec.Command("go", "test", "-c", "-tags=nextformat", "-ldflags=-s -w", "-o", build, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return build
}

// run starts a child of a build that produces tasks in a directory, and waits until the child has
// reported some.
func run(t *testing.T, build, dir string) *child {
	t.Helper()
	some := make(chan error, 1)
	c := start(t, command(t, build, "crash", crashConfig{dir, codeq.DurabilityProcess}), func(out io.Reader) {
		_, err := io.ReadFull(out, make([]byte, 100*nodeEventLen))
		some <- err
		_, _ = io.Copy(io.Discard, out)
	})
	require.NoError(t, <-some)
	return c
}

// TestBuildsBeside: two builds exclude each other from a directory, in both orders, also after the
// removal of its LOCK. The build with the next format raises the directory; then the other build
// refuses it, also for reading.
func TestBuildsBeside(t *testing.T) {
	testkit.OnlyLong(t, "a second build")
	t.Parallel()
	next, this, dir := nextBuild(t), thisBuild(t), filepath.Join(t.TempDir(), "queue")
	refuses := func(build, why string) {
		t.Helper()
		out, err := command(t, build, "crash", crashConfig{dir, codeq.DurabilityProcess}).CombinedOutput()
		require.Error(t, err)
		require.Contains(t, string(out), why)
	}
	owner := run(t, this, dir)
	defer owner.kill() // if the test fails
	refuses(next, fmt.Sprint("process ", owner.Process.Pid))
	require.NoError(t, os.Remove(filepath.Join(dir, manifest.LockName)))
	refuses(next, fmt.Sprint("process ", owner.Process.Pid))
	owner.kill()

	r, err := codeq.OpenReadOnly(dir, nil)
	require.NoError(t, err)
	refuses(next, "directory is locked")
	require.NoError(t, r.Close())
	raised := run(t, next, dir)
	raised.kill()
	_, err = codeq.Open(dir, nil)
	require.ErrorIs(t, err, codeq.ErrFormat)
	require.ErrorContains(t, err, "open it with a version that knows it")
	_, err = codeq.OpenReadOnly(dir, nil)
	require.ErrorIs(t, err, codeq.ErrFormat)
	run(t, next, dir).kill()
}

// TestUpgrade: a cluster under load loses nothing while nodes of the build with the next format
// replace its nodes one after the other. One node goes back to the old build in between. After the
// last replacement, the shards rise to the next format; then this build refuses the directory of a
// node.
func TestUpgrade(t *testing.T) {
	testkit.OnlyLong(t, "a second build, and many elections")
	older, newer := thisBuild(t), nextBuild(t) // before other tests of failovers begin
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
			require.EqualValues(t, manifest.Format, format)
		}
		c.mu.Unlock()
		replace(node, newer)
	}
	c.wait("all shards have risen", 20*time.Second, func() bool {
		for node := range c.processes {
			if c.formats[node] != manifest.Format+1 {
				return false
			}
		}
		return true
	})

	c.miss(0, c.kill)
	out, err := command(t, older, "node", c.config(0)).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), fmt.Sprintf("unknown storage format: %d, this version knows", manifest.Format+1))
	c.start(0)
	c.finish()
	t.Logf("%d elections, %d tasks acknowledged, %d completed", c.elections, len(c.produced), len(c.completed))
}
