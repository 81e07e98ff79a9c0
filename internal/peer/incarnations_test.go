package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
)

// living starts a Node that sends incarnations, and notes the nodes that it meets. It refuses
// incarnation 666.
func (nw *network) living(t *testing.T, name string, incarnations ...uint64) (n *Node, met *[]string) {
	met = new([]string)
	n = New(Config{
		Identity: identityOf(name), Listener: nw.listen(name), Dial: nw.dial, Groups: 2, Handler: echo, Timeout: testTimeout,
		Formats: Formats{5, 4}, Incarnations: Incarnations{All: incarnations},
		Files: func(_ int, from net.Conn) { _, _ = io.Copy(io.Discard, from) }, // ends after the handshake
		CheckIncarnations: func(_ context.Context, other Identity, said Incarnations) error {
			incarnations := said.All
			*met = append(*met, fmt.Sprint(other.Name, incarnations))
			switch last := incarnations[len(incarnations)-1]; last {
			case 666:
				return fmt.Errorf("%w: incarnation %d", base.ErrOldCopy, last)
			case 667:
				return base.ErrDiskFull
			}
			return nil
		},
	})
	t.Cleanup(func() { require.NoError(t, n.Close()) })
	return n, met
}

// TestIncarnationsAreSaid: both sides of each connection between members know the incarnations of
// the other before any use of the connection. Strangers, and nodes without incarnations, are not
// checked.
func TestIncarnationsAreSaid(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		a, metByA := nw.living(t, "a", 1, 2)
		_, metByB := nw.living(t, "b", 3)
		require.NoError(t, a.Greet(t.Context(), at("b")))
		synctest.Wait()
		require.Equal(t, []string{"b[3]"}, *metByA)
		require.Equal(t, []string{"a[1 2]"}, *metByB)
		requireNoConns(t, a)

		a.SetIncarnations(Incarnations{All: []uint64{2, 4}})
		_, err := a.Call(t.Context(), at("b"), 1, nil)
		require.NoError(t, err)
		dialRaft(t, a, "b")
		c, err := a.OpenFiles(t.Context(), at("b"), 1)
		require.NoError(t, err)
		require.NoError(t, c.Close())
		require.Equal(t, slices.Repeat([]string{"a[2 4]"}, 3), (*metByB)[1:])
		_, err = a.Introduce(t.Context(), at("b"), 1, nil)
		require.NoError(t, err)
		nw.connect(t, "b")
		require.Len(t, *metByB, 4)

		nw.formatted(t, "lifeless", Formats{7, 1})
		require.NoError(t, a.Greet(t.Context(), at("lifeless")))
		require.Len(t, *metByA, 4)
	})
}

// TestGreetingGivesUp: the end of the context ends the wait for an answer.
func TestGreetingGivesUp(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		defer nw.listen("b").Close()
		a, _ := nw.living(t, "a", 1)
		ctx, cancel := context.WithCancel(t.Context())
		l := nw.listeners["b"]
		go func() {
			c, err := l.Accept()
			if err != nil {
				t.Error(err)
			}
			_, _ = readHeader(c)
			time.Sleep(time.Second)
			cancel()
			_, _ = c.Read(make([]byte, 1))
		}()
		begin := time.Now()
		require.Error(t, a.Greet(ctx, at("b")))
		require.Equal(t, time.Second, time.Since(begin))
		requireNoConns(t, a)
	})
}

// TestOldCopyIsRefused: a node with an older copy of its directory gets no connection in either
// direction, and learns the reason. If an incarnation cannot be noted, the refusal is only
// temporary.
func TestOldCopyIsRefused(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		sound, _ := nw.living(t, "sound", 1)
		old, _ := nw.living(t, "old", 5, 666)
		go func() { // old has accepted the connections that sound refuses
			for c, err := old.Group(0).Accept(); err == nil; c, err = old.Group(0).Accept() {
				_ = c.Close()
			}
		}()
		for what, try := range map[string]func() error{
			"greeting": func() error { return old.Greet(t.Context(), at("sound")) },
			"call":     func() error { _, err := old.Call(t.Context(), at("sound"), 1, nil); return err },
			"raft": func() error {
				_, err := old.Group(0).Dial(at("sound").RaftAddress(), time.Second)
				return err
			},
		} {
			var refused *RefusedError
			require.ErrorAs(t, try(), &refused, what)
			require.Equal(t, RefusedCopy, refused.Reason)
			require.Contains(t, refused.Text, `node "old"`)
			require.True(t, strings.HasSuffix(refused.Text, "incarnation 666"), refused.Text)
		}
		var c net.Conn
		c, err := sound.Group(0).Dial(at("old").RaftAddress(), time.Second)
		require.ErrorIs(t, err, base.ErrOldCopy)
		require.Nil(t, c)
		require.ErrorIs(t, sound.Failure(at("old")), base.ErrOldCopy)
		var refused *RefusedError
		require.False(t, errors.As(err, &refused), "it is not the one that was refused")
		_, err = old.Introduce(t.Context(), at("sound"), 1, nil)
		require.NoError(t, err)

		old.SetIncarnations(Incarnations{All: []uint64{667}})
		err = old.Greet(t.Context(), at("sound"))
		require.Error(t, err)
		require.False(t, errors.As(err, &refused), "%v", err)
		old.SetIncarnations(Incarnations{All: []uint64{5}})
		require.NoError(t, old.Greet(t.Context(), at("sound")))
		requireNoConns(t, old)
	})
}

// TestBirthsAreSaid: the first incarnation of a process is sent between the others.
func TestBirthsAreSaid(t *testing.T) {
	for _, l := range []Incarnations{{[]uint64{0, 5}, 5}, {[]uint64{5}, 5}, {[]uint64{7}, 5}, {[]uint64{5, 7}, 5}, {[]uint64{1, 2, 3, 9}, 2}} {
		said := l.said()
		got := incarnationsOf(said)
		require.Equal(t, l.Birth, got.Birth)
		require.Equal(t, l.All, slices.Compact(got.All))
		require.Equal(t, l.All[0], said[0])
		require.Equal(t, l.All[len(l.All)-1], said[len(said)-1])
	}
	l := Incarnations{All: []uint64{1, 2}}
	require.Equal(t, l, incarnationsOf(l.said()))
}

// process starts a Node. Other processes may have the same directory.
func (nw *network) process(t *testing.T, of, address string, birth uint64) *Node {
	n := New(Config{
		Identity: identityOf(of), Listener: nw.listen(address), Dial: nw.dial, Groups: 2, Handler: echo, Timeout: testTimeout,
		Formats: Formats{7, 4}, Incarnations: Incarnations{[]uint64{1, birth}, birth},
	})
	t.Cleanup(func() { require.NoError(t, n.Close()) })
	return n
}

// TestEarlierProcessIsHeard: a node hears a process over connections from either side, also when
// another process has its address. When a process is admitted, the connections of earlier processes
// end, and they get no new ones.
func TestEarlierProcessIsHeard(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		b, elder := nw.process(t, "b", "b", 2), nw.process(t, "a", "a", 5)
		id := identityOf("a").ID
		hears := func(before uint64) bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, ok := b.Hears(ctx, id, before)
			return ok
		}
		require.False(t, hears(6))
		call := func(from *Node, to string) error {
			_, err := from.Call(t.Context(), at(to), 1, nil)
			return err
		}
		require.NoError(t, call(elder, "b"))
		require.True(t, hears(6), "it has dialed")
		require.False(t, hears(5))
		later := nw.process(t, "a", "a", 6)
		got, incarnations, err := b.Probe(t.Context(), at("a"))
		require.NoError(t, err)
		require.Equal(t, id, got)
		require.Equal(t, Incarnations{[]uint64{1, 6}, 6}, incarnations)
		require.True(t, hears(6), "another one has its address")

		b.Admit(id, 6)
		synctest.Wait()
		require.False(t, hears(anyBirth))
		var refused *RefusedError
		require.ErrorAs(t, call(elder, "b"), &refused)
		require.Equal(t, RefusedCopy, refused.Reason)
		require.NoError(t, call(later, "b"))
		require.NoError(t, call(b, "a"))
		require.EqualValues(t, 6, b.Admitted(id))
		require.True(t, hears(anyBirth))
		require.NoError(t, later.Close())
		require.False(t, hears(anyBirth))
	})
}

const anyBirth = ^uint64(0)

// TestLateAnswer: a process may not yet be known as the only one. It gets this answer in time, and
// may try again.
func TestLateAnswer(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		known := make(chan struct{})
		b := New(Config{
			Identity: identityOf("b"), Listener: nw.listen("b"), Groups: 2, Handler: echo, Timeout: testTimeout,
			Formats: Formats{7, 4}, Incarnations: Incarnations{[]uint64{1, 2}, 2},
			CheckIncarnations: func(ctx context.Context, _ Identity, _ Incarnations) error {
				select {
				case <-known:
					return nil
				case <-ctx.Done():
					return ErrEarly
				}
			},
		})
		defer func() { require.NoError(t, b.Close()) }()
		a := nw.process(t, "a", "a", 5)
		var refused *RefusedError
		require.ErrorAs(t, a.Greet(t.Context(), at("b")), &refused)
		require.Equal(t, RefusedEarly, refused.Reason)
		close(known)
		require.NoError(t, a.Greet(t.Context(), at("b")))
	})
}

// TestEndsMeanwhile: a node stops its wait for a process that ends during the check of its
// incarnations. If a process sends bytes during the check, the node reads them later.
func TestEndsMeanwhile(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		checked, waited := make(chan struct{}), make(chan time.Duration, 1)
		b := New(Config{
			Identity: identityOf("b"), Listener: nw.listen("b"), Dial: nw.dial, Groups: 2, Handler: echo, Timeout: testTimeout,
			Formats: Formats{7, 4}, Incarnations: Incarnations{[]uint64{1, 2}, 2},
			CheckIncarnations: func(ctx context.Context, _ Identity, _ Incarnations) error {
				begin := time.Now()
				select {
				case <-checked:
					return nil
				case <-ctx.Done():
					waited <- time.Since(begin)
					return ErrEarly
				}
			},
		})
		defer func() { require.NoError(t, b.Close()) }()
		a := nw.process(t, "a", "a", 5)
		ctx, cancel := context.WithTimeout(t.Context(), testTimeout/8)
		defer cancel()
		require.Error(t, a.Greet(ctx, at("b")))
		require.Equal(t, testTimeout/8, <-waited)

		called := make(chan error, 1)
		go func() {
			_, err := b.Call(t.Context(), at("a"), 1, nil)
			called <- err
		}()
		synctest.Wait()
		heard := make(chan bool, 1)
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, ok := a.Hears(ctx, identityOf("b").ID, anyBirth)
			heard <- ok
		}()
		synctest.Wait()
		close(checked)
		require.NoError(t, <-called)
		require.True(t, <-heard)
	})
}
