package engine

import (
	"errors"
	"slices"

	"codeq/internal/keys"
	"codeq/internal/store"
)

// outbox: stored messages are numbered between first and next, and as many wait as are stored and
// not taken.
func (c *checker) outbox() error {
	out := &c.state.Mail.out
	n := make([]uint64, len(out.waiting))
	err := store.Scan(c.disk, keys.Outbound, func(key, _ []byte) error {
		to, seq, err := keys.ParseOutbound(key)
		if err == nil && (seq < out.first[to] || seq >= out.next[to]) {
			c.report("message %d for shard %d is not one of %d to %d", seq, to, out.first[to], out.next[to])
		}
		if seq > out.taken[to] {
			n[to]++
		}
		return err
	})
	if !slices.Equal(n, out.waiting) {
		c.report("%d messages wait, on disk %d", out.waiting, n)
	}
	last := make([]uint64, len(out.next))
	err = errors.Join(err, store.Scan(c.disk, keys.Sent, func(key, value []byte) error {
		to, err := keys.ParseNumbered(key)
		if err == nil {
			last[to], err = keys.ParseNumber(value)
		}
		return err
	}))
	for to, next := range out.next {
		if last[to] != next-1 || out.stored[to] != last[to] {
			c.report("the next message to shard %d is %d, the last one is %d, on disk %d", to, next, out.stored[to], last[to])
		}
	}
	err = errors.Join(err, store.Scan(c.disk, keys.Inbound, func(key, value []byte) error {
		from, err := keys.ParseNumbered(key)
		if err != nil {
			return err
		}
		last, err := keys.ParseNumber(value)
		if got := c.state.Mail.inbound[from]; got != last {
			c.report("the last message of shard %d is %d, on disk %d", from, got, last)
		}
		return err
	}))
	return err
}
