package engine

import (
	"slices"
	"sort"

	"codeq/internal/keys"
)

// trimmer has what is consumed of the lanes deleted by range. The removal of a task leaves its
// record in Pebble's tables until a compaction has read it, and large records are so few keys that
// Pebble sees no reason for one. A range deletion drops whole tables without reading them.
//
// Behind the first ready task of a lane only leased tasks are alive. What lies between them is
// deleted in the first keys of a group: whatever is given back, woken or promoted to a place in
// there later is written later, and disk has nothing at that moment that memory does not know.
//
// Small tasks end before they reach a table, or Pebble sees their many keys: lanes count by bytes.
type trimmer struct {
	lanes    []*Lane // with something to be deleted
	promoted int     // bytes of the records that have left the range Scheduled since it was trimmed
	bytes    int     // of the records that have left lanes, and that range, since there was nothing to do
	since    uint64  // when there was something first, by uptime; never: there is nothing
}

const (
	TrimBytes = 16 << 20  // consumed of a shard before it is trimmed; an eighth of it while the disk is tight
	TrimLane  = 256 << 10 // consumed of a lane before it is worth a range deletion
	trimAfter = 5000      // ms, after which the lanes are trimmed with less than trimBytes
	trimTight = 250       // ms, likewise while the disk is tight

	maxSegments = 1024 // of a lane
)

// trail is what memory knows of a lane behind its window.
type trail struct {
	reach    uint64    // no task that was leased has a since at it or behind; 0: none was
	taken    int       // bytes of records taken since the last segment ended
	segments *segments // nil: none has ended
	listed   bool      // of the trimmer's lanes
}

// segments divide a lane before reach.
type segments struct {
	list []segment // in order; the last one ends before reach, or there
	ripe int       // dead bytes of segments that no lease holds any more
}

// segment is a part of a lane, from the end of the one before.
//
// Invariant: leased is how many leased tasks of the lane lie in it. Of the other tasks in it, those
// before the first ready one of the lane have ended or lie elsewhere.
type segment struct {
	end    uint64 // the smallest since behind it
	leased int
	dead   int // bytes of what was taken from it and is not deleted by range, about
}

// take is called when a task leaves the window at its front.
func (t *trail) take(since uint64) { t.reach = max(t.reach, since+1) }

// lease counts a leased task at a since.
func (t *trail) lease(since uint64) {
	t.reach = max(t.reach, since+1)
	if t.segments != nil {
		if g := t.segments.at(since); g != nil {
			g.leased++
		}
	}
}

// unlease is the end of a lease.
func (t *trail) unlease(since uint64) {
	if t.segments == nil {
		return
	}
	if g := t.segments.at(since); g != nil {
		if g.leased--; g.leased == 0 {
			t.segments.ripe += g.dead
		}
	}
}

// ripe is how many dead bytes the ends of leases have freed of segments.
func (t *trail) ripe() int {
	if t.segments == nil {
		return 0
	}
	return t.segments.ripe
}

// at returns the segment that has a since; nil if none has.
func (g *segments) at(since uint64) *segment {
	if i := sort.Search(len(g.list), func(i int) bool { return since < g.list[i].end }); i < len(g.list) {
		return &g.list[i]
	}
	return nil
}

// end is where the last segment ends.
func (g *segments) end() uint64 {
	if len(g.list) == 0 {
		return 0
	}
	return g.list[len(g.list)-1].end
}

// close ends the segment under way, in which leased tasks of a lane lie that lie in no other.
func (t *trail) close(leased int) {
	if t.segments == nil {
		t.segments = new(segments)
	}
	g := t.segments
	if t.reach > g.end() {
		for i := range g.list {
			leased -= g.list[i].leased
		}
		g.list = append(g.list, segment{end: t.reach, leased: leased})
	}
	if n := len(g.list); n > 0 {
		g.list[n-1].dead += t.taken
		t.taken = 0
	}
	if len(g.list) > maxSegments {
		g.halve()
	}
}

// halve joins segments in pairs.
func (g *segments) halve() {
	joined := g.list[:0]
	for pair := range slices.Chunk(g.list, 2) {
		whole := pair[len(pair)-1]
		if len(pair) == 2 {
			whole.leased += pair[0].leased
			whole.dead += pair[0].dead
		}
		joined = append(joined, whole)
	}
	g.list = joined
}

// gaps calls visit with each run of segments without a living task that has enough dead bytes:
// nothing before first is ready. The run becomes one segment, from which nothing has been taken.
func (g *segments) gaps(first uint64, enough int, visit func(from, to uint64)) {
	kept := g.list[:0]
	from := uint64(0)
	for i := 0; i < len(g.list); {
		run := segment{end: from}
		n := i
		for ; n < len(g.list) && g.list[n].leased == 0 && g.list[n].end <= first; n++ {
			run.end = g.list[n].end
			run.dead += g.list[n].dead
		}
		switch {
		case n == i:
			run = g.list[i]
			n++
		case run.dead >= enough:
			visit(from, run.end)
			run.dead = 0
		}
		kept = append(kept, run)
		from, i = run.end, n
	}
	g.list, g.ripe = kept, 0
}

// trimSoon has a lane trimmed.
func (s *State) trimSoon(l *Lane) {
	if !l.trail.listed {
		l.trail.listed = true
		s.trimmer.lanes = append(s.trimmer.lanes, l)
		s.trimmer.begin(s.Uptime)
	}
}

// consumed counts a record that leaves a lane.
func (s *State) consumed(l *Lane, bytes int) {
	s.trimmer.bytes += bytes
	if l.trail.taken += bytes; l.trail.taken >= s.config.TrimLane {
		s.trimSoon(l)
	}
}

func (t *trimmer) begin(now uint64) {
	if t.since == Never {
		t.since = now
	}
}

// notePromoted counts a record that leaves the range Scheduled, all before nextDue being dead.
func (s *State) notePromoted(bytes int) {
	t := &s.trimmer
	t.bytes += bytes
	if t.promoted += bytes; t.promoted >= s.config.TrimLane {
		t.begin(s.Uptime)
	}
}

// trimAt is when lanes are to be trimmed, by uptime.
func (s *State) trimAt() uint64 {
	t := &s.trimmer
	switch {
	case t.since == Never:
		return Never
	case s.Tight && t.bytes >= s.config.TrimBytes/8, t.bytes >= s.config.TrimBytes:
		return 0
	case s.Tight:
		return t.since + trimTight
	}
	return t.since + trimAfter
}

func (s *State) trimIsDue() bool { return s.trimmer.since != Never && s.trimAt() <= s.Uptime }

// trim deletes by range what is dead of the lanes that are listed, and of the scheduled tasks.
func (s *State) trim() {
	t := &s.trimmer
	if !s.Group.Batch.Empty() || len(s.Group.tasks) > 0 { // load has put something into it
		return
	}
	if !s.Store.MayReclaim() { // there is nothing to be dropped
		t.promoted = 0
	}
	if t.promoted >= s.config.TrimLane {
		lower, upper := keys.Range(keys.Scheduled)
		if s.nextDue != nothingDue {
			upper = keys.AppendScheduled(nil, s.nextDue.at, s.nextDue.name)
		}
		s.Group.trimRange(lower, upper)
		t.promoted = 0
	}
	for n := len(t.lanes); n > 0 && !s.Spent(); n = len(t.lanes) {
		l := t.lanes[n-1]
		t.lanes[n-1], t.lanes = nil, t.lanes[:n-1]
		l.trail.listed = false
		switch {
		case s.lanes.At(int(l.number)) != l: // it has left memory
		case !s.Store.MayReclaim():
			l.trail.taken, l.trail.segments = 0, nil
		default:
			s.trimLane(l)
		}
	}
	if len(t.lanes) == 0 {
		t.bytes, t.since = 0, Never
	}
}

// trimLane deletes by range what is dead of a lane.
func (s *State) trimLane(l *Lane) {
	if l.isIdle() {
		s.Group.trimRange(keys.AppendLane(nil, l.number), keys.AppendLane(nil, l.number+1))
		l.trail = trail{}
		return
	}
	l.trail.close(l.leased)
	first := uint64(Never)
	if pos, ok := l.first(); ok {
		first = pos.Since
	}
	l.trail.segments.gaps(first, s.config.TrimLane, func(from, to uint64) {
		s.Group.trimRange(keys.AppendSince(nil, l.number, from), keys.AppendSince(nil, l.number, to))
	})
}
