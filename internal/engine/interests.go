package engine

import (
	"fmt"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// mergeInterests makes groups collect what any node wants to know.
func (ml *mail) mergeInterests() {
	ml.Interested = 0
	for _, v := range ml.interests {
		ml.Interested |= KindSet(v.Kinds)
	}
	ml.Wanted |= ml.Interested
}

func (ml *mail) loadInterests() error {
	ml.interests = make(map[string]keys.InterestValue)
	err := store.Scan(ml.Store.DB(), keys.Interest, func(key, value []byte) error {
		v, err := keys.ParseInterest(value)
		if err != nil {
			return fmt.Errorf("%w: interest of node %q: %w", base.ErrCorrupt, key[1:], err)
		}
		ml.interests[string(key[1:])] = v
		return nil
	})
	ml.mergeInterests()
	return err
}

// SetInterest stores what a node wants to know, unless it has sent that before what is stored;
// gone: the node was removed from the cluster.
func (ml *mail) SetInterest(node string, v keys.InterestValue, gone bool) {
	old := ml.interests[node]
	if !gone && (v.IsBefore(old) || v.Kinds == 0 && old.Kinds == 0) {
		return
	}
	key := keys.AppendNamed(nil, keys.Interest, node)
	if ml.interests[node] = v; gone {
		ml.sessions.endNode(node, ml.Wall)
		delete(ml.interests, node)
	}
	if v.Kinds == 0 || gone {
		ml.Group.delete(key)
	} else {
		ml.Group.set(key, v.Append(nil))
	}
	ml.mergeInterests()
}
