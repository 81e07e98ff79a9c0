package cluster

import (
	"io"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/simtest"
)

// TestLargeMessageTakesItsTime: the time of a message and its answer depends on its size, and ends
// soon after nothing moves any more.
func TestLargeMessageTakesItsTime(t *testing.T) {
	const size, bandwidth = 16 << 20, 1 << 20
	for _, tc := range []struct {
		name   string
		cut    time.Duration // when the link fails; 0: it does not
		answer time.Duration // after the message
		fails  time.Duration // when; 0: it does not
	}{
		{"slow link", 0, 0, 0},
		{"slow disk", 0, raftTimeout + 2*time.Second, 0},
		{"no answer", 0, time.Hour, 16*time.Second + raftTimeout + size/slowDisk*time.Second},
		{"link fails", 8 * time.Second, 0, 8*time.Second + raftTimeout},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				network := simtest.NewNet(1, 0)
				here, there := network.Listen("here"), network.Listen("there")
				network.SetBandwidth("here", "there", bandwidth)
				raw, err := network.Dial(t.Context(), here, "there")
				require.NoError(t, err)
				c := net.Conn(&patientConn{Conn: raw, moved: func() {}})
				other, err := there.Accept()
				require.NoError(t, err)
				go func() {
					if _, err := io.CopyN(io.Discard, other, size); err == nil {
						time.Sleep(tc.answer)
						_, _ = other.Write([]byte{1})
					}
				}()
				if tc.cut > 0 {
					time.AfterFunc(tc.cut, func() { network.SetCut("here", "there", true) })
				}
				begun := time.Now()
				require.NoError(t, c.SetDeadline(begun.Add(raftTimeout)))
				_, err = c.Write(make([]byte, size))
				if err == nil {
					_, err = io.ReadFull(c, make([]byte, 1))
				}
				if tc.fails == 0 {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, os.ErrDeadlineExceeded)
					require.InDelta(t, tc.fails, time.Since(begun), float64(time.Second))
				}
				require.NoError(t, c.Close())
				require.NoError(t, other.Close())
				time.Sleep(tc.answer)
			})
		})
	}
}

// TestSmallMessageHasItsDeadline: a small message has the deadline that Raft sets, and so have
// later ones.
func TestSmallMessageHasItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := simtest.NewNet(1, 0)
		here, there := network.Listen("here"), network.Listen("there")
		raw, err := network.Dial(t.Context(), here, "there")
		require.NoError(t, err)
		other, err := there.Accept()
		require.NoError(t, err)
		go func() { _, _ = io.Copy(io.Discard, other) }()
		c := &patientConn{Conn: raw, moved: func() {}}
		for _, tc := range []struct {
			size int
			has  time.Duration
		}{{1 << 10, time.Second}, {progressBytes, time.Hour}} {
			begun := time.Now()
			require.NoError(t, c.SetDeadline(begun.Add(tc.has)))
			_, err = c.Write(make([]byte, tc.size))
			require.NoError(t, err)
			_, err = c.Read(make([]byte, 1))
			require.ErrorIs(t, err, os.ErrDeadlineExceeded)
			require.InDelta(t, tc.has, time.Since(begun), float64(time.Millisecond))
		}
		require.NoError(t, c.Close())
		require.NoError(t, other.Close())
	})
}
