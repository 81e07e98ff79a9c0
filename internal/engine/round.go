package engine

import "codeq/internal/store"

// round is what the rules have at hand while they decide a group: the disk as it is before the
// group, the time, the room and the budget; and what they collect: the Group to write, and the
// Effects to tell. All parts of the rules stand on it.
type round struct {
	config Config
	Store  *store.Store
	Instant
	Format int
	Room   Room
	Tight  bool
	Wanted KindSet
	Judged uint64 // earliest time at which the operation under decision may have arrived, as Now
	Broken error

	mint    minter
	periods periodClock
	begun   uint32 // groups

	Group   commitGroup
	Effects Effects

	budget       budget // of what is being done
	upkeepBudget budget // of KeepUp, and of the shares that follow it
	reading      reading
	walked       uint64 // keys that walk has stepped over, including deleted ones

	scratch, value []byte // for a key and a value before they are copied into the group
}

// Instant is the time at which a group is decided, ms.
type Instant struct {
	Now  uint64 // monotonic, without the time that does not count
	Wall uint64 // since 1970
	// Ahead is by how much Wall is ahead of the clocks of the other nodes; Never: that is not
	// known.
	Ahead  uint64
	Uptime uint64 // monotonic
	Reap   uint64 // leases with a deadline up to it may be taken back, as Now
}

// reading counts the entries of the store that have been read, and the bytes of their values.
type reading struct{ entries, bytes int }

// Start is what the owner tells the rules of the world before a group.
type Start struct {
	Instant
	Format int     // of what the shard may store; it may rise between two groups
	Room   Room    // on the disk
	Tight  bool    // space should be given back at once
	Wanted KindSet // what Effects should contain of what happens
}

// Judge sets the earliest time at which the operations that follow may have arrived, as Now: a
// lease that had expired by then is lost.
func (r *round) Judge(at uint64) { r.Judged = at }

// Break ends the use of the rules: memory and disk may differ from now on.
func (r *round) Break(err error) { r.Broken = err }

// Mend forgets a failure of an operation that only reads, and returns it. What such an operation
// has found damaged stays so, and the others go on.
func (r *round) Mend() (failure error) {
	failure, r.Broken = r.Broken, nil
	return failure
}

// TakeFed returns the queues that may have got claimable tasks since the last call. They are valid
// until more of them are fed.
func (r *round) TakeFed() []*Queue {
	fed := r.Effects.Fed
	r.Effects.Fed = fed[:0]
	for _, q := range fed {
		q.Fed = false
	}
	return fed
}
