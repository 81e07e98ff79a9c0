// Package arena cuts small records out of shared memory.
package arena

// Arena cuts small records out of shared chunks: the tasks of a batch have similar lifetimes, and
// one allocation for many is cheaper for the garbage collector. A payload that a worker keeps
// retains at most chunkBytes bytes.
type Arena struct{ chunk []byte }

const (
	chunkBytes = 4 << 10
	itemBytes  = 512 // larger ones are allocated separately
)

// Buffer returns an empty slice with unshared room for n bytes.
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
