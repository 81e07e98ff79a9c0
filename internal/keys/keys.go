// Package keys is the layout of a shard's keys and of the small values that
// are not task records. Encoders stand beside their decoders; the byte order
// of the keys is what the engine relies on:
//
//	01                      meta        identity of the shard, written once
//	02 queue                catalogue   name of a queue
//	03 lane                 catalogue   queue, priority and tenant of a lane
//	04 queue                counters    tasks by state, and the shard's clock
//	10 lane [since] id      task        ready and leased tasks, in the order they became ready
//	11 seq                  lease       the leases that one group granted
//	12 due id               scheduled   tasks that wait for their time
//	13 queue time id        dead        dead letters
//	14 expiry id            done        kept results
//	15 id                   index       where a task lies that has left its first place
//
// Numbers are big endian: byte order is numeric order.
package keys

import (
	"encoding/binary"
	"fmt"
)

// The first byte of a key names its range.
const (
	Meta      = 0x01
	Queue     = 0x02
	Lane      = 0x03
	Counters  = 0x04
	Task      = 0x10
	Lease     = 0x11
	Scheduled = 0x12
	Dead      = 0x13
	Done      = 0x14
	Index     = 0x15
)

// IDLen is the length of a task ID.
const IDLen = 16

// ID is a task ID as it stands in a key: a UUIDv7 whose first eight bytes are
// a time, a fixed version nibble and a counter.
type ID = [IDLen]byte

// A since orders the tasks of a lane: milliseconds in the upper 48 bits, a
// kind nibble, a 12-bit counter. The kind of a task in its first place is 7,
// the version nibble of its UUIDv7, so that its since is the head of its ID
// and is not written twice. A task that has been moved has kind 8.
const (
	kindShift = 12
	kindMask  = 0xf << kindShift
	kindFresh = 0x7 << kindShift
	kindMoved = 0x8 << kindShift
)

// SinceOf is the since of a task that lies in its first place.
func SinceOf(id ID) uint64 { return binary.BigEndian.Uint64(id[:8]) }

// MovedSince is the since of a task that became ready again at ms.
func MovedSince(ms uint64) uint64 { return ms<<16 | kindMoved }

// Fresh reports whether a since is that of a task in its first place.
func Fresh(since uint64) bool { return since&kindMask == kindFresh }

// SinceMillis is the time in a since, in milliseconds.
func SinceMillis(since uint64) uint64 { return since >> 16 }

// TaskLen is the length of a task key.
func TaskLen(since uint64) int {
	if Fresh(since) {
		return 1 + 4 + IDLen
	}
	return 1 + 4 + 8 + IDLen
}

// PutTask writes a task key into dst. REQUIRES: len(dst) == TaskLen(since), and
// a fresh since is SinceOf(id).
func PutTask(dst []byte, lane uint32, since uint64, id ID) {
	dst[0] = Task
	binary.BigEndian.PutUint32(dst[1:], lane)
	if Fresh(since) {
		copy(dst[5:], id[:])
		return
	}
	binary.BigEndian.PutUint64(dst[5:], since)
	copy(dst[13:], id[:])
}

// AppendTask appends a task key.
func AppendTask(dst []byte, lane uint32, since uint64, id ID) []byte {
	n := len(dst)
	dst = append(dst, make([]byte, TaskLen(since))...)
	PutTask(dst[n:], lane, since, id)
	return dst
}

// AppendLane appends the prefix of a lane's task keys.
func AppendLane(dst []byte, lane uint32) []byte {
	return binary.BigEndian.AppendUint32(append(dst, Task), lane)
}

// AppendFrom appends the smallest task key of a lane at or after a position.
// A since of 0 is the head of the lane.
func AppendFrom(dst []byte, lane uint32, since uint64, id ID) []byte {
	if since == 0 {
		return AppendLane(dst, lane)
	}
	return AppendTask(dst, lane, since, id)
}

// ParseTask reads a task key.
func ParseTask(key []byte) (lane uint32, since uint64, id ID, err error) {
	if len(key) < 1+4+IDLen || key[0] != Task {
		return 0, 0, id, malformed("task", key)
	}
	lane = binary.BigEndian.Uint32(key[1:])
	since = binary.BigEndian.Uint64(key[5:])
	if len(key) != TaskLen(since) {
		return 0, 0, id, malformed("task", key)
	}
	copy(id[:], key[len(key)-IDLen:])
	return lane, since, id, nil
}

// AppendTimed appends a key of the scheduled or the done range.
func AppendTimed(dst []byte, prefix byte, at uint64, id ID) []byte {
	dst = binary.BigEndian.AppendUint64(append(dst, prefix), at)
	return append(dst, id[:]...)
}

// ParseTimed reads a key of the scheduled or the done range.
func ParseTimed(key []byte) (at uint64, id ID, err error) {
	if len(key) != 1+8+IDLen || (key[0] != Scheduled && key[0] != Done) {
		return 0, id, malformed("timed", key)
	}
	copy(id[:], key[9:])
	return binary.BigEndian.Uint64(key[1:]), id, nil
}

// AppendDead appends the key of a dead letter.
func AppendDead(dst []byte, queue uint32, at uint64, id ID) []byte {
	dst = binary.BigEndian.AppendUint32(append(dst, Dead), queue)
	dst = binary.BigEndian.AppendUint64(dst, at)
	return append(dst, id[:]...)
}

// ParseDead reads the key of a dead letter.
func ParseDead(key []byte) (queue uint32, at uint64, id ID, err error) {
	if len(key) != 1+4+8+IDLen || key[0] != Dead {
		return 0, 0, id, malformed("dead letter", key)
	}
	copy(id[:], key[13:])
	return binary.BigEndian.Uint32(key[1:]), binary.BigEndian.Uint64(key[5:]), id, nil
}

// AppendIndex appends the key of an index entry.
func AppendIndex(dst []byte, id ID) []byte { return append(append(dst, Index), id[:]...) }

// ParseIndex reads the key of an index entry.
func ParseIndex(key []byte) (id ID, err error) {
	if len(key) != 1+IDLen || key[0] != Index {
		return id, malformed("index", key)
	}
	copy(id[:], key[1:])
	return id, nil
}

// LeaseLen is the length of the key of a lease record.
const LeaseLen = 1 + 8

// PutLease writes the key of a lease record into dst. REQUIRES: len(dst) == LeaseLen.
func PutLease(dst []byte, seq uint64) {
	dst[0] = Lease
	binary.BigEndian.PutUint64(dst[1:], seq)
}

// ParseLease reads the key of a lease record.
func ParseLease(key []byte) (seq uint64, err error) {
	if len(key) != LeaseLen || key[0] != Lease {
		return 0, malformed("lease", key)
	}
	return binary.BigEndian.Uint64(key[1:]), nil
}

// AppendNumbered appends a key of the queue, lane or counters range.
func AppendNumbered(dst []byte, prefix byte, n uint32) []byte {
	return binary.BigEndian.AppendUint32(append(dst, prefix), n)
}

// ParseNumbered reads a key of the queue, lane or counters range.
func ParseNumbered(key []byte) (n uint32, err error) {
	if len(key) != 1+4 {
		return 0, malformed("catalogue", key)
	}
	return binary.BigEndian.Uint32(key[1:]), nil
}

// Range returns the bounds of all keys with a prefix byte.
func Range(prefix byte) (lower, upper []byte) { return []byte{prefix}, []byte{prefix + 1} }

func malformed(what string, b []byte) error {
	return fmt.Errorf("malformed %s: %x", what, b)
}
