package crashfs

// chunkSize is how many bytes a chunk has, but for the last one of a file.
const chunkSize = 32 << 10

// blockSize is how many bytes a disk writes at once.
const blockSize = 4 << 10

// chunk is a part of one or several contents.
type chunk struct {
	b      []byte
	frozen int // so many bytes are those of another content as well, and never change
}

// content is what a file holds: all its chunks but the last are full.
type content struct {
	chunks []*chunk
	size   int
}

// each calls visit for the parts of the range that begins at off, by chunk.
func each(off, bytes int, visit func(index, from, to int)) {
	for end := off + bytes; off < end; {
		index, from := off/chunkSize, off%chunkSize
		to := min(chunkSize, from+end-off)
		visit(index, from, to)
		off += to - from
	}
}

// readAt fills p from off on, as far as there is something.
func (c *content) readAt(p []byte, off int) (n int) {
	each(off, min(len(p), max(c.size-off, 0)), func(index, from, to int) {
		n += copy(p[n:], c.chunks[index].b[from:to])
	})
	return n
}

// writeAt writes p at off; zeros fill the gap between the end and an off beyond it.
func (c *content) writeAt(p []byte, off int) {
	if gap := off - c.size; gap > 0 {
		c.writeAt(make([]byte, gap), c.size)
	}
	c.size = max(c.size, off+len(p))
	each(off, len(p), func(index, from, to int) {
		p = p[copy(c.writable(index, from, to)[from:to], p):]
	})
}

// writable returns the bytes of a chunk, which may be the next one, with room up to to; those from
// from on can be written.
func (c *content) writable(index, from, to int) []byte {
	if index == len(c.chunks) {
		c.chunks = append(c.chunks, new(chunk))
	}
	ch := c.chunks[index]
	shared := from < ch.frozen
	if size := max(to, len(ch.b)); size > cap(ch.b) || shared {
		room := chunkSize
		if index == 0 { // most files are small
			room = min(max(size, 2*len(ch.b)), chunkSize)
		}
		b := make([]byte, size, room)
		copy(b, ch.b)
		if shared { // the others keep theirs
			ch = new(chunk)
			c.chunks[index] = ch
		}
		ch.b = b
	}
	ch.b = ch.b[:max(to, len(ch.b))]
	return ch.b
}

// save makes s what c is, in O(chunks).
func (c *content) save(s *content) {
	s.chunks, s.size = append(s.chunks[:0], c.chunks...), c.size
	clear(s.chunks[len(s.chunks):cap(s.chunks)])
	for i, ch := range c.chunks {
		ch.freeze(min(c.size-i*chunkSize, chunkSize))
	}
}

// freeze keeps so many bytes as they are. Who finds them frozen does not write: a full chunk may
// be that of several disks.
func (ch *chunk) freeze(bytes int) {
	if ch.frozen < bytes {
		ch.frozen = bytes
	}
}

// clone returns a content of another disk: both share the chunks that are full.
func (c *content) clone() content {
	var s content
	c.save(&s)
	if last := len(s.chunks) - 1; last >= 0 && s.size < len(s.chunks)*chunkSize {
		b := make([]byte, s.size-last*chunkSize)
		copy(b, s.chunks[last].b)
		s.chunks[last] = &chunk{b: b}
	}
	return s
}

// take writes the block of from that begins at off.
func (c *content) take(from *content, off int) {
	if index := off / chunkSize; index < len(c.chunks) && c.chunks[index] == from.chunks[index] {
		return // both share the chunk, which is full
	}
	var block [blockSize]byte
	c.writeAt(block[:from.readAt(block[:], off)], off)
}
