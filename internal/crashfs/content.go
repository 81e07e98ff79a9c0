package crashfs

// chunkSize is the size of each chunk but the last of a file, in bytes.
const chunkSize = 32 << 10

// blockSize is the unit of a disk's writes, in bytes.
const blockSize = 4 << 10

// chunk is a part of one or several contents.
type chunk struct {
	b      []byte
	frozen int // so many bytes are shared with another content, and never change
}

// content is the content of a file. All chunks but the last are full.
type content struct {
	chunks []*chunk
	size   int
}

// each calls visit for each chunk's part of a range that begins at off.
func each(off, bytes int, visit func(index, from, to int)) {
	for end := off + bytes; off < end; {
		index, from := off/chunkSize, off%chunkSize
		to := min(chunkSize, from+end-off)
		visit(index, from, to)
		off += to - from
	}
}

// readAt reads from off until p is full or the content ends.
func (c *content) readAt(p []byte, off int) (n int) {
	each(off, min(len(p), max(c.size-off, 0)), func(index, from, to int) {
		n += copy(p[n:], c.chunks[index].b[from:to])
	})
	return n
}

// writeAt writes p at off. If off is beyond the end, it fills the gap with zeros.
func (c *content) writeAt(p []byte, off int) {
	if gap := off - c.size; gap > 0 {
		c.writeAt(make([]byte, gap), c.size)
	}
	c.size = max(c.size, off+len(p))
	each(off, len(p), func(index, from, to int) {
		p = p[copy(c.writable(index, from, to)[from:to], p):]
	})
}

// writable returns the bytes of a chunk with room up to to, for writes from from on. The chunk may
// be a new last one.
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
		if shared { // the other contents keep the old chunk
			ch = new(chunk)
			c.chunks[index] = ch
		}
		ch.b = b
	}
	ch.b = ch.b[:max(to, len(ch.b))]
	return ch.b
}

// save copies c to s in O(chunks).
func (c *content) save(s *content) {
	s.chunks, s.size = append(s.chunks[:0], c.chunks...), c.size
	clear(s.chunks[len(s.chunks):cap(s.chunks)])
	for i, ch := range c.chunks {
		ch.freeze(min(c.size-i*chunkSize, chunkSize))
	}
}

// freeze marks the first bytes as unchangeable. It does not write if they already are, since
// several disks may share a full chunk.
func (ch *chunk) freeze(bytes int) {
	if ch.frozen < bytes {
		ch.frozen = bytes
	}
}

// clone returns a copy for another disk. Both share the full chunks.
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

// take copies the block at off from from.
func (c *content) take(from *content, off int) {
	if index := off / chunkSize; index < len(c.chunks) && c.chunks[index] == from.chunks[index] {
		return // a full chunk, shared by both
	}
	var block [blockSize]byte
	c.writeAt(block[:from.readAt(block[:], off)], off)
}
