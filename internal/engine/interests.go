package engine

import (
	"fmt"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/schema"
)

// mergeInterests makes groups collect what any node wants to know.
func (s *State) mergeInterests() {
	s.Interested = 0
	for _, kinds := range s.interests {
		s.Interested |= kinds
	}
	s.Wanted |= s.Interested
}

func (s *State) loadInterests() error {
	s.interests = make(map[string]KindSet)
	err := schema.Scan(s.Store.DB(), keys.Interest, func(key, value []byte) error {
		kinds, err := keys.ParseNumber(value)
		if err != nil {
			return fmt.Errorf("%w: interest of node %q: %w", base.ErrCorrupt, key[1:], err)
		}
		s.interests[string(key[1:])] = KindSet(kinds)
		return nil
	})
	s.mergeInterests()
	return err
}

// SetInterest stores what a node wants to know; gone: the node was removed from the cluster.
func (s *State) SetInterest(node string, kinds KindSet, gone bool) {
	key := keys.AppendNamed(nil, keys.Interest, node)
	if gone {
		s.sessions.endNode(node, s.Wall)
	}
	if kinds == 0 {
		delete(s.interests, node)
		s.Group.delete(key)
	} else {
		s.interests[node] = kinds
		s.Group.set(key, keys.AppendNumber(nil, uint64(kinds)))
	}
	s.mergeInterests()
}
