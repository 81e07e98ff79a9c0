package keys

// Which shard a task, or a schedule, lies in: FNV-1a (Fowler, Noll, Vo; 64 bits) modulo the number of
// shards.

const (
	fnvOffset = 14695981039346656037
	fnvPrime  = 1099511628211
)

// ShardOf is the shard that an ID routes to.
func ShardOf(id ID, shards int) int {
	if shards == 1 {
		return 0
	}
	return int(fnvEnd(fnvStart(id[:IDLen-1]), id[IDLen-1]) % uint64(shards))
}

// ShardOfName is the shard that has the schedule of a name.
func ShardOfName(name string, shards int) int { return int(fnvStart([]byte(name)) % uint64(shards)) }

// Route sets the last byte of an ID such that it routes to a shard. It is false if no value does.
func Route(id *ID, shard, shards int) bool {
	if shards == 1 {
		return true
	}
	last := &id[IDLen-1]
	h := fnvStart(id[:IDLen-1])
	for range 256 {
		if fnvEnd(h, *last)%uint64(shards) == uint64(shard) {
			return true
		}
		*last++
	}
	return false
}

func fnvStart(b []byte) uint64 {
	h := uint64(fnvOffset)
	for _, c := range b {
		h = (h ^ uint64(c)) * fnvPrime
	}
	return h
}

func fnvEnd(h uint64, last byte) uint64 { return (h ^ uint64(last)) * fnvPrime }
