//go:build unix

package codeq_test

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/manifest"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestOpenRefusesFIFO: no verb waits for the other end of a FIFO, as the path, the manifest or
// LOCK.
func TestOpenRefusesFIFO(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	fifo, dir := filepath.Join(root, "fifo"), filepath.Join(root, "queue")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	cluster := &codeq.Options{Cluster: &codeq.Cluster{Node: "a", Listen: "127.0.0.1:1"}}
	refused := func(dir string, want error) {
		t.Helper()
		verbs := map[string]func() error{
			"Open":         func() error { _, err := codeq.Open(dir, nil); return err },
			"OpenReadOnly": func() error { _, err := codeq.OpenReadOnly(dir, nil); return err },
			"Verify":       func() error { _, err := codeq.Verify(dir, nil); return err },
			"Repair": func() error {
				_, err := codeq.Verify(dir, &codeq.VerifyOptions{Repair: true})
				return err
			},
			"RecoverCluster": func() error { return codeq.RecoverCluster(dir, cluster) },
			"OpenLocal":      func() error { _, err := codeq.OpenLocal(t.Context(), dir); return err },
		}
		for verb, call := range verbs {
			err := call()
			require.Error(t, err, verb)
			if want != nil {
				require.ErrorIs(t, err, want, verb)
			}
		}
	}
	refused(fifo, codeq.ErrNotQueue)
	q, err := codeq.Open(dir, nil)
	require.NoError(t, err)
	require.ErrorIs(t, q.Checkpoint(t.Context(), fifo), fs.ErrExist)
	require.NoError(t, q.Close())
	path := filepath.Join(dir, manifest.Name)
	text := testkit.ReadFile(t, path)
	require.NoError(t, os.Remove(path))
	require.NoError(t, syscall.Mkfifo(path, 0o600))
	refused(dir, codeq.ErrNotQueue)
	require.NoError(t, os.Remove(path))
	testkit.WriteFile(t, path, text)
	path = filepath.Join(dir, manifest.LockName)
	require.NoError(t, os.Remove(path))
	require.NoError(t, syscall.Mkfifo(path, 0o600))
	refused(dir, nil)
}

// TestOpenWhateverUmask: with any umask, only the owner can enter directories and read files.
func TestOpenWhateverUmask(t *testing.T) { // not parallel: a umask is for the whole process
	root := t.TempDir()
	dir := filepath.Join(root, "a", "b", "queue")
	defer syscall.Umask(syscall.Umask(0o777))
	q, err := codeq.Open(dir, &codeq.Options{Shards: 2})
	require.NoError(t, err)
	_, err = q.Produce(t.Context(), codeq.Task{Queue: "a"})
	require.NoError(t, err)
	require.NoError(t, q.Checkpoint(t.Context(), filepath.Join(root, "copy")))
	require.NoError(t, q.Close())
	requirePrivate(t, filepath.Join(root, "a"))
	requirePrivate(t, filepath.Join(root, "copy"))
}

// TestOpenAsRoot: files that root creates in the queue of another user belong to that user.
func TestOpenAsRoot(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root makes files for others")
	}
	const somebody = 65534
	root := t.TempDir()
	for name, opts := range map[string]*codeq.Options{
		"empty": {Shards: 2}, "queue": {Shards: 2},
		"node": {Shards: 2, Cluster: &codeq.Cluster{Node: "a", Listen: "127.0.0.1:0", Advertise: "127.0.0.1:1"}},
	} {
		dir := filepath.Join(root, name)
		require.NoError(t, os.Mkdir(dir, 0o700))
		if name == "queue" {
			queuetest.ClosedQueue(t, dir, 2)
		}
		require.NoError(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, _ error) error {
			return os.Chown(path, somebody, somebody)
		}))
		for range 2 {
			q, err := codeq.Open(dir, opts)
			require.NoError(t, err)
			require.NoError(t, q.WaitReady(t.Context()))
			_, err = q.Produce(t.Context(), codeq.Task{Queue: "a"})
			require.NoError(t, err)
			require.NoError(t, q.Close())
		}
		_, err := codeq.Verify(dir, &codeq.VerifyOptions{Repair: true})
		require.NoError(t, err)
		require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			require.NoError(t, err)
			info, err := d.Info()
			require.NoError(t, err)
			st := info.Sys().(*syscall.Stat_t)
			require.Equal(t, [2]uint32{somebody, somebody}, [2]uint32{st.Uid, st.Gid}, path)
			return nil
		}))
	}
	theirs := filepath.Join(root, "theirs")
	require.NoError(t, os.Mkdir(theirs, 0o700))
	require.NoError(t, os.Chown(theirs, somebody, somebody))
	queuetest.ClosedQueue(t, filepath.Join(theirs, "queue"), 1)
	info, err := os.Stat(filepath.Join(theirs, "queue"))
	require.NoError(t, err)
	require.Zero(t, info.Sys().(*syscall.Stat_t).Uid, "a queue of root's is root's, wherever it is")
}

// TestLocalConnections: of ten thousand connections some are accepted, and the others get the
// reason why not. The process goes on meanwhile, and accepts new connections when those have ended.
func TestLocalConnections(t *testing.T) {
	var limit syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	n := min(testkit.Sized(1000, 10_000), int(limit.Cur)-1000)
	s := openServed(t, t.TempDir(), codeq.Options{Shards: 1})
	socket, stop := s.serve(t)
	first := s.client(t)
	conns := make([]net.Conn, n)
	for i := range conns {
		c, err := net.Dial("unix", socket)
		for errors.Is(err, syscall.EAGAIN) { // more come than are accepted
			runtime.Gosched()
			c, err = net.Dial("unix", socket)
		}
		require.NoError(t, err)
		conns[i] = c
		if i%1000 == 0 {
			queuetest.Produce(t, s.Queue, codeq.Task{Queue: "a"})
		}
	}
	turnedAway := 0
	for _, c := range conns[100:] {
		text, err := io.ReadAll(c)
		require.NoError(t, err)
		require.Contains(t, string(text), "there are 100 connections")
		turnedAway++
	}
	require.Positive(t, turnedAway)
	queuetest.Produce(t, first, codeq.Task{Queue: "a"})
	_, err := codeq.OpenLocal(t.Context(), s.dir)
	require.ErrorIs(t, err, codeq.ErrNotServed)
	require.ErrorContains(t, err, "there are 100 connections")
	for _, c := range conns {
		require.NoError(t, c.Close())
	}
	for { // until the process has noticed
		c, err := codeq.OpenLocal(t.Context(), s.dir)
		if err == nil {
			require.NoError(t, c.Close())
			break
		}
		require.ErrorIs(t, err, codeq.ErrNotServed)
	}
	require.NoError(t, stop())
}

// Open refuses files of a queue that was not closed if they were copied one after the other: they
// may be of different moments. AcceptCopy is for an application that knows that the files did not
// change meanwhile, because the process had died.
func ExampleErrCopied() {
	root, err := os.MkdirTemp("", "")
	check(err)
	defer os.RemoveAll(root)
	q, err := codeq.Open(filepath.Join(root, "queue"), nil)
	check(err)
	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("welcome")})
	check(err)

	moved := filepath.Join(root, "moved") // as by cp -r; nothing writes here at this moment
	check(os.CopyFS(moved, os.DirFS(filepath.Join(root, "queue"))))
	check(q.Close())

	_, err = codeq.Open(moved, nil)
	fmt.Println("refused:", errors.Is(err, codeq.ErrCopied))

	accepted, err := codeq.Open(moved, &codeq.Options{AcceptCopy: true}) // the first time; then it is a queue of its own
	check(err)
	counts, err := accepted.Stats(ctx)
	check(err)
	fmt.Println("ready:", counts["mail"].Ready)
	check(accepted.Close())
	// Output:
	// refused: true
	// ready: 1
}
