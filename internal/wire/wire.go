// Package wire is how plain values are written one after another into a
// message between nodes, and read back. Writing cannot fail; a Reader notes the
// first thing that cannot be read, and returns zeros from then on, so that a
// message is decoded without a check at each step and one at the end.
package wire

import (
	"encoding/binary"
	"errors"
)

// ErrMalformed says that a message is not what its reader expects.
var ErrMalformed = errors.New("malformed message")

// AppendUint appends a number.
func AppendUint(dst []byte, n uint64) []byte { return binary.AppendUvarint(dst, n) }

// AppendInt appends a number that may be negative.
func AppendInt(dst []byte, n int64) []byte { return binary.AppendVarint(dst, n) }

// AppendBytes appends bytes with their number before them.
func AppendBytes[B ~[]byte | ~string](dst []byte, b B) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(b))), b...)
}

// AppendBool appends a truth value.
func AppendBool(dst []byte, v bool) []byte {
	if v {
		return append(dst, 1)
	}
	return append(dst, 0)
}

// Reader reads what the functions above have written.
type Reader struct {
	rest []byte
	bad  bool
}

// NewReader returns a Reader of a message. What Bytes returns aliases it.
func NewReader(message []byte) *Reader { return &Reader{rest: message} }

func (r *Reader) fail() { r.rest, r.bad = nil, true }

// Uint reads a number.
func (r *Reader) Uint() uint64 {
	n, size := binary.Uvarint(r.rest)
	if size <= 0 {
		r.fail()
		return 0
	}
	r.rest = r.rest[size:]
	return n
}

// Int reads a number that may be negative.
func (r *Reader) Int() int64 {
	n, size := binary.Varint(r.rest)
	if size <= 0 {
		r.fail()
		return 0
	}
	r.rest = r.rest[size:]
	return n
}

// Count reads how many things follow, each of which takes least bytes or more:
// so what a reader makes room for is bounded by the message.
func (r *Reader) Count(least int) int {
	n := r.Uint()
	if n > uint64(len(r.rest)/least) {
		r.fail()
		return 0
	}
	return int(n)
}

// Bytes reads bytes; they alias the message.
func (r *Reader) Bytes() []byte { return r.Take(r.Count(1)) }

// String reads bytes as a string.
func (r *Reader) String() string { return string(r.Bytes()) }

// Bool reads a truth value.
func (r *Reader) Bool() bool { return r.Byte() == 1 }

// Byte reads one byte.
func (r *Reader) Byte() byte {
	if len(r.rest) == 0 {
		r.fail()
		return 0
	}
	b := r.rest[0]
	r.rest = r.rest[1:]
	return b
}

// Take reads n bytes without a number before them; they alias the message.
func (r *Reader) Take(n int) []byte {
	if n > len(r.rest) {
		r.fail()
		return nil
	}
	b := r.rest[:n:n]
	r.rest = r.rest[n:]
	return b
}

// Rest reads whatever is left; it aliases the message.
func (r *Reader) Rest() []byte { return r.Take(len(r.rest)) }

// Done returns ErrMalformed if something could not be read, or is left.
func (r *Reader) Done() error {
	if r.bad || len(r.rest) > 0 {
		return ErrMalformed
	}
	return nil
}
