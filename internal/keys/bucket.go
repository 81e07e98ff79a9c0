package keys

import (
	"encoding/binary"
	"slices"

	"codeq/internal/wire"
)

// BucketValue describes a bucket of ended tasks. That of a bucket of dead letters also counts them
// by the kinds of their errors; those that no kind counts were stored without a number.
type BucketValue struct {
	Size  uint64
	Kinds []KindCount // each kind once
}

// KindCount counts the dead letters of a kind in a bucket. Their records have the number of the
// kind.
//
// Invariant: Days has exactly those of Count that died in its days.
type KindCount struct {
	Kind  uint32 // number of the kind in its queue; OtherKinds: of no own
	Count uint64 // 1 or more
	At    uint64 // when the last one died of those that were ever counted here, ms
	Last  ID     // it; zero: it has left the bucket
	Days  [DeadDays]uint64
}

const (
	// DeadDays is for how many days dead letters are counted by the day of their death: that of At,
	// and those before it.
	DeadDays = 14
	// OtherKinds is the number under which a bucket counts what exceeds MostKinds.
	OtherKinds = 0
	// MostKinds is how many kinds with a number of their own a bucket has at the most.
	MostKinds = 64

	dayMillis = 24 * 60 * 60 * 1000
)

// Kind returns the count of a kind; nil: the bucket has none of it.
func (v *BucketValue) Kind(number uint32) *KindCount {
	for i := range v.Kinds {
		if v.Kinds[i].Kind == number {
			return &v.Kinds[i]
		}
	}
	return nil
}

// Counted returns how many of the tasks a kind counts.
func (v *BucketValue) Counted() (n uint64) {
	for i := range v.Kinds {
		n += v.Kinds[i].Count
	}
	return n
}

// Add counts a dead letter that died at a time. added: it is the first of its kind in the bucket.
func (v *BucketValue) Add(number uint32, id ID, at uint64) (added bool) {
	k := v.Kind(number)
	if added = k == nil; added {
		v.Kinds = append(v.Kinds, KindCount{Kind: number, At: at})
		k = &v.Kinds[len(v.Kinds)-1]
	}
	if k.Count++; at >= k.At {
		k.turnTo(at)
		k.Last = id
	}
	if day := k.day(at); day < DeadDays {
		k.Days[day]++
	}
	return added
}

// Remove is the opposite of Add. gone: it was the last one of its kind.
func (v *BucketValue) Remove(number uint32, id ID, at uint64) (gone bool) {
	k := v.Kind(number)
	if k == nil {
		return false
	}
	if k.Count--; k.Count == 0 {
		v.Kinds = slices.DeleteFunc(v.Kinds, func(k KindCount) bool { return k.Kind == number })
		return true
	}
	if day := k.day(at); day < DeadDays && k.Days[day] > 0 {
		k.Days[day]--
	}
	if k.Last == id {
		k.Last = ID{}
	}
	return false
}

// Join adds the counts of another bucket, or of another kind that is shown as this one.
func (k *KindCount) Join(o *KindCount) {
	if o.At > k.At {
		k.turnTo(o.At)
		k.Last = o.Last
	}
	k.Count += o.Count
	for i, n := range o.Days {
		if day := uint64(i) + k.day(o.At); day < DeadDays {
			k.Days[day] += n
		}
	}
}

// day returns how many days before that of At a time is.
func (k *KindCount) day(at uint64) uint64 { return k.At/dayMillis - min(at, k.At)/dayMillis }

// turnTo makes a later time At.
func (k *KindCount) turnTo(at uint64) {
	by := min(at/dayMillis-k.At/dayMillis, DeadDays)
	copy(k.Days[by:], k.Days[:DeadDays-by])
	clear(k.Days[:by])
	k.At = at
}

// Append appends the encoded value: of a bucket without kinds, it is a number.
func (v *BucketValue) Append(dst []byte) []byte {
	dst = AppendNumber(dst, v.Size)
	for i := range v.Kinds {
		k := &v.Kinds[i]
		dst = wire.AppendUint(wire.AppendUint(dst, uint64(k.Kind)), k.Count)
		dst = append(wire.AppendUint(dst, k.At), k.Last[:]...)
		days := DeadDays
		for days > 0 && k.Days[days-1] == 0 {
			days--
		}
		dst = append(dst, byte(days))
		for _, n := range k.Days[:days] {
			dst = wire.AppendUint(dst, n)
		}
	}
	return dst
}

// ParseBucketValue is the inverse of Append.
func ParseBucketValue(b []byte) (v BucketValue, err error) {
	r := wire.NewReader(b)
	v.Size = r.Fixed64()
	left := v.Size
	for r.Len() > 0 {
		k := KindCount{Kind: r.Uint32(), Count: r.Uint(), At: r.Uint(), Last: ReadID(r)}
		ofDays := k.Count
		days := int(r.Byte())
		for i := range k.Days[:min(days, DeadDays)] {
			k.Days[i] = r.Uint()
			if k.Days[i] > ofDays || k.Days[i] == 0 && i == days-1 {
				r.Fail()
			}
			ofDays -= k.Days[i]
		}
		if days > DeadDays || k.Count == 0 || k.Count > left || v.Kind(k.Kind) != nil {
			r.Fail()
		}
		left -= k.Count
		v.Kinds = append(v.Kinds, k)
	}
	if r.Failed() {
		return BucketValue{}, malformed("bucket", b)
	}
	return v, nil
}

// AppendBucket appends the key of the size of a bucket of a range.
func AppendBucket(dst []byte, prefix byte, queue uint32, bucket uint64) []byte {
	dst = binary.BigEndian.AppendUint32(append(dst, Buckets, prefix), queue)
	return binary.BigEndian.AppendUint64(dst, bucket)
}

// AppendBuckets appends the common prefix of the keys of all buckets of a queue's range.
func AppendBuckets(dst []byte, prefix byte, queue uint32) []byte {
	return binary.BigEndian.AppendUint32(append(dst, Buckets, prefix), queue)
}

// ParseBucket reads the key of the size of a bucket.
func ParseBucket(key []byte) (prefix byte, queue uint32, bucket uint64, err error) {
	if len(key) != 2+4+8 || key[0] != Buckets || !Ended(key[1]) {
		return 0, 0, 0, malformed("bucket", key)
	}
	return key[1], binary.BigEndian.Uint32(key[2:]), binary.BigEndian.Uint64(key[6:]), nil
}

// AppendDeadKind appends the key of the text of a kind of errors.
func AppendDeadKind(dst []byte, queue, kind uint32) []byte {
	return binary.BigEndian.AppendUint32(AppendNumbered(dst, DeadKind, queue), kind)
}

// ParseDeadKind reads a key of AppendDeadKind.
func ParseDeadKind(key []byte) (queue, kind uint32, err error) {
	if len(key) != 1+4+4 || key[0] != DeadKind {
		return 0, 0, malformed("kind of errors", key)
	}
	return binary.BigEndian.Uint32(key[1:]), binary.BigEndian.Uint32(key[5:]), nil
}
