// Package fingerprint holds which of very many keys exist, in some three bytes a key.
package fingerprint

// Multiset is a multiset of fingerprints of 28 bits. It answers whether a key may have been added:
// of a key that has been, and has not been removed since, it never says no. Of n others it says yes
// for one in 2^28/n. Two keys of the same fingerprint are held twice, so that one remains when the
// other is removed.
//
// The first bits of a key's hash choose one of 4096 tables, the last ones are the tag that is
// stored there, by linear probing from a place that the tag gives. So a table that grows needs no
// hash again, and each grows alone: no call costs more than a copy of one table, 4096 tags or so
// where there are ten million keys.
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

// table has a slot for each tag, and free ones, which are 0. Between the place that a tag gives and
// the slot where it is, no slot is free.
type table struct {
	slots []uint16
	n     int
}

// place is the slot in which the search for a tag begins. It grows with the tag, whatever the size.
func place(tag uint16, size int) int { return int(tag) * size >> 16 }

// locate splits a hash.
func locate(hash uint64) (i int, tag uint16) {
	return int(hash >> (64 - tableBits)), max(uint16(hash), 1)
}

// Add adds a key of a hash, of which all bits count.
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

// Remove removes a key of a hash that was added.
func (m *Multiset) Remove(hash uint64) {
	i, tag := locate(hash)
	t := &m.tables[i]
	t.remove(tag)
	m.n--
	if len(t.slots) > minSlots && 4*t.n < len(t.slots) {
		m.resize(t, max(minSlots, len(t.slots)/2))
	}
}

// Has reports whether a key of this hash may have been added.
func (m *Multiset) Has(hash uint64) bool {
	if m.n == 0 {
		return false
	}
	i, tag := locate(hash)
	t := &m.tables[i]
	return t.n > 0 && t.slots[t.find(tag)] == tag
}

// Len is how many keys there are.
func (m *Multiset) Len() int { return m.n }

// Bytes is how much memory the tags take.
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

// find is the first slot with a tag, or the free one that ends the search for it.
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

// remove frees a slot of the tag, and moves up what is found from before it only: Knuth, The Art of
// Computer Programming, volume 3, algorithm 6.4R.
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

// distance is how many steps lead from a slot to another one.
func (t *table) distance(from, to int) int {
	if d := to - from; d >= 0 {
		return d
	}
	return to - from + len(t.slots)
}
