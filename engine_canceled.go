package codeq

import (
	"codeq/internal/base"
	"fmt"
)

// leaseLost is the error for a receipt that is not that of a lease in force.
func (s *state) leaseLost(r XReceipt) error { return leaseLost(r, s.canceled.Has(r)) }

func leaseLost(r XReceipt, canceled bool) error {
	if canceled {
		return fmt.Errorf("%w: %s: %w", base.ErrLeaseLost, r, base.ErrCanceled)
	}
	return fmt.Errorf("%w: %s", base.ErrLeaseLost, r)
}
