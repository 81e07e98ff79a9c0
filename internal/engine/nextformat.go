//go:build nextformat

package engine

import (
	"codeq/internal/keys"
	"codeq/internal/store"
)

// nextFormat is the format of the build (manifest.Format).
const nextFormat = 9

// sealNextFormat stores the key of the next format, with the first group after a shard has risen.
func (r *round) sealNextFormat() {
	if r.Format < nextFormat || r.Group.isEmpty() {
		return
	}
	switch b, err := store.Lookup(r.Store.DB(), []byte{keys.NextFormat}); {
	case err != nil:
		r.Broken = err
	case b == nil:
		r.Group.Set([]byte{keys.NextFormat}, []byte{1})
	}
}
