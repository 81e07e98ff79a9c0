package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestMain makes the test binary the command, for tests of several processes.
func TestMain(m *testing.M) {
	if os.Getenv("CODEQ_TEST_MAIN") != "" {
		main()
	}
	flag.Parse()
	os.Exit(m.Run())
}

// done is the result of a run of the command.
type done struct {
	code     int
	out, err string
}

// call runs the command with nothing in its environment.
func call(t *testing.T, args ...string) done {
	t.Helper()
	return run(t.Context(), nil, nil, args...)
}

// run runs the command.
func run(ctx context.Context, env map[string]string, in []byte, args ...string) done {
	var out, errs locked
	a := &app{
		in: bytes.NewReader(in), out: &out, err: &errs, env: func(name string) string { return env[name] },
		now: time.Now, loc: time.UTC,
	}
	code := a.run(ctx, append([]string{"codeq"}, args...))
	return done{code, out.String(), errs.String()}
}

// ok runs the command, requires success, and returns its output.
func ok(t *testing.T, args ...string) string {
	t.Helper()
	d := call(t, args...)
	require.Zero(t, d.code, "%v: %s%s", args, d.out, d.err)
	requireHarmless(t, d)
	return d.out
}

// requireHarmless: no output can control a terminal.
func requireHarmless(t *testing.T, d done) {
	t.Helper()
	for _, text := range []string{d.out, d.err} {
		require.True(t, isSafe(strings.ReplaceAll(text, "\n", "")), "%q", text)
	}
}

// decoded runs the command with -json, and decodes the document that it writes.
func decoded[T any](t *testing.T, args ...string) (v T) {
	t.Helper()
	out := ok(t, append([]string{"-json"}, args...)...)
	require.Equal(t, 1, strings.Count(out, "\n"), out)
	require.NoError(t, json.Unmarshal([]byte(out), &v), out)
	return v
}

// locked is a buffer that several goroutines use.
type locked struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *locked) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// hostile controls a terminal: it clears the screen, sets the title, and reverses the direction of
// the text.
const hostile = "\x1b[2J\x1b]0;owned\x07\u202egnp\u009b31m\r\n"

// hostileBytes is also invalid UTF-8.
const hostileBytes = hostile + "\xff"

// newQueue makes a directory with a queue. fill adds its tasks.
func newQueue(t *testing.T, fill func(context.Context, *codeq.Queue)) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "q")
	q, err := codeq.Open(dir, &codeq.Options{Shards: 2, Retention: time.Hour})
	require.NoError(t, err)
	if fill != nil {
		fill(t.Context(), q)
	}
	require.NoError(t, q.Close())
	return dir
}

// serve opens a directory and serves it, until the test ends or stop is called.
func serve(t *testing.T, dir string) (q *codeq.Queue, stop func()) {
	t.Helper()
	began := make(chan struct{})
	q, err := codeq.Open(dir, &codeq.Options{Logger: slog.New(serving{slog.DiscardHandler, began}), Retention: time.Hour})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- q.ServeLocal(context.Background()) }()
	select {
	case <-began:
	case err := <-ended:
		t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		require.NoError(t, q.Close())
		require.ErrorIs(t, <-ended, codeq.ErrClosed)
	})
	t.Cleanup(stop)
	return q, stop
}

// serveNode serves a queue until its Close, and returns when a program can call it.
func serveNode(t *testing.T, q *codeq.Queue, dir string) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- q.ServeLocal(context.Background()) }()
	for {
		other, err := codeq.OpenLocal(t.Context(), dir)
		if err == nil {
			require.NoError(t, other.Close())
			return
		}
		select {
		case err := <-ended:
			t.Fatal(err)
		default:
			runtime.Gosched()
		}
	}
}

// serving tells when a queue is served.
type serving struct {
	slog.Handler
	began chan struct{}
}

func (s serving) Enabled(context.Context, slog.Level) bool { return true }

func (s serving) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "serving programs on this machine" {
		close(s.began)
	}
	return nil
}

// produce produces a task.
func produce(t *testing.T, q *codeq.Queue, task codeq.Task) codeq.ID {
	t.Helper()
	id, err := q.Produce(t.Context(), task)
	require.NoError(t, err)
	return id
}

// kill makes a dead letter.
func kill(t *testing.T, q *codeq.Queue, task codeq.Task, cause string) {
	t.Helper()
	id := produce(t, q, task)
	l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{task.Queue}})
	require.NoError(t, err)
	require.Equal(t, id, l.ID)
	require.NoError(t, q.DeadLetter(t.Context(), l.Receipt, errors.New(cause)))
}

// everywhere runs a test with a closed directory, and with one that another Queue serves, and with
// one behind a dashboard.
func everywhere(t *testing.T, fill func(context.Context, *codeq.Queue), f func(t *testing.T, at ...string)) {
	t.Helper()
	t.Run("closed", func(t *testing.T) {
		f(t, "-dir", newQueue(t, fill))
	})
	t.Run("served", func(t *testing.T) {
		dir := newQueue(t, fill)
		serve(t, dir)
		f(t, "-dir", dir)
	})
	t.Run("dashboard", func(t *testing.T) {
		dir := newQueue(t, fill)
		q, _ := serve(t, dir)
		f(t, "-url", newDashboard(t, q).URL+"/admin")
	})
}

// with appends arguments.
func with(at []string, args ...string) []string { return append(append([]string{}, at...), args...) }

// settle waits for the next millisecond: a Bulk leaves out changes in the millisecond of its
// beginning.
func settle() {
	for now := time.Now().UnixMilli(); time.Now().UnixMilli() == now; {
		runtime.Gosched()
	}
}

func mail(i int) codeq.Task {
	return codeq.Task{Queue: "mail", Payload: fmt.Appendf(nil, "to %d", i)}
}
