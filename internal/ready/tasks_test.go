package ready

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReplacedRecordsStayWithinMemory: a task with a growing record takes more room in its window,
// at the cost of other tasks.
func TestReplacedRecordsStayWithinMemory(t *testing.T) {
	tasks := New(Config{Shards: 1, WindowTasks: 10, WindowBytes: 1 << 20, IdleLanes: 2}, nil)
	q := &Queue{Number: 1}
	lanes := make([]*Lane, 2)
	for i := range lanes {
		l := &Lane{Queue: q, Number: uint32(i), Weight: 1, Named: i > 0}
		lanes[i] = l
		tasks.Load(l, 0)
		tasks.Add(l, Item{Pos: Pos{Since: 1}, Record: make([]byte, 10)})
	}
	tasks.windows.limit = tasks.windows.bytes
	tasks.Replace(lanes[1], Item{Pos: Pos{Since: 1}, Record: make([]byte, 11)})
	require.LessOrEqual(t, tasks.windows.bytes, tasks.windows.limit)
	require.Positive(t, tasks.windows.bytes)
	require.Empty(t, tasks.Check([]Stored{
		{Lane: lanes[0], Tasks: []Item{{Pos: Pos{Since: 1}, Record: make([]byte, 10)}}},
		{Lane: lanes[1], Tasks: []Item{{Pos: Pos{Since: 1}, Record: make([]byte, 11)}}},
	}, []*Queue{q}))
}
