package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/record"
)

// TestCostOfCrash: a crash is an attempt for the task that is known to have been the only suspect
// at work, and if the attempt counted before.
func TestCostOfCrash(t *testing.T) {
	for _, c := range []struct {
		crash              crash
		suspect, counted   bool
		attempt, suspected bool
	}{
		{crash{Suspects: 0}, false, false, false, true},
		{crash{Suspects: 0, Partial: true}, false, false, false, true},
		{crash{Suspects: 1}, true, false, true, true},
		{crash{Suspects: 1}, false, false, false, false},
		{crash{Suspects: 1, Partial: true}, true, false, false, true},
		{crash{Suspects: 2}, true, false, false, true},
		{crash{Suspects: 2}, true, true, true, true},
	} {
		cost, suspected := costOfCrash(&c.crash, c.suspect, c.counted)
		require.Equal(t, c.attempt, cost == costAttempt, "%+v", c)
		require.Equal(t, c.suspected, suspected, "%+v", c)
	}
}

// oneMore is a table of suspects in which another shard has one as well.
type oneMore struct {
	atWork  map[string]int
	partial bool
}

func (o *oneMore) SetAtWork(worker string, n int) { o.atWork[worker] = n }
func (o *oneMore) Crash(worker string, lasts uint64) (suspects int, partial bool, left uint64) {
	return o.atWork[worker] + 1, o.partial, lasts / 2
}

// TestCrashOfSharedWorker: in a cluster, suspects of a worker in other shards count for its crash.
func TestCrashOfSharedWorker(t *testing.T) {
	r := newRuled(t, Config{Replicated: true})
	r.Format = formatOfSuspects
	table := &oneMore{atWork: make(map[string]int), partial: true}
	one := &lease{local: true, suspect: true, worker: "w", duration: 1000}
	r.beginSuspect(one)
	r.shareSuspects(table)
	require.Equal(t, map[string]int{"w": 1}, table.atWork, "those that were loaded")
	r.beginSuspect(&lease{local: true, suspect: true, worker: "w"})
	require.Equal(t, 2, table.atWork["w"])
	r.endSuspect(one)
	require.Equal(t, 1, table.atWork["w"])
	require.Equal(t, &crash{Suspects: 2, Partial: true}, r.crashOf(one))
	require.Equal(t, r.Now+1000, r.suspects.crashes["w"].until, "as long as for the other shards")
}

// TestSuspectsLeaveMemory: a queue without suspects leaves memory, and the list of queues that may
// have some: another crash does not wake it.
func TestSuspectsLeaveMemory(t *testing.T) {
	r := newRuled(t, Config{})
	r.begin(r.drivenShard)
	q := r.QueueNamed("a")
	r.noteSuspects(q)
	r.Rest(q)
	r.end()
	r.settle()
	require.Empty(t, r.Queues)
	require.Empty(t, r.suspects.queues)
}

// TestCrashIsOver: when all leases of Run of the process that has died have been taken back.
func TestCrashIsOver(t *testing.T) {
	r := newRuled(t, Config{})
	r.produce(newTask(LaneKey{Queue: "a"}, record.Record{}), newTask(LaneKey{Queue: "a"}, record.Record{}))
	for _, to := range []Holder{{}, {Local: true}} {
		r.begin(r.drivenShard)
		l, _ := r.Next(r.Queues["a"], 0)
		_, err := r.Grant(l, 30_000, to, nil)
		require.NoError(t, err)
		r.end()
	}
	require.True(t, r.CrashIsOver(), "nobody has died")
	r.killed = true
	r.reopen()
	require.False(t, r.CrashIsOver())
	r.settle()
	require.True(t, r.CrashIsOver())
}

// TestCrashOnFullDisk: tasks come back from a crash while the disk has no room to clear suspects:
// those that wait stay suspects, and start when there is room.
func TestCrashOnFullDisk(t *testing.T) {
	r := newRuled(t, Config{})
	for range 3 {
		r.produce(newTask(LaneKey{Queue: "a"}, record.Record{}))
	}
	claim := func(n int) {
		for range n {
			r.begin(r.drivenShard)
			l, _ := r.Next(r.Queues["a"], 0)
			_, err := r.Grant(l, 30_000, Holder{Local: true}, nil)
			require.NoError(t, err)
			r.end()
		}
	}
	start := func() bool {
		r.begin(r.drivenShard)
		defer r.settle()
		return r.Start(r.Queues["a"], func() bool { return true })
	}
	claim(3)
	r.format = formatOfSuspects
	r.killed = true
	r.reopen()
	r.settle()
	require.True(t, start())
	claim(1)
	r.Room = RoomScarce
	r.reopen()
	require.EqualValues(t, 1, r.countsOf("a").Leased)
	for r.keepUp(r.drivenShard) > 0 {
		r.end()
	}
	require.Zero(t, r.countsOf("a").Leased)
	require.EqualValues(t, 3, r.countsOf("a").Blocked)
	require.False(t, start(), "there is no room for a claim")
	r.Room = Roomy
	r.settle() // which looks for queues with suspects
	for range 3 {
		require.True(t, start())
	}
	require.EqualValues(t, 3, r.countsOf("a").Ready)
}
