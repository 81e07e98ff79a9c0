package record

import "encoding/binary"

// Home returns the shard of a task: the widest of its scopes decides, so that all tasks of a scope
// are in one shard. Without a scope, the task may be in any shard.
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
