package codeqweb_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// follow opens a stream, and returns its messages; closed at its end.
func follow(t *testing.T, server *httptest.Server, path string) (messages <-chan [2]string, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+path, nil)
	require.NoError(t, err)
	answer, err := server.Client().Do(r)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, answer.StatusCode)
	require.Contains(t, answer.Header.Get("Content-Type"), "text/event-stream")
	all := make(chan [2]string, 100)
	var reading sync.WaitGroup
	reading.Go(func() {
		defer close(all)
		defer answer.Body.Close()
		lines := bufio.NewScanner(answer.Body)
		lines.Buffer(nil, 1<<20)
		var m [2]string
		for lines.Scan() {
			switch text := lines.Text(); {
			case strings.HasPrefix(text, "event: "):
				m[0] = text[7:]
			case strings.HasPrefix(text, "data: "):
				m[1] += text[6:] + "\n"
			case text == "" && m[0] != "":
				select {
				case all <- m:
				case <-ctx.Done():
					return
				}
				m = [2]string{}
			}
		}
	})
	return all, func() { cancel(); reading.Wait() }
}

// next returns the next message of a kind.
func next(t *testing.T, messages <-chan [2]string, kind string) string {
	t.Helper()
	for {
		select {
		case m, ok := <-messages:
			require.True(t, ok, "the stream has ended")
			if m[0] == kind {
				return m[1]
			}
		case <-time.After(20 * time.Second):
			require.FailNow(t, "no message "+kind)
		}
	}
}

// TestLive: the overview, and the page of a queue, follow what happens.
func TestLive(t *testing.T) {
	s, _ := loaded(t, as(codeqweb.Read))
	server := httptest.NewServer(s.d)
	defer server.Close()
	over, stop1 := follow(t, server, "/live?page=overview&order=dead")
	defer stop1()
	queue, stop2 := follow(t, server, "/live?page=queue&name=mail")
	defer stop2()
	other, stop3 := follow(t, server, "/live?page=nonsense")
	defer stop3()
	for !strings.Contains(next(t, over, "live"), `data-queue="mail"`) { // the sample may be a second old
	}
	require.Contains(t, next(t, queue, "live"), `id="count-dead"`)
	next(t, other, "tick")
	s.produce(codeq.Task{Queue: "<new>"})
	for !strings.Contains(next(t, over, "live"), `data-queue="&lt;new&gt;"`) {
	}
	for n := range 7 {
		s.produce(codeq.Task{Queue: "mail", Payload: fmt.Append(nil, n)})
	}
	for !strings.Contains(next(t, queue, "live"), `state=ready">8</a>`) {
	}
}

// TestStreamsEnd: when the queue or the dashboard is closed, streams end, and no goroutine of the
// dashboard is left.
func TestStreamsEnd(t *testing.T) {
	for _, what := range []string{"queue", "dashboard"} {
		t.Run(what, func(t *testing.T) {
			q, err := codeq.Open(t.TempDir(), nil)
			require.NoError(t, err)
			d := codeqweb.Handler(q, as(codeqweb.All))
			s := &site{t, q, d}
			server := httptest.NewServer(d)
			defer server.Close()
			live, stop := follow(t, server, "/live?page=overview")
			defer stop()
			next(t, live, "live")
			events, stopEvents := follow(t, server, "/api/v1/events")
			defer stopEvents()
			s.produce(codeq.Task{Queue: "a"})
			next(t, events, "task")
			require.Equal(t, http.StatusAccepted, s.api(http.MethodPost, "bulk", `{"Action": "cancel", "States": ["ready"], "Rate": 0.01}`, nil))
			if what == "queue" {
				require.NoError(t, q.Close())
			} else {
				require.NoError(t, d.Close())
				defer func() { require.NoError(t, q.Close()) }()
			}
			for range live {
			}
			for m := range events {
				require.Contains(t, []string{"task", "end"}, m[0])
			}
			require.NoError(t, d.Close(), "its goroutines have ended")
			server.Close()
			requireNone(t, "codeqweb.(*sampler)", "codeqweb.(*Dashboard).runBulk", "codeqweb.(*Dashboard).live", "codeqweb.(*Dashboard).copyEvents")
			for _, path := range []string{"/healthz", "/readyz", "/", "/tasks", "/audit", "/live?page=overview", "/api/v1/", "/api/v1/bulk", "/api/v1/events"} {
				require.Equal(t, http.StatusServiceUnavailable, s.do(request(http.MethodGet, path, nil)).Code, path)
			}
		})
	}
}

// requireNone waits until no goroutine has one of these in its stack.
func requireNone(t *testing.T, names ...string) {
	t.Helper()
	require.Eventually(t, func() bool {
		stacks := make([]byte, 1<<20)
		text := string(stacks[:runtime.Stack(stacks, true)])
		for _, name := range names {
			if strings.Contains(text, name) {
				return false
			}
		}
		return true
	}, 10*time.Second, 10*time.Millisecond)
}

// TestEvents: a program gets the events of its filter.
func TestEvents(t *testing.T) {
	s := open(t, codeq.Options{}, &codeqweb.Options{Redact: func(t *codeq.TaskInfo) { t.LastError = strings.ReplaceAll(t.LastError, "secret", "***") }})
	server := httptest.NewServer(s.d)
	defer server.Close()
	events, stop := follow(t, server, "/api/v1/events?queue=a&kind=produced&kind=dead")
	defer stop()
	s.produce(codeq.Task{Queue: "b"})
	id := s.dead(codeq.Task{Queue: "a", Tenant: "x"}, "a secret\nis told")
	var e codeq.Event
	require.NoError(t, json.Unmarshal([]byte(next(t, events, "task")), &e))
	require.Equal(t, codeq.EventProduced, e.Kind)
	require.Equal(t, id, e.ID)
	require.NoError(t, json.Unmarshal([]byte(next(t, events, "task")), &e))
	require.Equal(t, codeq.EventDeadLettered, e.Kind)
	require.Equal(t, "a ***\nis told", e.LastError)
	require.Equal(t, http.StatusBadRequest, s.do(request(http.MethodGet, "/api/v1/events?kind=nonsense", nil)).Code)
}

// TestEventsHideNotes: notes of progress are shown with Payloads only, and redacted.
func TestEventsHideNotes(t *testing.T) {
	for access, note := range map[codeqweb.Access]string{codeqweb.Read: "", codeqweb.Read | codeqweb.Payloads: "***"} {
		opts := as(access)
		opts.Redact = func(t *codeq.TaskInfo) { t.Progress.Note = strings.ReplaceAll(t.Progress.Note, "secret", "***") }
		s := open(t, codeq.Options{}, opts)
		server := httptest.NewServer(s.d)
		defer server.Close()
		events, stop := follow(t, server, "/api/v1/events?kind=progress")
		defer stop()
		s.work("w", "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			return codeq.ReportProgress(ctx, 1, 2, "secret")
		})
		s.produce(codeq.Task{Queue: "a"})
		var e codeq.Event
		require.NoError(t, json.Unmarshal([]byte(next(t, events, "task")), &e))
		require.Equal(t, codeq.Progress{Done: 1, Total: 2, Note: note, At: e.Progress.At}, e.Progress)
	}
}

// TestStreamHead: HEAD has the headers of a stream and ends, so that its connection can be used
// again.
func TestStreamHead(t *testing.T) {
	t.Parallel()
	s := open(t, codeq.Options{Shards: 1}, nil)
	server := httptest.NewServer(s.d)
	defer server.Close()
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(20*time.Second)))
	reader := bufio.NewReader(conn)
	ask := func(method, path string) *http.Response {
		_, err := fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: localhost\r\n\r\n", method, path)
		require.NoError(t, err)
		answer, err := http.ReadResponse(reader, httptest.NewRequest(method, path, http.NoBody))
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, answer.Body)
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		return answer
	}
	for _, path := range []string{"/live?page=overview", "/api/v1/events"} {
		answer := ask(http.MethodHead, path)
		require.Equal(t, http.StatusOK, answer.StatusCode, path)
		require.Equal(t, "text/event-stream; charset=utf-8", answer.Header.Get("Content-Type"), path)
		require.Empty(t, answer.Header.Get("Content-Length"), path)
		require.Equal(t, http.StatusOK, ask(http.MethodGet, "/healthz").StatusCode, path)
	}
	require.Equal(t, http.StatusBadRequest, ask(http.MethodHead, "/api/v1/events?kind=nonsense").StatusCode)
}

// TestManyStreams: there are at most 256 streams. More are refused at once, until one ends.
func TestManyStreams(t *testing.T) {
	s := open(t, codeq.Options{}, &codeqweb.Options{User: func(r *http.Request) string { return r.Header.Get("X-User") }})
	server := httptest.NewServer(s.d)
	defer server.Close()
	var mu sync.Mutex
	served, refused := []io.Closer{}, 0
	var asking sync.WaitGroup
	for range 20 {
		asking.Go(func() {
			for n := range 100 {
				path := "/live?page=overview"
				if n%2 == 0 {
					path = "/api/v1/events"
				}
				conn, err := net.Dial("tcp", server.Listener.Addr().String())
				if err != nil {
					continue
				}
				_, _ = fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: localhost\r\nX-User: %d\r\n\r\n", path, n)
				_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
				answer, err := http.ReadResponse(bufio.NewReader(conn), nil) //nolint:bodyclose // its end is that of conn
				mu.Lock()
				switch {
				case err == nil && answer.StatusCode == http.StatusOK:
					served = append(served, conn)
				case err == nil && answer.StatusCode == http.StatusServiceUnavailable && answer.Header.Get("Retry-After") != "":
					refused++
					_ = conn.Close()
				default:
					t.Error(err)
				}
				mu.Unlock()
			}
		})
	}
	asking.Wait()
	require.Len(t, served, 256)
	require.Equal(t, 2000-256, refused)
	s.get("/") // pages are served meanwhile
	for _, conn := range served {
		require.NoError(t, conn.Close())
	}
	require.Eventually(t, func() bool {
		answer, err := server.Client().Get(server.URL + "/live")
		if err != nil {
			return false
		}
		defer answer.Body.Close()
		return answer.StatusCode == http.StatusOK
	}, 20*time.Second, 50*time.Millisecond)
}

// TestSlowReader: a client that does not read delays neither others nor the sampler, and is
// disconnected.
func TestSlowReader(t *testing.T) {
	s := open(t, codeq.Options{}, nil)
	for n := range 60 {
		s.produce(codeq.Task{Queue: fmt.Sprint(n, strings.Repeat("q", 200))})
	}
	server := httptest.NewUnstartedServer(s.d)
	server.Listener = smallBuffers{server.Listener}
	server.Start()
	defer server.Close()
	var slow []net.Conn
	for range 5 {
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		require.NoError(t, err)
		require.NoError(t, conn.(*net.TCPConn).SetReadBuffer(1024))
		_, err = fmt.Fprint(conn, "GET /live?page=overview HTTP/1.1\r\nHost: localhost\r\n\r\n")
		require.NoError(t, err)
		slow = append(slow, conn)
	}
	live, stop := follow(t, server, "/live?page=overview")
	defer stop()
	for range 3 {
		next(t, live, "live")
	}
	begin := time.Now()
	require.NoError(t, s.d.Close())
	require.Less(t, time.Since(begin), 5*time.Second, "it waits for no reader")
	for _, conn := range slow {
		require.NoError(t, conn.Close())
	}
}

// smallBuffers accepts connections that buffer little: a write soon waits for the reader.
type smallBuffers struct{ net.Listener }

func (l smallBuffers) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetWriteBuffer(1024)
	}
	return conn, err
}
