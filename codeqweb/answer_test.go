package codeqweb_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// TestUnreadAnswers: clients that do not read their answers do not block others.
func TestUnreadAnswers(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.Read))
	for range 100 {
		s.produce(codeq.Task{Queue: "a", Headers: map[string]string{"h": string(make([]byte, 4000))}})
	}
	opts := as(codeqweb.Read | codeqweb.Payloads)
	opts.User = func(r *http.Request) string { return r.Header.Get("X-User") }
	d := codeqweb.Handler(s.q, opts)
	defer func() { require.NoError(t, d.Close()) }()
	server := httptest.NewUnstartedServer(d)
	server.Config.ConnState = func(c net.Conn, state http.ConnState) {
		if tcp, ok := c.(*net.TCPConn); ok && state == http.StateNew {
			_ = tcp.SetWriteBuffer(4096)
		}
	}
	server.Start()
	defer server.Close()
	var conns []net.Conn
	for range 300 {
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		require.NoError(t, err)
		require.NoError(t, conn.(*net.TCPConn).SetReadBuffer(4096))
		_, err = fmt.Fprint(conn, "GET /api/v1/tasks?limit=100 HTTP/1.1\r\nHost: localhost\r\nX-User: slow\r\n\r\n")
		require.NoError(t, err)
		conns = append(conns, conn)
	}
	for range 5 {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/tasks", nil)
		require.NoError(t, err)
		r.Header.Set("X-User", "other")
		answer, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		require.Equal(t, http.StatusOK, answer.StatusCode)
	}
	for _, conn := range conns {
		require.NoError(t, conn.Close())
	}
}

// TestRequestsOfUser: each user has a separate bound, and finished answers do not count.
func TestRequestsOfUser(t *testing.T) {
	hold, held := make(chan struct{}), make(chan struct{}, 100)
	opts := as(codeqweb.All)
	opts.User = func(r *http.Request) string { return r.Header.Get("X-User") }
	holds := true
	opts.Access = func(r *http.Request) codeqweb.Access {
		if r.Header.Get("X-User") == "busy" && holds {
			held <- struct{}{}
			<-hold
		}
		return codeqweb.Read
	}
	s := open(t, codeq.Options{Shards: 1}, opts)
	ask := func(user string) int {
		r := request(http.MethodGet, "/audit-is-denied", nil)
		r.Header.Set("X-User", user)
		return s.do(r).Code
	}
	var asking sync.WaitGroup
	for range 32 {
		asking.Go(func() { ask("busy") })
	}
	for range 32 {
		<-held
	}
	require.Equal(t, http.StatusTooManyRequests, ask("busy"))
	require.Equal(t, http.StatusNotFound, ask("other"))
	close(hold)
	asking.Wait()
	holds = false
	require.Equal(t, http.StatusNotFound, ask("busy"))
}

// deadlines notes the deadlines that a handler sets. It is like middleware that passes them on, but
// hides the Flush of an answer.
type deadlines struct {
	*httptest.ResponseRecorder
	last time.Time
}

func (d *deadlines) SetWriteDeadline(t time.Time) error {
	d.last = t
	return nil
}

type unflushed struct {
	http.ResponseWriter
	d *deadlines
}

func (u unflushed) SetWriteDeadline(t time.Time) error { return u.d.SetWriteDeadline(t) }

// TestLastWriteHasDeadline: the server's writes after the handler's return have a deadline, also
// for answers buffered by a middleware, and at the end of a stream.
func TestLastWriteHasDeadline(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	d := &deadlines{ResponseRecorder: httptest.NewRecorder()}
	s.d.ServeHTTP(unflushed{d, d}, request(http.MethodGet, "/tasks", nil))
	require.Equal(t, http.StatusOK, d.Code)
	require.True(t, d.last.After(time.Now()))

	d = &deadlines{ResponseRecorder: httptest.NewRecorder()}
	r := request(http.MethodGet, "/api/v1/events", nil)
	ctx, cancel := context.WithCancel(r.Context())
	cancel()
	s.d.ServeHTTP(d, r.WithContext(ctx))
	require.Contains(t, d.Body.String(), "retry: ")
	require.True(t, d.last.After(time.Now()))
}
