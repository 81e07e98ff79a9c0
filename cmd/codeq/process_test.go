package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// startWorker starts a process that opens a queue, serves it, and reports that. The process ends
// with its standard input.
func startWorker(t *testing.T, dir string) (kill func()) {
	t.Helper()
	c := exec.Command(os.Args[0], "-test.run=^TestWorkerProcess$")
	c.Env = append(os.Environ(), "CODEQ_TEST_WORKER="+dir)
	in, err := c.StdinPipe()
	require.NoError(t, err)
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	c.Stderr = os.Stderr
	require.NoError(t, c.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "served\n", line)
	t.Cleanup(func() {
		_ = in.Close()
		_ = c.Wait()
	})
	return func() { require.NoError(t, c.Process.Kill()); _ = c.Wait() }
}

// TestWorkerProcess is the process of startWorker.
func TestWorkerProcess(t *testing.T) {
	dir := os.Getenv("CODEQ_TEST_WORKER")
	if dir == "" {
		t.Skip("it is the process of other tests")
	}
	q, _ := serve(t, dir)
	produce(t, q, mail(0))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	mux := new(codeq.Mux)
	codeq.Handle(mux, "mail", func(context.Context, *codeq.Job[[]byte]) error { return nil })
	go func() { ended <- q.Run(ctx, mux, &codeq.RunOptions{Name: "worker", Concurrency: 2}) }()
	require.Eventually(t, func() bool {
		workers, err := q.Workers(ctx)
		return err == nil && len(workers) == 1
	}, time.Minute, time.Millisecond)
	fmt.Println("served")
	_, _ = io.Copy(io.Discard, os.Stdin)
	stop()
	require.NoError(t, <-ended)
}

func killedQueue(t *testing.T) (dir string) {
	dir = filepath.Join(t.TempDir(), "q")
	startWorker(t, dir)()
	return dir
}

// process is the command as a process of its own.
func process(dir string, args ...string) *exec.Cmd {
	c := exec.Command(os.Args[0], args...)
	c.Env = append(os.Environ(), "CODEQ_TEST_MAIN=1", "CODEQ_DIR="+dir)
	return c
}

// TestProcess: the command runs in a process of its own, and exits with the code of run.
func TestProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "q")
	startWorker(t, dir)
	out, err := process(dir, "-json", "info").Output()
	require.NoError(t, err)
	var r infoResult
	require.NoError(t, json.Unmarshal(out, &r))
	require.Equal(t, whereServed, r.At.Kind)
	require.Equal(t, "worker", r.Workers[0].Name)
	var exit *exec.ExitError
	require.ErrorAs(t, process(dir, "get", codeq.ID{1}.String()).Run(), &exit)
	require.Equal(t, exitNotFound, exit.ExitCode())
}
