package engine

import (
	"bytes"
	"cmp"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// Tasks that have ended and are kept lie in buckets. A bucket holds the tasks of a queue that
// expire at the same time: one range deletion removes them, however many they are. Its size is
// stored separately, so that the counts of the queue stay exact. With it are counts of dead letters
// by the kinds of their errors. The record of each says under which kind it is counted.

// bucketKey names a bucket of a queue.
type bucketKey struct {
	prefix byte   // the range: Dead, Done or Canceled
	until  uint64 // by the clock of periods, ms
}

// bucket describes a bucket in memory.
type bucket struct {
	queue *Queue
	bucketKey
	keys.BucketValue
	place     int  // in the shard's heap; negative: not there
	touched   bool // on the group's list
	uncounted bool // on the list of buckets with dead letters that no kind counts
}

func (b *bucket) Due() uint64 { return b.until }

func (b *bucket) Spot() *int { return &b.place }

// keep stores a task that has ended in the bucket that ends at until. Its record no longer says
// that it holds a key.
func (tm *times) keep(q *Queue, prefix byte, id keys.ID, until uint64, ended keys.EndedValue, rec *record.Record) {
	rec.Flags &^= record.HoldsKey
	b := tm.bucket(q, bucketKey{prefix, until})
	if prefix == keys.Dead && tm.Format < keys.FormatOfDeadKinds {
		tm.noteUncounted(b)
	} else if prefix == keys.Dead {
		q.kinds.Count(&b.BucketValue, id, ended.At, rec)
	}
	tm.scratch = keys.AppendGrouped(tm.scratch[:0], prefix, q.Number, b.until, id)
	tm.Group.Change(id)
	tm.Group.Set(tm.scratch, append(ended.Append(nil), rec.Encode()...))
	tm.resize(b, 1)
}

// unkeep removes a kept task from its bucket.
func (tm *times) unkeep(at *located) {
	tm.Group.Change(at.id)
	tm.Group.Delete(at.place.AppendKey(nil, at.id))
	b := tm.bucket(at.lane.queue, bucketKey{at.place.Range, at.place.At})
	b.queue.kinds.Uncount(&b.BucketValue, at.id, at.ended.At, &at.rec)
	tm.resize(b, -1)
}

// rekeep keeps a kept task until another time.
func (tm *times) rekeep(at *located, until uint64) {
	tm.unkeep(at)
	tm.keep(at.lane.queue, at.place.Range, at.id, until, at.ended, &at.rec)
}

func (tm *times) noteUncounted(b *bucket) {
	if !b.uncounted {
		b.uncounted = true
		tm.uncounted = append(tm.uncounted, b)
	}
}

func (tm *times) countKindsIsDue() bool {
	return len(tm.uncounted) > 0 && tm.Format >= keys.FormatOfDeadKinds
}

// countKinds counts dead letters that were stored without a kind: by an earlier version, a repair
// or an import. Their records are written again. The next owner begins anew, and passes over those
// that have a kind.
func (tm *times) countKinds() {
	for tm.countKindsIsDue() && !tm.Spent() {
		b := tm.uncounted[len(tm.uncounted)-1]
		if b.Counted() < b.Size && !tm.isForgotten(b.until) && tm.countSome(b) {
			return
		}
		b.uncounted, tm.countFrom = false, nil
		tm.uncounted = tm.uncounted[:len(tm.uncounted)-1]
	}
}

// countSome is countKinds for one bucket, and reports whether more of it is left.
func (tm *times) countSome(b *bucket) (more bool) {
	all := keys.AppendGroup(nil, b.prefix, b.queue.Number, b.until)
	if tm.countFrom == nil {
		tm.countFrom = all
	}
	err := tm.Walk(tm.countFrom, keys.GroupEnd(all), func(it *pebble.Iterator, n int) (bool, error) {
		id, p, err := keys.ParsePlaceKey(it.Key())
		if more = n > 0 && tm.Spent() || tm.Group.hasChanged(id); more || err != nil {
			tm.countFrom = bytes.Clone(it.Key())
			return false, err
		}
		value, err := b.queue.kinds.CountStored(&b.BucketValue, id, p, it.Value())
		if value != nil {
			tm.Group.Change(id)
			tm.Group.Set(it.Key(), value)
			tm.resize(b, 0)
		}
		return err == nil, err
	})
	return tm.fails(err) || more
}

func (tm *times) bucket(q *Queue, k bucketKey) *bucket {
	b := q.buckets[k]
	if b == nil {
		b = &bucket{queue: q, bucketKey: k, place: -1}
		if k.until != keys.Forever {
			tm.expiries.Push(b)
		}
		if q.buckets == nil {
			q.buckets = make(map[bucketKey]*bucket)
		}
		if k.prefix == keys.Dead && q.kinds == nil {
			q.kinds = new(store.DeadKinds)
		}
		q.buckets[k] = b
	}
	return b
}

func (tm *times) resize(b *bucket, by int) {
	b.Size += uint64(by)
	*b.queue.Counts.Ended(b.prefix) += uint64(by)
	tm.names.touch(b.queue)
	if !b.touched {
		b.touched = true
		tm.Group.buckets = append(tm.Group.buckets, b)
	}
}

// seal stores the size and the counts of a bucket.
func (b *bucket) seal(g *commitGroup) {
	b.touched = false
	if b.prefix == keys.Dead {
		b.queue.kinds.Seal(&g.Writes, b.queue.Number)
	}
	key := keys.AppendBucket(nil, b.prefix, b.queue.Number, b.until)
	if b.Size == 0 {
		delete(b.queue.buckets, b.bucketKey)
		g.Delete(key)
		return
	}
	g.Set(key, b.Append(nil))
}

// expireEnded deletes the buckets that are due.
// REQUIRES: the group is empty.
func (tm *times) expireEnded() {
	for tm.past(tm.expiries.Next()) && !tm.Spent() {
		b := tm.expiries.Pop()
		all := keys.AppendGroup(nil, b.prefix, b.queue.Number, b.until)
		tm.Group.DeleteRange(all, keys.GroupEnd(all))
		b.queue.kinds.Drop(&b.BucketValue)
		tm.resize(b, -int(b.Size))
	}
}

func (tm *times) expireEndedIsDue() bool { return tm.past(tm.expiries.Next()) }

// dropEmpty removes the buckets that the group has emptied from the heap.
func (tm *times) dropEmpty() {
	for _, b := range tm.Group.buckets {
		if b.Size == 0 {
			tm.expiries.Remove(b)
		}
	}
}

// retention returns how long a completed or canceled task is kept, in ms: as the task says, or else
// its queue, or else the options.
func (tm *times) retention(q *Queue, task int64) int64 {
	return cmp.Or(task, record.Retention(q.Settings.Retention), record.Retention(tm.config.Retention))
}
