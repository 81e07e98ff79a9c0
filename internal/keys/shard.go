package keys

// Which shard a task or a schedule belongs to is a part of the format: FNV-1a (Fowler, Noll, Vo; 64
// bits) of its ID, or its name, modulo the number of shards.
const (
	fnvOffset = 14695981039346656037
	fnvPrime  = 1099511628211
)

// fnv is the hash of b.
func fnv(b []byte) uint64 {
	h := uint64(fnvOffset)
	for _, c := range b {
		h = fnvNext(h, c)
	}
	return h
}

// fnvNext is the hash of what has hash h and one more byte.
func fnvNext(h uint64, b byte) uint64 { return (h ^ uint64(b)) * fnvPrime }

// ShardOf is the number of the shard that an ID routes to.
func ShardOf(id ID, shards int) int {
	if shards == 1 {
		return 0
	}
	return int(fnv(id[:]) % uint64(shards))
}

// ShardOfSchedule is the number of the shard that has a schedule.
func ShardOfSchedule(name string, shards int) int { return int(fnv([]byte(name)) % uint64(shards)) }

// Route sets the last byte of an ID such that it routes to a shard. It is false if no value does.
func Route(id *ID, shard, shards int) bool {
	if shards == 1 {
		return true
	}
	last := &id[IDLen-1]
	h := fnv(id[:IDLen-1])
	for range 256 {
		if fnvNext(h, *last)%uint64(shards) == uint64(shard) {
			return true
		}
		*last++
	}
	return false
}
