package codeq

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
)

// TestMarksBeyondMemory: when more tasks are to be canceled at once than memory has marks
// for, those that it does not hold are read from disk.
func TestMarksBeyondMemory(t *testing.T) {
	t.Parallel()
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		const parents = 3*engine.WakeupsCap/engine.TellAtOnce + 10
		var cursors [][]byte
		var canceled []ID
		for range parents {
			family := make([]Task, 1+engine.TellAtOnce)
			family[0] = Task{Queue: "parent"}
			for i := 1; i < len(family); i++ {
				family[i] = Task{Queue: "child", After: []ID{Nth(0)}}
			}
			ids, err := q.ProduceBatch(t.Context(), family)
			require.NoError(t, err)
			canceled = append(canceled, ids[0])
		}
		requireSettled(t, q)
		require.EqualValues(t, parents*engine.TellAtOnce, countsOf(t, q, "child").Blocked)
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			require.False(t, s.Probe().Usage().WakeupsOnDisk)
			s.commit = watchedCommitter{s.commit, func() {
				if u := s.Probe().Usage(); u.WakeupsOnDisk {
					cursors = append(cursors, u.WakeupsFrom)
				}
			}}
			for _, id := range canceled {
				if err := s.Probe().Cancel(id); err != nil {
					return err
				}
			}
			return nil
		}))
		requireSettled(t, q)
		require.Zero(t, countsOf(t, q, "child"))
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			require.False(t, s.Probe().Usage().WakeupsOnDisk, "memory holds them all again")
			require.Zero(t, s.Probe().Usage().Wakeups)
			require.NotEmpty(t, cursors)
			require.True(t, slices.IsSortedFunc(cursors, bytes.Compare), "each group goes on where the one before ended")
			require.Less(t, string(cursors[0]), string(cursors[len(cursors)-1]))
			return nil
		}))
		produce(t, q, named(Task{Queue: "a", Group: "g"}, "1", "2", "3")...)
		requireNext(t, q, "a", "1", "2", "3")
		requireSettled(t, q)
	})
}

// watchedCommitter calls seen before each commit, in the owner.
type watchedCommitter struct {
	committer
	seen func()
}

func (c watchedCommitter) Commit(b *pebble.Batch) error {
	c.seen()
	return c.committer.Commit(b)
}

// TestFront: a task that begins to wait when younger ones have gone on already is
// the next to go on.
func TestFront(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		like := Task{Queue: "a", Group: "g"}
		late := like
		late.RunAt = time.Now().Add(time.Hour)
		produce(t, q, append(named(late, "late"), named(like, "1", "2", "3", "4", "5")...)...)
		complete(t, q, claimNow(t, q, "a"))
		complete(t, q, claimNow(t, q, "a"))
		l := claimNow(t, q, "a")
		require.Equal(t, "3", string(l.Payload))
		require.NoError(t, q.Extend(t.Context(), l.Receipt, 2*time.Hour))
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			front := s.Probe().CursorOf(like.groupScope())
			require.Positive(t, bytes.Compare(front[:], l.ID[:]), "behind those that have gone on")
			return nil
		}))
		time.Sleep(time.Hour)
		requireSettled(t, q)
		complete(t, q, l)
		requireNext(t, q, "a", "late", "4", "5")
		requireSettled(t, q)
	})
}
