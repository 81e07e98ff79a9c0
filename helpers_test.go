package codeq_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// named returns copies of a task with the names as payloads.
func named(like codeq.Task, names ...string) []codeq.Task {
	tasks := make([]codeq.Task, len(names))
	for i, name := range names {
		tasks[i] = like
		tasks[i].Payload = []byte(name)
	}
	return tasks
}

// forShards runs a test in fake time for queues of one shard and of three.
func forShards(t *testing.T, test func(t *testing.T, q *codeq.Queue)) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			queuetest.Bubble(t, codeq.Options{Shards: shards, MaxAttempts: 1000, WindowTasks: 8}, test)
		})
	}
}

// child runs a test of this program in a process of its own, with env. It returns when the test
// reports that it is ready. kill ends the process at once, and end waits until the test finishes.
func child(t *testing.T, test, env string) (kill, end func()) {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, "-test.run=^"+test+"$")
	cmd.Env, cmd.Stderr = append(os.Environ(), env), os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // no effect after its end
	lines := bufio.NewScanner(out)
	ready := false
	for !ready && lines.Scan() {
		ready = lines.Text() == lockChildSays
	}
	require.True(t, ready, "the child does what it was told")
	kill = func() {
		require.NoError(t, cmd.Process.Kill())
		_ = cmd.Wait()
		_ = in.Close()
	}
	end = func() {
		require.NoError(t, in.Close())
		for lines.Scan() {
		}
		require.NoError(t, cmd.Wait())
	}
	return kill, end
}
