package keys

import (
	"crypto/sha256"
	"encoding/binary"
)

// The tasks of a limit, or of a group, wait for each other in a scope, and so do the suspects of a
// queue. Its number is a hash of its name; the last bit is 1 for groups and 0 for all others, the
// bit before is 0 for suspects and 1 for all others, and no number is 0.
const (
	GroupScopeBit = 1
	namedScopeBit = 2
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

// SuspectScope returns the scope of the tasks of a queue that wait since they may have ended the
// process.
func SuspectScope(queue string) uint64 {
	h := hash("suspect", queue)
	return binary.BigEndian.Uint64(h[:])&^(GroupScopeBit|namedScopeBit) | 4
}

// IsSuspectScope reports whether a scope is one of suspects.
func IsSuspectScope(scope uint64) bool { return scope != 0 && scope&(GroupScopeBit|namedScopeBit) == 0 }

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
