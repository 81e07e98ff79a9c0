package engine

import (
	"fmt"
	"slices"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/schema"
)

// CallNumber identifies a produce of a node. The zero CallNumber is none.
type CallNumber struct {
	Node    string
	Session uint64 // one run of the node's process
	Seq     uint64 // from 1
	Low     uint64 // the node knows the outcomes of all calls below it
}

// sessionTable holds the sessions of all nodes in one shard. Only its owner uses it.
type sessionTable struct {
	byNode  map[string]*keys.SessionValue
	changed []string // nodes whose sessions the group stores; all are in byNode
}

// outcome returns the outcome of a call, if the shard has resolved it before.
func (t *sessionTable) outcome(c *CallNumber) (done *keys.SessionCall, err error) {
	v := t.byNode[c.Node]
	if v == nil || v.Session != c.Session {
		return nil, nil
	}
	if c.Seq < v.Low {
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
	if v == nil || v.Session != c.Session {
		if t.byNode == nil {
			t.byNode = make(map[string]*keys.SessionValue)
		}
		v = &keys.SessionValue{Session: c.Session}
		t.byNode[c.Node] = v
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

// forgetNode is called when a node was removed from the cluster. The outcomes of its calls are
// forgotten, and any of them that arrives later is refused: a produce that the node has tried again
// may still be on its way. What stays is a few bytes.
func (t *sessionTable) forgetNode(node string) {
	v := t.byNode[node]
	if v == nil {
		return
	}
	for i := range v.Calls {
		v.Low = max(v.Low, v.Calls[i].Seq+1)
	}
	v.Calls = nil
	t.change(node)
}

func (t *sessionTable) change(node string) {
	if !slices.Contains(t.changed, node) {
		t.changed = append(t.changed, node)
	}
}

// seal adds the sessions that have changed to the group.
func (t *sessionTable) seal(g *commitGroup) {
	for _, node := range t.changed {
		g.set(keys.AppendNamed(nil, keys.Session, node), t.byNode[node].Append(nil))
	}
	t.changed = t.changed[:0]
}

func (s *State) loadSessions() error {
	return schema.Scan(s.Store.DB(), keys.Session, func(key, value []byte) error {
		v, err := keys.ParseSession(value)
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		if s.sessions.byNode == nil {
			s.sessions.byNode = make(map[string]*keys.SessionValue)
		}
		s.sessions.byNode[string(key[1:])] = &v
		return nil
	})
}
