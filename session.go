package codeq

import (
	"crypto/rand"
	"encoding/binary"
	"sync"
)

// In a cluster a produce whose outcome is unknown, because the leader of its
// shard was lost, is tried again with the next leader, and has its effect once:
// the node of its caller numbers its produces into each shard, and the shard
// stores what it answered to those whose callers may not know yet, in the commit
// of the tasks. With each produce the node says which ones it knows of, so that
// what is kept is no more than what was under way lately.
//
// The idea is that of RIFL (Lee, Park, Kejriwal, Matsushita, Ousterhout,
// "Implementing Linearizability at Large Scale and Low Latency", 2015).

// session numbers the produces of this node into one shard.
type session struct {
	mu      sync.Mutex // guards what follows
	last    uint64
	low     uint64 // the first call that is under way, or the next one
	pending map[uint64]struct{}
}

func (s *session) begin() (seq, low uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending == nil {
		s.pending, s.low = make(map[uint64]struct{}), 1
	}
	s.last++
	s.pending[s.last] = struct{}{}
	return s.last, s.low
}

// end is when the caller of a produce knows its outcome, or will never ask again.
func (s *session) end(seq uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pending, seq)
	for s.low <= s.last {
		if _, ok := s.pending[s.low]; ok {
			return
		}
		s.low++
	}
}

// newLife is a number that no other life of a node has.
func newLife() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.BigEndian.Uint64(b[:])
}
