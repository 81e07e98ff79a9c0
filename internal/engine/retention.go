package engine

import (
	"codeq/internal/keys"
	"codeq/internal/record"
)

// Tasks that have ended and are kept lie in buckets. A bucket holds the tasks of a queue that
// expire at the same time: one range deletion removes them, however many they are. Its size is
// stored separately, so that the counts of the queue stay exact.

// bucketKey names a bucket of a queue.
type bucketKey struct {
	prefix byte   // the range: Dead, Done or Canceled
	until  uint64 // by the clock of periods, ms
}

// bucket describes a bucket in memory.
type bucket struct {
	queue *Queue
	bucketKey
	size    uint64
	place   int  // in the shard's heap; negative: not there
	touched bool // on the group's list
}

func (b *bucket) Due() uint64 { return b.until }

func (b *bucket) Spot() *int { return &b.place }

// keep stores a task that has ended in the bucket that ends at until. Its record no longer says
// that it holds a key.
func (tm *times) keep(q *Queue, prefix byte, id keys.ID, until uint64, ended keys.EndedValue, rec *record.Record) {
	rec.Flags &^= record.HoldsKey
	b := tm.bucket(q, bucketKey{prefix, until})
	tm.scratch = keys.AppendGrouped(tm.scratch[:0], prefix, q.Number, b.until, id)
	tm.Group.change(id)
	tm.Group.Set(tm.scratch, append(ended.Append(nil), rec.Encode()...))
	tm.resize(b, 1)
}

// unkeep removes a kept task from its bucket.
func (tm *times) unkeep(at *located) {
	tm.Group.change(at.id)
	tm.Group.Delete(at.place.AppendKey(nil, at.id))
	tm.resize(tm.bucket(at.lane.queue, bucketKey{at.place.Range, at.place.At}), -1)
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
		q.buckets[k] = b
	}
	return b
}

func (tm *times) resize(b *bucket, by int) {
	b.size += uint64(by)
	*b.queue.Counts.Ended(b.prefix) += uint64(by)
	tm.names.touch(b.queue)
	if !b.touched {
		b.touched = true
		tm.Group.buckets = append(tm.Group.buckets, b)
	}
}

// seal stores the size of a bucket.
func (b *bucket) seal(g *commitGroup) {
	b.touched = false
	key := keys.AppendBucket(nil, b.prefix, b.queue.Number, b.until)
	if b.size == 0 {
		delete(b.queue.buckets, b.bucketKey)
		g.Delete(key)
		return
	}
	g.Set(key, keys.AppendNumber(nil, b.size))
}

// expireEnded deletes the buckets that are due.
// REQUIRES: the group is empty.
func (tm *times) expireEnded() {
	for tm.past(tm.expiries.Next()) && !tm.Spent() {
		b := tm.expiries.Pop()
		all := keys.AppendGroup(nil, b.prefix, b.queue.Number, b.until)
		tm.Group.DeleteRange(all, keys.GroupEnd(all))
		tm.resize(b, -int(b.size))
	}
}

func (tm *times) expireEndedIsDue() bool { return tm.past(tm.expiries.Next()) }

// dropEmpty removes the buckets that the group has emptied from the heap.
func (tm *times) dropEmpty() {
	for _, b := range tm.Group.buckets {
		if b.size == 0 {
			tm.expiries.Remove(b)
		}
	}
}

// retention returns how long a completed or canceled task is kept, in ms: as the task says, or else
// its queue, or else the options.
func (tm *times) retention(q *Queue, task int64) int64 {
	if task == 0 {
		task = record.Retention(q.Settings.Retention)
	}
	if task == 0 {
		task = record.Retention(tm.config.Retention)
	}
	return task
}
