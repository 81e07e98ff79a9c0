package engine

import (
	"bytes"
	"errors"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// times: no scheduled task is due, no bucket expires, and no idempotency key becomes free before
// the time of the shard's next look.
func (c *checker) times() error {
	s := c.state
	first := func(prefix byte, parse func(key []byte) (uint64, [keys.IDLen]byte, error)) (from store.DueCursor, err error) {
		from = store.NothingDue
		err = store.Scan(c.disk, prefix, func(key, _ []byte) error {
			at, name, err := parse(key)
			from.Lower(at, name)
			return err
		})
		return from, err
	}
	due, wait := store.NothingDue, store.NothingDue
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
			wait.Lower(at, id)
		} else {
			due.Lower(at, id)
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
		next, first store.DueCursor
	}{{"scheduled task", s.Times.nextDue, due}, {"task between attempts", s.Times.nextWait, wait}, {"bucket", store.DueCursor{At: s.Times.expiries.Next()}, expiry}, {"idempotency key", s.Ties.nextFreed, freed}} {
		held := t.next
		if held.Lower(t.first.At, t.first.Name); held != t.next {
			c.report("the first %s is looked for from %x on, and is at %x", t.what, t.next, t.first)
		}
	}
	return errors.Join(err1, err2, err3)
}

// recurring: the schedules are as on disk.
func (c *checker) recurring() error {
	c.errs = append(c.errs, c.state.Times.recurring.Check(func(visit func(key, value []byte) error) error {
		return store.Scan(c.disk, keys.Schedule, visit)
	})...)
	return nil
}

// buckets: their sizes and counts are those on disk, and so are the kinds of errors.
func (c *checker) buckets() error {
	type place struct {
		queue uint32
		bucketKey
	}
	held := make(map[place]*bucket)
	for _, q := range c.state.Names.numbers.All() {
		if q == nil {
			continue
		}
		for k, b := range q.buckets {
			if b.queue != q || b.bucketKey != k || b.touched {
				c.report("bucket %+v of queue %q is %+v", k, q.Name, b)
			}
			held[place{q.Number, k}] = b
			if n := b.Counted(); n > b.Size || n < b.Size && !b.uncounted && k.prefix == keys.Dead {
				c.report("bucket %+v of queue %q has kinds for %d of %d tasks", k, q.Name, n, b.Size)
			}
		}
		if q.kinds != nil {
			c.errs = append(c.errs, q.kinds.Check(c.disk, q.Number)...)
		}
	}
	err := store.Scan(c.disk, keys.Buckets, func(key, value []byte) error {
		prefix, number, until, err := keys.ParseBucket(key)
		if err != nil {
			return err
		}
		k := place{number, bucketKey{prefix, until}}
		if got := held[k]; got == nil || !bytes.Equal(got.Append(nil), value) {
			c.report("bucket %+v is %+v, on disk %x", k, got, value)
		}
		delete(held, k)
		return err
	})
	if len(held) > 0 {
		c.report("buckets in memory only: %+v", held)
	}
	return err
}
