//go:build nextformat

package engine

import (
	"codeq/internal/keys"
	"codeq/internal/store"
)

// nextFormat is the format of the build (manifest.Format).
const nextFormat = 8

// sealNextFormat stores what the next format adds, with the first group after a shard has risen.
func (s *State) sealNextFormat() {
	if s.Format < nextFormat || s.Group.isEmpty() {
		return
	}
	switch b, err := store.Lookup(s.Store.DB(), []byte{keys.NextFormat}); {
	case err != nil:
		s.Broken = err
	case b == nil:
		s.Group.set([]byte{keys.NextFormat}, []byte{1})
	}
}
