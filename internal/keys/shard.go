package keys

// The assignment of tasks and schedules to shards is a part of the format: FNV-1a (Fowler, Noll,
// Vo; 64 bits) of the ID, or the name, modulo the number of shards.
const (
	fnvOffset = 14695981039346656037
	fnvPrime  = 1099511628211
)

// fnv returns the hash of b.
func fnv(b []byte) uint64 {
	h := uint64(fnvOffset)
	for _, c := range b {
		h = fnvNext(h, c)
	}
	return h
}

// fnvNext returns the hash of the bytes with hash h and one more byte.
func fnvNext(h uint64, b byte) uint64 { return (h ^ uint64(b)) * fnvPrime }

// ShardOf returns the number of the shard of an ID.
func ShardOf(id ID, shards int) int {
	if shards == 1 {
		return 0
	}
	return int(fnv(id[:]) % uint64(shards))
}

// ShardOfSchedule returns the number of the shard of a schedule.
func ShardOfSchedule(name string, shards int) int { return int(fnv([]byte(name)) % uint64(shards)) }

// Route changes the last byte of an ID so that it belongs to a shard. It returns false if that is
// impossible.
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
