package raftlog

import (
	"maps"

	"github.com/hashicorp/raft"
)

// largeData is the least length of data of a large command: see GetHead.
const largeData = 4 << 10

func isLarge(l *raft.Log) bool { return l.Type == raft.LogCommand && len(l.Data) >= largeData }

// GetHead is GetLog, but of a large command it gets index, term and type only, and returns the
// length of its data; 0 for any other entry. The heads of commands that were read before, or stored
// since the store was opened, are in memory.
func (g *Group) GetHead(index uint64, log *raft.Log) (data int, err error) {
	g.mu.RLock()
	if index < g.first || index > g.last || index == 0 {
		g.mu.RUnlock()
		return 0, raft.ErrLogNotFound // Raft compares with ==
	}
	h, known := g.heads.of[index]
	if !known {
		if l := g.recent.get(index); l != nil {
			*log = *l
			g.mu.RUnlock()
			return 0, nil
		}
	}
	replaced := g.heads.replaced
	g.mu.RUnlock()
	if known {
		*log = h.log(index)
		return h.data, nil
	}
	err = g.view(index, func(value []byte) error {
		l, err := parseValue(g.number, index, value)
		switch {
		case err != nil:
			return err
		case isLarge(&l):
			h, known = headOf(&l), true
		default:
			*log = clone(l)
		}
		return nil
	})
	if err != nil || !known {
		return 0, err
	}
	*log = h.log(index)
	g.mu.Lock()
	defer g.mu.Unlock()
	if index >= g.first {
		g.heads.learn(index, h, replaced)
	}
	return h.data, nil
}

// head is the part of a large command that GetHead needs, without the data.
type head struct {
	term uint64
	data int // its length
}

func headOf(l *raft.Log) head { return head{l.Term, len(l.Data)} }

func (h head) log(index uint64) raft.Log {
	return raft.Log{Index: index, Term: h.term, Type: raft.LogCommand}
}

// heads are the heads of the large commands of a log that were stored or read since it was opened.
// Another head costs a read of the whole command. Group.mu guards them.
type heads struct {
	of       map[uint64]head
	replaced uint64 // counts removals of entries at indexes that may come again
}

func newHeads() heads { return heads{of: make(map[uint64]head)} }

func (h *heads) add(l *raft.Log) {
	if isLarge(l) {
		h.of[l.Index] = headOf(l)
	}
}

// learn adds a head that was read from the store when replaced had the given value.
func (h *heads) learn(index uint64, of head, replaced uint64) {
	if h.replaced == replaced {
		h.of[index] = of
	}
}

// dropThrough removes those up to an index, of entries that do not come again.
func (h *heads) dropThrough(index uint64) {
	maps.DeleteFunc(h.of, func(i uint64, _ head) bool { return i <= index })
}

// dropFrom removes those from an index on.
func (h *heads) dropFrom(index uint64) {
	h.replaced++
	maps.DeleteFunc(h.of, func(i uint64, _ head) bool { return i >= index })
}
