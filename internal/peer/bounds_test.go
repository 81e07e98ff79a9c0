package peer

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// bounded starts a Node "b" with bounds.
func (nw *network) bounded(t *testing.T, b Bounds, handler func(*Request)) {
	n := New(Config{
		Identity: identityOf("b"), Listener: nw.listen("b"), Dial: nw.dial, Groups: 2, Handler: handler, Timeout: testTimeout, Bounds: b,
	})
	t.Cleanup(func() { require.NoError(t, n.Close()) })
}

// requireEnded: the other side of a connection has closed it, or closes it soon.
func requireEnded(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		require.ErrorIs(t, err, io.ErrClosedPipe)
		return
	}
	for {
		_, err := c.Read(make([]byte, 1<<10))
		if err != nil {
			require.NotErrorIs(t, err, net.ErrClosed)
			var late net.Error
			require.NotErrorAs(t, err, &late, "it is open")
			return
		}
	}
}

// TestBoundOfCalls: calls of a connection beyond the bound are refused, until the answers of others
// are written.
func TestBoundOfCalls(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		waiting := make(chan *Request, 10)
		nw.bounded(t, Bounds{Calls: 3}, func(r *Request) { waiting <- r })
		a := nw.node(t, "a", nil)
		var calls []<-chan outcome
		for range 3 {
			calls = append(calls, goCall(t.Context(), a, "b", nil))
		}
		synctest.Wait()
		o := <-goCall(t.Context(), a, "b", nil)
		require.Equal(t, &RemoteError{CodeBusy, "too many calls of one connection at a time"}, o.err)
		require.Len(t, waiting, 3)
		var sent atomic.Int64
		for range calls {
			r := <-waiting
			r.OnSent(func() { sent.Add(1) })
			r.Reply([]byte("done"))
		}
		for _, call := range calls {
			require.Equal(t, outcome{[]byte("done"), nil}, <-call)
		}
		synctest.Wait()
		require.EqualValues(t, 3, sent.Load())
		call := goCall(t.Context(), a, "b", nil)
		(<-waiting).Reply(nil)
		require.NoError(t, (<-call).err)
	})
}

// TestBoundOfBodies: a request that announces a body beyond the bound ends its connection. No more
// large bodies are read at a time than the bound allows.
func TestBoundOfBodies(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		waiting := make(chan *Request, 10)
		nw.bounded(t, Bounds{Body: 1 << 20, Large: 2}, func(r *Request) { waiting <- r })
		c := nw.connect(t, "b")
		_, err := c.Write(appendFrame(nil, frameRequest, 1, 1, make([]byte, 1<<20+1))[:frameHead])
		require.NoError(t, err)
		requireEnded(t, c)
		var calls []<-chan outcome
		for _, name := range []string{"a", "c", "d"} { // each has a connection of its own
			calls = append(calls, goCall(t.Context(), nw.node(t, name, nil), "b", make([]byte, 1<<20)))
		}
		synctest.Wait()
		require.Len(t, waiting, 2)
		small := goCall(t.Context(), nw.node(t, "e", nil), "b", []byte("small"))
		synctest.Wait()
		require.Len(t, waiting, 3, "small ones go on")
		gone := <-waiting
		(<-waiting).Reply(nil)
		synctest.Wait()
		require.Len(t, waiting, 2, "the third large one, and the small one")
		for len(waiting) > 0 {
			(<-waiting).Reply(nil)
		}
		gone.Reply(nil)
		for _, call := range append(calls, small) {
			require.NoError(t, (<-call).err)
		}

		// A connection that ends in the middle of a body, or during a request, keeps no place.
		for range 3 {
			half := nw.connect(t, "b")
			_, err := half.Write(appendFrame(nil, frameRequest, 1, 1, make([]byte, 1<<20))[:1<<17])
			require.NoError(t, err)
			require.NoError(t, half.Close())
			synctest.Wait()
		}
		last := goCall(t.Context(), nw.node(t, "f", nil), "b", make([]byte, 1<<20))
		(<-waiting).Reply(nil)
		require.NoError(t, (<-last).err)
	})
}

// TestSlowReader: a caller sends requests and reads no answers. When enough bytes of answers wait,
// the node reads no more requests. After a Timeout the connection ends, and all its requests with
// it.
func TestSlowReader(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		var served, sent atomic.Int64
		nw.bounded(t, Bounds{Queued: 1 << 20, Idle: time.Hour}, func(r *Request) {
			served.Add(1)
			r.OnSent(func() { sent.Add(1) })
			r.Reply(make([]byte, 100<<10))
		})
		c := nw.connect(t, "b")
		began := time.Now()
		go func() {
			for i := range uint64(1000) {
				if _, err := c.Write(appendFrame(nil, frameRequest, 1, i+1, bytes.Repeat([]byte("x"), 10<<10))); err != nil {
					return
				}
			}
		}()
		synctest.Wait()
		require.Less(t, served.Load(), int64(40), "what is queued, what is being written, and what was read ahead")
		require.Zero(t, sent.Load())
		time.Sleep(testTimeout)
		synctest.Wait()
		require.Equal(t, served.Load(), sent.Load())
		require.Less(t, served.Load(), int64(40))
		requireEnded(t, c)
		require.Equal(t, testTimeout, time.Since(began))
	})
}

// TestIdleConnection: an idle connection ends, but not while a call waits for an answer. The next
// call opens another connection.
func TestIdleConnection(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		waiting := make(chan *Request, 10)
		nw.bounded(t, Bounds{Queued: 1 << 20, Idle: time.Minute}, func(r *Request) { waiting <- r })
		a := nw.node(t, "a", nil)
		c := nw.connect(t, "b")
		_, err := c.Write(appendFrame(nil, frameRequest, 1, 1, nil))
		require.NoError(t, err)
		r := <-waiting
		time.Sleep(time.Hour)
		require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Second)))
		go r.Reply([]byte("late"))
		f, err := readFrame(bufio.NewReader(c), nil)
		require.NoError(t, err)
		require.Equal(t, []byte("late"), f.body)
		<-time.After(2 * time.Minute)
		requireEnded(t, c)
		for range 2 {
			call := goCall(t.Context(), a, "b", nil)
			(<-waiting).Reply(nil)
			require.NoError(t, (<-call).err)
			time.Sleep(10 * time.Minute)
		}
		require.Equal(t, 3, nw.dials)
	})
}

// TestBoundOfConnections: a connection beyond the bound is refused before it has sent anything. It
// is accepted after the end of another one.
func TestBoundOfConnections(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	b := New(Config{Identity: identityOf("b"), Listener: l, Groups: 2, Handler: echo, Bounds: Bounds{Connections: 3}})
	defer func() { require.NoError(t, b.Close()) }()
	var conns []net.Conn
	for range 3 {
		c, err := net.Dial("unix", path)
		require.NoError(t, err)
		defer c.Close()
		_, err = c.Write(encodeHeader(headerTo("b", header{use: useCalls, groups: 2})))
		require.NoError(t, err)
		_, err = readAnswer(c)
		require.NoError(t, err)
		conns = append(conns, c)
	}
	for range 10 {
		c, err := net.Dial("unix", path)
		require.NoError(t, err)
		_, err = readAnswer(c)
		require.Equal(t, &RefusedError{RefusedBusy, "there are 3 connections, and no more are accepted"}, err)
		require.NoError(t, c.Close())
	}
	call := func() error { // by a Node without a listener
		a := New(Config{Identity: identityOf("a"), Groups: 2, Dial: dialUnix})
		_, err := a.Call(t.Context(), Target{ID: identityOf("b").ID, Name: "b", Address: path}, 1, nil)
		require.NoError(t, a.Close())
		return err
	}
	var refused *RefusedError
	require.ErrorAs(t, call(), &refused)
	require.Equal(t, RefusedBusy, refused.Reason)
	require.NoError(t, conns[0].Close())
	for err = call(); err != nil; err = call() { // until b has noticed
		require.ErrorAs(t, err, &refused)
	}
}

func dialUnix(ctx context.Context, path string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", path)
}
