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

// living starts a Node that says lives, and notes with whom it meets. It refuses those who say 666.
func (nw *network) living(t *testing.T, name string, lives ...uint64) (n *Node, met *[]string) {
	met = new([]string)
	n = New(Config{
		Identity: identityOf(name), Listener: nw.listen(name), Dial: nw.dial, Groups: 2, Handler: echo, Timeout: testTimeout,
		Formats: Formats{5, 4}, Lives: lives,
		Files: func(_ int, from net.Conn) { _, _ = io.Copy(io.Discard, from) }, // ends after the handshake
		CheckLives: func(other Identity, lives []uint64) error {
			*met = append(*met, fmt.Sprint(other.Name, lives))
			switch last := lives[len(lives)-1]; last {
			case 666:
				return fmt.Errorf("%w: life %d", base.ErrOldCopy, last)
			case 667:
				return base.ErrDiskFull
			}
			return nil
		},
	})
	t.Cleanup(func() { require.NoError(t, n.Close()) })
	return n, met
}

// TestLivesAreSaid: both sides of each connection between members know the lives of the other
// before the connection is used, whatever it is for; strangers and older builds are not asked.
func TestLivesAreSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nw := newNetwork()
		a, metByA := nw.living(t, "a", 1, 2)
		_, metByB := nw.living(t, "b", 3)
		require.NoError(t, a.Greet(t.Context(), at("b")))
		synctest.Wait()
		require.Equal(t, []string{"b[3]"}, *metByA)
		require.Equal(t, []string{"a[1 2]"}, *metByB)
		requireNoConns(t, a)

		a.SetLives([]uint64{2, 4})
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

		nw.oldNode(t, "old")
		require.NoError(t, a.Greet(t.Context(), at("old")))
		require.Len(t, *metByA, 4)
	})
}

// TestGreetingGivesUp: the end of the context ends the wait for an answer.
func TestGreetingGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nw := newNetwork()
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

// TestOldCopyIsRefused: a node whose directory is an older copy gets no connection in either
// direction, and is told why. What cannot be noted refuses nobody for good.
func TestOldCopyIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nw := newNetwork()
		sound, _ := nw.living(t, "sound", 1)
		old, _ := nw.living(t, "old", 5, 666)
		go func() { // what sound has refused has been accepted
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
			require.True(t, strings.HasSuffix(refused.Text, "life 666"), refused.Text)
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

		old.SetLives([]uint64{667})
		err = old.Greet(t.Context(), at("sound"))
		require.Error(t, err)
		require.False(t, errors.As(err, &refused), "%v", err)
		old.SetLives([]uint64{5})
		require.NoError(t, old.Greet(t.Context(), at("sound")))
		requireNoConns(t, old)
	})
}
