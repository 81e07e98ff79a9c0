package store

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// Interests holds the interests of all nodes in one shard. Only its owner uses it.
type Interests struct {
	byNode map[string]keys.InterestValue // without kinds: its interest has ended
}

// Load reads the interests.
func (t *Interests) Load(r pebble.Reader) error {
	t.byNode = make(map[string]keys.InterestValue)
	return Scan(r, keys.Interest, func(key, value []byte) error {
		v, err := keys.ParseInterest(value)
		if err != nil {
			return fmt.Errorf("%w: interest of node %q: %w", base.ErrCorrupt, key[1:], err)
		}
		t.byNode[string(key[1:])] = v
		return nil
	})
}

// Set stores the interests of a node, unless they are older than the stored ones.
func (t *Interests) Set(w *Writes, node string, v keys.InterestValue) {
	old := t.byNode[node]
	if v.IsBefore(old) || v.Kinds == 0 && old.Kinds == 0 {
		return
	}
	t.byNode[node] = v
	key := keys.AppendNamed(nil, keys.Interest, node)
	if v.Kinds == 0 {
		w.Delete(key)
	} else {
		w.Set(key, v.Append(nil))
	}
}

// Remove removes the interests of a node.
func (t *Interests) Remove(w *Writes, node string) {
	delete(t.byNode, node)
	w.Delete(keys.AppendNamed(nil, keys.Interest, node))
}

// Kinds returns the kinds of all interests.
func (t *Interests) Kinds() (kinds uint64) {
	for _, v := range t.byNode {
		kinds |= v.Kinds
	}
	return kinds
}
