package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/record"
)

// TestCostOfCrash: a crash counts as an attempt of a task if the task is known to be the only
// suspect at work, or if the attempt counted before.
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

// oneMore is a table of suspects with one suspect of another shard.
type oneMore struct {
	atWork  map[uint64]int
	partial bool
	asking  bool
	crashed map[uint64]int
}

func (o *oneMore) SetAtWork(process uint64, n int) { o.atWork[process] = n }
func (o *oneMore) Crashed(process uint64, suspects int, _ bool, _ uint64) {
	if o.crashed == nil {
		o.crashed = make(map[uint64]int)
	}
	o.crashed[process] = suspects
}
func (o *oneMore) Crash(process, lasts uint64) (suspects int, partial bool, left uint64, ok bool) {
	return o.atWork[process] + 1, o.partial, lasts / 2, !o.asking
}

// lease grants the next task of a queue.
func (r *ruled) lease(queue string, duration uint64, to Holder) (grants []Grant) {
	r.Helper()
	r.begin(r.drivenShard)
	l, _ := r.Next(r.Names.Queues[queue], 0)
	require.NotNil(r, l)
	grants, err := r.Grant(l, duration, to, nil)
	require.NoError(r, err)
	r.end()
	return grants
}

// start starts a suspect of a queue, if one may start.
func (r *ruled) start(queue string) bool {
	r.Helper()
	r.begin(r.drivenShard)
	defer r.settle()
	return r.Suspects.Start(r.Names.Queues[queue], func() bool { return true })
}

// TestCrashOverLeaderChange: a new leader that takes back the rest of a process's tasks also counts
// the suspects that the previous leader found, and tells the other shards.
func TestCrashOverLeaderChange(t *testing.T) {
	r := newRuled(t, Config{SuspectFor: 60_000, Replicated: true})
	r.produce(newTask(LaneKey{Queue: "a"}, record.Record{}), newTask(LaneKey{Queue: "b"}, record.Record{}))
	claim := func(process uint64, durations ...uint64) {
		for i, queue := range []string{"a", "b"} {
			r.lease(queue, durations[i], Holder{Local: true, Handled: true, Process: process})
		}
	}
	claim(1, 30_000, 30_000)
	r.pass(31 * time.Second)
	r.settle()
	for _, queue := range []string{"a", "b"} {
		require.True(t, r.start(queue))
	}
	claim(2, 30_000, 35_000)
	r.pass(31 * time.Second)
	r.settle()
	require.EqualValues(t, 1, r.countsOf("b").Leased)
	r.reopen()
	table := &oneMore{atWork: make(map[uint64]int)}
	r.Suspects.shareSuspects(table)
	require.Equal(t, map[uint64]int{1: 0, 2: 2}, table.crashed, "leases of both may be left")
	r.Suspects.table = nil
	r.pass(10 * time.Second)
	r.settle()
	for _, queue := range []string{"a", "b"} {
		require.EqualValues(t, 1, r.countsOf(queue).Blocked)
		require.True(t, r.start(queue))
		require.EqualValues(t, 1, r.lease(queue, 1000, Holder{})[0].Attempt, "two suspects were at work")
	}
}

// TestCrashOverLeaders: in a cluster, suspects of a process in other shards count for its crash as
// soon as they are known. Suspects of another process with a worker of the same name do not count,
// nor does a lease of Claim.
func TestCrashOverLeaders(t *testing.T) {
	r := newRuled(t, Config{Replicated: true})
	table := &oneMore{atWork: make(map[uint64]int), partial: true, asking: true}
	one := &lease{local: true, handled: true, suspect: true, worker: "w", record: &leaseRecord{process: 7}, duration: 1000}
	r.Suspects.countAtWork(one, 1)
	r.Suspects.shareSuspects(table)
	require.Equal(t, map[uint64]int{7: 1}, table.atWork, "those that were loaded")
	r.Suspects.countAtWork(&lease{local: true, worker: "w", record: &leaseRecord{process: 7}}, 1)
	r.Suspects.countAtWork(&lease{local: true, worker: "w", record: &leaseRecord{process: 8}}, 1)
	require.Equal(t, 2, table.atWork[7])
	r.Suspects.endSuspect(one)
	require.Equal(t, 1, table.atWork[7])
	_, ok := r.Suspects.crashOf(one)
	require.False(t, ok, "other leaders are asked")
	require.Empty(t, r.Leases.crashes)
	table.asking = false
	c, ok := r.Suspects.crashOf(one)
	require.True(t, ok)
	require.Equal(t, &crash{Suspects: 2, Partial: true}, c)
	require.Equal(t, r.Now+1000, r.Leases.crashes[7].until, "as long as for the other shards")
	c, ok = r.Suspects.crashOf(&lease{local: true, record: one.record, duration: 1000})
	require.True(t, ok)
	require.Nil(t, c, "it is not known that a handler has worked on the task")
	c, _ = r.Suspects.crashOf(&lease{local: true, handled: true, record: new(leaseRecord), duration: 1000})
	require.Equal(t, &crash{Partial: true}, c, "its process is not known")
}

// TestSuspectsLeaveMemory: a queue without suspects leaves memory, and the list of queues with
// possible suspects: another crash does not wake it.
func TestSuspectsLeaveMemory(t *testing.T) {
	r := newRuled(t, Config{})
	r.begin(r.drivenShard)
	q := r.Names.QueueNamed("a")
	r.Suspects.noteSuspects(q, 3)
	r.Names.Rest(q)
	r.end()
	r.settle()
	require.Empty(t, r.Names.Queues)
	require.Empty(t, r.Suspects.queues)
}

// TestCrashIsOver: a crash is over once the shard has taken back all leases of Run of the process
// that died.
func TestCrashIsOver(t *testing.T) {
	r := newRuled(t, Config{})
	r.produce(newTask(LaneKey{Queue: "a"}, record.Record{}), newTask(LaneKey{Queue: "a"}, record.Record{}))
	for _, to := range []Holder{{}, {Local: true}} {
		r.lease("a", 30_000, to)
	}
	require.True(t, r.Suspects.CrashIsOver(), "nobody has died")
	r.killed = true
	r.reopen()
	require.False(t, r.Suspects.CrashIsOver())
	r.settle()
	require.True(t, r.Suspects.CrashIsOver())
}

// TestCrashOnFullDisk: tasks come back from a crash while the disk has no room to clear suspects:
// the waiting ones stay suspects, and start when there is room.
func TestCrashOnFullDisk(t *testing.T) {
	r := newRuled(t, Config{SuspectFor: 60_000})
	for range 3 {
		r.produce(newTask(LaneKey{Queue: "a"}, record.Record{}))
	}
	for range 3 {
		r.lease("a", 30_000, Holder{Local: true})
	}
	r.killed = true
	r.reopen()
	r.settle()
	require.True(t, r.start("a"))
	r.lease("a", 30_000, Holder{Local: true})
	r.Room = RoomScarce
	r.reopen()
	require.EqualValues(t, 1, r.countsOf("a").Leased)
	for r.keepUp(r.drivenShard) > 0 {
		r.end()
	}
	require.Zero(t, r.countsOf("a").Leased)
	require.EqualValues(t, 3, r.countsOf("a").Blocked)
	require.False(t, r.start("a"), "there is no room for a claim")
	r.Room = Roomy
	r.settle() // it looks for queues with suspects
	for range 3 {
		require.True(t, r.start("a"))
	}
	require.EqualValues(t, 3, r.countsOf("a").Ready)
}

// TestClearingBesideBlocked: tasks come back from a crash that clears suspects, for any number of
// groups with tasks that wait for their turns.
func TestClearingBesideBlocked(t *testing.T) {
	r := newRuled(t, Config{SuspectFor: 60_000})
	suspects := r.produce(newTask(LaneKey{Queue: "a"}, record.Record{}), newTask(LaneKey{Queue: "z"}, record.Record{}))
	const groups = 100
	for i := range groups {
		group := newTask(LaneKey{Queue: "g"}, record.Record{GroupKey: fmt.Sprint(i)})
		r.add(group, group)
	}
	r.end()
	r.settle()
	r.lease("a", 30_000, Holder{Local: true})
	r.lease("z", 30_000, Holder{Local: true})
	r.killed = true
	r.reopen()
	r.settle()
	require.True(t, r.start("a"))
	r.lease("a", 30_000, Holder{Local: true})
	r.reopen()
	r.slow = time.Millisecond
	for n := 0; r.Leases.all.Len() > 0; n++ {
		require.Less(t, n, 10)
		r.begin(r.drivenShard)
		r.KeepUp(r.passed, 0)
		r.end()
	}
	require.NotEmpty(t, r.Names.rechecks)
	r.settle()
	require.EqualValues(t, 1, r.countsOf("a").Blocked, "%x was the only suspect at work", suspects[0])
	require.EqualValues(t, 1, r.countsOf("z").Ready)
}

// TestClearingWithoutSuspects: tasks come back from a crash that clears suspects, though none of
// another queue is left that has had some.
func TestClearingWithoutSuspects(t *testing.T) {
	r := newRuled(t, Config{SuspectFor: 60_000, Replicated: true})
	r.add(newTask(LaneKey{Queue: "a"}, record.Record{}))
	gone := r.produce(newTask(LaneKey{Queue: "z"}, record.Record{}))[0]
	r.settle()
	dies := func(process uint64, queues ...string) {
		for _, q := range queues {
			r.lease(q, 30_000, Holder{Local: true, Handled: true, Process: process})
		}
		r.pass(30_001 * time.Millisecond)
		r.settle()
	}
	dies(1, "a", "z")
	r.in(func() (Verdict, error) { return r.Alter(gone, AlterCancel, AlterTo{}) })
	r.settle()
	require.True(t, r.start("a"))
	dies(2, "a")
	require.Zero(t, r.Leases.all.Len())
	require.EqualValues(t, 1, r.countsOf("a").Blocked, "the suspect that was at work")
}

// TestClearingOfManyQueues: a group clears the suspects of no more queues than its budget allows,
// and looks for suspects in no more queues.
func TestClearingOfManyQueues(t *testing.T) {
	r := newRuled(t, Config{SuspectFor: 60_000, Replicated: true})
	const queues = 6000
	for i := range queues {
		r.add(newTask(LaneKey{Queue: fmt.Sprint("q", i)}, record.Record{}))
		if i%1000 == 999 {
			r.end()
		}
	}
	r.settle()
	claim := func(queue int, process uint64) {
		l, _ := r.Next(r.Names.Queues[fmt.Sprint("q", queue)], 0)
		_, err := r.Grant(l, 30_000, Holder{Local: true, Handled: true, Process: process}, nil)
		require.NoError(t, err)
	}
	expire := func() {
		r.pass(30_001 * time.Millisecond)
		for most := 0; r.isDueAt(r.driver.Instant); {
			r.begin(r.drivenShard)
			r.KeepUp(r.passed, 0)
			most = max(most, r.Group.Entries())
			r.end()
			require.Less(t, most, 2*UpkeepBudget.Records)
		}
	}
	r.begin(r.drivenShard)
	for i := range queues {
		claim(i, 1)
	}
	r.end()
	expire()
	require.True(t, r.start("q7"))
	r.begin(r.drivenShard)
	claim(7, 2)
	r.end()
	expire()
	r.settle()
	blocked := 0
	for _, q := range r.Names.Queues {
		blocked += int(q.Counts.Blocked)
	}
	require.Equal(t, 1, blocked, "the suspect that was at work")
}

// TestStaleSuspect: a started suspect without a lease at the end of its place holds back the other
// suspects of its queue. It takes a place when it gets a lease after all, or leaves when a call
// cancels it.
func TestStaleSuspect(t *testing.T) {
	r := newRuled(t, Config{SuspectFor: 60_000})
	for range 3 {
		r.produce(newTask(LaneKey{Queue: "a"}, record.Record{}))
	}
	claim := func() (grants []Grant) {
		r.begin(r.drivenShard)
		defer r.settle()
		for l, _ := r.Next(r.Names.Queues["a"], 0); l != nil; l, _ = r.Next(r.Names.Queues["a"], 0) {
			var err error
			grants, err = r.Grant(l, 1e6, Holder{Local: true}, grants)
			require.NoError(t, err)
		}
		return grants
	}
	require.Len(t, claim(), 3)
	r.killed = true
	r.reopen()
	r.settle()
	for _, leased := range []bool{true, false} {
		require.True(t, r.start("a"))
		r.Now += 60_000
		r.settle()
		require.False(t, r.start("a"))
		require.Equal(t, 1, r.Names.Queues["a"].Stale)
		if leased {
			require.Len(t, claim(), 1)
			require.Len(t, r.Suspects.started, 1, "it has a place again")
		} else {
			l, _ := r.Next(r.Names.Queues["a"], 0)
			pos, _, _ := l.tasks.First()
			r.begin(r.drivenShard)
			v, err := r.Alter(pos.ID, AlterCancel, AlterTo{})
			require.NoError(t, err)
			require.Equal(t, Decided, v)
			r.settle()
		}
		require.Zero(t, r.Names.Queues["a"].Stale)
	}
	require.True(t, r.start("a"))
}
