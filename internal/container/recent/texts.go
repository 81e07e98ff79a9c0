package recent

import "slices"

// Texts remembers a value and two texts of each key that was added last: of TextsHalf keys at
// least, or as many as their texts have room for. It consists of two halves: one is filled, and
// then forgotten as a whole. So to add a key costs an allocation at first only. The zero Texts is
// empty. It is not safe for concurrent use.
type Texts[K comparable, V any] struct{ now, before textsHalf[K, V] }

// TextsHalf and TextsBytes bound each half: so many keys, and so many bytes of their texts.
const (
	TextsHalf  = 2048
	TextsBytes = 512 << 10
)

type textsHalf[K comparable, V any] struct {
	keys   []K // separate: a search reads nothing else
	values []withTexts[V]
	texts  []byte
}

type withTexts[V any] struct {
	value V
	text  uint32 // where the first text begins in texts; the second one follows
	first uint32 // length
	rest  uint32 // likewise, of the second
}

// Add adds a key, unless its texts are too long.
func (t *Texts[K, V]) Add(key K, value V, first []byte, second string) {
	size := len(first) + len(second)
	if size > TextsBytes {
		return
	}
	h := &t.now
	if len(h.keys) == TextsHalf || len(h.texts)+size > TextsBytes {
		t.now, t.before = t.before, t.now
		h.keys, h.values, h.texts = h.keys[:0], h.values[:0], h.texts[:0]
	}
	h.keys = append(h.keys, key)
	h.values = append(h.values, withTexts[V]{value, uint32(len(h.texts)), uint32(len(first)), uint32(len(second))})
	if size > 0 {
		h.texts = append(append(h.texts, first...), second...)
	}
}

// Find returns the value of a key, and copies of its texts.
func (t *Texts[K, V]) Find(key K) (value V, first []byte, second string, ok bool) {
	for _, h := range []*textsHalf[K, V]{&t.now, &t.before} {
		if i := slices.Index(h.keys, key); i >= 0 {
			of := &h.values[i]
			texts := h.texts[of.text:]
			return of.value, append([]byte(nil), texts[:of.first]...), string(texts[of.first:][:of.rest]), true
		}
	}
	return value, nil, "", false
}
