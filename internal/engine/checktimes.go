package engine

import (
	"bytes"
	"errors"
	"slices"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// times: no scheduled task is due, no bucket expires, and no idempotency key becomes free before
// the time of the shard's next look.
func (c *checker) times() error {
	s := c.state
	first := func(prefix byte, parse func(key []byte) (uint64, [keys.IDLen]byte, error)) (from dueCursor, err error) {
		from = nothingDue
		err = store.Scan(c.disk, prefix, func(key, _ []byte) error {
			at, name, err := parse(key)
			from.lower(at, name)
			return err
		})
		return from, err
	}
	due, wait := nothingDue, nothingDue
	err1 := store.Scan(c.disk, keys.Scheduled, func(key, value []byte) error {
		at, id, err := keys.ParseScheduled(key)
		if err != nil {
			return err
		}
		_, rec, err := keys.SplitLane(value)
		if err != nil {
			return err
		}
		head, err := record.DecodeHead(rec)
		if head.IsWait(at) {
			wait.lower(at, id)
		} else {
			due.lower(at, id)
		}
		return err
	})
	expiry, err2 := first(keys.Buckets, func(key []byte) (uint64, [keys.IDLen]byte, error) {
		_, _, until, err := keys.ParseBucket(key)
		return until, [keys.IDLen]byte{}, err
	})
	freed, err3 := first(keys.Freed, keys.ParseFreed)
	for _, t := range []struct {
		what        string
		next, first dueCursor
	}{{"scheduled task", s.Times.nextDue, due}, {"task between attempts", s.Times.nextWait, wait}, {"bucket", dueCursor{at: s.Times.expiries.Next()}, expiry}, {"idempotency key", s.Ties.nextFreed, freed}} {
		held := t.next
		if held.lower(t.first.at, t.first.name); held != t.next {
			c.report("the first %s is looked for from %x on, and is at %x", t.what, t.next, t.first)
		}
	}
	return errors.Join(err1, err2, err3)
}

// recurring: the table has exactly the schedules on disk, and none ticks before the time of the
// shard's next look.
func (c *checker) recurring() error {
	t := &c.state.Times.recurring
	onDisk := 0
	err := store.Scan(c.disk, keys.Schedule, func(key, value []byte) error {
		name, err := keys.ParseSchedule(key)
		if err != nil {
			return err
		}
		onDisk++
		r := t.find(name)
		if r == nil || !bytes.Equal(value, r.value.Append(nil)) {
			c.report("schedule %q in memory is %+v, on disk %x", name, r, value)
			return nil
		}
		if r.Err == nil && !r.value.Paused && r.next != r.times.Next(r.value.After) || r.value.Paused && r.next != Never || t.next() > r.next {
			c.report("schedule %q ticks at %d, is looked at when it is %d", name, r.next, t.next())
		}
		if late := slices.Contains(t.late, r); late == (r.place >= 0) || !late && t.waiting.Items()[r.place] != r {
			c.report("schedule %q is at %d of those that wait, late: %v", name, r.place, late)
		}
		return nil
	})
	if onDisk != len(t.list) {
		c.report("%d schedules in memory, %d on disk", len(t.list), onDisk)
	}
	return err
}

// buckets: their sizes are those on disk.
func (c *checker) buckets() error {
	type place struct {
		queue uint32
		bucketKey
	}
	held := make(map[place]uint64)
	for _, q := range c.state.Names.numbers.All() {
		if q == nil {
			continue
		}
		for k, b := range q.buckets {
			if b.queue != q || b.bucketKey != k || b.touched {
				c.report("bucket %+v of queue %q is %+v", k, q.Name, b)
			}
			held[place{q.Number, k}] = b.size
		}
	}
	err := store.Scan(c.disk, keys.Buckets, func(key, value []byte) error {
		prefix, number, until, err := keys.ParseBucket(key)
		if err != nil {
			return err
		}
		size, err := keys.ParseNumber(value)
		k := place{number, bucketKey{prefix, until}}
		if got, ok := held[k]; !ok || got != size {
			c.report("bucket %+v has size %d (%t), on disk %d", k, got, ok, size)
		}
		delete(held, k)
		return err
	})
	if len(held) > 0 {
		c.report("buckets in memory only: %+v", held)
	}
	return err
}
