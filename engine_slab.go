package codeq

// slab cuts small records out of shared chunks: the tasks of a batch come and
// go together, and one allocation for many costs the garbage collector less.
// A payload that a worker keeps holds on to slabChunk bytes at the most.
type slab struct{ chunk []byte }

const (
	slabChunk = 4 << 10
	slabItem  = 512 // larger ones are allocated by themselves
)

// buffer returns an empty slice with room for n bytes that nobody else uses.
func (s *slab) buffer(n int) []byte {
	if n > slabItem {
		return make([]byte, 0, n)
	}
	if cap(s.chunk)-len(s.chunk) < n {
		s.chunk = make([]byte, 0, slabChunk)
	}
	at := len(s.chunk)
	s.chunk = s.chunk[:at+n]
	return s.chunk[at : at : at+n]
}

func (s *slab) clone(b []byte) []byte { return append(s.buffer(len(b)), b...) }
