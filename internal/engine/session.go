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
	Node string
	Life uint64 // of the node: one run of its process, or a part of it; later ones have larger numbers
	Seq  uint64 // from 1
	Low  uint64 // the node knows the outcomes of all calls below it
}

// A session is what a shard knows of the produces of a node in its latest life. The first produce
// of a life begins it, and ends that of the life before: a message of that one is refused, however
// late it comes, since it is not known any more whether its call was decided. The removal of the
// node ends its session, too; what stays is the number of the life. The owner lets only members
// begin a session, so that number matters only once a node of the same name is a member again. The
// removal of a directory, under its name in the cluster, is stored in the same way.

// goneSessions is how many nodes and directories that were removed a shard remembers: the last
// ones.
const goneSessions = 1000

// LifeOverError is the answer to a call of a life of a node that is over. The call was not decided.
type LifeOverError struct {
	Node   string
	Latest uint64 // the latest life of the node that is known here
}

func (e *LifeOverError) Error() string {
	const why = "was removed, or opened again, after the call had begun"
	return fmt.Sprintf("%v: node %q %s", base.ErrNotMember, e.Node, why)
}

func (e *LifeOverError) Unwrap() error { return base.ErrNotMember }

// sessionTable holds the sessions of all nodes in one shard. Only its owner uses it.
type sessionTable struct {
	byNode  map[string]*keys.SessionValue
	changed []string // nodes whose sessions the group stores, or deletes
}

// Continues reports whether a call is of a session that goes on: it begins none.
func (ml *mail) Continues(c *CallNumber) bool {
	v := ml.sessions.byNode[c.Node]
	return v != nil && v.Life == c.Life && v.Gone == 0
}

// outcome returns the outcome of a call, if the shard has resolved it before.
func (t *sessionTable) outcome(c *CallNumber) (done *keys.SessionCall, err error) {
	v := t.byNode[c.Node]
	switch {
	case v == nil || c.Life > v.Life:
		return nil, nil
	case c.Life < v.Life || v.Gone != 0:
		return nil, &LifeOverError{c.Node, v.Life}
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
	if v == nil || v.Life != c.Life {
		v = &keys.SessionValue{Life: c.Life}
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
		gone.Life = v.Life
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
			g.set(key, v.Append(nil))
		} else {
			g.delete(key)
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
