package codeq

import "fmt"

// leaseLost is the error for a receipt that is not that of a lease in force.
func (s *state) leaseLost(r Receipt) error { return leaseLost(r, s.canceled.Has(r)) }

func leaseLost(r Receipt, canceled bool) error {
	if canceled {
		return fmt.Errorf("%w: %s: %w", ErrLeaseLost, r, ErrCanceled)
	}
	return fmt.Errorf("%w: %s", ErrLeaseLost, r)
}
