package engine

import (
	"codeq/internal/keys"
	"codeq/internal/store"
)

// SetPlacement stores which node is to lead the shard, as somebody has decided; "": any.
func (s *State) SetPlacement(node string) {
	if s.Placement = node; node == "" {
		s.Group.delete([]byte{keys.Placement})
	} else {
		s.Group.set([]byte{keys.Placement}, []byte(node))
	}
}

func (s *State) loadPlacement() error {
	node, err := store.Lookup(s.Store.DB(), []byte{keys.Placement})
	s.Placement = string(node)
	return err
}
