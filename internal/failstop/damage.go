package failstop

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/integrity"
)

// OfPebble converts an error of Pebble: it matches integrity.ErrDamaged if it reports damage, and
// names the file if it is known.
func OfPebble(err error) error {
	switch i := pebble.ExtractDataCorruptionInfo(err); {
	case err == nil:
		return nil
	case i != nil:
		return fmt.Errorf("%w: %s: %w", integrity.ErrDamaged, i.Path, i.Details)
	case pebble.IsCorruptionError(err):
		return fmt.Errorf("%w: %w", integrity.ErrDamaged, err)
	}
	return err
}

// OfOpening is OfPebble for a store that cannot be opened. More causes count as damage. Another
// comparer, merger or directory of the log means flipped bits in OPTIONS. A file may be missing, or
// have a wrong size; if it is the marker of the format, Pebble takes the store for an incomplete
// new one that is not empty.
func OfOpening(err error) error {
	if err = OfPebble(err); err == nil || errors.Is(err, integrity.ErrDamaged) {
		return err
	}
	var elsewhere pebble.ErrMissingWALRecoveryDir
	says := func(what string) bool { return strings.Contains(err.Error(), what) }
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, pebble.ErrDBNotPristine) || errors.As(err, &elsewhere) ||
		says("does not exist") || says("size mismatch") || says("name from file") {
		return fmt.Errorf("%w: %w", integrity.ErrDamaged, err)
	}
	return err
}
