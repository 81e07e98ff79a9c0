package engine

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// TestWakeupsBeyondMemory: when canceled parents cancel more tasks at once than memory has wakeups
// for, the shard reads the other wakeups from disk.
func TestWakeupsBeyondMemory(t *testing.T) {
	t.Parallel()
	r := newRuled(t, Config{})
	const parents = 3*wakeupsCap/TellAtOnce + 10
	var canceled []keys.ID
	for range parents {
		family := make([]NewTask, 1+TellAtOnce)
		family[0] = newTask(LaneKey{Queue: "parent"}, record.Record{Head: record.Head{Ties: record.Ties{Parent: true}}})
		for i := 1; i < len(family); i++ {
			family[i] = newTask(LaneKey{Queue: "child"}, record.Record{Parents: [][record.IDLen]byte{keys.Nth(0)}})
		}
		canceled = append(canceled, r.produce(family...)[0])
	}
	r.settle()
	require.EqualValues(t, parents*TellAtOnce, r.countsOf("child").Blocked)
	require.False(t, r.Ties.wakeups.onDisk)
	var cursors [][]byte
	r.sealing = func(s *drivenShard) {
		if s.Ties.wakeups.onDisk {
			cursors = append(cursors, slices.Clone(s.Ties.wakeups.from))
		}
	}
	commits := r.commits
	for _, id := range canceled {
		r.in(func() (Verdict, error) { return r.Alter(id, AlterCancel, AlterTo{}) })
	}
	require.Equal(t, commits, r.commits, "one group")
	r.settle()
	require.Zero(t, r.countsOf("child"))
	require.False(t, r.Ties.wakeups.onDisk, "memory holds them all again")
	require.Empty(t, r.Ties.wakeups.order)
	require.NotEmpty(t, cursors)
	require.True(t, slices.IsSortedFunc(cursors, bytes.Compare), "each group goes on where the one before ended")
	require.Less(t, string(cursors[0]), string(cursors[len(cursors)-1]))

	ids := r.produce(inGroup("1"), inGroup("2"), inGroup("3"))
	for _, id := range ids {
		grants := r.claim("a", 2)
		require.Len(t, grants, 1)
		require.Equal(t, id, grants[0].Receipt.ID)
		r.complete(grants...)
		r.settle()
	}
}

func inGroup(payload string) NewTask {
	return newTask(LaneKey{Queue: "a"}, record.Record{GroupKey: "g", Payload: []byte(payload)})
}

// TestFront: a task that begins to wait after younger ones have already gone on is the next to go
// on.
func TestFront(t *testing.T) {
	t.Parallel()
	r := newRuled(t, Config{})
	late := record.Record{GroupKey: "g", Payload: []byte("late")}
	late.RunAt = storyStart + uint64(time.Hour/time.Millisecond)
	r.produce(newTask(LaneKey{Queue: "a"}, late), inGroup("1"), inGroup("2"), inGroup("3"), inGroup("4"), inGroup("5"))
	next := func(payload string) Grant {
		grants := r.claim("a", 2)
		require.Len(t, grants, 1)
		rec, err := record.Decode(grants[0].Rec)
		require.NoError(t, err)
		require.Equal(t, payload, string(rec.Payload))
		return grants[0]
	}
	complete := func(g Grant) {
		r.complete(g)
		r.settle()
	}
	complete(next("1"))
	complete(next("2"))
	third := next("3")
	r.in(func() (Verdict, error) {
		return Decided, r.Leases.Extend(third.Receipt, uint64(2*time.Hour/time.Millisecond))
	})
	r.settle()
	r.pass(time.Hour)
	r.settle()
	complete(third)
	for _, payload := range []string{"late", "4", "5"} {
		complete(next(payload))
	}
}

// TestDoubtfulQueuesAreForgotten: queues with possible wakeups leave memory as soon as disk has no
// wakeups that memory lacks, with or without other events.
func TestDoubtfulQueuesAreForgotten(t *testing.T) {
	t.Parallel()
	r := newRuled(t, Config{})
	r.begin(r.drivenShard)
	for _, name := range namesOf("unused", 4*doubtsAtOnce) {
		q := r.Names.QueueNamed(name)
		q.resting, q.hasWakeups = true, true
		r.Names.doubtful.Append(q)
	}
	groups := 0
	for r.end(); r.Ties.hasDoubts(); r.end() {
		groups++
		r.begin(r.drivenShard)
	}
	require.LessOrEqual(t, groups, 8)
	require.Empty(t, r.Names.Queues)
	r.settle()
}

// TestDueAtOnce: the cost of tasks that become due at one moment is in proportion to their number,
// for any number of groups: the shard reads each task once. The same holds for idempotency keys
// that become free at one moment.
func TestDueAtOnce(t *testing.T) {
	t.Parallel()
	const batch, batches, slack = 512, 20, 4
	const n = batch * batches
	r := newRuled(t, Config{})
	walkedFor := func(d time.Duration) uint64 {
		before := r.Walked
		r.pass(d)
		r.settle()
		return r.Walked - before
	}
	for range batches {
		tasks := make([]NewTask, batch)
		for i := range tasks {
			tasks[i] = newTask(LaneKey{Queue: "a"}, record.Record{Head: record.Head{RunAt: storyStart + 3_600_000}})
		}
		r.produce(tasks...)
	}
	require.EqualValues(t, n, r.countsOf("a").Scheduled)
	commits := r.commits
	require.LessOrEqual(t, walkedFor(time.Hour), uint64(slack*n))
	require.Greater(t, r.commits-commits, 5)
	require.EqualValues(t, n, r.countsOf("a").Ready)

	for g := range batches {
		tasks := make([]NewTask, batch)
		for i := range tasks {
			tasks[i] = newTask(LaneKey{Queue: "b"}, record.Record{Head: record.Head{Ties: record.Ties{UniqueFor: 24 * 3_600_000}}, UniqueKey: fmt.Sprint(g, " ", i)})
		}
		r.produce(tasks...)
	}
	require.Equal(t, n, r.stored(keys.Freed))
	commits = r.commits
	require.LessOrEqual(t, walkedFor(25*time.Hour), uint64(slack*n))
	require.Greater(t, r.commits-commits, 5)
	require.Zero(t, r.stored(keys.Freed))
}
