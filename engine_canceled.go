package codeq

import "fmt"

// canceledLeases remembers the leases that cancels have ended, so that their
// workers learn why: as many as there is room for, the latest ones.
type canceledLeases struct {
	receipts map[Receipt]struct{}
	ring     []Receipt
	next     int
}

const canceledCap = 1024

func (c *canceledLeases) add(r Receipt) {
	if c.receipts == nil {
		c.receipts = make(map[Receipt]struct{})
	}
	if len(c.ring) < canceledCap {
		c.ring = append(c.ring, r)
	} else {
		delete(c.receipts, c.ring[c.next])
		c.ring[c.next] = r
		c.next = (c.next + 1) % canceledCap
	}
	c.receipts[r] = struct{}{}
}

func (c *canceledLeases) has(r Receipt) bool {
	_, ok := c.receipts[r]
	return ok
}

// leaseLost is the error for a receipt that is not that of a lease in force.
func (s *state) leaseLost(r Receipt) error { return leaseLost(r, s.canceled.has(r)) }

func leaseLost(r Receipt, canceled bool) error {
	if canceled {
		return fmt.Errorf("%w: %s: %w", ErrLeaseLost, r, ErrCanceled)
	}
	return fmt.Errorf("%w: %s", ErrLeaseLost, r)
}
