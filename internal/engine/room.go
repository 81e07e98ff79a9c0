package engine

// Room is how much of it there is. Whatever goes on at a level goes on at those above it. What a
// level adds to the disk is bounded by what those above have let in, so that the reserve below
// MinFreeBytes is used up step by step: by tasks that are claimed, then by what becomes of them,
// then by what gives space back. The last half is for the tables and compactions of all this.
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
func (s *State) HasRoom(level Room) bool { return s.Room <= level }
