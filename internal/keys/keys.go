// Package keys is the layout of a shard's keys and of the small values that are not task records.
// Encoders stand beside their decoders; the engine relies on the byte order of the keys:
//
//	01                      meta        identity of the shard, written once for each format
//	02 queue                catalogue   name of a queue
//	03 lane                 catalogue   queue, priority and tenant of a lane
//	04 queue                counters    tasks by state, the clock, and totals; queue 0: only the clock
//	05 range queue bucket   buckets     number of ended tasks in a bucket; of dead letters, from
//	                                    format 8 on, also by kind of error
//	06 [name]               settings    of a queue; without: the version that settings of queues
//	                                    without an entry must exceed
//	07 shard                inbound     number of the last message taken from a shard
//	08 name                 schedule    a schedule and its progress
//	09 shard                sent        number of the last message sent to a shard
//	0a                      applied     last applied entry of the log
//	0b node                 session     recent produces of a node, which it may repeat
//	0c node                 interest    events that a node subscribes to
//	0d                      lease time  the clock of leases, in a cluster only
//	0e [queue name, day]    daily       totals of a queue at the end of a day; without: the day of
//	                                    the last sweep of these rows
//	0f                      placement   the node chosen by hand to lead
//	10 lane [since] id      task        ready and leased tasks, in the order they became ready
//	11 seq                  lease       the leases that one group granted
//	12 due id               scheduled   tasks that wait for their time
//	13 queue scope id       blocked     tasks that wait for others
//	14 queue bucket id      dead        dead letters
//	15 queue bucket id      done        completed tasks that are kept
//	16 queue bucket id      canceled    canceled tasks that are kept
//	17 id                   index       place of a task that has left its first one
//	18 hash                 unique      task that holds an idempotency key
//	19 time hash            freed       expiry of idempotency keys, unless their task still exists
//	1a scope                group       task with the turn of a group
//	1b queue scope id       wake        blocked tasks to wake
//	1c id                   pending     number of parents that a task waits for
//	1d parent child         dependent   tasks that wait for the end of a task
//	1e shard seq            outbound    messages that a shard has not taken yet
//	1f parent               telling     end of a task, until all its children have been told
//	20 child parent         pin         parents whose results are kept until a task has ended
//	21 parent               pinned      number of pins of a task's result
//	22                      period time the clock of periods, if it differs from the minter's
//	23 queue name           granted     last lease of a task of a queue with a rate
//	24                      clock sets  when the wall clock was set, and by how much
//	25 id number            step        a finished step of an unended task, from format 8 on; number
//	                                    fffe: the cursors of the task; ffff: the signals
//	                                    that it has got
//	26 queue kind           dead kind   text of a kind of errors of a queue's dead letters, while a
//	                                    bucket counts some; from format 8 on
//
// A bucket is the time at which its tasks expire. Tasks of one scope block each other.
//
// Numbers are big endian: byte order is numeric order.
package keys

import (
	"encoding/binary"
	"fmt"
	"math/bits"
)

// The first byte of a key names its range.
const (
	Meta       = 0x01
	Queue      = 0x02
	Lane       = 0x03
	Counters   = 0x04
	Buckets    = 0x05
	Settings   = 0x06
	Inbound    = 0x07
	Schedule   = 0x08
	Sent       = 0x09
	Applied    = 0x0a
	Session    = 0x0b
	Interest   = 0x0c
	LeaseTime  = 0x0d
	Daily      = 0x0e
	Placement  = 0x0f
	Task       = 0x10
	Lease      = 0x11
	Scheduled  = 0x12
	Blocked    = 0x13
	Dead       = 0x14
	Done       = 0x15
	Canceled   = 0x16
	Index      = 0x17
	Unique     = 0x18
	Freed      = 0x19
	Group      = 0x1a
	Wake       = 0x1b
	Pending    = 0x1c
	Dependent  = 0x1d
	Outbound   = 0x1e
	Telling    = 0x1f
	Pin        = 0x20
	Pinned     = 0x21
	PeriodTime = 0x22
	Granted    = 0x23
	ClockSets  = 0x24
	Step       = 0x25
	DeadKind   = 0x26
)

// IDLen is the length of a task ID.
const IDLen = 16

// ID is a task ID as in a key: a UUIDv7. Its first eight bytes are a time, a fixed version nibble
// and a counter.
type ID = [IDLen]byte

// A since orders the tasks of a lane: milliseconds in the upper 48 bits, a kind nibble, a 12-bit
// counter. The kind of a task in its first place is 7, the version nibble of its UUIDv7: its since
// is the head of its ID, and is not written twice. A moved task has kind 8.
const (
	kindShift = 12
	kindMask  = 0xf << kindShift
	kindFirst = 0x7 << kindShift
	kindMoved = 0x8 << kindShift
)

// SinceOf returns the since of a task in its first place.
func SinceOf(id ID) uint64 { return binary.BigEndian.Uint64(id[:8]) }

// ClockOf returns the shard's clock at the creation of an ID: milliseconds, and a counter in the
// last 12 bits.
func ClockOf(id ID) uint64 {
	since := SinceOf(id)
	return SinceMillis(since)<<kindShift | since&(1<<kindShift-1)
}

// ClockMillis returns the milliseconds of a value of the shard's clock.
func ClockMillis(clock uint64) uint64 { return clock >> kindShift }

// MovedSince returns the since of a task that became ready again at ms.
func MovedSince(ms uint64) uint64 { return ms<<16 | kindMoved }

// FrontSince returns the since of a task that became ready again and goes before all tasks that
// were produced in its millisecond, or later. Its first place is not written twice.
func FrontSince(id ID) uint64 { return MovedSince(MintedAt(id) - 1) }

// IsFirstPlace reports whether a since is that of a task in its first place.
func IsFirstPlace(since uint64) bool { return since&kindMask == kindFirst }

// SinceMillis returns the time in a since, in milliseconds.
func SinceMillis(since uint64) uint64 { return since >> 16 }

// MintedAt returns the time in an ID, by the clock of its shard, ms.
func MintedAt(id ID) uint64 { return SinceMillis(SinceOf(id)) }

// TaskLen returns the length of a task key.
func TaskLen(since uint64) int {
	if IsFirstPlace(since) {
		return 1 + 4 + IDLen
	}
	return 1 + 4 + 8 + IDLen
}

// PutTask writes a task key into dst. REQUIRES: len(dst) == TaskLen(since), and the since of a
// first place is SinceOf(id).
func PutTask(dst []byte, lane uint32, since uint64, id ID) {
	dst[0] = Task
	binary.BigEndian.PutUint32(dst[1:], lane)
	if IsFirstPlace(since) {
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

// LaneLen is the length of the prefix of a lane's task keys.
const LaneLen = 1 + 4

// LaneOfTask reads the lane in a task key, or in its prefix.
// REQUIRES: len(key) >= LaneLen.
func LaneOfTask(key []byte) (lane uint32) { return binary.BigEndian.Uint32(key[1:]) }

// AppendFrom appends the smallest task key of a lane at or after a position. A since of 0 means the
// head of the lane.
func AppendFrom(dst []byte, lane uint32, since uint64, id ID) []byte {
	if since == 0 {
		return AppendLane(dst, lane)
	}
	return AppendTask(dst, lane, since, id)
}

// AppendSince appends a key after all task keys of a lane with a smaller since, and before all
// others of the lane.
func AppendSince(dst []byte, lane uint32, since uint64) []byte {
	return binary.BigEndian.AppendUint64(AppendLane(dst, lane), since)
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

// AppendScheduled appends the key of a task that waits for its time.
func AppendScheduled(dst []byte, due uint64, id ID) []byte {
	dst = binary.BigEndian.AppendUint64(append(dst, Scheduled), due)
	return append(dst, id[:]...)
}

// ParseScheduled reads the key of a task that waits for its time.
func ParseScheduled(key []byte) (due uint64, id ID, err error) {
	if len(key) != 1+8+IDLen || key[0] != Scheduled {
		return 0, id, malformed("scheduled task", key)
	}
	copy(id[:], key[9:])
	return binary.BigEndian.Uint64(key[1:]), id, nil
}

// AppendGrouped appends a key of the ranges Blocked, Dead, Done, Canceled and Wake: at is the scope
// of a blocked task, and the bucket of an ended one.
func AppendGrouped(dst []byte, prefix byte, queue uint32, at uint64, id ID) []byte {
	return append(AppendGroup(dst, prefix, queue, at), id[:]...)
}

// AppendGroup appends the common prefix of the keys of one scope or bucket.
func AppendGroup(dst []byte, prefix byte, queue uint32, at uint64) []byte {
	return binary.BigEndian.AppendUint64(AppendNumbered(dst, prefix, queue), at)
}

// ParseGrouped reads a key of AppendGrouped. The caller knows the range.
func ParseGrouped(key []byte) (queue uint32, at uint64, id ID, err error) {
	if len(key) != 1+4+8+IDLen {
		return 0, 0, id, malformed("grouped", key)
	}
	copy(id[:], key[13:])
	return binary.BigEndian.Uint32(key[1:]), binary.BigEndian.Uint64(key[5:]), id, nil
}

// GroupEnd returns the first key after all keys that begin with group. REQUIRES: a byte of group is
// not 0xff.
func GroupEnd(group []byte) []byte {
	end := append([]byte(nil), group...)
	for i := len(end) - 1; i >= 0; i-- {
		end[i]++
		if end[i] != 0 {
			break
		}
	}
	return end
}

// Forever is the bucket of tasks that are kept forever, and a time that never comes.
const Forever = 1<<64 - 1

// minBucket is the width of the narrowest buckets, in ms.
const minBucket = 1000

// BucketOf returns the end of the bucket for a task with a retention in ms from now; negative:
// forever. The width of buckets is between an eighth and a sixteenth of the retention, so that a
// queue has few of them.
func BucketOf(wall uint64, retention int64) uint64 {
	if retention < 0 || uint64(retention) > 1<<62 {
		return Forever
	}
	width := uint64(minBucket)
	if eighth := uint64(retention) / 8; eighth > width {
		width = max(width, 1<<(bits.Len64(eighth)-1))
	}
	end := wall + uint64(retention)
	return (end + width - 1) / width * width
}

// Later returns a time of the wall clock ms milliseconds later, or Forever.
func Later(wall, ms uint64) uint64 {
	if ms > Forever-wall {
		return Forever
	}
	return wall + ms
}

// RecordRanges are the ranges of the records of tasks.
var RecordRanges = [...]byte{Task, Scheduled, Blocked, Dead, Done, Canceled}

// Ended reports whether a range has ended tasks.
func Ended(prefix byte) bool { return prefix == Dead || prefix == Done || prefix == Canceled }

// AppendHashed appends a key of the range Unique.
func AppendHashed(dst []byte, hash [UniqueLen]byte) []byte {
	return append(append(dst, Unique), hash[:]...)
}

// ParseHashed reads a key of the range Unique.
func ParseHashed(key []byte) (hash [UniqueLen]byte, err error) {
	if len(key) != 1+UniqueLen || key[0] != Unique {
		return hash, malformed("idempotency key", key)
	}
	copy(hash[:], key[1:])
	return hash, nil
}

// UniqueLen is the length of the hash of an idempotency key.
const UniqueLen = 16

// AppendFreed appends a key of the range Freed.
func AppendFreed(dst []byte, at uint64, hash [UniqueLen]byte) []byte {
	return append(binary.BigEndian.AppendUint64(append(dst, Freed), at), hash[:]...)
}

// ParseFreed reads a key of the range Freed.
func ParseFreed(key []byte) (at uint64, hash [UniqueLen]byte, err error) {
	if len(key) != 1+8+UniqueLen || key[0] != Freed {
		return 0, hash, malformed("time of an idempotency key", key)
	}
	copy(hash[:], key[9:])
	return binary.BigEndian.Uint64(key[1:]), hash, nil
}

// AppendScope appends a key of the range Group.
func AppendScope(dst []byte, scope uint64) []byte {
	return binary.BigEndian.AppendUint64(append(dst, Group), scope)
}

// ParseScope reads a key of the range Group.
func ParseScope(key []byte) (scope uint64, err error) {
	if len(key) != 1+8 || key[0] != Group {
		return 0, malformed("group", key)
	}
	return binary.BigEndian.Uint64(key[1:]), nil
}

// AppendDependent appends a key of the range Dependent.
func AppendDependent(dst []byte, parent, child ID) []byte {
	return append(append(append(dst, Dependent), parent[:]...), child[:]...)
}

// ParseDependent reads a key of the range Dependent.
func ParseDependent(key []byte) (parent, child ID, err error) {
	if len(key) != 1+2*IDLen || key[0] != Dependent {
		return parent, child, malformed("dependent", key)
	}
	copy(parent[:], key[1:])
	copy(child[:], key[1+IDLen:])
	return parent, child, nil
}

// AppendPin appends a key of the range Pin.
func AppendPin(dst []byte, child, parent ID) []byte {
	return append(append(append(dst, Pin), child[:]...), parent[:]...)
}

// ParsePin reads a key of the range Pin.
func ParsePin(key []byte) (child, parent ID, err error) {
	if len(key) != 1+2*IDLen || key[0] != Pin {
		return child, parent, malformed("pin", key)
	}
	copy(child[:], key[1:])
	copy(parent[:], key[1+IDLen:])
	return child, parent, nil
}

// AppendOutbound appends a key of the range Outbound.
func AppendOutbound(dst []byte, shard uint32, seq uint64) []byte {
	return AppendGroup(dst, Outbound, shard, seq)
}

// ParseOutbound reads a key of the range Outbound.
func ParseOutbound(key []byte) (shard uint32, seq uint64, err error) {
	if len(key) != 1+4+8 || key[0] != Outbound {
		return 0, 0, malformed("message", key)
	}
	return binary.BigEndian.Uint32(key[1:]), binary.BigEndian.Uint64(key[5:]), nil
}

// AppendByID appends a key of the ranges Index, Pending, Telling and Pinned.
func AppendByID(dst []byte, prefix byte, id ID) []byte { return append(append(dst, prefix), id[:]...) }

// ParseByID reads a key of AppendByID.
func ParseByID(key []byte) (id ID, err error) {
	if len(key) != 1+IDLen || key[0] != Index && key[0] != Pending && key[0] != Telling && key[0] != Pinned {
		return id, malformed("key by ID", key)
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

// AppendNumbered appends a key of the ranges Queue, Lane, Counters, Inbound and Sent, or the common
// prefix of a queue's keys in the ranges of AppendGrouped.
func AppendNumbered(dst []byte, prefix byte, n uint32) []byte {
	return binary.BigEndian.AppendUint32(append(dst, prefix), n)
}

// ParseNumbered reads a key of the ranges Queue, Lane, Counters, Inbound and Sent. The caller knows
// the range.
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
