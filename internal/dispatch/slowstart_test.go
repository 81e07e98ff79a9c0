package dispatch

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
	"codeq/internal/wire"
)

// ended are ended places of a SlowStart.
func ended(passed, freed int, anew bool) *engine.Effects {
	e := new(engine.Effects)
	e.Suspects.Passed, e.Suspects.Freed, e.Suspects.Anew = passed, freed, anew
	return e
}

// TestSlowStart: each round has twice as many places as the round before, and ends when all of them
// have passed. A returned place may be taken again, and does not count. Refused suspects learn once
// that there may be places again.
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

	// New suspects begin anew when the suspect at work has passed.
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

// TestSlowStartOfAShardThatEnds: a shard that ends in any way frees its places for the suspects of
// the other shards, and gets no more reports.
func TestSlowStartOfAShardThatEnds(t *testing.T) {
	slow := new(SlowStart)
	ends, _ := newDispatcher(t)
	stays, port := newDispatcher(t)
	ends.Join(nil, slow, time.Minute)
	stays.Join(nil, slow, time.Minute)
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

// TestCrashOverShards: the suspects of a process in all shards count for its crash. The suspects of
// shards with leaders in other processes count as soon as these leaders have answered. If one
// leader does not answer, there may be more suspects.
func TestCrashOverShards(t *testing.T) {
	slow, now := new(SlowStart), time.Now()
	var shards []*shardSuspects
	for range 3 {
		d, _ := newDispatcher(t)
		d.shards, d.now = 3, func() time.Time { return now }
		d.Join(nil, slow, time.Minute)
		shards = append(shards, (*shardSuspects)(d))
	}
	crash := func(shard int, process uint64) (int, bool) {
		suspects, partial, left, ok := shards[shard].Crash(process, 1000)
		require.True(t, ok)
		require.LessOrEqual(t, left, uint64(1000))
		return suspects, partial
	}
	for i, s := range shards {
		s.SetAtWork(1, 1)
		s.SetAtWork(2, i/2)
	}
	n, partial := crash(0, 2)
	require.Equal(t, 1, n)
	require.False(t, partial)
	for i, s := range shards { // their leases end one after the other
		n, partial = crash(i, 1)
		require.Equal(t, 3, n)
		require.False(t, partial)
		s.SetAtWork(1, 0)
		now = now.Add(400 * time.Millisecond)
	}
	n, _ = crash(0, 1)
	require.Zero(t, n, "it is another crash")

	(*Dispatcher)(shards[2]).LeaveSlowStart()
	shards[1].SetAtWork(3, 1)
	n, partial = crash(0, 3)
	require.Equal(t, 1, n)
	require.True(t, partial, "another process leads a shard")
	shards[0].SetAtWork(3, 2)
	n, _ = crash(0, 3)
	require.Equal(t, 2, n, "the shard has come later")

	var asked []byte
	require.Nil(t, slow.Answer([]byte(`{"Do": "list"}`)))
	var answer func(answers [][]byte)
	slow.Connect(func(question []byte, answered func(answers [][]byte)) { asked, answer = question, answered })
	for process, answers := range map[uint64]int{4: 1, 5: 0} {
		shards[0].SetAtWork(process, 1)
		for i := range 2 {
			_, _, _, ok := shards[i].Crash(process, 1000)
			require.False(t, ok)
		}
		shards[0].SetAtWork(process, 0)
		require.JSONEq(t, `{"Suspects": 1, "Shards": 2}`, string(slow.Answer(asked)), "it was at work in the crash")
		of := wire.AppendJSON(nil, suspectsAnswer{2 * answers, answers})
		answer([][]byte{of, []byte("nonsense")})
		n, partial = crash(1, process)
		require.Equal(t, 1+2*answers, n)
		require.Equal(t, answers == 0, partial)
	}
}

// TestRecoveredFromCrash: a process has taken back all tasks of a crash if each of its shards has
// taken back its own before an end in order.
func TestRecoveredFromCrash(t *testing.T) {
	slow := new(SlowStart)
	require.True(t, slow.Recovered(), "nobody has died")
	one, _ := newDispatcher(t)
	two, _ := newDispatcher(t)
	one.Join(nil, slow, time.Minute)
	two.Join(nil, slow, time.Minute)
	slow.Begin(true, slog.New(slog.DiscardHandler))
	one.EndInOrder()
	one.Close(nil, nil)
	require.False(t, slow.Recovered())
	two.Close(nil, nil) // it has failed
	two.LeaveSlowStart()
	require.False(t, slow.Recovered())
	two.EndInOrder()
	require.True(t, slow.Recovered())
}

// TestDrawnSuspects: the next place is for the drawn suspects, for any order of the requests. If
// these do not want the place for a moment, the place is for all suspects. A claim that wants the
// drawn suspects opens their shard.
func TestDrawnSuspects(t *testing.T) {
	slow, now := new(SlowStart), time.Now()
	var offers []suspects
	var ports []*port
	for range 2 {
		d, p := newDispatcher(t)
		d.Join(nil, slow, time.Minute)
		offers, ports = append(offers, suspects{d, "a"}), append(ports, p)
		slow.offer(suspects{d, "a"}, true)
	}
	first := make(map[suspects]int)
	for range 200 {
		for i, of := range offers {
			if ok, wait := slow.take(of, now); ok {
				first[of]++
				slow.end(of.claims, ended(0, 1, false))
				break
			} else if i == 0 {
				require.Equal(t, time.Minute/moments, wait)
			}
		}
	}
	require.Len(t, first, 2)
	require.Greater(t, min(first[offers[0]], first[offers[1]]), 50, "%v", first)

	slow.drawNone()
	slow.draw(now)
	at := 0
	if slow.drawn == offers[1] {
		at = 1
	}
	opened := ports[at].opened
	for range 2 {
		slow.want("b", offers[1-at].claims, now)
		slow.want("a", offers[1-at].claims, now)
	}
	require.Equal(t, opened+1, ports[at].opened, "once")
	require.True(t, slow.isWanted(offers[at]))
	require.False(t, slow.isWanted(offers[at]))
	ok, wait := slow.take(offers[1-at], now)
	require.False(t, ok)
	ok, _ = slow.take(offers[1-at], now.Add(wait))
	require.True(t, ok, "they were not wanted")
	slow.want("a", offers[1-at].claims, now)
	require.Equal(t, opened+1, ports[at].opened, "there is no place")
	for _, of := range offers {
		slow.offer(of, false)
	}
	require.Zero(t, slow.offered.Load())
}

// TestSlowStartAfterOthers: suspects wait until the tasks that ran beside suspects in a crash have
// ended an attempt, or for the time that a suspect needs to pass.
func TestSlowStartAfterOthers(t *testing.T) {
	for _, apart := range []bool{true, false} {
		slow, now := new(SlowStart), time.Now()
		d, _ := newDispatcher(t)
		d.Join(nil, slow, time.Minute)
		of := suspects{d, "a"}
		e := new(engine.Effects)
		e.Suspects.Beside = 2
		require.Empty(t, slow.end(d, e))
		ok, wait := slow.take(of, now)
		require.False(t, ok)
		require.Equal(t, time.Minute, wait)
		if !apart {
			ok, _ = slow.take(of, now.Add(wait))
			require.True(t, ok)
			continue
		}
		e.Suspects.Beside, e.Suspects.Apart = 0, 2
		require.Contains(t, slow.end(d, e), of)
		ok, _ = slow.take(of, now)
		require.True(t, ok)
	}
}
