package record

import (
	"fmt"
	"maps"
	"slices"
	"unicode/utf8"

	"codeq/internal/wire"
)

// Cursors are the encoded values that the handlers of a task have set, by name.
type Cursors map[string][]byte

// MaxCursorBytes bounds the names and values of the cursors of a task. A name has at most
// MaxStepName bytes.
const MaxCursorBytes = 4 << 10

// Size returns the bytes that MaxCursorBytes limits.
func (c Cursors) Size() (n int) {
	for name, value := range c {
		n += len(name) + len(value)
	}
	return n
}

func (c Cursors) maxSize() int { return 3*(2*len(c)+1) + c.Size() }

// Append appends the stored form.
func (c Cursors) Append(b []byte) []byte {
	b = wire.AppendUint(b, uint64(len(c)))
	for _, name := range slices.Sorted(maps.Keys(c)) {
		b = wire.AppendBytes(wire.AppendBytes(b, name), c[name])
	}
	return b
}

func readCursors(r *wire.Reader) Cursors {
	n := r.Count(2)
	c := make(Cursors, n)
	for range n {
		name := r.String()
		c[name] = slices.Clone(r.Bytes())
	}
	if c.Sound() != nil {
		r.Fail()
	}
	return c
}

// ParseCursors reads the result of Append.
func ParseCursors(b []byte) (Cursors, error) {
	r := wire.NewReader(b)
	c := readCursors(r)
	if r.Done() != nil {
		return nil, malformed(b)
	}
	return c, nil
}

// Sound returns an error if no shard stores such cursors.
func (c Cursors) Sound() error {
	if n := c.Size(); len(c) == 0 || n > MaxCursorBytes {
		return fmt.Errorf("%d cursors of %d bytes", len(c), n)
	}
	for name := range c {
		if name == "" || len(name) > MaxStepName || !utf8.ValidString(name) {
			return fmt.Errorf("a cursor with the name %q", Clip(name, 2*MaxStepName))
		}
	}
	return nil
}
