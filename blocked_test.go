package codeq

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"
)

// TestMarksBeyondMemory: when more tasks are to be canceled at once than memory has marks
// for, those that it does not hold are read from disk.
func TestMarksBeyondMemory(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		const parents = 3*engine.marksCap/engine.tellAtOnce + 10
		var cursors [][]byte
		var canceled []ID
		for range parents {
			family := make([]Task, 1+engine.tellAtOnce)
			family[0] = Task{Queue: "parent"}
			for i := 1; i < len(family); i++ {
				family[i] = Task{Queue: "child", After: []ID{Nth(0)}}
			}
			ids, err := q.ProduceBatch(t.Context(), family)
			require.NoError(t, err)
			canceled = append(canceled, ids[0])
		}
		requireSettled(t, q)
		require.EqualValues(t, parents*engine.tellAtOnce, countsOf(t, q, "child").Blocked)
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			require.False(t, s.marks.onDisk)
			s.commit = watchedCommitter{s.commit, func() {
				if s.marks.onDisk {
					cursors = append(cursors, s.marks.from)
				}
			}}
			for _, id := range canceled {
				at, err := s.locate(id)
				if err != nil {
					return err
				}
				s.cancel(at)
			}
			return nil
		}))
		requireSettled(t, q)
		require.Zero(t, countsOf(t, q, "child"))
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			require.False(t, s.marks.onDisk, "memory holds them all again")
			require.Empty(t, s.marks.order)
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
			require.EqualValues(t, engine.after(l.ID), frontOf(&s.fronts, like.groupScope()))
			return nil
		}))
		time.Sleep(time.Hour)
		requireSettled(t, q)
		complete(t, q, l)
		requireNext(t, q, "a", "late", "4", "5")
		requireSettled(t, q)
	})
}

// frontOf is where the tasks begin that wait in a scope.
func frontOf(t *engine.frontTable, scope uint64) ID {
	if f := t.byScope[scope]; f != nil {
		return f.id
	}
	return ID{}
}

// TestFrontOfGroup: the front does not pass a task that disk does not have yet.
func TestFrontOfGroup(t *testing.T) {
	id := func(n byte) ID { return ID{15: n} }
	f := engine.frontTable{group: 1}
	add := func(n byte) { f.add(1, id(n), nil) }
	advance := func(n byte) { f.advance(f.at(1), id(n)) }
	require.Zero(t, frontOf(&f, 1))
	add(5)
	require.Zero(t, frontOf(&f, 1), "there may be others before it")
	advance(7)
	require.Equal(t, id(5), frontOf(&f, 1))
	f.next()
	advance(7)
	require.Equal(t, id(7), frontOf(&f, 1))
	add(9)
	add(3)
	add(4)
	require.Equal(t, id(3), frontOf(&f, 1))
	advance(8)
	require.Equal(t, id(3), frontOf(&f, 1))
	require.Zero(t, frontOf(&f, 2))

	for scope := range uint64(engine.frontsCap + 1) {
		f.at(scope)
	}
	f.next()
	require.Len(t, f.byScope, engine.frontsCap)
}
