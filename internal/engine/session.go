package engine

import (
	"cmp"
	"fmt"
	"slices"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// CallNumber identifies a produce of a node. The zero CallNumber is none.
type CallNumber struct {
	Node        string
	Incarnation uint64 // of the node: a run of its process, or a part of it; later ones are larger
	Seq         uint64 // from 1
	Low         uint64 // the node knows the outcomes of all calls below it
}

// A session is the record that a shard has of the produces of a node in its latest incarnation. The
// first produce of an incarnation begins the session, and ends the one before: the messages of an
// earlier incarnation are refused, however late they come, since the shard does not know any more
// whether their calls were decided. The removal of the node ends its session, too; the number of
// the incarnation stays. Only members may begin a session, so that this number matters once a node
// of the same name is a member again. The removal of a directory, under its name in the cluster, is
// stored in the same way.

// goneSessions is how many nodes and directories that were removed a shard remembers: the last
// ones.
const goneSessions = 1000

// IncarnationOverError refuses a call of an earlier incarnation of a node. It was not decided.
type IncarnationOverError struct {
	Node   string
	Latest uint64 // the latest incarnation of the node that the shard knows
}

func (e *IncarnationOverError) Error() string {
	const why = "was removed, or opened again, after the call had begun"
	return fmt.Sprintf("%v: node %q %s", base.ErrNotMember, e.Node, why)
}

func (e *IncarnationOverError) Unwrap() error { return base.ErrNotMember }

// sessionTable holds the sessions of all nodes in one shard. Only its owner uses it.
type sessionTable struct {
	byNode  map[string]*keys.SessionValue
	changed []string // nodes with sessions that the group stores, or deletes
}

// Continues reports whether a call is of a session that goes on: it begins none.
func (ml *mail) Continues(c *CallNumber) bool {
	v := ml.sessions.byNode[c.Node]
	return v != nil && v.Incarnation == c.Incarnation && v.Gone == 0
}

// outcome returns the outcome of a call, if the shard has resolved it before.
func (t *sessionTable) outcome(c *CallNumber) (done *keys.SessionCall, err error) {
	v := t.byNode[c.Node]
	switch {
	case v == nil || c.Incarnation > v.Incarnation:
		return nil, nil
	case c.Incarnation < v.Incarnation || v.Gone != 0:
		return nil, &IncarnationOverError{c.Node, v.Incarnation}
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

// note keeps the outcome of a call.
func (t *sessionTable) note(c *CallNumber, ids []keys.ID, duplicates []int) {
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

func (t *sessionTable) put(node string, v *keys.SessionValue) {
	if t.byNode == nil {
		t.byNode = make(map[string]*keys.SessionValue)
	}
	t.byNode[node] = v
}

// endNode ends the session of a node that was removed from the cluster, or notes that a directory
// was.
func (t *sessionTable) endNode(node string, wall uint64) {
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
	if count > goneSessions {
		delete(t.byNode, oldest)
		t.change(oldest)
	}
}

func (t *sessionTable) change(node string) {
	if !slices.Contains(t.changed, node) {
		t.changed = append(t.changed, node)
	}
}

// seal adds the sessions that have changed to the group.
func (t *sessionTable) seal(g *commitGroup) {
	for _, node := range t.changed {
		key := keys.AppendNamed(nil, keys.Session, node)
		if v := t.byNode[node]; v != nil {
			g.Set(key, v.Append(nil))
		} else {
			g.Delete(key)
		}
	}
	t.changed = t.changed[:0]
}

func (ml *mail) loadSessions() error {
	return store.Scan(ml.Store.DB(), keys.Session, func(key, value []byte) error {
		v, err := keys.ParseSession(value)
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		ml.sessions.put(string(key[1:]), &v)
		return nil
	})
}
