package keys

// Which shard a task or a schedule belongs to is a part of the format: FNV-1a (Fowler, Noll, Vo; 64 bits)
// of its ID, or its name, modulo the number of shards.
const (
	fnvOffset = 14695981039346656037
	fnvPrime  = 1099511628211
)

// FNV is the hash of b.
func FNV(b []byte) uint64 {
	h := uint64(fnvOffset)
	for _, c := range b {
		h = FNVNext(h, c)
	}
	return h
}

// FNVNext is the hash of what has hash h and one more byte.
func FNVNext(h uint64, b byte) uint64 { return (h ^ uint64(b)) * fnvPrime }

// ShardOf is the number of the shard that an ID routes to.
func ShardOf(id ID, shards int) int {
	if shards == 1 {
		return 0
	}
	return int(FNV(id[:]) % uint64(shards))
}

// ShardOfSchedule is the number of the shard that has a schedule.
func ShardOfSchedule(name string, shards int) int { return int(FNV([]byte(name)) % uint64(shards)) }
