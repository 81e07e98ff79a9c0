package keys

import (
	"encoding/binary"

	"codeq/internal/wire"
)

// EventKinds is the number of kinds of events that every value counts.
const EventKinds = 8

// Unhandled is the index of the leases that ended since no handler knows the kind of the task. A
// value has them if there were any: their shard has the format FormatOfKinds.
const Unhandled = EventKinds

// Totals counts the events of the tasks of a queue, by kind: the first kind has number 1 and index
// 0.
type Totals [EventKinds + 1]uint64

// Add adds the totals of o.
func (t *Totals) Add(o *Totals) {
	for i := range t {
		t[i] += o[i]
	}
}

// AtLeast reports whether no count is less than in o.
func (t *Totals) AtLeast(o *Totals) bool {
	for i := range t {
		if t[i] < o[i] {
			return false
		}
	}
	return true
}

// TotalsValue has the totals of a queue up to a day, and of that day. It ends the value of the
// queue's counters, and is the value of a row of the range Daily.
type TotalsValue struct {
	Day   uint32 // day of the queue's last change, in UTC, since 1970; 0: nothing was counted
	All   Totals
	OfDay Totals
}

// hasUnhandled is added to the day of a value that counts Unhandled.
const hasUnhandled = 1 << 31

// Append appends the encoded value.
func (v *TotalsValue) Append(dst []byte) []byte {
	day, kinds := uint64(v.Day), EventKinds
	if v.All[Unhandled] != 0 {
		day, kinds = day|hasUnhandled, kinds+1
	}
	dst = wire.AppendUint(dst, day)
	for _, n := range v.All[:kinds] {
		dst = wire.AppendUint(dst, n)
	}
	for _, n := range v.OfDay[:kinds] {
		dst = wire.AppendUint(dst, n)
	}
	return dst
}

// ReadTotals is the inverse of Append.
func ReadTotals(r *wire.Reader) (v TotalsValue) {
	day, kinds := r.Uint32(), EventKinds
	if day&hasUnhandled != 0 {
		kinds++
	}
	v.Day = day &^ hasUnhandled
	for i := range kinds {
		v.All[i] = r.Uint()
	}
	for i := range kinds {
		v.OfDay[i] = r.Uint()
	}
	if v.Day == 0 || !v.All.AtLeast(&v.OfDay) || kinds > EventKinds && v.All[Unhandled] == 0 {
		r.Fail()
	}
	return v
}

// ParseTotals reads the value of a row.
func ParseTotals(b []byte) (TotalsValue, error) {
	r := wire.NewReader(b)
	v := ReadTotals(r)
	if r.Done() != nil {
		return TotalsValue{}, malformed("totals", b)
	}
	return v, nil
}

// AppendTotals appends the key of a row: the totals of a queue at the end of a day. The rows of a
// queue are adjacent, in the order of days. REQUIRES: the queue has a name.
func AppendTotals(dst []byte, queue string, day uint32) []byte {
	dst = wire.AppendBytes(append(dst, Daily), queue)
	return binary.BigEndian.AppendUint32(dst, day)
}

// ParseTotalsKey reads the key of a row; queue aliases key.
func ParseTotalsKey(key []byte) (queue []byte, day uint32, err error) {
	if len(key) == 0 || key[0] != Daily {
		return nil, 0, malformed("row of totals", key)
	}
	r := wire.NewReader(key[1:])
	queue, day = r.Bytes(), r.Fixed32()
	if r.Done() != nil || len(queue) == 0 || day == 0 {
		return nil, 0, malformed("row of totals", key)
	}
	return queue, day, nil
}

// TotalsRows returns the bounds of the keys of all rows.
func TotalsRows() (lower, upper []byte) { return []byte{Daily, 1}, []byte{Daily + 1} }
