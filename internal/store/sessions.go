package store

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// A session is the record that a shard has of the produces of a node in its latest incarnation. The
// first produce of an incarnation begins the session, and ends the one before: the messages of an
// earlier incarnation are refused, however late they come, since the shard does not know any more
// whether their calls were decided. The removal of the node ends its session, too; the number of
// the incarnation stays. Only members may begin a session, so that this number matters once a node
// of the same name is a member again. The removal of a directory, under its name in the cluster, is
// stored in the same way.

// GoneSessions is how many nodes and directories that were removed a shard remembers: the last
// ones.
const GoneSessions = 1000

// Sessions holds the sessions of all nodes in one shard. Only its owner uses it.
type Sessions struct {
	byNode  map[string]*keys.SessionValue
	changed []string // nodes with sessions that the group stores, or deletes
}

// Continues reports whether a call is of a session that goes on: it begins none.
func (t *Sessions) Continues(c *keys.CallNumber) bool {
	v := t.byNode[c.Node]
	return v != nil && v.Incarnation == c.Incarnation && v.Gone == 0
}

// Outcome returns the outcome of a call, if the shard has resolved it before.
func (t *Sessions) Outcome(c *keys.CallNumber) (done *keys.SessionCall, err error) {
	v := t.byNode[c.Node]
	switch {
	case v == nil || c.Incarnation > v.Incarnation:
		return nil, nil
	case c.Incarnation < v.Incarnation || v.Gone != 0:
		return nil, &keys.IncarnationOverError{Node: c.Node, Latest: v.Incarnation}
	case c.Seq < v.Low:
		return nil, fmt.Errorf("%w: produce %d of node %s is one whose outcome is forgotten", base.ErrUncertain, c.Seq, c.Node)
	}
	for i := range v.Calls {
		if v.Calls[i].Seq == c.Seq {
			return &v.Calls[i], nil
		}
	}
	return nil, nil
}

// Note keeps the outcome of a call.
func (t *Sessions) Note(c *keys.CallNumber, ids []keys.ID, duplicates []int) {
	v := t.byNode[c.Node]
	if v == nil || v.Incarnation != c.Incarnation {
		v = &keys.SessionValue{Incarnation: c.Incarnation}
		t.put(c.Node, v)
	}
	if c.Low > v.Low {
		v.Low = c.Low
		v.Calls = slices.DeleteFunc(v.Calls, func(done keys.SessionCall) bool { return done.Seq < c.Low })
	}
	done := keys.SessionCall{Seq: c.Seq, Duplicates: slices.Clone(duplicates)}
	for _, id := range ids {
		done.IDs = append(done.IDs, keys.ID(id))
	}
	v.Calls = append(v.Calls, done)
	t.change(c.Node)
}

func (t *Sessions) put(node string, v *keys.SessionValue) {
	if t.byNode == nil {
		t.byNode = make(map[string]*keys.SessionValue)
	}
	t.byNode[node] = v
}

// EndNode ends the session of a node that was removed from the cluster, or notes that a directory
// was.
func (t *Sessions) EndNode(node string, wall uint64) {
	gone := &keys.SessionValue{Gone: max(wall, 1)}
	if v := t.byNode[node]; v != nil {
		if v.Gone != 0 {
			return
		}
		gone.Incarnation = v.Incarnation
	}
	t.put(node, gone)
	t.change(node)
	count, oldest := 0, node
	for name, v := range t.byNode {
		if v.Gone == 0 {
			continue
		}
		count++
		if cmp.Or(cmp.Compare(v.Gone, t.byNode[oldest].Gone), cmp.Compare(name, oldest)) < 0 {
			oldest = name
		}
	}
	if count > GoneSessions {
		delete(t.byNode, oldest)
		t.change(oldest)
	}
}

func (t *Sessions) change(node string) {
	if !slices.Contains(t.changed, node) {
		t.changed = append(t.changed, node)
	}
}

// Len returns the number of sessions.
func (t *Sessions) Len() int { return len(t.byNode) }

// Of returns the session of a node; nil: it has none.
func (t *Sessions) Of(node string) *keys.SessionValue { return t.byNode[node] }

// Seal adds the sessions that have changed to the group.
func (t *Sessions) Seal(w *Writes) {
	for _, node := range t.changed {
		key := keys.AppendNamed(nil, keys.Session, node)
		if v := t.byNode[node]; v != nil {
			w.Set(key, v.Append(nil))
		} else {
			w.Delete(key)
		}
	}
	t.changed = t.changed[:0]
}

// Load reads the sessions.
func (t *Sessions) Load(r pebble.Reader) error {
	return Scan(r, keys.Session, func(key, value []byte) error {
		v, err := keys.ParseSession(value)
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		t.put(string(key[1:]), &v)
		return nil
	})
}
