package raftlog

import (
	"maps"

	"github.com/hashicorp/raft"
)

// LargeData is the length of data from which a command is large: see GetHead.
const LargeData = 4 << 10

func isLarge(l *raft.Log) bool { return l.Type == raft.LogCommand && len(l.Data) >= LargeData }

// GetHead is GetLog, but of a large command it gets index, term and type only, and returns the
// length of its data; 0 of any other entry. What was read before, or stored since the store was
// opened, is in memory.
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

// head is what is known of a large command without reading its data.
type head struct {
	term uint64
	data int // its length
}

func headOf(l *raft.Log) head { return head{l.Term, len(l.Data)} }

func (h head) log(index uint64) raft.Log {
	return raft.Log{Index: index, Term: h.term, Type: raft.LogCommand}
}

// heads are those of the large commands of a log that were stored or read since it was opened. To
// read the head of another one means to read all of it. Group.mu guards them.
type heads struct {
	of       map[uint64]head
	replaced uint64 // how often entries that may come again, at the same indexes, were removed
}

func newHeads() heads { return heads{of: make(map[uint64]head)} }

func (h *heads) add(l *raft.Log) {
	if isLarge(l) {
		h.of[l.Index] = headOf(l)
	}
}

// learn adds one that was read from the store when entries had been removed so often.
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
