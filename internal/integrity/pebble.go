package integrity

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"
)

// OfPebble converts an error of Pebble: it matches ErrDamaged if it reports damage, and names the
// file if it is known.
func OfPebble(err error) error {
	switch i := pebble.ExtractDataCorruptionInfo(err); {
	case err == nil:
		return nil
	case i != nil:
		return fmt.Errorf("%w: %s: %w", ErrDamaged, i.Path, i.Details)
	case pebble.IsCorruptionError(err):
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return err
}
