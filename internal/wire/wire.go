// Package wire writes plain values one after another, into a message between nodes or into stored
// data, and reads them back. Writing cannot fail; a Reader notes the first thing that it cannot
// read, and returns zeros from then on, so that a message is decoded with one check at the end.
package wire

import (
	"encoding/binary"
	"errors"
	"math"
)

// ErrMalformed says that a message does not have the form that the reader expects.
var ErrMalformed = errors.New("malformed message")

// AppendUint appends a number.
func AppendUint(dst []byte, n uint64) []byte { return binary.AppendUvarint(dst, n) }

// AppendInt appends a number that may be negative.
func AppendInt(dst []byte, n int64) []byte { return binary.AppendVarint(dst, n) }

// AppendBytes appends bytes after their number.
func AppendBytes[B ~[]byte | ~string](dst []byte, b B) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(b))), b...)
}

// AppendStrings appends strings after their number.
func AppendStrings(dst []byte, list []string) []byte {
	dst = AppendUint(dst, uint64(len(list)))
	for _, s := range list {
		dst = AppendBytes(dst, s)
	}
	return dst
}

// AppendBool appends a truth value.
func AppendBool(dst []byte, v bool) []byte {
	if v {
		return append(dst, 1)
	}
	return append(dst, 0)
}

// Reader reads values that the functions above have written.
type Reader struct {
	rest []byte
	bad  bool
}

// NewReader returns a Reader of a message. The result of Bytes aliases it.
func NewReader(message []byte) *Reader { return &Reader{rest: message} }

// Fail notes that the message is not as expected.
func (r *Reader) Fail() { r.rest, r.bad = nil, true }

// Failed reports whether something could not be read.
func (r *Reader) Failed() bool { return r.bad }

// Len returns how many bytes are left.
func (r *Reader) Len() int { return len(r.rest) }

// Uint reads a number.
func (r *Reader) Uint() uint64 {
	n, size := binary.Uvarint(r.rest)
	if size <= 0 {
		r.Fail()
		return 0
	}
	r.rest = r.rest[size:]
	return n
}

// Uint32 reads a number that fits 32 bits.
func (r *Reader) Uint32() uint32 {
	n := r.Uint()
	if n > math.MaxUint32 {
		r.Fail()
		return 0
	}
	return uint32(n)
}

// Int reads a number that may be negative.
func (r *Reader) Int() int64 {
	n, size := binary.Varint(r.rest)
	if size <= 0 {
		r.Fail()
		return 0
	}
	r.rest = r.rest[size:]
	return n
}

// Count reads the number of following elements. Each takes least bytes or more: so the message
// limits the allocations of a reader.
func (r *Reader) Count(least int) int {
	n := r.Uint()
	if n > uint64(len(r.rest)/least) {
		r.Fail()
		return 0
	}
	return int(n)
}

// Bytes reads bytes; they alias the message.
func (r *Reader) Bytes() []byte { return r.Take(r.Count(1)) }

// String reads bytes as a string.
func (r *Reader) String() string { return string(r.Bytes()) }

// Strings reads strings after their number; nil if there are none.
func (r *Reader) Strings() (list []string) {
	for range r.Count(1) {
		list = append(list, r.String())
	}
	return list
}

// Bool reads a truth value.
func (r *Reader) Bool() bool { return r.Byte() == 1 }

// Byte reads one byte.
func (r *Reader) Byte() byte {
	if len(r.rest) == 0 {
		r.Fail()
		return 0
	}
	b := r.rest[0]
	r.rest = r.rest[1:]
	return b
}

// Fixed32 reads a big-endian number of four bytes.
func (r *Reader) Fixed32() uint32 {
	if b := r.Take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

// Fixed64 reads a big-endian number of eight bytes.
func (r *Reader) Fixed64() uint64 {
	if b := r.Take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

// Take reads n bytes that have no length before them; they alias the message.
func (r *Reader) Take(n int) []byte {
	if n > len(r.rest) {
		r.Fail()
		return nil
	}
	b := r.rest[:n:n]
	r.rest = r.rest[n:]
	return b
}

// Rest reads all remaining bytes; they alias the message.
func (r *Reader) Rest() []byte { return r.Take(len(r.rest)) }

// Done returns ErrMalformed if something could not be read, or is left over.
func (r *Reader) Done() error {
	if r.bad || len(r.rest) > 0 {
		return ErrMalformed
	}
	return nil
}
