package cluster

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/guard"
	"codeq/internal/platform"
	"codeq/internal/raftlog"
)

// TestRecoverOfBrokenNode: if the log of a node cannot be applied, the error says why.
func TestRecoverOfBrokenNode(t *testing.T) {
	disk, votes := crashfs.New(), filepath.Join(t.TempDir(), "votes")
	n := newLoneNode(t, disk, votes, new(notes))
	r := openLone(t, n).raft
	require.NoError(t, r.Apply(entryOf(0, 0, r.CurrentTerm(), "an entry").Data, 0).Error())
	require.NoError(t, n.Close())

	guard.Observe(func(what string, value any, _ []byte) { t.Errorf("panic in %s: %v", what, value) })
	defer guard.Observe(nil)
	require.ErrorIs(t, newLoneNode(t, disk, votes, &notes{err: errBroken}).Recover(), errBroken)
}

// stillLive is a store that has nothing to flush.
type stillLive struct{}

func (stillLive) Flush() error            { return nil }
func (stillLive) Checkpoint(string) error { return errBroken }

// logOf replaces the log of a node that is not open.
func logOf(t *testing.T, disk vfs.FS, entries ...*raft.Log) {
	s, err := raftlog.Open("dir/raft", raftlog.Options{FS: disk})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	g, err := s.Group(0)
	require.NoError(t, err)
	last, err := g.LastIndex()
	require.NoError(t, err)
	require.NoError(t, g.DeleteRange(1, last))
	require.NoError(t, g.StoreLogs(entries))
}

// TestRecover: a node goes on from what its store has, and from its log as far as that continues
// the store. Later entries are beyond all that the node has stored, however often it is recovered.
func TestRecover(t *testing.T) {
	entry := func(index, term uint64) *raft.Log { return entryOf(index, term, term, fmt.Sprint(index)) }
	for _, tc := range []struct {
		name    string
		store   Position
		log     []*raft.Log
		term    uint64 // of the last vote
		applied []uint64
		end     Position
	}{
		{"log continues the store", Position{2, 3}, []*raft.Log{entry(1, 3), entry(2, 3), entry(3, 3), entry(4, 4)}, 5, []uint64{3, 4}, Position{4, 4}},
		{"log begins behind the store", Position{2, 3}, []*raft.Log{entry(3, 4)}, 1, []uint64{3}, Position{3, 4}},
		{"store is empty", Position{}, []*raft.Log{entry(1, 1), entry(2, 1)}, 1, []uint64{1, 2}, Position{2, 1}},
		{"log ends before the store", Position{9, 5}, []*raft.Log{entry(1, 3), entry(2, 3)}, 5, nil, Position{9, 5}},
		{"log has an earlier term", Position{2, 5}, []*raft.Log{entry(1, 3), entry(2, 3), entry(3, 3)}, 4, nil, Position{3, 5}},
		{"log has a later term", Position{2, 3}, []*raft.Log{entry(2, 7), entry(3, 8)}, 6, nil, Position{3, 8}},
		{"log has a gap", Position{2, 3}, []*raft.Log{entry(5, 3)}, 3, nil, Position{5, 3}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			disk, votes := crashfs.New(), filepath.Join(t.TempDir(), "votes")
			require.NoError(t, disk.MkdirAll("dir", 0o700))
			logOf(t, disk, tc.log...)
			file, err := raftlog.OpenStable(platform.FS, votes)
			require.NoError(t, err)
			require.NoError(t, file.Group(0).SetUint64([]byte(keyCurrentTerm), tc.term))
			require.NoError(t, file.Close())
			m := &notes{last: tc.store, live: stillLive{}}
			for i := range 3 {
				m.applied = nil
				require.NoError(t, newLoneNode(t, disk, votes, m).Recover())
				var applied []uint64
				for _, e := range m.applied {
					applied, m.last = append(applied, e.Index), Position{e.Index, e.Term}
				}
				if i == 0 {
					require.Equal(t, tc.applied, applied)
				}
				n := newLoneNode(t, disk, votes, m)
				g := openLone(t, n)
				require.NoError(t, g.Failure())
				if i == 0 {
					require.Equal(t, tc.end, g.log.snapshot)
					require.Greater(t, g.raft.CurrentTerm(), max(tc.end.Term, tc.term))
					require.Greater(t, g.raft.LastIndex(), tc.end.Index)
				}
				members, err := g.members()
				require.NoError(t, err)
				require.Equal(t, []raft.Server{{ID: n.Self().ServerID(), Address: "a:1"}}, members)
				before := g.Applied()
				require.NoError(t, g.Propose(g.raft.CurrentTerm(), make([]byte, EntryHeader)))
				require.Greater(t, g.Applied(), before)
				m.last = g.applied.get()
				require.NoError(t, n.Close())
			}
		})
	}
	require.ErrorContains(t, newLoneNode(t, crashfs.New(), filepath.Join(t.TempDir(), "votes"), new(notes)).Recover(), "nothing was ever stored")
}
