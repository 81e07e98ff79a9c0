package engine

import (
	"fmt"

	"codeq/internal/base"
)

// leaseLost is the error for a receipt that names no current lease.
func (le *leases) leaseLost(r Receipt) error { return LeaseLost(r, le.canceled.Has(r)) }

func LeaseLost(r Receipt, canceled bool) error {
	if canceled {
		return fmt.Errorf("%w: %s: %w", base.ErrLeaseLost, r, base.ErrCanceled)
	}
	return fmt.Errorf("%w: %s", base.ErrLeaseLost, r)
}
