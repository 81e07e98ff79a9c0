// Package fingerprint records which of very many keys exist, in about three bytes a key.
package fingerprint

// Multiset is a multiset of 28-bit fingerprints. It answers whether a key may have been added: for
// a key that was added, and has not been removed since, the answer is never no. Among n others it
// is yes for one in 2^28/n. Two keys with the same fingerprint are held twice, so that one remains
// when the other is removed.
//
// The first bits of a key's hash choose one of 4096 tables, the last ones are the tag, stored there
// by linear probing from a slot that the tag determines. So a growing table needs no hashes, and
// each table grows separately: no call costs more than a copy of one table, about 4096 tags with
// ten million keys.
//
// The zero Multiset is empty. It is not safe for concurrent use.
type Multiset struct {
	tables []table // nil until the first Add
	n      int
	slots  int
}

const (
	tableBits = 12
	minSlots  = 8
)

// table has a slot for each tag, and free slots, which are 0. Between the slot that a tag
// determines and the slot where it is, no slot is free.
type table struct {
	slots []uint16
	n     int
}

// place returns the first slot of the search for a tag. It grows with the tag, at any size.
func place(tag uint16, size int) int { return int(tag) * size >> 16 }

// locate splits a hash.
func locate(hash uint64) (i int, tag uint16) {
	return int(hash >> (64 - tableBits)), max(uint16(hash), 1)
}

// Add adds a key by its hash. All bits of the hash are significant.
func (m *Multiset) Add(hash uint64) {
	if m.tables == nil {
		m.tables = make([]table, 1<<tableBits)
	}
	i, tag := locate(hash)
	t := &m.tables[i]
	if 4*(t.n+1) > 3*len(t.slots) {
		m.resize(t, max(minSlots, len(t.slots)+len(t.slots)/4))
	}
	t.insert(tag)
	m.n++
}

// Remove removes an added key, by its hash.
func (m *Multiset) Remove(hash uint64) {
	i, tag := locate(hash)
	t := &m.tables[i]
	t.remove(tag)
	m.n--
	if len(t.slots) > minSlots && 4*t.n < len(t.slots) {
		m.resize(t, max(minSlots, len(t.slots)/2))
	}
}

// Has reports whether a key with this hash may have been added.
func (m *Multiset) Has(hash uint64) bool {
	if m.n == 0 {
		return false
	}
	i, tag := locate(hash)
	t := &m.tables[i]
	return t.n > 0 && t.slots[t.find(tag)] == tag
}

// Len returns the number of keys.
func (m *Multiset) Len() int { return m.n }

// Bytes returns the memory of the tags.
func (m *Multiset) Bytes() int { return m.slots * 2 }

func (m *Multiset) resize(t *table, size int) {
	m.slots += size - len(t.slots)
	old := t.slots
	*t = table{slots: make([]uint16, size)}
	for _, tag := range old {
		if tag != 0 {
			t.insert(tag)
		}
	}
}

// find returns the first slot with a tag, or the free slot at the end of the search.
func (t *table) find(tag uint16) int {
	i := place(tag, len(t.slots))
	for t.slots[i] != 0 && t.slots[i] != tag {
		i = t.next(i)
	}
	return i
}

func (t *table) next(i int) int {
	if i++; i == len(t.slots) {
		return 0
	}
	return i
}

func (t *table) insert(tag uint16) {
	i := place(tag, len(t.slots))
	for t.slots[i] != 0 {
		i = t.next(i)
	}
	t.slots[i] = tag
	t.n++
}

// remove frees a slot of the tag, and moves up the tags that could not be found across a free slot:
// Knuth, The Art of Computer Programming, volume 3, algorithm 6.4R.
func (t *table) remove(tag uint16) {
	free := t.find(tag)
	if t.slots[free] == 0 {
		panic("fingerprint: a key is removed that was not added")
	}
	t.n--
	for i := t.next(free); t.slots[i] != 0; i = t.next(i) {
		from := place(t.slots[i], len(t.slots))
		if t.distance(from, i) >= t.distance(free, i) {
			t.slots[free] = t.slots[i]
			free = i
		}
	}
	t.slots[free] = 0
}

// distance returns the number of steps from one slot to another.
func (t *table) distance(from, to int) int {
	if d := to - from; d >= 0 {
		return d
	}
	return to - from + len(t.slots)
}
