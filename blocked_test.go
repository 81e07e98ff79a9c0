package codeq

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMarksBeyondMemory: when more tasks may go on at once than memory has marks
// for, those that it does not hold are read from disk.
func TestMarksBeyondMemory(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		const children = 3*marksCap + 100
		parent := produce(t, q, Task{Queue: "parent"})[0]
		for from := 0; from < children; from += marksCap {
			tasks := make([]Task, min(marksCap, children-from))
			for i := range tasks {
				tasks[i] = Task{Queue: "child", After: []ID{parent}}
			}
			_, err := q.ProduceBatch(t.Context(), tasks)
			require.NoError(t, err)
		}
		requireSettled(t, q)
		l := claimNow(t, q, "parent")
		require.NoError(t, q.shards[0].probe(func(s *shard) error {
			require.False(t, s.wakes)
			return nil
		}))
		complete(t, q, l)
		requireSettled(t, q)
		counts, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, children, counts["child"].Ready)
		require.NoError(t, q.shards[0].probe(func(s *shard) error {
			require.False(t, s.wakes, "memory holds them all again")
			require.Empty(t, s.marks.order)
			return nil
		}))
		produce(t, q, named(Task{Queue: "a", Group: "g"}, "1", "2", "3")...)
		requireNext(t, q, "a", "1", "2", "3")
		requireSettled(t, q)
	})
}
