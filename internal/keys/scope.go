package keys

import (
	"crypto/sha256"
	"encoding/binary"
)

// A scope is what tasks wait in for each other: the tasks of a limit, or of a group. Its number is
// a hash of what names it; the last bit tells those of groups from those of limits, and none is 0.
const GroupScopeBit = 1

// LimitScope is the scope of the tasks of a queue with a limit key; 0 for an empty one.
func LimitScope(queue, limitKey string) uint64 {
	if limitKey == "" {
		return 0
	}
	return scopeOf(hash("limit", queue, limitKey))
}

// GroupScope is the scope of the tasks of a group; 0 for an empty one.
func GroupScope(queue, tenant, limitKey, group string) uint64 {
	if group == "" {
		return 0
	}
	return scopeOf(hash("group", queue, tenant, limitKey, group)) | GroupScopeBit
}

func scopeOf(h [sha256.Size]byte) uint64 { return binary.BigEndian.Uint64(h[:])&^GroupScopeBit | 2 }

// UniqueHash is what is stored of an idempotency key.
func UniqueHash(queue, tenant, limitKey, group, key string) [UniqueLen]byte {
	h := hash("unique", queue, tenant, limitKey, group, key)
	return [UniqueLen]byte(h[:])
}

// hash is SHA-256 over what tells a scope from every other.
func hash(kind string, parts ...string) [sha256.Size]byte {
	b := append(make([]byte, 0, 256), kind...) // on the stack, if that is enough
	for _, p := range parts {
		b = append(binary.AppendUvarint(b, uint64(len(p))), p...)
	}
	return sha256.Sum256(b)
}
