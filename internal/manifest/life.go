package manifest

import (
	"crypto/rand"
	"encoding/binary"
	"time"
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
