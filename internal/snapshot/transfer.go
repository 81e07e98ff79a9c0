package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"time"
)

// The files of a checkpoint travel on a connection of their own:
//
//	sender    offer:   length u32 of the manifest | term u64 of the sender | manifest
//	receiver  answer:  go on | offset u64: so many bytes of the files are there already
//	sender    pieces:  length u32 | CRC-32C u32 of offset u64 and bytes | bytes
//	receiver  answer:  complete | 0, once all is durable
//
// Instead of either answer, and at any time, the receiver may refuse. The files are sent one after
// the other, as the manifest lists them, from the offset on; a piece may be of several. Integers
// are little-endian, an answer is:
//
//	kind u8 | offset u64 | length u16 | text
//
// Each piece, in either direction, has its own time limit, so that a transfer may last as long as
// it makes progress.
const (
	pieceBytes = 256 << 10
	pieceHead  = 4 + 4
	offerHead  = 4 + 8
	answerHead = 1 + 8 + 2
	maxText    = 1024
)

const (
	answerGoOn byte = 1 + iota
	answerComplete
	answerRefused
)

// ErrRefused is the error of Send if the receiver does not want the files.
var ErrRefused = errors.New("snapshot: refused by the receiver")

type answer struct {
	kind   byte
	offset int64
	text   string
}

func (a answer) write(w io.Writer) error {
	text := a.text[:min(len(a.text), maxText)]
	b := binary.LittleEndian.AppendUint64([]byte{a.kind}, uint64(a.offset))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(text)))
	_, err := w.Write(append(b, text...))
	return err
}

func readAnswer(r io.Reader) (a answer, err error) {
	var b [answerHead + maxText]byte
	if _, err := io.ReadFull(r, b[:answerHead]); err != nil {
		return a, err
	}
	a.kind, a.offset = b[0], int64(binary.LittleEndian.Uint64(b[1:]))
	text := b[:min(int(binary.LittleEndian.Uint16(b[9:])), maxText)]
	if _, err := io.ReadFull(r, text); err != nil {
		return a, err
	}
	a.text = string(text)
	if a.kind < answerGoOn || a.kind > answerRefused || a.offset < 0 {
		return a, fmt.Errorf("%w: answer of kind %d, offset %d", ErrDamaged, a.kind, a.offset)
	}
	if a.kind == answerRefused {
		return a, fmt.Errorf("%w: %s", ErrRefused, a.text)
	}
	return a, nil
}

// pieceSum is the checksum of a piece.
func pieceSum(offset int64, p []byte) uint32 {
	var at [8]byte
	binary.LittleEndian.PutUint64(at[:], uint64(offset))
	return crc32.Update(crc32.Checksum(at[:], castagnoli), castagnoli, p)
}

// Transfer sends the files of a checkpoint to another node, on one connection.
type Transfer struct {
	checkpoint *Checkpoint
	conn       net.Conn
	timeout    time.Duration // of a piece
	files      *filesReader
	offset     int64      // of files
	has        bool       // the receiver has the snapshot
	ended      chan error // capacity 1: the receiver's last answer, or the error instead
}

// Transfer makes a transfer on a connection. timeout is the time to send or to store a piece.
func (c *Checkpoint) Transfer(conn net.Conn, timeout time.Duration) *Transfer {
	return &Transfer{checkpoint: c, conn: conn, timeout: timeout, ended: make(chan error, 1)}
}

// Offer offers the files to the receiver, as the leader of a term.
func (t *Transfer) Offer(term uint64) error {
	c := t.checkpoint
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(c.Manifest)))
	b = append(binary.LittleEndian.AppendUint64(b, term), c.Manifest...)
	if err := t.write(b); err != nil {
		return err
	}
	if err := t.conn.SetReadDeadline(time.Now().Add(t.timeout)); err != nil {
		return err
	}
	a, err := readAnswer(t.conn)
	if err != nil {
		return err
	}
	if a.kind == answerComplete { // the other side may have closed the connection by now
		t.has = true
		return nil
	}
	if err := t.conn.SetReadDeadline(time.Time{}); err != nil { // from now on Send limits the waits
		return err
	}
	t.offset = a.offset
	t.files, err = c.from(a.offset)
	return err
}

func (t *Transfer) write(b []byte) error {
	for len(b) > 0 {
		n := min(len(b), pieceHead+pieceBytes)
		if err := t.conn.SetWriteDeadline(time.Now().Add(t.timeout)); err != nil {
			return err
		}
		if _, err := t.conn.Write(b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// Listen waits for the receiver's last answer, while Send sends, and ends the connection after a
// refusal. The connection has no other reader.
func (t *Transfer) Listen() {
	if t.has {
		return
	}
	a, err := readAnswer(t.conn)
	if err == nil && a.kind != answerComplete {
		err = fmt.Errorf("%w: answer of kind %d amid the files", ErrDamaged, a.kind)
	}
	if err != nil {
		t.Fail(err)
		return
	}
	t.end(nil)
}

// Fail ends the transfer. Any goroutine may call it.
func (t *Transfer) Fail(err error) {
	t.end(err)
	_ = t.conn.Close()
}

// end stores the first end.
func (t *Transfer) end(err error) {
	select {
	case t.ended <- err:
	default:
	}
}

// Send sends the files that the receiver lacks, and returns when it has all. moved gets the number
// of bytes of the files that were sent on this connection, or had come before; its error ends the
// transfer. REQUIRES: Listen runs, or will, or Fail is called.
func (t *Transfer) Send(moved func(to int64) error) error {
	if t.has {
		return nil
	}
	defer func() { _ = t.files.close() }() // the files were only read
	for b := make([]byte, pieceHead+pieceBytes); t.offset < t.checkpoint.Size; {
		n, err := io.ReadFull(t.files, b[pieceHead:][:min(t.checkpoint.Size-t.offset, pieceBytes)])
		if err != nil {
			return err
		}
		binary.LittleEndian.PutUint32(b, uint32(n))
		binary.LittleEndian.PutUint32(b[4:], pieceSum(t.offset, b[pieceHead:][:n]))
		if err := t.write(b[:pieceHead+n]); err != nil {
			return t.last(err)
		}
		t.offset += int64(n)
		if err := moved(t.offset); err != nil {
			return err
		}
	}
	return t.last(nil)
}

// last is the receiver's last answer. After a failure of sending, only a refusal matters.
func (t *Transfer) last(failure error) error {
	_ = t.conn.SetReadDeadline(time.Now().Add(t.timeout)) // after an error Listen fails
	if err := <-t.ended; failure == nil || errors.Is(err, ErrRefused) {
		return err
	}
	return failure
}

// Offered describes the files that another node offers.
type Offered struct {
	Sender      uint64 // its term
	Index, Term uint64 // of the snapshot
}

// Gate decides about files that another node offers. After an error of Room or Next no received
// bytes are kept.
type Gate struct {
	// Admit returns whether the node already has the snapshot.
	Admit func(Offered) (has bool, err error)
	// Room is called before the rest of the files comes, with its number of bytes.
	Room func(bytes int64) error
	// Next is called before so many bytes are stored, of the rest that is not stored yet.
	Next func(o Offered, bytes int, rest int64) error
}

// Receive receives the files that the other side of a connection offers, and returns when they are
// complete, or no more come. Received bytes are kept then. timeout is that of a piece.
func (s *Store) Receive(conn net.Conn, timeout time.Duration, g Gate) error {
	r := &reader{conn: conn, timeout: timeout, buf: make([]byte, pieceBytes)}
	err := s.receiveFrom(r, g)
	if err == nil || r.lost {
		return err
	}
	// The sender gets a refusal only if unread bytes do not reset the connection.
	end := time.Now().Add(timeout)
	if conn.SetDeadline(end) == nil && (answer{kind: answerRefused, text: err.Error()}).write(conn) == nil {
		_, _ = io.Copy(io.Discard, conn)
	}
	return err
}

// reader reads the messages of a sender.
type reader struct {
	conn    net.Conn
	timeout time.Duration
	lost    bool // the connection has failed
	buf     []byte
}

func (r *reader) read(p []byte) error {
	for len(p) > 0 {
		n := min(len(p), pieceBytes)
		err := r.conn.SetReadDeadline(time.Now().Add(r.timeout))
		if err == nil {
			_, err = io.ReadFull(r.conn, p[:n])
		}
		if err != nil {
			r.lost = true
			return err
		}
		p = p[n:]
	}
	return nil
}

func (r *reader) answer(a answer) error {
	err := r.conn.SetWriteDeadline(time.Now().Add(r.timeout))
	if err == nil {
		err = a.write(r.conn)
	}
	r.lost = err != nil
	return err
}

func (s *Store) receiveFrom(r *reader, g Gate) error {
	o, encoded, err := r.offer()
	if err != nil {
		return err
	}
	has, err := g.Admit(o)
	if err != nil {
		return err
	}
	if !has {
		a, err := s.receive(encoded, r.timeout)
		if err != nil {
			return err
		}
		if err := r.files(a, o, g); err != nil {
			if !r.lost && !errors.Is(err, ErrDamaged) {
				a.drop()
			}
			return err
		}
	}
	return r.answer(answer{kind: answerComplete})
}

// files receives the missing bytes.
func (r *reader) files(a *arrival, o Offered, g Gate) error {
	offset, total := a.offset(), a.manifest.total
	if err := g.Room(total - offset); err != nil {
		return err
	}
	if err := r.answer(answer{kind: answerGoOn, offset: offset}); err != nil {
		return err
	}
	for offset < total {
		p, err := r.piece(offset)
		if err != nil {
			return err
		}
		if err := g.Next(o, len(p), total-offset); err != nil {
			return err
		}
		if err := a.write(offset, p); err != nil {
			return err
		}
		offset += int64(len(p))
	}
	return a.finish()
}

// offer reads the first message of a sender.
func (r *reader) offer() (o Offered, encoded []byte, err error) {
	head := r.buf[:offerHead]
	if err := r.read(head); err != nil {
		return o, nil, err
	}
	length := binary.LittleEndian.Uint32(head)
	o.Sender = binary.LittleEndian.Uint64(head[4:])
	if length > maxManifest {
		return o, nil, fmt.Errorf("%w: manifest of %d bytes", ErrDamaged, length)
	}
	for rest := int(length); rest > 0; { // no more memory than bytes that have arrived
		p := r.buf[:min(rest, len(r.buf))]
		if err := r.read(p); err != nil {
			return o, nil, err
		}
		encoded = append(encoded, p...)
		rest -= len(p)
	}
	m, err := parseManifest(encoded)
	if err != nil {
		return o, nil, err
	}
	o.Index, o.Term = m.index, m.term
	return o, encoded, nil
}

// piece reads the piece at an offset. It is valid until the next one.
func (r *reader) piece(offset int64) ([]byte, error) {
	head := r.buf[:pieceHead]
	if err := r.read(head); err != nil {
		return nil, err
	}
	length, sum := binary.LittleEndian.Uint32(head), binary.LittleEndian.Uint32(head[4:])
	if length == 0 || length > pieceBytes {
		return nil, fmt.Errorf("%w: piece of %d bytes", ErrDamaged, length)
	}
	p := r.buf[:length]
	if err := r.read(p); err != nil {
		return nil, err
	}
	if got := pieceSum(offset, p); got != sum {
		return nil, fmt.Errorf("%w: checksum %08x of the piece at %d, not %08x", ErrDamaged, got, offset, sum)
	}
	return p, nil
}
