package simtest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"sync"

	"github.com/hashicorp/raft"

	"codeq/internal/raftlog"
)

// Votes are the terms and votes of a node, always on disk. They survive Close. Used directly, they
// have no injected faults.
type Votes struct {
	mu     sync.Mutex // guards the fields below
	values map[string][]byte
}

var _ raftlog.Stables = (*Votes)(nil)

func NewVotes() *Votes { return &Votes{values: make(map[string][]byte)} }

// Clone returns a copy of the current votes.
func (v *Votes) Clone() *Votes {
	v.mu.Lock()
	defer v.mu.Unlock()
	return &Votes{values: maps.Clone(v.values)}
}

func (v *Votes) Group(n uint32) raft.StableStore { return votesOfGroup{v, nil, n} }
func (v *Votes) Close() error                    { return nil }

// stables are the votes with the faults of a life.
type stables struct {
	*Votes
	life *Life
}

func (s stables) Group(n uint32) raft.StableStore { return votesOfGroup{s.Votes, s.life, n} }

type votesOfGroup struct {
	votes *Votes
	life  *Life // nil: nothing fails
	group uint32
}

func (g votesOfGroup) name(key []byte) string { return fmt.Sprint(g.group, " ", string(key)) }

func (g votesOfGroup) Set(key, value []byte) error {
	if g.life != nil {
		if err := g.life.before("write", "votes"); err != nil {
			return err
		}
	}
	g.votes.mu.Lock()
	defer g.votes.mu.Unlock()
	g.votes.values[g.name(key)] = bytes.Clone(value)
	return nil
}

func (g votesOfGroup) Get(key []byte) ([]byte, error) {
	g.votes.mu.Lock()
	defer g.votes.mu.Unlock()
	return bytes.Clone(g.votes.values[g.name(key)]), nil
}

func (g votesOfGroup) SetUint64(key []byte, value uint64) error {
	return g.Set(key, binary.BigEndian.AppendUint64(nil, value))
}

func (g votesOfGroup) GetUint64(key []byte) (uint64, error) {
	v, err := g.Get(key)
	if len(v) == 0 {
		return 0, err
	}
	return binary.BigEndian.Uint64(v), err
}
