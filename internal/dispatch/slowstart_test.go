package dispatch

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
)

// ended are places of a SlowStart that are over.
func ended(passed, freed int, anew bool) *engine.Effects {
	e := new(engine.Effects)
	e.Suspects.Passed, e.Suspects.Freed, e.Suspects.Anew = passed, freed, anew
	return e
}

// TestSlowStart: each round has twice as many places, and ends when all of them have passed; one
// that is given back may be taken again, and does not count. Who was refused learns when there may
// be places, once.
func TestSlowStart(t *testing.T) {
	s, now := new(SlowStart), time.Now()
	of := suspects{queue: "a"}
	take := func(n int) {
		t.Helper()
		for range n {
			ok, wait := s.take(of, now)
			require.True(t, ok)
			require.Zero(t, wait)
		}
		ok, wait := s.take(of, now)
		require.False(t, ok, "more than %d", n)
		require.Zero(t, wait, "it waits for an end, and for no time")
	}
	take(1)
	require.Contains(t, s.end(nil, ended(1, 0, false)), of)
	require.Empty(t, s.end(nil, ended(0, 0, false)), "it was told before")
	take(2)
	require.Empty(t, s.end(nil, ended(1, 0, false)))
	take(0)
	require.Contains(t, s.end(nil, ended(0, 1, false)), of)
	take(1)
	require.Contains(t, s.end(nil, ended(1, 0, false)), of)
	take(4)
	require.Empty(t, s.end(nil, ended(3, 0, false)))

	// New suspects begin anew: when the one that is at work has passed.
	require.Empty(t, s.end(nil, ended(0, 0, true)))
	take(0)
	require.Contains(t, s.end(nil, ended(1, 0, false)), of)
	take(2)
	_, running := s.Counts()
	require.Equal(t, 2, running)
}

// TestSlowStartLeavesAMoment: if other tasks are ready, or are no suspects any more, the first
// suspect waits for a moment, from the first claim on.
func TestSlowStartLeavesAMoment(t *testing.T) {
	s, now := new(SlowStart), time.Now()
	s.moment = 250 * time.Millisecond
	for _, at := range []time.Duration{0, 249 * time.Millisecond} {
		ok, wait := s.take(suspects{}, now.Add(at))
		require.False(t, ok)
		require.Equal(t, s.moment-at, wait)
	}
	ok, _ := s.take(suspects{}, now.Add(s.moment))
	require.True(t, ok)
}

// TestSlowStartOfAShardThatEnds: a shard that ends, in whatever way, frees its places for the
// suspects of the others, and is told nothing more.
func TestSlowStartOfAShardThatEnds(t *testing.T) {
	slow := new(SlowStart)
	ends, _ := newDispatcher(t)
	stays, port := newDispatcher(t)
	ends.Join(nil, slow)
	stays.Join(nil, slow)
	take := func(d *Dispatcher) bool {
		ok, _ := slow.take(suspects{d, "a"}, time.Now())
		return ok
	}
	require.True(t, take(ends))
	require.False(t, take(ends))
	require.False(t, take(stays))
	ends.LeaveSlowStart()
	require.Equal(t, 1, port.opened)
	require.Empty(t, slow.waiting)
	_, running := slow.Counts()
	require.Zero(t, running)
	require.True(t, take(stays))
	ends.LeaveSlowStart()
	require.False(t, take(stays), "its places are freed once")
	require.NotEmpty(t, slow.end(stays, ended(1, 0, false)))
	require.True(t, take(stays))
	require.True(t, take(stays), "it is the next round")
	require.Empty(t, slow.end(stays, ended(2, 0, false)), "nobody waits")
	require.Empty(t, slow.shards)
}

// TestCrashOverShards: the suspects of a worker in all shards of the process count for its crash.
// If the process does not lead all shards, there may be more.
func TestCrashOverShards(t *testing.T) {
	slow, now := new(SlowStart), time.Now()
	var shards []*shardSuspects
	for range 3 {
		d, _ := newDispatcher(t)
		d.shards, d.now = 3, func() time.Time { return now }
		d.Join(nil, slow)
		d.rules.Share(nil, (*shardSuspects)(d))
		shards = append(shards, (*shardSuspects)(d))
	}
	crash := func(shard int, worker string) (int, bool) {
		suspects, partial, left := shards[shard].Crash(worker, 1000)
		require.LessOrEqual(t, left, uint64(1000))
		return suspects, partial
	}
	for i, s := range shards {
		s.SetAtWork("a", 1)
		s.SetAtWork("b", i/2)
	}
	n, partial := crash(0, "b")
	require.Equal(t, 1, n)
	require.False(t, partial)
	for i, s := range shards { // their leases end one after the other
		n, partial = crash(i, "a")
		require.Equal(t, 3, n)
		require.False(t, partial)
		s.SetAtWork("a", 0)
		now = now.Add(400 * time.Millisecond)
	}
	n, _ = crash(0, "a")
	require.Zero(t, n, "it is another crash")

	(*Dispatcher)(shards[2]).LeaveSlowStart()
	shards[1].SetAtWork("c", 1)
	n, partial = crash(0, "c")
	require.Equal(t, 1, n)
	require.True(t, partial, "another process leads a shard")
	shards[0].SetAtWork("c", 2)
	n, _ = crash(0, "c")
	require.Equal(t, 2, n, "the shard has come later")
}

// TestRecoveredFromCrash: a process has taken all tasks of a crash back if each of its shards has
// when it ends in order.
func TestRecoveredFromCrash(t *testing.T) {
	slow := new(SlowStart)
	require.True(t, slow.Recovered(), "nobody has died")
	one, _ := newDispatcher(t)
	two, _ := newDispatcher(t)
	one.Join(nil, slow)
	two.Join(nil, slow)
	slow.Begin([]*engine.State{one.rules, two.rules}, true, time.Minute, slog.New(slog.DiscardHandler))
	one.Close(nil, nil)
	require.False(t, slow.Recovered())
	two.LeaveSlowStart()
	require.False(t, slow.Recovered())
	two.Close(nil, nil)
	require.True(t, slow.Recovered())
}
