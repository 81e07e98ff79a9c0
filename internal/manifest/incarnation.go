package manifest

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"codeq/internal/base"
)

// A node numbers its incarnations, so that others can distinguish messages of earlier and later
// ones. The upper bits of a number are the time of the incarnation's start, in ms since 1970, the
// lower ones are random. The manifest has the last number: so numbers rise even if the clock is set
// back. If the directory is an older copy of itself, they rise by the clock; and if the clock is
// wrong as well, the random bits avoid a number that was used before.

// incarnationChance is the number of random bits in the number of an incarnation.
const incarnationChance = 20

// IncarnationAfter returns the number of an incarnation that begins now, after the given one.
func IncarnationAfter(last uint64) uint64 {
	var chance [8]byte
	_, _ = rand.Read(chance[:]) // never fails
	began := max(last>>incarnationChance+1, uint64(time.Now().UnixMilli()))
	return began<<incarnationChance | binary.BigEndian.Uint64(chance[:])>>(64-incarnationChance)
}

// A directory restored from an older copy lacks later acknowledged entries. So each node stores the
// latest incarnation in which it has seen the directory of each other node, and each node sends the
// incarnations of its own directory: if the stored one is not among them, the directory is an older
// copy. Numbers alone would not prove that, since those of a copy rise, too. A node cannot notice
// the copy if it has seen no incarnation that began after it.

// MaxIncarnations bounds Incarnations.
const MaxIncarnations = 15

// Incarnations returns the incarnations in which others may have seen the directory last: the
// current one is the last, and the first one also means all earlier ones.
func (m *Manifest) Incarnations() []uint64 { return append(slices.Clone(m.Earlier), m.Incarnation) }

// BeginIncarnation begins an incarnation. If there are too many without an answer of other nodes,
// it drops the oldest: a node that has seen the directory last in a dropped one will take it for an
// older copy.
func (m *Manifest) BeginIncarnation() {
	m.Earlier = append(m.Earlier, m.Incarnation)
	if n := len(m.Earlier); n >= MaxIncarnations {
		m.Earlier = slices.Delete(m.Earlier, 1, n-MaxIncarnations+2)
	}
	m.Incarnation = IncarnationAfter(m.Incarnation)
}

// ForgetEarlier drops the earlier incarnations: a majority, this node included, has seen the
// current one. If the directory is an older copy nevertheless, no node can notice the missing
// entries.
func (m *Manifest) ForgetEarlier() { m.Earlier = nil }

// See records the incarnations of another node's directory. isNew: write the manifest before
// relying on the other node.
func (m *Manifest) See(id string, incarnations []uint64) (isNew bool, err error) {
	seen, now := m.Seen[id], incarnations[len(incarnations)-1]
	switch {
	case seen == now:
		return false, nil
	case seen > incarnations[0] && !slices.Contains(incarnations, seen):
		return false, fmt.Errorf("%w: directory %s was seen in incarnation %d, but no longer has it", base.ErrOldCopy, id, seen)
	}
	if m.Seen == nil {
		m.Seen = make(map[string]uint64)
	}
	m.Seen[id] = now
	return true, nil
}
