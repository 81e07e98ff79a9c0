package manifest

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"codeq/internal/base"
)

// A node numbers its lives, so that others can tell a message of an earlier life from one of a
// later. A number is the time at which the life began, in ms since 1970, and chance below it. The
// manifest has the last one: so numbers rise when the clock is set back. If the directory is an
// older copy of itself, they rise by the clock; and if the clock is wrong as well, chance keeps the
// number from being one that was used before.

// lifeChance is how many bits of the number of a life are random.
const lifeChance = 20

// LifeAfter returns the number of a life that begins now, after the given one.
func LifeAfter(last uint64) uint64 {
	var chance [8]byte
	_, _ = rand.Read(chance[:]) // never fails
	began := max(last>>lifeChance+1, uint64(time.Now().UnixMilli()))
	return began<<lifeChance | binary.BigEndian.Uint64(chance[:])>>(64-lifeChance)
}

// A directory that is put back from an older copy lacks what the node has acknowledged since. So
// each node remembers the latest life in which it has seen the directory of each other one, and a
// node says the lives of its own: if the one that is remembered is not among them, the directory is
// an older copy. Numbers alone would not tell, since those of a copy rise, too. It is not noticed
// by a node that has not seen a life which began after the copy was made.

// MaxLives bounds Lives.
const MaxLives = 15

// Lives are those of a node's directory in which others may have seen it last: the current one is
// the last of them, and the first one stands for all before it, too.
func (m *Manifest) Lives() []uint64 { return append(slices.Clone(m.Earlier), m.Life) }

// BeginLife begins a life. Of too many in which nobody has answered, the oldest are dropped: if
// another node has seen the directory last in one of these, it will take it for an older copy.
func (m *Manifest) BeginLife() {
	m.Earlier = append(m.Earlier, m.Life)
	if n := len(m.Earlier); n >= MaxLives {
		m.Earlier = slices.Delete(m.Earlier, 1, n-MaxLives+2)
	}
	m.Life = LifeAfter(m.Life)
}

// ForgetEarlier notes that the current life may stand for all before it: so many others have seen
// it that they are a majority with this node. If the directory is an older copy nevertheless,
// nobody knows what it lacks.
func (m *Manifest) ForgetEarlier() { m.Earlier = nil }

// See notes that the directory of another node was seen, with its lives. isNew says that the
// manifest is to be written before the other node is relied on.
func (m *Manifest) See(id string, lives []uint64) (isNew bool, err error) {
	seen, now := m.Seen[id], lives[len(lives)-1]
	switch {
	case seen == now:
		return false, nil
	case seen > lives[0] && !slices.Contains(lives, seen):
		return false, fmt.Errorf("%w: directory %s was seen in life %d, which it does not know", base.ErrOldCopy, id, seen)
	}
	if m.Seen == nil {
		m.Seen = make(map[string]uint64)
	}
	m.Seen[id] = now
	return true, nil
}
