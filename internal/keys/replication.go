package keys

import (
	"encoding/binary"
	"fmt"

	"codeq/internal/wire"
)

// AppliedLen is the length of the value of the key Applied.
const AppliedLen = 16

// PutApplied writes the index and term of the last log entry that a store has applied. REQUIRES:
// len(dst) == AppliedLen.
func PutApplied(dst []byte, index, term uint64) {
	binary.BigEndian.PutUint64(dst, index)
	binary.BigEndian.PutUint64(dst[8:], term)
}

// ParseApplied is the inverse of PutApplied.
func ParseApplied(b []byte) (index, term uint64, err error) {
	if len(b) != AppliedLen {
		return 0, 0, fmt.Errorf("malformed applied entry: %x", b)
	}
	return binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:]), nil
}

// AppendNamed appends a key with the name of a node.
func AppendNamed(dst []byte, prefix byte, node string) []byte {
	return append(append(dst, prefix), node...)
}

// SessionValue holds the recent produces of a node in a shard: the calls with outcomes that the
// node may not know yet.
type SessionValue struct {
	Incarnation uint64 // of the node: the latest incarnation that has produced
	Low         uint64 // the node knows the outcome of every call below it
	Calls       []SessionCall
	Gone        uint64 // time of the node's removal from the cluster; wall clock, ms; 0: none
}

// InterestValue is the set of events that a node subscribes to. Among several, the one of the
// latest life with the largest number counts.
type InterestValue struct {
	Kinds               uint64 // a set; 0 is not stored
	Incarnation, Number uint64 // Incarnation is not 0
}

// IsBefore reports whether v is older than w.
func (v InterestValue) IsBefore(w InterestValue) bool {
	return v.Incarnation < w.Incarnation || v.Incarnation == w.Incarnation && v.Number < w.Number
}

// Append appends the stored form. Incarnation and Number are left out if they are 0.
func (v InterestValue) Append(dst []byte) []byte {
	dst = AppendNumber(dst, v.Kinds)
	if v.Incarnation != 0 {
		dst = AppendNumber(AppendNumber(dst, v.Incarnation), v.Number)
	}
	return dst
}

// ParseInterest is the inverse of Append.
func ParseInterest(b []byte) (v InterestValue, err error) {
	switch len(b) {
	case 8:
	case 24:
		if v.Incarnation, v.Number = binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:]); v.Incarnation == 0 {
			return InterestValue{}, malformed("interest", b)
		}
	default:
		return v, malformed("interest", b)
	}
	v.Kinds = binary.BigEndian.Uint64(b)
	return v, nil
}

// SessionCall is the outcome of one call.
type SessionCall struct {
	Seq        uint64
	IDs        []ID
	Duplicates []int // indexes of IDs
}

// Append appends the stored form. Gone is left out if it is 0.
func (v *SessionValue) Append(dst []byte) []byte {
	dst = binary.BigEndian.AppendUint64(dst, v.Incarnation)
	dst = wire.AppendUint(dst, v.Low)
	dst = wire.AppendUint(dst, uint64(len(v.Calls)))
	for i := range v.Calls {
		c := &v.Calls[i]
		dst = AppendIDs(wire.AppendUint(dst, c.Seq), c.IDs)
		dst = AppendIndexes(dst, c.Duplicates)
	}
	if v.Gone != 0 {
		dst = wire.AppendUint(dst, v.Gone)
	}
	return dst
}

// ParseSession is the inverse of Append.
func ParseSession(b []byte) (v SessionValue, err error) {
	r := wire.NewReader(b)
	v.Incarnation, v.Low = r.Fixed64(), r.Uint()
	n := r.Count(3)
	for range n {
		v.Calls = append(v.Calls, SessionCall{Seq: r.Uint(), IDs: ReadIDs(r), Duplicates: ReadIndexes(r)})
	}
	if r.Len() > 0 {
		v.Gone = r.Uint()
	}
	if err := r.Done(); err != nil {
		return SessionValue{}, fmt.Errorf("session %x: %w", b, err)
	}
	return v, nil
}

// AppendIDs appends IDs to a message.
func AppendIDs[T ~[IDLen]byte](dst []byte, ids []T) []byte {
	dst = wire.AppendUint(dst, uint64(len(ids)))
	for _, id := range ids {
		b := ID(id)
		dst = append(dst, b[:]...)
	}
	return dst
}

// ReadIDs is the inverse of AppendIDs. It returns nil for none.
func ReadIDs(r *wire.Reader) []ID {
	n := r.Count(IDLen)
	if n == 0 {
		return nil
	}
	ids := make([]ID, n)
	for i := range ids {
		ids[i] = ReadID(r)
	}
	return ids
}

// ReadID reads an ID.
func ReadID(r *wire.Reader) (id ID) {
	copy(id[:], r.Take(IDLen))
	return id
}

// AppendIndexes appends small numbers to a message.
func AppendIndexes(dst []byte, list []int) []byte {
	dst = wire.AppendUint(dst, uint64(len(list)))
	for _, n := range list {
		dst = wire.AppendUint(dst, uint64(n))
	}
	return dst
}

// ReadIndexes is the inverse of AppendIndexes. It returns nil for none.
func ReadIndexes(r *wire.Reader) []int {
	n := r.Count(1)
	if n == 0 {
		return nil
	}
	list := make([]int, n)
	for i := range list {
		list[i] = int(r.Uint())
	}
	return list
}
