package engine

import (
	"bytes"
	"cmp"
	"slices"

	"pgregory.net/rapid"

	"codeq/internal/keys"
)

// Suspects in the model. The model decides by itself the cost of a crash, and which suspects wait.
// It also acts as the owner, which starts suspects.

// kill is the action of a process that dies with running tasks.
func (m *model) kill(*rapid.T) {
	m.driver.killed = true
	m.reopen()
	m.driver.killed = false
}

// countDead counts the suspects at work in the process that has died. With this count it clears the
// other suspects.
func (m *model) countDead() {
	m.dead = nil
	if m.driver.killed && !m.config.Replicated {
		m.dead = &crash{Suspects: m.suspectsAtWork(-1)}
		for i := range m.shards {
			m.clearSuspects(i, m.dead.Suspects)
		}
	}
	clear(m.places)
	clear(m.beside)
	for _, t := range m.live {
		t.started = false
	}
}

// suspectsAtWork counts the suspects of Run in a shard; -1: in all.
func (m *model) suspectsAtWork(shard int) (n int) {
	for _, t := range m.live {
		if t.state == Leased && t.local && t.rec.Suspect && (shard < 0 || t.shard == shard) {
			n++
		}
	}
	return n
}

// crashes returns, by shard, the crash that has ended the expired leases of Run, and clears
// suspects because of it.
func (m *model) crashes(expired []*modelTask) map[int]*crash {
	crashes := make(map[int]*crash)
	for _, t := range expired {
		if !t.local || m.config.Replicated && !t.handled || crashes[t.shard] != nil {
			continue
		}
		if !m.config.Replicated {
			if m.dead != nil && t.over {
				crashes[t.shard] = m.dead
			}
			continue
		}
		e := m.shards[t.shard].Leases.crashes[0]
		crashes[t.shard] = &e.crash
		until := e.until + m.shards[t.shard].Leases.clock.Ahead
		if m.until[t.shard] == until { // the process has lost leases before
			continue
		}
		m.until[t.shard] = until
		if n := m.suspectsAtWork(t.shard); n != e.Suspects {
			m.rt.Fatalf("a process has died with %d suspects of shard %d, expected %d", e.Suspects, t.shard, n)
		}
		m.clearSuspects(t.shard, e.Suspects)
	}
	return crashes
}

// clearSuspects clears the suspects that wait in a shard, if others were at work.
func (m *model) clearSuspects(shard, atWork int) {
	for _, t := range m.live {
		if atWork > 0 && t.shard == shard && t.state == Blocked && t.on == onSuspicion {
			t.rec.Suspect = false
			m.toReady(t, keys.SinceOf(t.id))
		}
	}
}

// adoptCleared reads from disk which leases of Claim expired before a crash of the same time: the
// crash clears the suspects of these leases, too.
func (m *model) adoptCleared(expired []*modelTask, crashes map[int]*crash) {
	for _, t := range expired {
		c := crashes[t.shard]
		if c != nil && c.Suspects > 0 && !t.local && t.state == Blocked && t.on == onSuspicion && m.placeOf(t).Range == keys.Task {
			t.rec.Suspect = false
			m.toReady(t, keys.SinceOf(t.id))
		}
	}
}

// crashed is the end of an attempt with its process.
func (m *model) crashed(t *modelTask, c *crash) {
	counts := t.overdue || t.rec.Suspect && c.Suspects == 1 && !c.Partial
	if !counts {
		t.rec.Attempts--
		t.rec.Crashes++
	}
	t.rec.Suspect = t.rec.Suspect || c.Suspects == 0
	t.rec.Error, t.rec.RetryFirst = causeCrash, false
	m.expect(EventExpired, t, causeCrash)
	most := m.maxAttempts(t, 0)
	if counts && t.rec.Attempts >= most || t.rec.Crashes >= crashesPerAttempt*most {
		m.toDead(t)
		return
	}
	m.toReadyOrHeld(t, t.since)
}

// toReadyOrHeld is toReady for a task that may be a suspect.
func (m *model) toReadyOrHeld(t *modelTask, since uint64) {
	if t.rec.Suspect {
		m.toBlocked(t, onSuspicion)
		return
	}
	m.toReady(t, since)
}

// start is the action of an owner that starts suspects of a queue.
func (m *model) start(t *rapid.T) {
	var waiting []*modelTask
	for _, t := range m.live {
		if t.state == Blocked && t.on == onSuspicion && !m.settings[t.Queue].Paused {
			waiting = append(waiting, t)
		}
	}
	if len(waiting) == 0 {
		t.Skip()
	}
	first := oneOf(m, "of the queue of", waiting...)
	waiting = slices.DeleteFunc(waiting, func(t *modelTask) bool { return t.shard != first.shard || t.Queue != first.Queue })
	slices.SortFunc(waiting, func(a, b *modelTask) int {
		return cmp.Or(cmp.Compare(m.suspectPart(a), m.suspectPart(b)), bytes.Compare(a.id[:], b.id[:]))
	})
	n := rapid.IntRange(1, 3).Draw(m.rt, "suspects")
	s := m.group(first.shard)
	for range n {
		q := s.Names.Queues[first.Queue]
		if q != nil && q.Stale > 0 {
			n = 0
			break
		}
		if q == nil || !s.Suspects.Start(q, func() bool { return true }) {
			m.rt.Fatalf("suspects of queue %s may not start", first.Queue)
		}
	}
	m.places[first.shard] += n
	m.deliver()
	for _, t := range waiting[:min(n, len(waiting))] {
		m.toReady(t, keys.SinceOf(t.id))
		t.started = true
	}
	m.settle(false)
}

// suspectPart is the scope of a waiting suspect.
func (m *model) suspectPart(t *modelTask) int { return keys.SuspectPart(m.placeOf(t).At) }

// begins is for a task that gets a lease. If an earlier process started it as a suspect, it was not
// at work at the end of that process, and is no suspect any more.
func (m *model) begins(t *modelTask) {
	t.rec.Suspect = t.rec.Suspect && t.started
}

// hearPlaces counts the places of suspects that have ended.
func (m *model) hearPlaces(s *drivenShard) {
	e := &s.Effects.Suspects
	m.places[s.config.Shard] += e.Late - e.Passed - e.Freed
	m.beside[s.config.Shard] += e.Beside - e.Apart
}

// comparePlaces: each place belongs to a suspect.
func (m *model) comparePlaces() {
	for i, s := range m.shards {
		n, stale, beside := 0, 0, len(s.Suspects.beside)
		for _, q := range s.Names.Queues {
			n += q.starting
			stale += q.Stale
		}
		for _, st := range s.Suspects.started {
			if st.at != 0 {
				n++
			} else {
				stale--
			}
		}
		if stale != 0 || beside != m.beside[i] {
			m.rt.Fatalf("shard %d has %d more suspects without a place than it knows, and %d tasks beside them, expected %d", i, stale, beside, m.beside[i])
		}
		if n != m.places[i] {
			m.rt.Fatalf("shard %d has %d suspects with %d places", i, n, m.places[i])
		}
		for id := range s.Suspects.started {
			if t := m.tasks[id]; t == nil || !t.rec.Suspect {
				m.rt.Fatalf("shard %d has a place of task %s, which is %+v", i, keys.FormatID(id), t)
			}
		}
	}
}
