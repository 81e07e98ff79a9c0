// Package record is the stored form of a task: what the producer said of it,
// what has happened to it, and its payload. Where the task belongs (queue,
// tenant, priority) is in its key and in the catalogue.
package record

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Head is what the engine needs of a task to decide on it: the part that is
// decoded without an allocation. Times are milliseconds.
type Head struct {
	Attempts    uint32 // attempts counted so far
	Leases      uint32 // leases granted so far; at least Attempts
	MaxAttempts uint32
	Lease       uint64
	Timeout     uint64
	Retention   int64 // negative: for ever
	RunAt       uint64
}

// Record is a decoded task. A zero field takes no space. The zero Record with
// a payload costs one byte more than the payload.
type Record struct {
	Head
	Error   string // of the last attempt
	Headers map[string]string
	Payload []byte
}

// A record is a byte of these flags, the fields that they announce in this
// order, and the payload.
const (
	hasHistory = 1 << iota
	hasMaxAttempts
	hasLease
	hasTimeout
	hasRetention
	hasRunAt
	hasError
	hasHeaders
)

// ErrMalformed is wrapped by every error of Decode.
var ErrMalformed = errors.New("malformed record")

// Encode returns the stored form. Equal records have equal forms: headers are
// written in the order of their names.
func (r *Record) Encode() []byte { return r.Append(make([]byte, 0, r.MaxSize())) }

// MaxSize is a bound of the length of the stored form: exact for a record that
// has nothing but a payload.
func (r *Record) MaxSize() int {
	if r.plain() {
		return 1 + len(r.Payload)
	}
	n := 1 + 8*binary.MaxVarintLen64 + binary.MaxVarintLen32 + len(r.Error) + len(r.Payload)
	for k, v := range r.Headers {
		n += 2*binary.MaxVarintLen32 + len(k) + len(v)
	}
	return n
}

// Append appends the stored form.
func (r *Record) Append(b []byte) []byte {
	start := len(b)
	b = append(b, 0)
	if r.plain() {
		return append(b, r.Payload...)
	}
	var flags byte
	uint := func(flag byte, v uint64) {
		if v != 0 {
			flags |= flag
			b = binary.AppendUvarint(b, v)
		}
	}
	if r.Attempts != 0 || r.Leases != 0 {
		flags |= hasHistory
		b = binary.AppendUvarint(b, uint64(r.Attempts))
		b = binary.AppendUvarint(b, uint64(r.Leases))
	}
	uint(hasMaxAttempts, uint64(r.MaxAttempts))
	uint(hasLease, r.Lease)
	uint(hasTimeout, r.Timeout)
	if r.Retention != 0 {
		flags |= hasRetention
		b = binary.AppendVarint(b, r.Retention)
	}
	uint(hasRunAt, r.RunAt)
	if r.Error != "" {
		flags |= hasError
		b = appendString(b, r.Error)
	}
	if len(r.Headers) != 0 {
		flags |= hasHeaders
		b = binary.AppendUvarint(b, uint64(len(r.Headers)))
		for _, k := range slices.Sorted(maps.Keys(r.Headers)) {
			b = appendString(b, k)
			b = appendString(b, r.Headers[k])
		}
	}
	b[start] = flags
	return append(b, r.Payload...)
}

func (r *Record) plain() bool {
	return r.Head == Head{} && r.Error == "" && len(r.Headers) == 0
}

// DecodeHead reads the head of a stored record.
func DecodeHead(b []byte) (Head, error) {
	if len(b) > 0 && b[0] == 0 {
		return Head{}, nil
	}
	d, flags := begin(b)
	h := d.head(flags)
	if err := d.err(b); err != nil {
		return Head{}, err
	}
	return h, nil
}

// Decode reads a stored record. Payload aliases b.
func Decode(b []byte) (Record, error) {
	var r Record
	d, flags := begin(b)
	r.Head = d.head(flags)
	if flags&hasError != 0 {
		r.Error = d.string()
	}
	if flags&hasHeaders != 0 {
		r.Headers = d.headers()
	}
	r.Payload = d.b
	if err := d.err(b); err != nil {
		return Record{}, err
	}
	return r, nil
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// decoder takes fields off the front of b; after the first one that does not
// fit, bad is true and every field is zero.
type decoder struct {
	b   []byte
	bad bool
}

func begin(b []byte) (decoder, byte) {
	if len(b) == 0 {
		return decoder{bad: true}, 0
	}
	return decoder{b: b[1:]}, b[0]
}

func (d *decoder) err(b []byte) error {
	if !d.bad {
		return nil
	}
	return fmt.Errorf("%w: %d bytes, beginning %x", ErrMalformed, len(b), b[:min(len(b), 16)])
}

func (d *decoder) head(flags byte) (h Head) {
	if flags&hasHistory != 0 {
		h.Attempts, h.Leases = d.uint32(), d.uint32()
	}
	if flags&hasMaxAttempts != 0 {
		h.MaxAttempts = d.uint32()
	}
	if flags&hasLease != 0 {
		h.Lease = d.uint64()
	}
	if flags&hasTimeout != 0 {
		h.Timeout = d.uint64()
	}
	if flags&hasRetention != 0 {
		h.Retention = d.int64()
	}
	if flags&hasRunAt != 0 {
		h.RunAt = d.uint64()
	}
	return h
}

func (d *decoder) uint64() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.bad, d.b = true, nil
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) int64() int64 {
	v, n := binary.Varint(d.b)
	if n <= 0 {
		d.bad, d.b = true, nil
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) uint32() uint32 {
	v := d.uint64()
	if v > 1<<32-1 {
		d.bad, d.b = true, nil
		return 0
	}
	return uint32(v)
}

func (d *decoder) string() string {
	n := d.uint64()
	if n > uint64(len(d.b)) {
		d.bad, d.b = true, nil
		return ""
	}
	s := string(d.b[:n])
	d.b = d.b[n:]
	return s
}

func (d *decoder) headers() map[string]string {
	n := d.uint64()
	if n > uint64(len(d.b)) { // each header takes two bytes at least
		d.bad, d.b = true, nil
		return nil
	}
	h := make(map[string]string, n)
	for range n {
		k := d.string()
		h[k] = d.string()
	}
	return h
}
