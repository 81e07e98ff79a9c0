package peer

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// script is a connection with fixed content for its reader; it ignores writes.
type script struct {
	net.Conn
	mu     sync.Mutex
	says   *bytes.Reader
	closed bool
}

func says(b []byte) *script { return &script{says: bytes.NewReader(b)} }

func (s *script) Read(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, net.ErrClosed
	}
	return s.says.Read(p)
}

func (s *script) Write(p []byte) (int, error) { return len(p), nil }

func (s *script) SetWriteDeadline(time.Time) error { return nil }

func (s *script) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return nil
}

// ended requires that a reader has ended a connection: at the end of its content, or because the
// other side broke the protocol.
func ended(t *testing.T, s *stream) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Error(t, s.err)
	ours := errors.Is(s.err, io.EOF) || errors.Is(s.err, io.ErrUnexpectedEOF) || errors.Is(s.err, errProtocol)
	require.True(t, ours, "%v", s.err)
	require.True(t, s.conn.(*script).closed)
}

// FuzzServer: for any bytes of a caller, requests arrive in the order of their numbers, each is
// canceled at most once, and the connection ends.
func FuzzServer(f *testing.F) {
	f.Add(appendFrame(nil, frameRequest, 7, 1, []byte("body")))
	f.Add(appendFrame(appendFrame(nil, frameRequest, 1, 2, nil), frameCancel, 0, 2, nil))
	f.Add(appendFrame(appendFrame(nil, frameRequest, 0, 2, nil), frameRequest, 0, 1, nil))
	f.Add(appendFrame(appendFrame(nil, framePing, 0, 0, nil), frameReply, 0, 1, nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		last := uint64(0)
		canceled := make(map[*Request]int)
		var waiting []*Request
		n := &Node{c: Config{Timeout: time.Second, Handler: func(r *Request) {
			require.Greater(t, r.number, last)
			last = r.number
			switch r.Kind % 4 {
			case 0:
				r.Reply(r.Body)
			case 1:
				r.OnCancel(func() { canceled[r]++ })
				waiting = append(waiting, r)
			case 2:
				r.OnCancel(func() { canceled[r]++ })
				r.Fail(r.Kind, string(r.Body))
				r.Reply(nil)
				waiting = append(waiting, r)
			}
		}}}
		c := newServer(n, header{from: identityOf("caller")}, says(data))
		c.read()
		ended(t, &c.stream)
		for _, r := range waiting {
			want := 1
			if r.answered {
				want = 0
			}
			require.Equal(t, want, canceled[r])
			r.Reply(nil)
		}
	})
}

// FuzzClient: for any answer of a called node, each pending call ends: with the reply, or an error
// of this package.
func FuzzClient(f *testing.F) {
	f.Add(appendFrame(appendFrame(nil, frameReply, 0, 2, []byte("reply")), frameFail, 9, 1, []byte("text")))
	f.Add(appendFrame(appendFrame(nil, frameReply, 0, 1, nil), frameReply, 0, 1, nil))
	f.Add(appendFrame(appendFrame(nil, framePong, 0, 0, nil), frameRequest, 0, 1, nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		n := &Node{c: Config{Logger: slog.New(slog.DiscardHandler)}, links: map[lane]*link{{to: at("a")}: {}}}
		c := newClient(n, lane{to: at("a")}, says(data))
		waiters := make([]*waiter, 3)
		for i := range waiters {
			w := &waiter{done: make(chan struct{}, 1)}
			c.last++
			c.pending[c.last] = w
			waiters[i] = w
		}
		c.read()
		ended(t, &c.stream)
		for _, w := range waiters {
			require.Len(t, w.done, 1)
			var remote *RemoteError
			if w.err != nil && !errors.As(w.err, &remote) {
				require.True(t, errors.Is(w.err, ErrLost) || errors.Is(w.err, ErrNotSent), "%v", w.err)
			}
		}
	})
}
