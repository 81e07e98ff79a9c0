package peer

import (
	"bytes"
	"encoding/hex"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"
)

func TestHeaderGolden(t *testing.T) {
	for want, h := range map[string]header{
		"636f646571 02 000b 01 00000000 00000003 6e31": {use: useCalls, groups: 3, name: "n1"},
		"636f646571 02 0009 02 00000102 00000203":      {use: useRaft, group: 0x102, groups: 0x203},
	} {
		b := appendHeader(nil, h)
		require.Equal(t, strings.ReplaceAll(want, " ", ""), hex.EncodeToString(b))
		got, err := readHeader(bytes.NewReader(b))
		require.NoError(t, err)
		require.Equal(t, h, got)
	}
}

func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nw := newNetwork()
		nw.node(t, "b", echo)
		other := New(Config{Name: "a", Listener: nw.listen("a"), Dial: nw.dial, Groups: 3, Timeout: testTimeout})
		defer other.Close()
		var refused *RefusedError

		_, err := other.Call(t.Context(), "b", 1, nil)
		requireNotSent(t, err)
		require.ErrorAs(t, err, &refused)
		require.Equal(t, &RefusedError{RefusedGroups, "b has 2 groups, not 3"}, refused)

		_, err = other.Group(1).Dial("b", time.Second)
		require.ErrorAs(t, err, &refused)
		require.Equal(t, RefusedGroups, refused.Reason)
		require.Len(t, other.conns, 0)

		handshake := func(header []byte) error {
			c, err := nw.dial(t.Context(), "b")
			require.NoError(t, err)
			defer c.Close()
			_, err = c.Write(header)
			require.NoError(t, err)
			err = readAnswer(c)
			if err != nil {
				_, end := c.Read(make([]byte, 1))
				require.ErrorIs(t, end, io.EOF)
			}
			return err
		}
		require.NoError(t, handshake(appendHeader(nil, header{use: useRaft, group: 1, groups: 2})))
		require.Equal(t, &RefusedError{RefusedGroup, "b has no group 2"},
			handshake(appendHeader(nil, header{use: useRaft, group: 2, groups: 2})))
		require.Equal(t, &RefusedError{RefusedVersion, "protocol version is 2, not 3"},
			handshake([]byte("codeq\x03\x00\x03???")))
	})
}

// A dialer that does not speak the protocol gets no answer, and one that sends nothing is not
// waited for.
func TestGarbageInsteadOfHeader(t *testing.T) {
	for name, garbage := range map[string]string{
		"another protocol": "GET / HTTP/1.1\r\n\r\n",
		"too long":         "codeq\x02\xff\xff",
		"too short":        "codeq\x02\x00\x01\x01",
		"another use":      "codeq\x02\x00\x09\x07\x00\x00\x00\x00\x00\x00\x00\x02",
		"half a header":    "codeq\x02\x00",
		"nothing":          "",
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				nw := newNetwork()
				b := nw.node(t, "b", echo)
				c, err := nw.dial(t.Context(), "b")
				require.NoError(t, err)
				defer c.Close()
				go func() { _, _ = io.WriteString(c, garbage) }()
				begin := time.Now()
				_, err = c.Read(make([]byte, 1))
				require.ErrorIs(t, err, io.EOF)
				if name == "nothing" || name == "half a header" {
					require.Equal(t, testTimeout, time.Since(begin))
				} else {
					require.Zero(t, time.Since(begin))
				}
				synctest.Wait()
				require.Empty(t, b.conns)
			})
		})
	}
}

// A dialer does not wait for an answer for ever.
func TestHandshakeHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nw := newNetwork()
		l := nw.listen("b")
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				defer c.Close()
				go func() { _, _ = io.Copy(io.Discard, c) }()
			}
		}()
		a := nw.node(t, "a", nil)
		begin := time.Now()
		_, err := a.Call(t.Context(), "b", 1, nil)
		requireNotSent(t, err)
		require.Equal(t, testTimeout, time.Since(begin))
		begin = time.Now()
		_, err = a.Group(0).Dial(raft.ServerAddress("b"), time.Second)
		require.Error(t, err)
		require.Equal(t, time.Second, time.Since(begin))
		require.Empty(t, a.conns)
		require.NoError(t, l.Close())
	})
}

func TestNameTooLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nw := newNetwork()
		nw.node(t, "b", func(r *Request) { r.Reply([]byte(r.From)) })
		for _, length := range []int{maxName, maxName + 1} {
			n := nw.node(t, strings.Repeat("a", length), nil)
			from, err := n.Call(t.Context(), "b", 1, nil)
			if length > maxName {
				requireNotSent(t, err)
				require.ErrorContains(t, err, "name of 256 bytes")
			} else {
				require.NoError(t, err)
				require.Equal(t, n.c.Name, string(from))
			}
		}
	})
}

func FuzzHeader(f *testing.F) {
	f.Add(appendHeader(nil, header{use: useCalls, groups: 3, name: "n1"}))
	f.Add(appendHeader(nil, header{use: useRaft, group: 2, groups: 3, name: strings.Repeat("n", maxName)}))
	f.Add([]byte("codeq\x02\x00\x03???"))
	f.Add([]byte("codeq\x02\xff\xff"))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		h, err := readHeader(r)
		if err == nil {
			read := data[:len(data)-r.Len()]
			require.Equal(t, read, appendHeader(nil, h))
		}
		r.Reset(data)
		_ = readAnswer(r)
	})
}
