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
	Ties
	// Rewritten: the key under which the record lies had been written before.
	Rewritten bool
}

// Ties bind a task to others. The zero Ties are none.
type Ties struct {
	Unique    [UniqueLen]byte // hash of the idempotency key and its scope
	UniqueFor uint64          // how long the key is taken at least, ms
	Flags     uint8           // of the idempotency key; the meaning is the engine's
	Group     uint64          // hash of the group and its scope
	Limit     uint64          // hash of the key of a limit and its scope
	Parent    bool            // other tasks wait for the end of this one
}

// UniqueLen is the length of the hash of an idempotency key.
const UniqueLen = 16

// IDLen is the length of a task ID.
const IDLen = 16

// Record is a decoded task. A zero field takes no space. The zero Record with
// a payload costs one byte more than the payload.
type Record struct {
	Head
	Error     string // of the last attempt
	Headers   map[string]string
	UniqueKey string
	GroupKey  string
	LimitKey  string
	Parents   [][IDLen]byte // tasks that had to end before this one
	OnDead    uint8         // what a parent's death means; kept with Parents only
	Payload   []byte
}

// A record is these flags as a varint, the fields that they announce in this
// order, and the payload. The flags of what most tasks have fit one byte.
const (
	hasHistory = 1 << iota
	hasMaxAttempts
	hasLease
	hasTimeout
	hasRetention
	hasError
	hasHeaders

	hasRunAt
	hasUnique
	hasGroup
	hasLimit
	hasParents
	isParent
	isRewritten

	oneByte  = hasRunAt - 1
	allFlags = isRewritten<<1 - 1
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
	n := 2 + 14*binary.MaxVarintLen64 + len(r.Error) + len(r.Payload)
	for k, v := range r.Headers {
		n += 2*binary.MaxVarintLen32 + len(k) + len(v)
	}
	if r.Ties != (Ties{}) {
		n += UniqueLen + 1 + 8 + 8 + len(r.UniqueKey) + len(r.GroupKey) + len(r.LimitKey)
	}
	return n + IDLen*len(r.Parents)
}

func (r *Record) flags() uint64 {
	var flags uint64
	for _, f := range [...]struct {
		flag uint64
		set  bool
	}{
		{hasHistory, r.Attempts != 0 || r.Leases != 0},
		{hasMaxAttempts, r.MaxAttempts != 0},
		{hasLease, r.Lease != 0},
		{hasTimeout, r.Timeout != 0},
		{hasRetention, r.Retention != 0},
		{hasError, r.Error != ""},
		{hasHeaders, len(r.Headers) != 0},
		{hasRunAt, r.RunAt != 0},
		{hasUnique, r.Unique != [UniqueLen]byte{}},
		{hasGroup, r.Group != 0},
		{hasLimit, r.Limit != 0},
		{hasParents, len(r.Parents) != 0},
		{isParent, r.Parent},
		{isRewritten, r.Rewritten},
	} {
		if f.set {
			flags |= f.flag
		}
	}
	return flags
}

// Append appends the stored form.
func (r *Record) Append(b []byte) []byte {
	if r.plain() {
		return append(append(b, 0), r.Payload...)
	}
	flags := r.flags()
	b = binary.AppendUvarint(b, flags)
	if flags&hasHistory != 0 {
		b = binary.AppendUvarint(b, uint64(r.Attempts))
		b = binary.AppendUvarint(b, uint64(r.Leases))
	}
	if flags&hasMaxAttempts != 0 {
		b = binary.AppendUvarint(b, uint64(r.MaxAttempts))
	}
	if flags&hasLease != 0 {
		b = binary.AppendUvarint(b, r.Lease)
	}
	if flags&hasTimeout != 0 {
		b = binary.AppendUvarint(b, r.Timeout)
	}
	if flags&hasRetention != 0 {
		b = binary.AppendVarint(b, r.Retention)
	}
	if flags&hasRunAt != 0 {
		b = binary.AppendUvarint(b, r.RunAt)
	}
	if flags&hasUnique != 0 {
		b = append(b, r.Unique[:]...)
		b = binary.AppendUvarint(b, r.UniqueFor)
		b = append(b, r.Flags)
	}
	if flags&hasGroup != 0 {
		b = binary.BigEndian.AppendUint64(b, r.Group)
	}
	if flags&hasLimit != 0 {
		b = binary.BigEndian.AppendUint64(b, r.Limit)
	}
	if flags&hasError != 0 {
		b = appendString(b, r.Error)
	}
	if flags&hasHeaders != 0 {
		b = binary.AppendUvarint(b, uint64(len(r.Headers)))
		for _, k := range slices.Sorted(maps.Keys(r.Headers)) {
			b = appendString(b, k)
			b = appendString(b, r.Headers[k])
		}
	}
	if flags&hasUnique != 0 {
		b = appendString(b, r.UniqueKey)
	}
	if flags&hasGroup != 0 {
		b = appendString(b, r.GroupKey)
	}
	if flags&hasLimit != 0 {
		b = appendString(b, r.LimitKey)
	}
	if flags&hasParents != 0 {
		b = binary.AppendUvarint(append(b, r.OnDead), uint64(len(r.Parents)))
		for _, id := range r.Parents {
			b = append(b, id[:]...)
		}
	}
	return append(b, r.Payload...)
}

func (r *Record) plain() bool {
	return r.Head == Head{} && r.Error == "" && len(r.Headers) == 0 && len(r.Parents) == 0
}

// Plain returns the payload of a stored record that has nothing else.
func Plain(b []byte) (payload []byte, ok bool) {
	if len(b) > 0 && b[0] == 0 {
		return b[1:], true
	}
	return nil, false
}

// DecodeHead reads the head of a stored record.
func DecodeHead(b []byte) (Head, error) {
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
	if flags&hasUnique != 0 {
		r.UniqueKey = d.string()
	}
	if flags&hasGroup != 0 {
		r.GroupKey = d.string()
	}
	if flags&hasLimit != 0 {
		r.LimitKey = d.string()
	}
	if flags&hasParents != 0 {
		if f := d.bytes(1); !d.bad {
			r.OnDead = f[0]
		}
		r.Parents = d.ids()
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

func begin(b []byte) (d decoder, flags uint64) {
	d.b = b
	flags = d.uint64()
	if flags > allFlags {
		d.fail()
	}
	return d, flags
}

func (d *decoder) fail() { d.bad, d.b = true, nil }

func (d *decoder) err(b []byte) error {
	if !d.bad {
		return nil
	}
	return fmt.Errorf("%w: %d bytes, beginning %x", ErrMalformed, len(b), b[:min(len(b), 16)])
}

func (d *decoder) head(flags uint64) (h Head) {
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
	if flags <= oneByte {
		return h
	}
	if flags&hasRunAt != 0 {
		h.RunAt = d.uint64()
	}
	if flags&hasUnique != 0 {
		copy(h.Unique[:], d.bytes(UniqueLen))
		h.UniqueFor = d.uint64()
		if f := d.bytes(1); !d.bad {
			h.Flags = f[0]
		}
		if h.Unique == [UniqueLen]byte{} {
			d.fail()
		}
	}
	if flags&hasGroup != 0 {
		h.Group = d.hash()
	}
	if flags&hasLimit != 0 {
		h.Limit = d.hash()
	}
	h.Parent = flags&isParent != 0
	h.Rewritten = flags&isRewritten != 0
	return h
}

func (d *decoder) bytes(n int) []byte {
	if n > len(d.b) {
		d.fail()
		return nil
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

// hash takes a number of eight bytes that is not zero.
func (d *decoder) hash() uint64 {
	b := d.bytes(8)
	if d.bad {
		return 0
	}
	h := binary.BigEndian.Uint64(b)
	if h == 0 {
		d.fail()
	}
	return h
}

func (d *decoder) ids() [][IDLen]byte {
	n := d.uint64()
	if n == 0 || n > uint64(len(d.b)/IDLen) {
		d.fail()
		return nil
	}
	ids := make([][IDLen]byte, n)
	for i := range ids {
		copy(ids[i][:], d.bytes(IDLen))
	}
	return ids
}

func (d *decoder) uint64() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) int64() int64 {
	v, n := binary.Varint(d.b)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) uint32() uint32 {
	v := d.uint64()
	if v > 1<<32-1 {
		d.fail()
		return 0
	}
	return uint32(v)
}

func (d *decoder) string() string {
	n := d.uint64()
	if n > uint64(len(d.b)) {
		d.fail()
		return ""
	}
	s := string(d.b[:n])
	d.b = d.b[n:]
	return s
}

func (d *decoder) headers() map[string]string {
	n := d.uint64()
	if n > uint64(len(d.b)) { // each header takes two bytes at least
		d.fail()
		return nil
	}
	h := make(map[string]string, n)
	for range n {
		k := d.string()
		h[k] = d.string()
	}
	return h
}
