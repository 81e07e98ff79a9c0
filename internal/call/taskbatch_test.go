package call

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/testbase"
	"codeq/internal/wire"
)

// newTask returns a task of the lane (a, t, 3).
func newTask(rec record.Record) (t engine.NewTask) {
	t.Key = engine.LaneKey{Queue: "a", Tenant: "t", Priority: 3}
	rec.Child = len(rec.Parents) > 0
	t.Encode(&rec, nil)
	return t
}

// inGroup is a task that belongs to a shard.
func inGroup(shard uint64, parents ...[record.IDLen]byte) engine.NewTask {
	return newTask(record.Record{Head: record.Head{Ties: record.Ties{Group: 4 * shard}}, Parents: parents, GroupKey: "g"})
}

// withKey is a task with an idempotency key. The key determines its shard, of four.
func withKey(key byte, flags uint8) engine.NewTask {
	return newTask(record.Record{Head: record.Head{Ties: record.Ties{Unique: [keys.UniqueLen]byte{7: 4 * key}, Flags: flags}}, UniqueKey: "k"})
}

// TestSplit: each task goes to its shard, tasks without a shard go with the last part, and tasks
// that a repetition would store again come last.
func TestSplit(t *testing.T) {
	free := newTask(record.Record{Payload: []byte("p")})
	require.Nil(t, SplitBatch([]engine.NewTask{free, free}, 4))

	parts := SplitBatch([]engine.NewTask{inGroup(2), free, withKey(1, 0), inGroup(2), withKey(3, 0), free}, 4)
	require.Equal(t, []BatchPart{
		{Shard: 1, Tasks: []int{2}},
		{Shard: 3, Tasks: []int{4}},
		{Shard: 2, Tasks: []int{0, 1, 3, 5}, again: true},
	}, parts)
}

// TestSplitFlow: a task that waits for others of the batch is in their part if possible. Otherwise
// it is in a later part, which refers to them by their IDs.
func TestSplitFlow(t *testing.T) {
	nth := func(n ...int) (ids [][record.IDLen]byte) {
		for _, i := range n {
			ids = append(ids, keys.Nth(i))
		}
		return ids
	}
	free := newTask(record.Record{Payload: []byte("p")})
	tasks := []engine.NewTask{
		withKey(1, 0), withKey(2, 0), // 0, 1
		newTask(record.Record{Parents: nth(0, 1)}), // 2: after both
		inGroup(2, nth(1)...),                      // 3: with 1
		inGroup(1, nth(2, 3)...),                   // 4: after 3, and perhaps after 2
		free,                                       // 5: no task waits for it
		free,                                       // 6: 7 waits for it
		newTask(record.Record{Parents: nth(6)}),    // 7: with 6
		withKey(1, 0),                              // 8: the twin of 0
		newTask(record.Record{Parents: nth(8, 3)}),                             // 9
		newTask(record.Record{Parents: append(nth(9), [record.IDLen]byte{1})}), // 10
	}
	findTwins(tasks)
	parts := SplitBatch(tasks, 4)
	at := make(map[int]int)
	var all []int
	for n, p := range parts {
		for _, i := range p.Tasks {
			at[i] = n
			if home, bound := tasks[i].Home(4); bound {
				require.Equal(t, home, p.Shard)
			}
		}
		all = append(all, p.Tasks...)
		require.True(t, slices.IsSorted(p.Tasks))
	}
	slices.Sort(all)
	require.Equal(t, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, all)
	require.Equal(t, at[0], at[8])
	require.Equal(t, at[1], at[3])
	require.Equal(t, at[6], at[7])
	require.Equal(t, at[9], at[10])
	require.LessOrEqual(t, len(parts), 4)
	stored := func(i int) keys.ID { return keys.ID{byte(i + 1), 9} }
	for n, p := range parts {
		for k, task := range p.Append(nil, tasks, stored) {
			i := p.Tasks[k]
			var want [][record.IDLen]byte
			for _, id := range decoded(&tasks[i]).Parents {
				if sibling, ok := keys.NthOf(id); !ok {
					want = append(want, id)
				} else if at[sibling] == n {
					want = append(want, keys.Nth(slices.Index(p.Tasks, sibling)))
				} else {
					require.Less(t, at[sibling], n, "%d waits for %d", i, sibling)
					want = append(want, stored(sibling))
				}
			}
			require.Equal(t, want, decoded(&task).Parents)
			if len(want) > 0 {
				require.Equal(t, want, task.Tied.Parents)
			}
		}
	}
}

// TestRoute: tasks that wait for each other go from shard to shard, and each shard stores the tasks
// that it can.
func TestRoute(t *testing.T) {
	nth := keys.Nth
	free := newTask(record.Record{})
	tasks := []engine.NewTask{
		withKey(1, 0), // 0
		withKey(2, 0), // 1
		newTask(record.Record{Parents: [][record.IDLen]byte{nth(0), nth(1)}}), // 2: with 1
		inGroup(2, nth(2)), // 3
		free,               // 4
		newTask(record.Record{Parents: [][record.IDLen]byte{nth(4)}}), // 5: with 4
		inGroup(4),    // 6: by itself
		withKey(1, 0), // 7: the twin of 0
		newTask(record.Record{Parents: [][record.IDLen]byte{nth(7), nth(4)}}), // 8: with 0
		inGroup(1, nth(3)), // 9: the hops come back to its shard
	}
	findTwins(tasks)
	markParents(tasks)
	r, err := routeOf(tasks, 3, 4, math.MaxInt)
	require.NoError(t, err)
	require.Equal(t, []BatchHop{{3, 1}, {1, 2}, {2, 1}}, r.hops)
	at := slices.Clone(r.at)
	at[7] = -1 // it is not stored
	require.Equal(t, []int{1, 2, 2, 2, 3, 3, 0, -1, 1, 1}, at)
	require.Equal(t, []BatchHop{{3, 1}, {1, 2}, {2, 1}, {3, 3}, {2, 1}, {2, 2}, {1, 3}, {1, 2}}, BatchHops(tasks, 3, 4, true))
	require.NoError(t, CheckRoute(tasks, 3, 4, MaxBatchLimits))

	var invalid *base.Invalid
	require.ErrorAs(t, CheckRoute(tasks, 3, 4, BatchLimits{Bytes: 2500}), &invalid)
	require.NoError(t, CheckRoute(tasks, 3, 1, BatchLimits{Bytes: 2500}))
	require.NoError(t, CheckRoute([]engine.NewTask{inGroup(2), inGroup(1)}, 3, 4, BatchLimits{}), "nobody waits")
}

// TestTwinsAndParents: the first task of a key is the twin of the others. A task that waits for one
// of the others has the first as its parent.
func TestTwinsAndParents(t *testing.T) {
	tasks := []engine.NewTask{
		newTask(record.Record{}), withKey(1, 0), withKey(2, 0), withKey(1, record.ReleaseOnDead),
		newTask(record.Record{Parents: [][record.IDLen]byte{keys.Nth(0), keys.Nth(3)}}),
	}
	findTwins(tasks)
	markParents(tasks)
	for i, want := range []struct {
		parent bool
		twin   int
	}{{true, -1}, {true, -1}, {false, -1}, {false, 1}, {false, -1}} {
		rec, err := record.Decode(tasks[i].Rec)
		require.NoError(t, err)
		require.Equal(t, want.parent, rec.Parent, i)
		require.Equal(t, want.parent, tasks[i].Tied.Parent, i)
		require.Equal(t, want.twin, tasks[i].Tied.Twin, i)
	}
}

// TestReplaceInBatch: of several tasks of a key that replace each other, the first one is stored
// with the content of the last, and keeps its own parents. The receiver of the batch finds the
// twins again, and this changes nothing.
func TestReplaceInBatch(t *testing.T) {
	keyed := func(payload string, flags uint8, parents ...[record.IDLen]byte) engine.NewTask {
		ties := record.Ties{Unique: [keys.UniqueLen]byte{7: 4}, Flags: record.HoldsKey | flags}
		return newTask(record.Record{Head: record.Head{Ties: ties}, UniqueKey: "k", Payload: []byte(payload), Parents: parents})
	}
	tasks := []engine.NewTask{
		newTask(record.Record{}),
		keyed("first", 0, keys.Nth(0)),
		keyed("second", record.ReplaceWaiting),
		keyed("refused", 0),
		keyed("last", record.ReplaceWaiting, [record.IDLen]byte{1}),
		newTask(record.Record{Parents: [][record.IDLen]byte{keys.Nth(4)}}),
	}
	tasks[4].Key.Priority = 7
	findTwins(tasks)
	markParents(tasks)
	rec, err := record.Decode(tasks[1].Rec)
	require.NoError(t, err)
	require.Equal(t, "last", string(rec.Payload))
	require.Equal(t, [][record.IDLen]byte{keys.Nth(0)}, rec.Parents)
	require.True(t, rec.Parent)
	require.Equal(t, uint8(record.HoldsKey|record.ReplaceWaiting), tasks[1].Tied.Flags)
	require.Equal(t, uint8(7), tasks[1].Key.Priority)
	for i, twin := range []int{-1, -1, 1, 1, 1, -1} {
		require.Equal(t, twin, tasks[i].Tied.Twin, i)
	}
	require.True(t, HasReplaced(tasks, 4, []int{2, 3, 4}))
	require.False(t, HasReplaced(tasks, 4, []int{1, 2, 3, 4}), "the key is taken")
	require.False(t, HasReplaced(tasks, 1, []int{1}))

	again := readTasks(wire.NewReader(appendTasks(nil, tasks)))
	for i := range tasks {
		require.Equal(t, tasks[i].Rec, again[i].Rec, i)
		require.Equal(t, tasks[i].Tied.Twin, again[i].Tied.Twin, i)
	}
}

// TestCost: a batch is refused with the limit that it exceeds.
func TestCost(t *testing.T) {
	task := newTask(record.Record{Parents: make([][record.IDLen]byte, 3), Payload: make([]byte, 100)})
	var cost BatchCost
	require.NoError(t, cost.Add(&task, MaxBatchLimits))
	require.Equal(t, BatchCost{Parents: 3, Bytes: len(task.Rec) + len("at") + taskCost + 3*parentCost}, cost)
	var invalid *base.Invalid
	require.ErrorAs(t, cost.Add(&task, BatchLimits{Parents: 5, Bytes: 1 << 20}), &invalid)
	require.Equal(t, base.Invalid{Field: "parents of the batch", Value: "6 and more", Limit: "at most 5"}, *invalid)
	cost = BatchCost{Bytes: 1000}
	require.ErrorAs(t, cost.Add(&task, BatchLimits{Parents: 5, Bytes: 1100}), &invalid)
	require.Equal(t, "bytes to be written at once", invalid.Field)
	require.Regexp(t, `^\d+ bytes and more$`, invalid.Value)
	require.Equal(t, "at most 1100 bytes", invalid.Limit)
}

// FuzzRead: tasks from another node are refused, or encode to the same bytes again.
func FuzzRead(f *testing.F) {
	f.Add(appendTasks(nil, nil))
	f.Add(appendTasks(nil, []engine.NewTask{newTask(record.Record{}), withKey(1, 0), inGroup(2, keys.Nth(0)), withKey(1, 0)}))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := wire.NewReader(b)
		var tasks []engine.NewTask
		testbase.BoundDecode(t, len(b), func() { tasks = readTasks(r) })
		if r.Done() != nil {
			return
		}
		sent := appendTasks(nil, tasks)
		again := wire.NewReader(sent)
		require.Equal(t, tasks, readTasks(again))
		require.NoError(t, again.Done())
	})
}
