package manifest

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"codeq/internal/base"
)

// A node numbers its incarnations, so that others can tell a message of an earlier incarnation from
// one of a later. A number is the time at which the incarnation began, in ms since 1970, and chance
// below it. The manifest has the last one: so numbers rise when the clock is set back. If the
// directory is an older copy of itself, they rise by the clock; and if the clock is wrong as well,
// chance keeps the number from being one that was used before.

// incarnationChance is how many bits of the number of an incarnation are random.
const incarnationChance = 20

// IncarnationAfter returns the number of an incarnation that begins now, after the given one.
func IncarnationAfter(last uint64) uint64 {
	var chance [8]byte
	_, _ = rand.Read(chance[:]) // never fails
	began := max(last>>incarnationChance+1, uint64(time.Now().UnixMilli()))
	return began<<incarnationChance | binary.BigEndian.Uint64(chance[:])>>(64-incarnationChance)
}

// A directory that is put back from an older copy lacks what the node has acknowledged since. So
// each node remembers the latest incarnation in which it has seen the directory of each other one,
// and a node says the incarnations of its own: if the one that is remembered is not among them, the
// directory is an older copy. Numbers alone would not tell, since those of a copy rise, too. It is
// not noticed by a node that has not seen an incarnation which began after the copy was made.

// MaxIncarnations bounds Incarnations.
const MaxIncarnations = 15

// Incarnations are those of a node's directory in which others may have seen it last: the current
// one is the last of them, and the first one stands for all before it, too.
func (m *Manifest) Incarnations() []uint64 { return append(slices.Clone(m.Earlier), m.Incarnation) }

// BeginIncarnation begins an incarnation. Of too many in which nobody has answered, the oldest are
// dropped: if another node has seen the directory last in one of these, it will take it for an
// older copy.
func (m *Manifest) BeginIncarnation() {
	m.Earlier = append(m.Earlier, m.Incarnation)
	if n := len(m.Earlier); n >= MaxIncarnations {
		m.Earlier = slices.Delete(m.Earlier, 1, n-MaxIncarnations+2)
	}
	m.Incarnation = IncarnationAfter(m.Incarnation)
}

// ForgetEarlier notes that the current incarnation may stand for all before it: so many others have
// seen it that they are a majority with this node. If the directory is an older copy nevertheless,
// nobody knows what it lacks.
func (m *Manifest) ForgetEarlier() { m.Earlier = nil }

// See notes that the directory of another node was seen, with its incarnations. isNew says that the
// manifest is to be written before the other node is relied on.
func (m *Manifest) See(id string, incarnations []uint64) (isNew bool, err error) {
	seen, now := m.Seen[id], incarnations[len(incarnations)-1]
	switch {
	case seen == now:
		return false, nil
	case seen > incarnations[0] && !slices.Contains(incarnations, seen):
		return false, fmt.Errorf("%w: directory %s was seen in incarnation %d, which it does not know", base.ErrOldCopy, id, seen)
	}
	if m.Seen == nil {
		m.Seen = make(map[string]uint64)
	}
	m.Seen[id] = now
	return true, nil
}
