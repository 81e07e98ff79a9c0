package engine

import (
	"fmt"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// mergeInterests makes groups collect what any node wants to know.
func (s *State) mergeInterests() {
	s.Interested = 0
	for _, v := range s.interests {
		s.Interested |= KindSet(v.Kinds)
	}
	s.Wanted |= s.Interested
}

func (s *State) loadInterests() error {
	s.interests = make(map[string]keys.InterestValue)
	err := store.Scan(s.Store.DB(), keys.Interest, func(key, value []byte) error {
		v, err := keys.ParseInterest(value)
		if err != nil {
			return fmt.Errorf("%w: interest of node %q: %w", base.ErrCorrupt, key[1:], err)
		}
		s.interests[string(key[1:])] = v
		return nil
	})
	s.mergeInterests()
	return err
}

// SetInterest stores what a node wants to know, unless it has sent that before what is stored;
// gone: the node was removed from the cluster.
func (s *State) SetInterest(node string, v keys.InterestValue, gone bool) {
	old := s.interests[node]
	if !gone && (v.IsBefore(old) || v.Kinds == 0 && old.Kinds == 0) {
		return
	}
	key := keys.AppendNamed(nil, keys.Interest, node)
	if s.interests[node] = v; gone {
		s.sessions.endNode(node, s.Wall)
		delete(s.interests, node)
	}
	if v.Kinds == 0 || gone {
		s.Group.delete(key)
	} else {
		s.Group.set(key, v.Append(nil))
	}
	s.mergeInterests()
}
