// Package arena cuts small records out of shared memory.
package arena

// Arena cuts small records out of shared chunks: the tasks of a batch come and go together, and one
// allocation for many costs the garbage collector less. A payload that a worker keeps retains at
// most chunkBytes bytes.
type Arena struct{ chunk []byte }

const (
	chunkBytes = 4 << 10
	itemBytes  = 512 // larger ones are allocated by themselves
)

// Buffer returns an empty slice with room for n bytes that nobody else uses.
func (a *Arena) Buffer(n int) []byte {
	if n > itemBytes {
		return make([]byte, 0, n)
	}
	if cap(a.chunk)-len(a.chunk) < n {
		a.chunk = make([]byte, 0, chunkBytes)
	}
	at := len(a.chunk)
	a.chunk = a.chunk[:at+n]
	return a.chunk[at : at : at+n]
}

// Clone returns a copy of b.
func (a *Arena) Clone(b []byte) []byte { return append(a.Buffer(len(b)), b...) }
