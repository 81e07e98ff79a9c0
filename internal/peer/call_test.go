package peer

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func requireNotSent(t *testing.T, err error) {
	t.Helper()
	require.ErrorIs(t, err, ErrNotSent)
	require.NotErrorIs(t, err, ErrLost)
}

func requireLost(t *testing.T, err error) {
	t.Helper()
	require.ErrorIs(t, err, ErrLost)
	require.NotErrorIs(t, err, ErrNotSent)
}

func TestCallsAreHandledInOrderAndAnsweredInAny(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		var requests []*Request // of one reader; read while no goroutine runs
		nw.node(t, "b", func(r *Request) { requests = append(requests, r) })
		a := nw.node(t, "a", nil)
		const calls = 200
		var outcomes [calls]<-chan outcome
		for i := range outcomes {
			outcomes[i] = goCall(t.Context(), a, "b", fmt.Appendf(nil, "call %d", i))
			synctest.Wait()
		}
		require.Len(t, requests, calls)
		for i, r := range requests {
			require.Equal(t, fmt.Sprintf("call %d", i), string(r.Body))
			require.Equal(t, identityOf("a"), r.From)
			require.Equal(t, byte(1), r.Kind)
		}
		for _, r := range slices.Backward(requests) {
			go r.Reply(append([]byte("reply to "), r.Body...))
		}
		for i, o := range outcomes {
			got := <-o
			require.NoError(t, got.err)
			require.Equal(t, fmt.Sprintf("reply to call %d", i), string(got.reply))
		}
	})
}

func TestManyCallersBothWays(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		names := []string{"a", "b"}
		nodes := []*Node{nw.node(t, "a", echo), nw.node(t, "b", func(r *Request) { go r.Reply(r.Body) })}
		var callers sync.WaitGroup
		for i := range 64 {
			callers.Go(func() {
				for j := range 100 {
					body := fmt.Appendf(nil, "%d %d", i, j)
					reply, err := nodes[i%2].Call(t.Context(), at(names[1-i%2]), 1, body)
					if err != nil || !bytes.Equal(body, reply) {
						t.Errorf("%s: %s, %v", body, reply, err)
					}
				}
			})
		}
		callers.Wait()
		require.Equal(t, 2, nw.dials)
	})
}

func TestFailTravels(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.node(t, "b", func(r *Request) { r.Fail(7, "no such queue") })
		a := nw.node(t, "a", nil)
		_, err := a.Call(t.Context(), at("b"), 1, nil)
		require.Equal(t, &RemoteError{7, "no such queue"}, err)
		b := nw.node(t, "c", nil)
		_, err = b.Call(t.Context(), at("a"), 1, nil)
		require.Equal(t, &RemoteError{codePeer, "no handler"}, err)
	})
}

func TestFirstAnswerCounts(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.node(t, "b", func(r *Request) {
			r.Reply([]byte("first"))
			r.Reply([]byte("second"))
			r.Fail(1, "third")
		})
		c := nw.connect(t, "b")
		_, err := c.Write(appendFrame(appendFrame(nil, frameRequest, 0, 5, nil), framePing, 0, 0, nil))
		require.NoError(t, err)
		r := bufio.NewReader(c)
		f, err := readFrame(r, nil)
		require.NoError(t, err)
		require.Equal(t, frame{number: 5, typ: frameReply, body: []byte("first")}, f)
		f, err = readFrame(r, nil)
		require.NoError(t, err)
		require.Equal(t, frame{typ: framePong}, f)
	})
}

func TestLargeBodies(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.node(t, "b", echo)
		a := nw.node(t, "a", nil)
		for _, size := range []int{0, trusted, trusted + 1, 3 * trusted, writeChunk, 9<<20 + 1} {
			body := make([]byte, size)
			for i := range body {
				body[i] = byte(uint64(i) * 2654435761 >> 13)
			}
			reply, err := a.Call(t.Context(), at("b"), 1, body)
			require.NoError(t, err)
			require.True(t, bytes.Equal(body, reply), "%d bytes", size)
		}
	})
}

func TestTooLarge(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		huge := make([]byte, MaxBody+1) // never touched
		nw.node(t, "b", func(r *Request) { r.Reply(huge) })
		a := nw.node(t, "a", nil)
		_, err := a.Call(t.Context(), at("b"), 1, huge)
		requireNotSent(t, err)
		_, err = a.Call(t.Context(), at("b"), 1, nil)
		var remote *RemoteError
		require.ErrorAs(t, err, &remote)
		require.Equal(t, codePeer, remote.Code)
	})
}

func TestCancelReachesTheHandler(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		var canceled []string
		var requests []*Request
		nw.node(t, "b", func(r *Request) {
			requests = append(requests, r)
			r.OnCancel(func() { canceled = append(canceled, string(r.Body)) })
		})
		a := nw.node(t, "a", nil)
		cause := errors.New("worker has gone")
		ctx, cancel := context.WithCancelCause(t.Context())
		first := goCall(ctx, a, "b", []byte("first"))
		synctest.Wait()
		second := goCall(t.Context(), a, "b", []byte("second"))
		synctest.Wait()
		require.Empty(t, canceled)

		cancel(cause)
		o := <-first
		requireLost(t, o.err)
		require.ErrorIs(t, o.err, cause)
		synctest.Wait()
		require.Equal(t, []string{"first"}, canceled)

		requests[0].Reply([]byte("too late"))
		requests[1].Reply([]byte("in time"))
		o = <-second
		require.NoError(t, o.err)
		require.Equal(t, "in time", string(o.reply))

		_, err := a.Call(ctx, at("b"), 1, nil)
		requireNotSent(t, err)
		require.ErrorIs(t, err, cause)
		require.NoError(t, a.Close())
		synctest.Wait()
		require.Equal(t, []string{"first"}, canceled, "the second was answered")
	})
}

func TestEndOfConnectionCancels(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		canceled := 0
		var request *Request
		nw.node(t, "b", func(r *Request) {
			if len(r.Body) > 0 { // already answered
				r.Reply(nil)
				r.OnCancel(func() { t.Error("canceled after its answer") })
				return
			}
			request = r
			r.OnCancel(func() { canceled++ })
		})
		a := nw.node(t, "a", nil)
		_, err := a.Call(t.Context(), at("b"), 1, []byte("x"))
		require.NoError(t, err)
		call := goCall(t.Context(), a, "b", nil)
		synctest.Wait()
		require.NoError(t, a.Close())
		o := <-call
		requireLost(t, o.err)
		require.ErrorIs(t, o.err, ErrClosed)
		synctest.Wait()
		require.Equal(t, 1, canceled)
		request.Reply(nil)
	})
}

func TestLossOfConnection(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		seen := 0
		b := nw.node(t, "b", func(r *Request) { seen++ })
		a := nw.node(t, "a", nil)
		call := goCall(t.Context(), a, "b", nil)
		synctest.Wait()
		require.Equal(t, 1, seen)
		require.NoError(t, b.Close())
		requireLost(t, (<-call).err)

		_, err := a.Call(t.Context(), at("b"), 1, nil)
		requireNotSent(t, err)
		time.Sleep(lastBackoff)
		nw.node(t, "b", echo)
		_, err = a.Call(t.Context(), at("b"), 1, nil)
		require.NoError(t, err)
	})
}

// A peer that reads nothing blocks the writer in the first frame. It has certainly not seen the
// later frames.
func TestQueuedCallsAreNotSent(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.fake(t, "b", func(net.Conn) { time.Sleep(time.Hour) })
		a := nw.node(t, "a", nil)
		handed := goCall(t.Context(), a, "b", nil)
		synctest.Wait()
		begin := time.Now()
		queued := goCall(t.Context(), a, "b", nil)
		requireLost(t, (<-handed).err)
		requireNotSent(t, (<-queued).err)
		require.Equal(t, testTimeout, time.Since(begin))
		time.Sleep(time.Hour)
	})
}

// The peer cannot have seen a frame if a part of it was never written to the connection.
func TestIncompleteFrameIsNotSent(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.fake(t, "b", func(c net.Conn) { _, _ = io.CopyN(io.Discard, c, writeChunk/2) })
		a := nw.node(t, "a", nil)
		_, err := a.Call(t.Context(), at("b"), 1, make([]byte, 2*writeChunk))
		requireNotSent(t, err)
	})
}

func TestCallsWaitForRoom(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		read := make(chan struct{})
		frames := 0
		nw.fake(t, "b", func(c net.Conn) {
			<-read
			n, _ := io.Copy(io.Discard, c)
			frames = int(n / queuedBytes)
		})
		a := nw.node(t, "a", nil)
		body := make([]byte, queuedBytes)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for range 2 { // one that the writer has taken, one in the queue
			goCall(ctx, a, "b", body)
			synctest.Wait()
		}
		short, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		_, err := a.Call(short, at("b"), 1, nil)
		requireNotSent(t, err)
		require.ErrorIs(t, err, context.DeadlineExceeded)

		third := goCall(ctx, a, "b", body)
		synctest.Wait()
		close(read)
		synctest.Wait()
		require.NoError(t, a.Close())
		requireLost(t, (<-third).err)
		synctest.Wait()
		require.Equal(t, 3, frames)
	})
}

func TestOneDialForAllCallers(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.delay = time.Second
		nw.node(t, "b", echo)
		a := nw.node(t, "a", nil)
		impatient, cancel := context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		first := goCall(impatient, a, "b", nil)
		var others [10]<-chan outcome
		for i := range others {
			others[i] = goCall(t.Context(), a, "b", nil)
		}
		o := <-first
		requireNotSent(t, o.err)
		require.ErrorIs(t, o.err, context.DeadlineExceeded)
		for _, other := range others {
			require.NoError(t, (<-other).err)
		}
		require.Equal(t, 1, nw.dials)
	})
}

func TestBackoffAfterFailedDials(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		a := nw.node(t, "a", nil)
		begin := time.Now()
		var dialed []time.Duration
		for time.Since(begin) < 2*time.Second {
			before := nw.dials
			_, err := a.Call(t.Context(), at("b"), 1, nil)
			requireNotSent(t, err)
			require.ErrorContains(t, err, "nobody listens at b")
			if nw.dials > before {
				dialed = append(dialed, time.Since(begin)/time.Millisecond)
			}
			time.Sleep(10 * time.Millisecond)
		}
		require.Equal(t, []time.Duration{0, 50, 150, 350, 600, 850, 1100, 1350, 1600, 1850}, dialed)

		time.Sleep(time.Second)
		b := nw.node(t, "b", echo)
		_, err := a.Call(t.Context(), at("b"), 1, nil)
		require.NoError(t, err)
		require.NoError(t, b.Close())
		synctest.Wait()
		before := nw.dials
		for range 2 {
			_, err = a.Call(t.Context(), at("b"), 1, nil)
			requireNotSent(t, err)
			time.Sleep(firstBackoff)
		}
		require.Equal(t, before+2, nw.dials, "success has reset the back-off")
	})
}

func TestSilentPeer(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.fake(t, "b", func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
		a := nw.node(t, "a", nil)
		begin := time.Now()
		_, err := a.Call(t.Context(), at("b"), 1, nil)
		requireLost(t, err)
		require.ErrorIs(t, err, errSilent)
		require.Equal(t, 2*testTimeout, time.Since(begin))
	})
}

func TestSlowHandlerIsNotSilent(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.node(t, "b", func(r *Request) { time.AfterFunc(100*testTimeout, func() { r.Reply(nil) }) })
		a := nw.node(t, "a", nil)
		begin := time.Now()
		_, err := a.Call(t.Context(), at("b"), 1, nil)
		require.NoError(t, err)
		require.Equal(t, 100*testTimeout, time.Since(begin))
	})
}

func TestIdleConnectionHasNoTimer(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.node(t, "b", echo)
		a := nw.node(t, "a", nil)
		for range 3 {
			_, err := a.Call(t.Context(), at("b"), 1, nil)
			require.NoError(t, err)
			c := a.links[lane{to: at("b")}].client
			state := func() (armed bool, pings uint64) {
				c.mu.Lock()
				defer c.mu.Unlock()
				return c.armed, c.pingEnd
			}
			armed, _ := state()
			require.True(t, armed)
			time.Sleep(2 * testTimeout)
			armed, pings := state()
			require.False(t, armed)
			require.Zero(t, pings)
		}
	})
}

// slowConn reads at most 64 KiB in an eighth of a second.
type slowConn struct{ net.Conn }

func (c slowConn) Read(p []byte) (int, error) {
	time.Sleep(time.Second / 8)
	return c.Conn.Read(p[:min(len(p), 64<<10)])
}

// Bodies that take many Timeouts, followed by a ping, keep the connection.
func TestSlowNetworkIsNotSilent(t *testing.T) {
	for _, slow := range []string{"there", "back"} {
		t.Run(slow, func(t *testing.T) {
			inNetwork(t, func(t *testing.T, nw *network) {
				nw.wrap = func(d, a net.Conn) (net.Conn, net.Conn) {
					if slow == "back" {
						return slowConn{d}, a
					}
					return d, slowConn{a}
				}
				nw.node(t, "b", echo)
				a := nw.node(t, "a", nil)
				body := make([]byte, 15<<20)
				begin := time.Now()
				reply, err := a.Call(t.Context(), at("b"), 1, body)
				require.NoError(t, err)
				require.Len(t, reply, len(body))
				require.Greater(t, time.Since(begin), 5*testTimeout)
			})
		})
	}
}

// A peer that violates the protocol loses the connection.
func TestProtocolViolations(t *testing.T) {
	request := appendFrame(nil, frameRequest, 0, 1, nil)
	for name, frames := range map[string][]byte{
		"a reply to the called node": appendFrame(nil, frameReply, 0, 1, nil),
		"a number used twice":        append(request, request...),
		"a type that is none":        appendFrame(nil, 77, 0, 1, nil),
		"a length that is none":      {0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0},
		"a body too large":           {0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0},
		"a ping with a body":         appendFrame(nil, framePing, 0, 1, []byte("x")),
	} {
		t.Run(name, func(t *testing.T) {
			inNetwork(t, func(t *testing.T, nw *network) {
				n := nw.node(t, "b", func(*Request) {})
				c := nw.connect(t, "b")
				_, err := c.Write(frames)
				require.NoError(t, err)
				_, err = c.Read(make([]byte, 1))
				require.ErrorIs(t, err, io.EOF)
				requireNoConns(t, n)
			})
		})
	}
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.fake(t, "b", func(c net.Conn) {
			go io.Copy(io.Discard, c)
			_, _ = c.Write(request)
			time.Sleep(time.Hour)
		})
		_, err := nw.node(t, "a", nil).Call(t.Context(), at("b"), 1, nil)
		require.ErrorIs(t, err, errProtocol)
		time.Sleep(time.Hour)
	})
}

func TestCloseWithCallsUnderWay(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.node(t, "b", func(*Request) {})
		nw.fake(t, "hangs", func(net.Conn) { time.Sleep(time.Hour) })
		nw.listen("never accepts")
		a := nw.node(t, "a", nil)
		var calls []<-chan outcome
		for range 10 {
			for _, addr := range []string{"b", "hangs", "never accepts"} {
				calls = append(calls, goCall(t.Context(), a, addr, nil))
			}
		}
		synctest.Wait()
		begin := time.Now()
		require.NoError(t, a.Close())
		require.NoError(t, a.Close())
		for _, c := range calls {
			o := <-c
			require.True(t, errors.Is(o.err, ErrLost) || errors.Is(o.err, ErrNotSent), "%v", o.err)
		}
		require.Zero(t, time.Since(begin))
		_, err := a.Call(t.Context(), at("b"), 1, nil)
		requireNotSent(t, err)
		require.ErrorIs(t, err, ErrClosed)
		time.Sleep(time.Hour)
	})
}

// TestLanes: neither heartbeats and renewals nor other small calls wait for a large request that is
// under way.
func TestLanes(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.wrap = func(d, a net.Conn) (net.Conn, net.Conn) { return &congestedConn{Conn: d}, a }
		const large = 8 << 20
		got := make(chan int, 8)
		nw.node(t, "b", func(r *Request) {
			got <- len(r.Body)
			r.Reply(nil)
		})
		a := nw.node(t, "a", nil)
		_, err := a.Call(t.Context(), at("b"), 1, nil)
		require.NoError(t, err)
		begin := time.Now()
		sent := goCall(t.Context(), a, "b", make([]byte, large))
		synctest.Wait()
		for range 3 {
			_, err := a.CallUntil(t.Context(), nil, nil, at("b"), 1, make([]byte, 20), true)
			require.NoError(t, err)
			_, err = a.Call(t.Context(), at("b"), 1, make([]byte, largeBody-1))
			require.NoError(t, err)
		}
		require.Zero(t, time.Since(begin))
		require.NoError(t, (<-sent).err)
		require.Equal(t, large/writeChunk*time.Second, time.Since(begin).Truncate(time.Second))
		require.Equal(t, 3, nw.dials)
		for _, size := range []int{0, 20, largeBody - 1, 20, largeBody - 1, 20, largeBody - 1, large} {
			require.Equal(t, size, <-got)
		}
	})
}

// congestedConn takes a second for each chunk that it writes.
type congestedConn struct{ net.Conn }

func (c *congestedConn) Write(p []byte) (int, error) {
	if len(p) == writeChunk {
		time.Sleep(time.Second)
	}
	return c.Conn.Write(p)
}
