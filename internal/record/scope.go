package record

import (
	"crypto/sha256"
	"encoding/binary"
)

// The Flags of an idempotency key.
const (
	ReleaseOnComplete = 1 << iota
	ReleaseOnDead
	ReplaceWaiting
	// HoldsKey: until the task ends, it holds its key. A key may be released while its task goes on, so that
	// the end of a task need not look up whose the key is. A task without it may hold its key.
	HoldsKey
)

// What several tasks share has a scope: SHA-256 over what names it. GroupBit, the last bit of a scope,
// tells those of groups from those of limits.
const GroupBit = 1

// LimitScope is the scope of a LimitKey.
func LimitScope(queue, key string) uint64 { return scopeOf(hash("limit", queue, key)) }

// GroupScope is the scope of a group.
func GroupScope(queue, tenant, limitKey, group string) uint64 {
	return scopeOf(hash("group", queue, tenant, limitKey, group)) | GroupBit
}

// UniqueHash is the hash of an idempotency key and its scope.
func UniqueHash(queue, tenant, limitKey, group, key string) [UniqueLen]byte {
	h := hash("unique", queue, tenant, limitKey, group, key)
	return [UniqueLen]byte(h[:])
}

// Home says which shard a task belongs to: the widest of its scopes decides,
// so that all tasks of a scope lie together. Without one, any shard will do.
func (t *Ties) Home(shards int) (shard int, bound bool) {
	h := t.Limit
	if h == 0 {
		h = t.Group
	}
	if h == 0 {
		h = binary.BigEndian.Uint64(t.Unique[:])
	}
	return int(h >> 2 % uint64(shards)), h != 0
}

// hash is SHA-256 over what tells a scope from every other.
func hash(kind string, parts ...string) [sha256.Size]byte {
	b := append(make([]byte, 0, 256), kind...) // on the stack, if that is enough
	for _, p := range parts {
		b = append(binary.AppendUvarint(b, uint64(len(p))), p...)
	}
	return sha256.Sum256(b)
}

func scopeOf(h [sha256.Size]byte) uint64 { return binary.BigEndian.Uint64(h[:])&^GroupBit | 2 }
