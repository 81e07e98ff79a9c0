package cluster

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/hashicorp/raft"
)

// Raft reads MaxAppend entries for each message to a node that is behind, and as many for each of
// 128 batches that may wait to be applied. So that its memory does not depend on the size of the
// entries, it gets references to large ones: an entry without data, with the length of the data as
// its Extensions. The data is read where it is needed: when the entry is sent (transport), and when
// it is applied (fsm).
//
// Invariant: entries that are stored or sent have no Extensions.

// refer makes an entry without data a reference to data of a given length.
func refer(l *raft.Log, data int) {
	l.Extensions = binary.BigEndian.AppendUint64(nil, uint64(data))
}

func isReference(l *raft.Log) bool { return len(l.Extensions) > 0 }

// dataOf is the length of an entry's data, or of the data that it refers to.
func dataOf(l *raft.Log) int {
	if isReference(l) {
		return int(binary.BigEndian.Uint64(l.Extensions))
	}
	return len(l.Data)
}

// load returns the entry that a reference stands for.
func (l *groupLog) load(ref *raft.Log) (raft.Log, error) {
	var whole raft.Log
	err := l.LogStore.GetLog(ref.Index, &whole)
	switch {
	case errors.Is(err, raft.ErrLogNotFound):
	case err != nil:
		l.group.lose(err)
	case whole.Term != ref.Term: // another leader has replaced it
		err = fmt.Errorf("it is of term %d, not %d", whole.Term, ref.Term)
	}
	if err != nil {
		return raft.Log{}, fmt.Errorf("read entry %d: %w", ref.Index, err)
	}
	return whole, nil
}

// A message between nodes has at most MaxAppend entries, of messageBytes together, or one entry.
const (
	MaxAppend    = 64
	messageBytes = 4 << 20
)

// fitting is the number of entries, from the first on, that fit into a message.
func fitting(entries []*raft.Log) int {
	bytes := 0
	for i, l := range entries {
		if bytes += dataOf(l); bytes > messageBytes && i > 0 {
			return i
		}
	}
	return len(entries)
}

// message is a request with the first n of its entries, and their data.
func (g *Group) message(req *raft.AppendEntriesRequest, n int) (*raft.AppendEntriesRequest, error) {
	if n == len(req.Entries) && !slices.ContainsFunc(req.Entries, isReference) {
		return req, nil
	}
	part := *req
	part.Entries = slices.Clone(req.Entries[:n])
	clampCommit(&part)
	for i, l := range part.Entries {
		if isReference(l) {
			whole, err := g.log.load(l)
			if err != nil {
				return nil, err
			}
			part.Entries[i] = &whole
		}
	}
	return &part, nil
}

// newest is the number of entries, up to index last, that so many messages hold. Entries that the
// log no longer has count as empty.
func (l *groupLog) newest(last uint64, messages int) (entries uint64) {
	for ; messages > 0; messages-- {
		bytes := 0
		for n := 0; n < MaxAppend && entries < last; n++ {
			var e raft.Log
			if data, err := l.GetHead(last-entries, &e); err == nil {
				bytes += max(data, len(e.Data))
			}
			if bytes > messageBytes && n > 0 {
				break
			}
			entries++
		}
	}
	return entries
}
