package main

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestCompletion: completions are verbs, flags, and names of queues that no shell evaluates.
func TestCompletion(t *testing.T) {
	dir := newQueue(t, func(_ context.Context, q *codeq.Queue) {
		for _, name := range []string{"mail", "a-b.c_1", "$(reboot)", "`x`", "a b", "-rf", "x:y", hostile, "日本"} {
			produce(t, q, codeq.Task{Queue: name})
		}
	})
	for _, shell := range []string{"bash", "zsh", "fish", "pwsh"} {
		script := call(t, "completion", shell)
		require.Zero(t, script.code)
		require.Contains(t, script.out, "generate-shell-completion")
	}
	const ask = "--generate-shell-completion"
	asked, err := process(dir, ask).Output() // the library looks at os.Args
	require.NoError(t, err)
	out := string(asked)
	for _, verb := range []string{"info", "redrive", "cluster"} {
		require.Contains(t, out, verb)
	}
	require.Contains(t, ok(t, "-dir", dir, "ls", "--st", ask), "--state")
	require.Equal(t, "a-b.c_1\nmail\n", ok(t, "-dir", dir, "pause", ask))
	require.Contains(t, ok(t, "-dir", dir, "pause", "--dry", ask), "--dry-run")
	require.Empty(t, ok(t, "-dir", dir+"x", "pause", ask), "no queue")
}
