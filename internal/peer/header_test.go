package peer

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"
)

func TestHeaderGolden(t *testing.T) {
	const c, i, j = "63000000000000000000000000000000", "696e3100000000000000000000000000", "696e3200000000000000000000000000"
	const none = "00000000000000000000000000000000"
	from, to := identityOf("n1"), identityOf("n2")
	for want, h := range map[string]header{
		"636f646571 04 0043 0105 0104 00 01 00000000 00000003" + c + i + j + "02 6e31 6e32": {
			use: useCalls, groups: 3, from: from, to: to, formats: Formats{0x105, 0x104}},
		"636f646571 04 004f 0105 0104 02 0000000000000102 0000000000000203 02 00000000 00000003" + none + none + none + "00": {
			use: useRaft, groups: 3, formats: Formats{0x105, 0x104}, incarnations: []uint64{0x102, 0x203}},
	} {
		b := encodeHeader(h)
		require.Equal(t, strings.ReplaceAll(want, " ", ""), hex.EncodeToString(b))
		got, err := readHeader(bytes.NewReader(b))
		require.NoError(t, err)
		require.Equal(t, h, got)
	}
	for want, a := range map[string]answer{
		"0025" + c + i + "0105010400": {from.Cluster, from.ID, Formats{0x105, 0x104}, nil},
		"002d" + c + i + "01050104" + "01" + "0000000000000102": {
			from.Cluster, from.ID, Formats{0x105, 0x104}, []uint64{0x102}},
	} {
		var b bytes.Buffer
		require.NoError(t, writeAnswer(&b, a, nil))
		require.Equal(t, want, hex.EncodeToString(b.Bytes()))
		got, err := readAnswer(&b)
		require.NoError(t, err)
		require.Equal(t, a, got)
	}
}

// TestRefusals: a node accepts connections of its own cluster that are meant for its own directory,
// and says why it accepts no others.
func TestRefusals(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.node(t, "b", echo)
		self := identityOf("a")
		other := New(Config{Identity: self, Listener: nw.listen("a"), Dial: nw.dial, Groups: 3, Timeout: testTimeout})
		defer other.Close()
		var refused *RefusedError

		_, err := other.Call(t.Context(), at("b"), 1, nil)
		requireNotSent(t, err)
		require.ErrorAs(t, err, &refused)
		require.Equal(t, &RefusedError{RefusedGroups, "b has 2 groups, not 3"}, refused)

		_, err = other.Group(1).Dial(at("b").RaftAddress(), time.Second)
		require.ErrorAs(t, err, &refused)
		require.Equal(t, RefusedGroups, refused.Reason)
		requireNoConns(t, other)

		handshake := func(header []byte) error {
			c, err := nw.dial(t.Context(), "b")
			require.NoError(t, err)
			defer c.Close()
			_, err = c.Write(header)
			require.NoError(t, err)
			_, err = readAnswer(c)
			if err != nil {
				_, end := c.Read(make([]byte, 1))
				require.ErrorIs(t, end, io.EOF)
			}
			return err
		}
		const b = `this is node "b" (69620000, of cluster 63000000), not `
		require.NoError(t, handshake(encodeHeader(headerTo("b", header{use: useRaft, group: 1, groups: 2}))))
		require.Equal(t, &RefusedError{RefusedGroup, "b has no group 2"},
			handshake(encodeHeader(headerTo("b", header{use: useRaft, group: 2, groups: 2}))))
		require.Equal(t, &RefusedError{RefusedVersion, "protocol version is 4, not 5"},
			handshake([]byte("codeq\x05\x00\x03???")))

		for _, use := range []byte{useCalls, useRaft, useFiles} {
			for _, cluster := range []ID{{'d'}, {}} {
				h := headerTo("b", header{use: use, groups: 2})
				h.from.Cluster = cluster
				require.Equal(t, &RefusedError{RefusedCluster, b[:len(b)-4] + "not of cluster " + orNone(cluster)}, handshake(encodeHeader(h)))
			}
			require.Equal(t, &RefusedError{RefusedNode, b + `node "c" (69630000, of cluster 63000000)`},
				handshake(encodeHeader(headerTo("c", header{use: use, groups: 2}))))
			h := headerTo("b", header{use: use, groups: 2})
			h.to.ID = ID{'j'} // a directory that was lost
			require.Equal(t, &RefusedError{RefusedNode, b + `node "b" (6a000000, of cluster 63000000)`}, handshake(encodeHeader(h)))
			h = headerTo("b", header{use: use, groups: 2})
			h.from = identityOf("b")
			require.Equal(t, RefusedNode, handshake(encodeHeader(h)).(*RefusedError).Reason, "itself")
		}
		stranger := headerTo("b", header{use: useIntroduction, groups: 2})
		stranger.from.Cluster = ID{}
		require.NoError(t, handshake(encodeHeader(stranger)))
		require.Equal(t, &RefusedError{RefusedNode, b + `node "c"`},
			handshake(encodeHeader(headerTo("c", header{use: useIntroduction, groups: 2}))))
	})
}

// TestWrongNodeAnswers: a dialer gives up if the accepting node is not the intended one.
func TestWrongNodeAnswers(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		for name, answers := range map[string]Identity{
			"b": identityOf("c"),
			"d": {ID{'d'}, identityOf("d").ID, "d"},
		} {
			l := nw.listen(name)
			defer l.Close()
			go func() {
				c, err := l.Accept()
				if err == nil {
					_, err = readHeader(c)
				}
				if err == nil {
					err = writeAnswer(c, answer{cluster: answers.Cluster, id: answers.ID, formats: Formats{1, 1}}, nil)
				}
				if err != nil {
					t.Error(err)
				}
			}()
			_, err := nw.node(t, "a"+name, nil).Call(t.Context(), at(name), 1, nil)
			requireNotSent(t, err)
			var refused *RefusedError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, RefusedNode, refused.Reason)
		}
	})
}

// TestOtherServerAnswers: the error distinguishes a server of another protocol, at the address of a
// node, from a node that refuses.
func TestOtherServerAnswers(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		for name, banner := range map[string]string{"w": "HTTP/1.1 400 Bad Request\r\n\r\n", "s": "SSH-2.0-x\r\n", "m": "220 mail\r\n"} {
			l := nw.listen(name)
			go func() {
				c, err := l.Accept()
				if err == nil {
					_, err = readHeader(c)
				}
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = c.Write([]byte(banner)) // no reader may take all of it
				_ = c.Close()
			}()
			_, err := nw.node(t, "a"+name, nil).Introduce(t.Context(), at(name), 1, nil)
			var refused *RefusedError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, &RefusedError{RefusedNode, fmt.Sprintf("it is no node that answers: %q", banner[:2])}, refused)
		}
	})
}

// TestIntroduction: a node without a cluster can only introduce itself, and the other side knows
// that it does.
func TestIntroduction(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		var seen []*Request
		nw.node(t, "b", func(r *Request) {
			seen = append(seen, r)
			r.Reply(r.Body)
		})
		self := identityOf("a")
		self.Cluster = ID{}
		a := New(Config{Identity: self, Listener: nw.listen("a"), Dial: nw.dial, Groups: 2, Timeout: testTimeout})
		defer a.Close()
		_, err := a.Call(t.Context(), at("b"), 1, nil)
		requireNotSent(t, err)
		require.ErrorIs(t, err, errNoCluster)
		require.Zero(t, nw.dials)

		reply, err := a.Introduce(t.Context(), Target{Name: "b", Address: "b"}, 1, []byte("hello"))
		require.NoError(t, err)
		require.Equal(t, "hello", string(reply))
		require.True(t, seen[0].Introduction)
		require.Equal(t, self, seen[0].From)
		requireNoConns(t, a)

		a.SetCluster(testCluster)
		time.Sleep(lastBackoff)
		_, err = a.Call(t.Context(), at("b"), 1, nil)
		require.NoError(t, err)
		require.False(t, seen[1].Introduction)
	})
}

func TestTargetAddress(t *testing.T) {
	for _, to := range []Target{at("b"), {Name: "a\x00b/c", Address: "h:1"}, {ID: ID{1}}} {
		got, err := targetOf(to.RaftAddress())
		require.NoError(t, err)
		require.Equal(t, to, got)
	}
	for _, bad := range []raft.ServerAddress{"", "b", "\x00b", "xx\x00b\x00c"} {
		_, err := targetOf(bad)
		require.Error(t, err, "%q", bad)
	}
}

// A dialer with another protocol gets no answer. The node does not wait for a dialer that sends
// nothing.
func TestGarbageInsteadOfHeader(t *testing.T) {
	for name, garbage := range map[string]string{
		"another protocol":       "GET / HTTP/1.1\r\n\r\n",
		"too long":               "codeq\x04\xff\xff",
		"no formats":             "codeq\x04\x00\x01\x01",
		"half of an incarnation": "codeq\x04\x00\x06\x00\x05\x00\x05\x01\x00",
		"too many incarnations": string(encodeHeader(headerTo("b", header{
			use: useCalls, groups: 2, formats: Formats{5, 5}, incarnations: make([]uint64, MaxIncarnations+1)}))),
		"wrong formats": string(encodeHeader(headerTo("b", header{use: useCalls, groups: 2, formats: Formats{5, 6}}))),
		"another use":   string(encodeHeader(headerTo("b", header{use: 7, groups: 2}))),
		"half a header": "codeq\x04\x00",
		"nothing":       "",
	} {
		t.Run(name, func(t *testing.T) {
			inNetwork(t, func(t *testing.T, nw *network) {
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
				requireNoConns(t, b)
			})
		})
	}
}

// A dialer does not wait for an answer for ever.
func TestHandshakeHangs(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
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
		_, err := a.Call(t.Context(), at("b"), 1, nil)
		requireNotSent(t, err)
		require.Equal(t, testTimeout, time.Since(begin))
		begin = time.Now()
		_, err = a.Group(0).Dial(at("b").RaftAddress(), time.Second)
		require.Error(t, err)
		require.Equal(t, time.Second, time.Since(begin))
		requireNoConns(t, a)
		require.NoError(t, l.Close())
	})
}

func TestNameTooLong(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		nw.node(t, "b", func(r *Request) { r.Reply([]byte(r.From.Name)) })
		for _, length := range []int{maxName, maxName + 1} {
			n := nw.node(t, strings.Repeat("a", length), nil)
			from, err := n.Call(t.Context(), at("b"), 1, nil)
			if length > maxName {
				requireNotSent(t, err)
				require.ErrorContains(t, err, "names of 256 and 1 bytes")
			} else {
				require.NoError(t, err)
				require.Equal(t, n.c.Identity.Name, string(from))
			}
		}
	})
}

func FuzzHeader(f *testing.F) {
	f.Add(encodeHeader(headerTo("n1", header{use: useCalls, groups: 3})))
	f.Add(encodeHeader(headerTo(strings.Repeat("n", maxName), header{use: useRaft, group: 2, groups: 3})))
	f.Add(encodeHeader(headerTo("n1", header{use: useCalls, groups: 3, formats: Formats{6, 5}})))
	f.Add(encodeHeader(headerTo("n1", header{use: useRaft, groups: 3, formats: Formats{6, 5}, incarnations: []uint64{1, 2}})))
	f.Add([]byte("codeq\x05\x00\x03???"))
	f.Add([]byte("codeq\x04\xff\xff"))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		h, err := readHeader(r)
		if err == nil {
			read := data[:len(data)-r.Len()]
			require.Equal(t, read, encodeHeader(h))
		}
		r.Reset(data)
		_, _ = readAnswer(r)
	})
}
