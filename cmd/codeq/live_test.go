//go:build !windows

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/stretchr/testify/require"

	"codeq"
)

// terminal is a process of the command in a pseudo terminal.
type terminal struct {
	t     *testing.T
	c     *exec.Cmd
	pty   *os.File
	mu    sync.Mutex
	shown bytes.Buffer
	more  chan struct{} // has an element when something was shown
	ended chan struct{} // closed when the terminal is
}

func inTerminal(t *testing.T, args ...string) *terminal {
	t.Helper()
	c := exec.Command(os.Args[0], args...)
	c.Env = append(os.Environ(), "CODEQ_TEST_MAIN=1", "TERM=xterm")
	p, err := pty.StartWithSize(c, &pty.Winsize{Rows: 12, Cols: 100})
	require.NoError(t, err)
	x := &terminal{t: t, c: c, pty: p, more: make(chan struct{}, 1), ended: make(chan struct{})}
	go func() {
		defer close(x.ended)
		b := make([]byte, 4096)
		for {
			n, err := p.Read(b)
			x.mu.Lock()
			x.shown.Write(b[:n])
			x.mu.Unlock()
			select {
			case x.more <- struct{}{}:
			default:
			}
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = p.Close()
		<-x.ended
	})
	return x
}

func (x *terminal) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.shown.String()
}

// expect waits until the terminal shows a text that matches, after the last match.
func (x *terminal) expect(pattern string) {
	x.t.Helper()
	late := time.After(30 * time.Second)
	re := regexp.MustCompile(pattern)
	for ended := false; ; {
		x.mu.Lock()
		at := re.FindIndex(x.shown.Bytes())
		if at != nil {
			x.shown.Next(at[1])
		}
		x.mu.Unlock()
		if at != nil {
			return
		}
		if ended {
			x.t.Fatalf("it has ended; %q was expected: %.4000q", pattern, x.text())
		}
		select {
		case <-x.more:
		case <-x.ended:
			ended = true // it may have shown it before
		case <-late:
			x.t.Fatalf("%q was expected: %.4000q", pattern, x.text())
		}
	}
}

func (x *terminal) press(keys string) {
	x.t.Helper()
	_, err := x.pty.WriteString(keys)
	require.NoError(x.t, err)
}

// TestTopInTerminal: top shows the queue of another process live, and reacts to keys.
func TestTopInTerminal(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "q")
	startWorker(t, dir)
	q, err := codeq.OpenLocal(t.Context(), dir)
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	x := inTerminal(t, "-dir", dir, "top", "-interval", "20ms")
	x.expect(`\x1b\[\?1049h`)
	x.expect(`served`)
	x.expect(`mail +0 +0`)
	x.expect(`worker.*works`)
	x.expect(`by queue`)
	produce(t, q, codeq.Task{Queue: "new " + hostile})
	x.expect(`new \\x1b\[2J\\x1b\]0;owned\\x07\\u202egnp\\\.\.\.`)
	for range len(columns) { // an arrow, and one order after the other
		x.press("\x1b[Bs")
		x.expect("by ")
	}
	require.NotContains(t, x.text(), "\x1b]0;")
	x.press("q")
	x.expect(`\x1b\[\?25h\x1b\[\?1049l`)
	<-x.ended
	require.NoError(t, x.c.Wait())

	x = inTerminal(t, "-dir", dir, "top")
	x.expect(`by queue`)
	x.press("\x03") // Ctrl-C is a key
	x.expect(`\x1b\[\?1049l`)
	require.NoError(t, x.c.Wait())
	x = inTerminal(t, "-dir", dir, "top")
	x.expect(`by queue`)
	require.NoError(t, x.c.Process.Signal(syscall.SIGTERM))
	x.expect(`\x1b\[\?1049l`)
	require.NoError(t, x.c.Wait())
}

// TestTailInTerminal: tail waits for a process, shows its events, and goes on with the next
// process.
func TestTailInTerminal(t *testing.T) {
	dir := newQueue(t, nil)
	x := inTerminal(t, "-dir", dir, "tail")
	x.expect("waiting for one")
	for i := range 2 {
		kill := startWorker(t, dir)
		x.expect("a process serves the queue")
		q, err := codeq.OpenLocal(t.Context(), dir)
		require.NoError(t, err)
		produce(t, q, codeq.Task{Queue: hostile, Tenant: "t"})
		x.expect(`produced .* \\x1b\[2J\\x1b\]0;owned\\x07\\u202egnp\\u009b31m\\r\\n tenant=t`)
		produce(t, q, mail(i))
		x.expect("completed .* mail attempt=1")
		require.NoError(t, q.Close())
		kill()
		x.expect("waiting for one")
	}
	require.NoError(t, x.c.Process.Signal(os.Interrupt))
	<-x.ended
	require.NoError(t, x.c.Wait())
	require.NotContains(t, x.text(), "\x1b")
}

// TestRawInTerminal: the bytes of a payload are not written to a terminal.
func TestRawInTerminal(t *testing.T) {
	var id codeq.ID
	dir := newQueue(t, func(_ context.Context, q *codeq.Queue) {
		id = produce(t, q, codeq.Task{Queue: "q", Payload: []byte(hostileBytes)})
	})
	x := inTerminal(t, "-dir", dir, "get", "-raw", id.String())
	x.expect("redirect it")
	<-x.ended
	require.NotContains(t, x.text(), "\x1b")
}

// TestTop: without a terminal, each sample follows the one before; -json has a document for each.
func TestTop(t *testing.T) {
	everywhere(t, fillMixed(t), func(t *testing.T, at ...string) {
		out := ok(t, with(at, "top", "-n", "2", "-interval", "10ms", "-sort", "ready")...)
		require.Equal(t, 2, strings.Count(out, "QUEUE"))
		require.Contains(t, out, "mail")
		out = ok(t, with(at, "-json", "top", "-n", "3", "-interval", "10ms")...)
		n := 0
		for line := range strings.Lines(out) {
			var s sample
			require.NoError(t, json.Unmarshal([]byte(line), &s))
			require.Len(t, s.Queues, 4)
			n++
		}
		require.Equal(t, 3, n)
		require.Equal(t, exitUsage, call(t, with(at, "top", "-sort", "x")...).code)
		require.Equal(t, exitUsage, call(t, with(at, "top", "-interval", "1ms")...).code)
		require.Equal(t, exitEnded, call(t, with(at, "-timeout", "50ms", "top", "-interval", "10ms")...).code)
	})
}

// TestTopLetsOthersOpen: while top shows a closed directory, a worker may open it. Then top shows
// the worker, and goes on after its end.
func TestTopLetsOthersOpen(t *testing.T) {
	dir := newQueue(t, fillMixed(t))
	tg := &target{dir: dir, app: &app{now: time.Now}}
	s := &sampler{t: tg}
	defer s.close()
	take := func(kind string) {
		t.Helper()
		n, err := s.take(t.Context())
		require.NoError(t, err)
		require.Equal(t, kind, n.At.Kind)
		require.Empty(t, n.Error)
	}
	take(whereClosed)
	_, stop := serve(t, dir)
	take(whereServed)
	take(whereServed)
	stop()
	take(whereClosed)
	require.NoError(t, os.Rename(dir, dir+"x"))
	n, err := s.take(t.Context())
	require.NoError(t, err)
	require.NotEmpty(t, n.Error, "the last numbers, and why there are no newer ones")
}

// TestTail: tail shows events of an open queue, and selects them by kind and queue.
func TestTail(t *testing.T) {
	dir := newQueue(t, nil)
	q, _ := serve(t, dir)
	for _, at := range [][]string{{"-dir", dir}, {"-url", newDashboard(t, q).URL + "/admin/"}} {
		ctx, stop := context.WithCancel(t.Context())
		produced := make(chan struct{})
		go func() { // until tail has begun and seen some
			defer close(produced)
			for ctx.Err() == nil {
				_, _ = q.Produce(ctx, mail(0))
				_, _ = q.Produce(ctx, codeq.Task{Queue: "other"})
			}
		}()
		out := ok(t, with(at, "-json", "tail", "-n", "5", "-queue", "mail", "-kind", "produced")...)
		n := 0
		for line := range strings.Lines(out) {
			var e codeq.Event
			require.NoError(t, json.Unmarshal([]byte(line), &e))
			if e.Kind != 0 {
				require.Equal(t, "mail", e.Queue)
				n++
			}
		}
		require.Equal(t, 5, n)
		if at[0] == "-url" {
			require.Contains(t, out, `{"Lost":7}`)
		}
		stop()
		<-produced
		require.Equal(t, exitUsage, call(t, with(at, "tail", "-kind", "x")...).code)
		require.Equal(t, exitEnded, call(t, with(at, "-timeout", "20ms", "tail", "-queue", "nothing")...).code)
	}
}
