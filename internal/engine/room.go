package engine

// Room is the level of free space on the disk. What goes on at a level goes on at all levels above
// it. What is written at a level is bounded by what the levels above have let in, so that the
// reserve below MinFreeBytes is used up step by step: by claims, then by the ends of leases, then
// by what gives space back. The last half is for the resulting tables and compactions.
type Room uint8

const (
	Roomy      Room = iota
	RoomLow         // below MinFreeBytes: what adds tasks is refused
	RoomScarce      // below 3/4 of it: leases are ended and extended, and none is granted
	RoomNone        // below 1/2: only what gives space back is written
	RoomEmpty       // below 1/4: nothing is written
)

func (r Room) String() string {
	return [...]string{"enough", "low", "scarce", "none", "empty"}[r]
}

// HasRoom reports whether there is room for what goes on down to a level.
func (r *round) HasRoom(level Room) bool { return r.Room <= level }
