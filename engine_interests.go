package codeq

import (
	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/schema"
	"fmt"
)

// heed has the groups collect what any node wants to hear of.
func (s *state) heed() {
	s.interested = 0
	for _, kinds := range s.interests {
		s.interested |= kinds
	}
	s.wanted |= s.interested
}

func (s *state) loadInterests() error {
	s.interests = make(map[string]XKindSet)
	err := schema.Scan(s.store.DB(), keys.Interest, func(key, value []byte) error {
		kinds, err := keys.ParseNumber(value)
		if err != nil {
			return fmt.Errorf("%w: interest of node %q: %w", base.ErrCorrupt, key[1:], err)
		}
		s.interests[string(key[1:])] = XKindSet(kinds)
		return nil
	})
	s.heed()
	return err
}
