package codeq

import (
	"time"

	"codeq/internal/keys"
)

// ID identifies a task. It is a UUIDv7 (RFC 9562): the IDs that one shard makes sort in the order
// in which they were made. No task has the zero ID.
//
//	bytes 0-5    milliseconds since 1970
//	bytes 6-7    version 7, and a 12-bit counter
//	byte  8      variant, 6 random bits
//	bytes 9-11   the lane in which the task was produced
//	bytes 12-14  random
//	byte  15     chosen so that FNV-1a(ID) mod shards is the task's shard
type ID [keys.IDLen]byte

// String returns the canonical form of the UUID.
func (id ID) String() string { return keys.FormatID(id) }

// MarshalText returns the canonical form of the UUID.
func (id ID) MarshalText() ([]byte, error) { return keys.AppendIDText(nil, id), nil }

// UnmarshalText reads the canonical form of a UUID, and returns an error that matches [ErrInvalid]
// for anything else.
func (id *ID) UnmarshalText(b []byte) error {
	read, ok := keys.ParseID(b)
	if !ok {
		return &InvalidError{"ID", string(b), "a UUID such as 0193b3c0-...."}
	}
	*id = read
	return nil
}

// ParseID reads the canonical form of a UUID.
//
// Errors: [ErrInvalid].
func ParseID(s string) (ID, error) {
	var id ID
	err := id.UnmarshalText([]byte(s))
	return id, err
}

// Time returns when the task was produced, to the millisecond, by the clock of its shard.
func (id ID) Time() time.Time {
	return time.UnixMilli(int64(keys.SinceMillis(keys.SinceOf(id))))
}

// shard returns the number of the shard to which the ID routes.
func (id ID) shard(shards int) int { return keys.ShardOf(id, shards) }
