package keys

import (
	"crypto/sha256"
	"encoding/binary"
)

// The tasks of a limit, or of a group, wait for each other in a scope, and the suspects of a queue
// in several. The number of a scope is a hash of its name; the last bit is 1 for groups and 0 for
// all others, the bit before is 0 for suspects and 1 for all others, and no number is 0.
const (
	GroupScopeBit = 1
	namedScopeBit = 2

	suspectScopeBit = 4
	suspectPartBit  = 8 // the lowest bit of the part
)

// LimitScope returns the scope of the tasks of a queue with a limit key; 0 for an empty key.
func LimitScope(queue, limitKey string) uint64 {
	if limitKey == "" {
		return 0
	}
	return scopeOf(hash("limit", queue, limitKey))
}

// GroupScope returns the scope of the tasks of a group; 0 for an empty name.
func GroupScope(queue, tenant, limitKey, group string) uint64 {
	if group == "" {
		return 0
	}
	return scopeOf(hash("group", queue, tenant, limitKey, group)) | GroupScopeBit
}

func scopeOf(h [sha256.Size]byte) uint64 {
	return binary.BigEndian.Uint64(h[:])&^GroupScopeBit | namedScopeBit
}

// SuspectParts is the number of scopes for the suspects of a queue.
const SuspectParts = 16

// SuspectScope returns a scope of the suspects of a queue: tasks that wait because they may have
// ended the process. part is less than SuspectParts.
func SuspectScope(queue string, part int) uint64 {
	const kind = GroupScopeBit | namedScopeBit | suspectScopeBit
	h := hash("suspect", queue)
	return binary.BigEndian.Uint64(h[:])&^(kind|(SuspectParts-1)*suspectPartBit) | suspectScopeBit | uint64(part)*suspectPartBit
}

// IsSuspectScope reports whether a scope is one of suspects.
func IsSuspectScope(scope uint64) bool { return scope != 0 && scope&(GroupScopeBit|namedScopeBit) == 0 }

// SuspectPartOf returns the part of a suspect after a number of leases. It is as random as
// the ID and changes with each crash, so that eventually each suspect comes before each other one.
func SuspectPartOf(id ID, leases uint32) int {
	x := binary.BigEndian.Uint64(id[:]) ^ binary.BigEndian.Uint64(id[8:]) + uint64(leases)*0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9 // the finalizer of SplitMix64 (Steele and others, 2014)
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return int(x >> 33 % SuspectParts)
}

// SuspectPart returns the part of a scope of suspects.
func SuspectPart(scope uint64) int { return int(scope / suspectPartBit % SuspectParts) }

// UniqueHash returns the stored form of an idempotency key.
func UniqueHash(queue, tenant, limitKey, group, key string) [UniqueLen]byte {
	h := hash("unique", queue, tenant, limitKey, group, key)
	return [UniqueLen]byte(h[:])
}

// hash returns the SHA-256 of the name of a scope.
func hash(kind string, parts ...string) [sha256.Size]byte {
	b := append(make([]byte, 0, 256), kind...) // on the stack, if it is short enough
	for _, p := range parts {
		b = append(binary.AppendUvarint(b, uint64(len(p))), p...)
	}
	return sha256.Sum256(b)
}
