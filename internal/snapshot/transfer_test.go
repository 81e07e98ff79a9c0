package snapshot

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/platform"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
)

// openGate admits everything.
var openGate = Gate{
	Admit: func(Offered) (bool, error) { return false, nil },
	Room:  func(int64) error { return nil },
	Next:  func(Offered, int, int64) error { return nil },
}

// A transfer of these files takes several pieces; some hold parts of two files.
var someFiles = []file{{"000001.sst", 3*pieceBytes/2 + 1}, {"000002.sst", 0}, {"000003.sst", pieceBytes}, {"MANIFEST", 1}}

const someBytes = 5*pieceBytes/2 + 2

// filesLive is a store of certain files.
type filesLive struct {
	fs      vfs.FS
	content [32]byte // seed of their content
}

func (*filesLive) Flush() error { return nil }

func (l *filesLive) Checkpoint(dir string) error {
	if err := l.fs.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	chance := rand.NewChaCha8(l.content)
	for _, f := range someFiles {
		b := make([]byte, f.size)
		_, _ = chance.Read(b) // never fails
		if err := platform.WriteFile(l.fs, l.fs.PathJoin(dir, f.name), b); err != nil {
			return err
		}
	}
	return nil
}

// someCheckpoint returns a checkpoint of some files.
func someCheckpoint(t *testing.T, seed byte) *Checkpoint {
	live := &filesLive{crashfs.New(), [32]byte{seed}}
	n := &node{fs: live.fs}
	var err error
	n.store, err = Open(live.fs, "raft", func() Live { return live }, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	sink := n.create(t, 7)
	require.NoError(t, sink.Persist(live))
	require.NoError(t, sink.Close())
	return n.checkpoint(t)
}

// link carries what one side of a connection writes to the other.
type link struct {
	net.Conn
	rate   int   // bytes per second; 0: no limit
	breaks int64 // it ends after so many bytes; 0: it does not
	flips  int64 // the byte there is damaged; 0: none
	passed int64
}

func (l *link) Write(p []byte) (int, error) {
	p = bytes.Clone(p)
	if at := l.flips - l.passed; l.flips > 0 && at >= 0 && at < int64(len(p)) {
		p[at] ^= 16
	}
	if left := l.breaks - l.passed; l.breaks > 0 && left < int64(len(p)) {
		n, _ := l.Conn.Write(p[:left])
		l.passed += int64(n)
		return n, errors.Join(errReset, l.Conn.Close())
	}
	if l.rate > 0 {
		time.Sleep(time.Duration(len(p)) * time.Second / time.Duration(l.rate))
	}
	n, err := l.Conn.Write(p)
	l.passed += int64(n)
	return n, err
}

var errReset = errors.New("connection reset")

const testTimeout = 10 * time.Second

// send sends the files of a checkpoint over a link, and returns what either side has.
func send(c *Checkpoint, to *Store, l *link, g Gate) (sent, received error) {
	here, there := net.Pipe()
	l.Conn = here
	var ends sync.WaitGroup
	ends.Go(func() { received = errors.Join(to.Receive(there, testTimeout, g), there.Close()) })
	t := c.Transfer(l, testTimeout)
	err := t.Offer(3)
	if err == nil {
		ends.Go(t.Listen)
		err = t.Send(func(int64) error { return nil })
	}
	if err == nil {
		ends.Wait() // or else the pipe may take an answer that was read for one that was not
	}
	_ = here.Close()
	ends.Wait()
	return err, received
}

func emptyStore(t *testing.T) *Store {
	s, err := Open(crashfs.New(), "raft", nil, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	return s
}

// requireFiles fails unless a store has received the files of a checkpoint, and nothing else.
func requireFiles(t *testing.T, s *Store, c *Checkpoint) {
	t.Helper()
	in, err := s.adopt(c.Manifest)
	require.NoError(t, err)
	for _, f := range someFiles {
		want, err := platform.ReadFile(c.store.fs, c.store.fs.PathJoin(c.dir, f.name))
		require.NoError(t, err)
		got, err := platform.ReadFile(s.fs, s.fs.PathJoin(in.dir, f.name))
		require.NoError(t, err)
		require.Equal(t, want, got, f.name)
	}
	require.Len(t, names(t, s), 1)
}

func names(t *testing.T, s *Store) []string {
	t.Helper()
	names, err := s.fs.List(s.dir)
	require.NoError(t, err)
	return names
}

// TestTransferIsResumed: a connection that breaks is continued by the next one where it ended,
// wherever that is, but for a piece.
func TestTransferIsResumed(t *testing.T) {
	c := someCheckpoint(t, 1)
	for _, breaks := range []int64{1, 300, pieceBytes, pieceBytes + 1000, 2*pieceBytes + 500} {
		s, total := emptyStore(t), int64(0)
		for tries := 0; ; tries++ {
			l := &link{breaks: max(breaks, int64(len(c.Manifest))+pieceBytes+100)}
			switch tries {
			case 0:
				l.breaks = breaks
			case 2:
				l.breaks = 0
			}
			sent, received := send(c, s, l, openGate)
			total += l.passed
			if sent == nil {
				require.NoError(t, received)
				break
			}
			require.Less(t, tries, 5)
		}
		again := int64(2*pieceBytes + 3*(offerHead+len(c.Manifest)) + 6*pieceHead)
		require.LessOrEqual(t, total, someBytes+again)
		requireFiles(t, s, c)
	}
}

// TestFilesOfOneCheckpoint: the received bytes of a checkpoint are removed when another one comes.
func TestFilesOfOneCheckpoint(t *testing.T) {
	s := emptyStore(t)
	_, received := send(someCheckpoint(t, 1), s, &link{breaks: 2 * pieceBytes}, openGate)
	require.Error(t, received)
	require.Len(t, names(t, s), 1)
	c := someCheckpoint(t, 2)
	_, received = send(c, s, &link{breaks: 2 * pieceBytes}, openGate)
	require.Error(t, received)
	require.Len(t, names(t, s), 1)
	sent, received := send(c, s, &link{}, openGate)
	require.NoError(t, errors.Join(sent, received))
	requireFiles(t, s, c)
	s.Close()
}

// TestDamagedPiece: a piece that was damaged on its way is not stored, and comes again.
func TestDamagedPiece(t *testing.T) {
	c := someCheckpoint(t, 1)
	begin := int64(offerHead + len(c.Manifest))
	for _, at := range []int64{
		offerHead + 3, begin - 1, begin, begin + 4, begin + pieceHead, begin + 2*pieceHead + pieceBytes, begin + 2*pieceBytes + 100,
	} {
		s := emptyStore(t)
		sent, received := send(c, s, &link{flips: at}, openGate)
		require.ErrorIs(t, received, ErrDamaged, "byte %d", at)
		require.ErrorIs(t, sent, ErrRefused)
		require.ErrorContains(t, sent, "damaged")
		sent, received = send(c, s, &link{}, openGate)
		require.NoError(t, errors.Join(sent, received))
		requireFiles(t, s, c)
	}
}

// TestTransferLastsWhileItMoves: a transfer has time for each piece, and none for all of them. One
// that stands still ends.
func TestTransferLastsWhileItMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := someCheckpoint(t, 1), emptyStore(t)
		begun := time.Now()
		sent, received := send(c, s, &link{rate: pieceBytes / 8}, openGate) // a piece takes 8 s
		require.NoError(t, errors.Join(sent, received))
		require.Greater(t, time.Since(begun), 2*testTimeout)
		requireFiles(t, s, c)

		s, begun = emptyStore(t), time.Now()
		sent, received = send(c, s, &link{rate: pieceBytes / 30}, openGate)
		require.ErrorIs(t, received, os.ErrDeadlineExceeded)
		require.Error(t, sent)
		require.Less(t, time.Since(begun), 40*time.Second)

		here, there := net.Pipe() // there is no receiver
		defer there.Close()
		begun = time.Now()
		err := c.Transfer(here, testTimeout).Offer(3)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.Equal(t, testTimeout, time.Since(begun))
	})
}

// TestGate: files that a node does not want are refused, with the reason, and not kept.
func TestGate(t *testing.T) {
	full := errors.New("the disk is full")
	c := someCheckpoint(t, 1)
	s := emptyStore(t)
	refused := func(g Gate) {
		t.Helper()
		sent, received := send(c, s, &link{}, g)
		require.ErrorIs(t, sent, ErrRefused)
		require.ErrorContains(t, sent, full.Error())
		require.ErrorIs(t, received, full)
	}
	g := openGate
	g.Admit = func(o Offered) (bool, error) {
		require.Equal(t, Offered{Sender: 3, Index: 7, Term: 3}, o)
		return false, full
	}
	refused(g)
	g = openGate
	g.Room = func(bytes int64) error {
		require.EqualValues(t, someBytes, bytes)
		return full
	}
	refused(g)
	require.Empty(t, names(t, s))
	pieces := 0
	g = openGate
	g.Next = func(Offered, int, int64) error {
		if pieces++; pieces == 2 {
			return full
		}
		return nil
	}
	refused(g)
	require.Empty(t, names(t, s))

	g.Admit = func(Offered) (bool, error) { return true, nil }
	sent, received := send(c, s, &link{}, g)
	require.NoError(t, errors.Join(sent, received))
	require.Empty(t, names(t, s))
}

// TestConnectionIsReplaced: of two connections with the same files the latest counts. Later bytes
// of the other one are not stored, and it removes nothing.
func TestConnectionIsReplaced(t *testing.T) {
	c, s := someCheckpoint(t, 1), emptyStore(t)
	first, err := s.receive(c.Manifest, time.Minute)
	require.NoError(t, err)
	require.NoError(t, first.write(0, []byte("x")))
	second, err := s.receive(c.Manifest, time.Minute)
	require.NoError(t, err)
	require.EqualValues(t, 1, second.offset())
	require.ErrorIs(t, first.write(1, []byte("y")), errSuperfluous)
	require.ErrorIs(t, first.finish(), errSuperfluous)
	first.drop()
	require.ErrorIs(t, second.write(0, []byte("z")), ErrDamaged)
	require.ErrorIs(t, second.write(1, make([]byte, someBytes)), ErrDamaged)
	require.NoError(t, second.write(1, []byte("z")))
	s.DropReceived()
	require.ErrorIs(t, second.write(2, []byte("z")), errSuperfluous)
	require.Empty(t, names(t, s))
}

// TestDiskFailsUnderTransfer: files that could not be stored are removed.
func TestDiskFailsUnderTransfer(t *testing.T) {
	c, s := someCheckpoint(t, 1), emptyStore(t)
	s.fs = &testkit.HookFS{FS: s.fs, Before: func(op, name string) error {
		if op == "create" && strings.HasSuffix(name, "000003.sst") {
			return errBroken
		}
		return nil
	}}
	sent, received := send(c, s, &link{}, openGate)
	require.ErrorIs(t, received, errBroken)
	require.ErrorIs(t, sent, ErrRefused)
	require.Empty(t, names(t, s))
}

// FuzzReceive: any bytes are refused, or stored, and take no more memory than their number.
func FuzzReceive(f *testing.F) {
	c := encode(3, file{"a", 3})
	offer := append([]byte{byte(len(c)), 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0}, c...)
	piece := append([]byte{3, 0, 0, 0, 0, 0, 0, 0}, "abc"...)
	for i := range 4 {
		piece[4+i] = byte(pieceSum(0, []byte("abc")) >> (8 * i))
	}
	f.Add(append(bytes.Clone(offer), piece...))
	f.Add(append(bytes.Clone(offer), "abc"...))
	f.Add(offer)
	f.Add([]byte{255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := Open(crashfs.New(), "raft", nil, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		conn := &recording{Reader: bytes.NewReader(b)}
		testbase.BoundDecode(t, len(b)+2*pieceBytes, func() { err = s.Receive(conn, time.Second, openGate) })
		root, listErr := s.fs.List("")
		require.NoError(t, listErr)
		require.Equal(t, []string{"raft"}, root)
		if err == nil {
			require.Equal(t, answerComplete, conn.answers[len(conn.answers)-answerHead])
		}
	})
}

// recording is a connection on which certain bytes come.
type recording struct {
	net.Conn
	io.Reader
	answers []byte
}

func (c *recording) Read(p []byte) (int, error) { return c.Reader.Read(p) }
func (c *recording) Write(p []byte) (int, error) {
	c.answers = append(c.answers, p...)
	return len(p), nil
}
func (*recording) SetDeadline(time.Time) error      { return nil }
func (*recording) SetReadDeadline(time.Time) error  { return nil }
func (*recording) SetWriteDeadline(time.Time) error { return nil }

// TestFilesOfADiskThatFailsAreNotContinued: when a disk hangs and then fails, the sender notices
// that it hangs: it offers the files again before the received bytes are removed.
func TestFilesOfADiskThatFailsAreNotContinued(t *testing.T) {
	fails := false // the next sync
	fs := &testkit.HookFS{FS: crashfs.New(), Before: func(op, name string) error {
		if op == "sync" && fails {
			fails = false
			return errBroken
		}
		return nil
	}}
	s, err := Open(fs, "raft", nil, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	c := someCheckpoint(t, 1)
	all := make([]byte, someBytes)
	half := someFiles[0].size

	first, err := s.receive(c.Manifest, time.Minute)
	require.NoError(t, err)
	require.NoError(t, first.write(0, all[:half]))
	fails = true
	require.ErrorIs(t, first.write(half, all[half:]), errBroken)

	second, err := s.receive(c.Manifest, time.Minute)
	require.NoError(t, err)
	first.drop()
	require.ErrorIs(t, second.write(second.offset(), all[second.offset():]), errSuperfluous)
	require.ErrorIs(t, second.finish(), errSuperfluous)
	second.drop()

	require.NoError(t, errors.Join(send(c, s, &link{}, openGate)))
	requireFiles(t, s, c)
}
