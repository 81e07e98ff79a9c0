package engine

import (
	"slices"
	"sort"

	"codeq/internal/keys"
)

// trimmer deletes the consumed parts of lanes by range. The removal of a task leaves its record in
// Pebble's tables until a compaction has read it, and large records have so few keys that Pebble
// sees no reason for one. A range deletion drops whole tables without reading them.
//
// Before the first ready task of a lane only leased tasks are alive. What lies between them is
// deleted in the first keys of a group: a task that is given back, woken or promoted to a place in
// there is written later, and at that moment disk has nothing there that memory does not know.
//
// Small tasks end before they reach a table, or Pebble sees their many keys: lanes are counted in
// bytes.
type trimmer struct {
	lanes    []*Lane // with something to delete
	promoted int     // bytes of the records that have left the range Scheduled since it was trimmed
	bytes    int     // of the records that have left lanes and that range since all was trimmed
	since    uint64  // since when there is something to delete, by uptime; Never: nothing
}

const (
	TrimBytes = 16 << 20  // consumed in a shard that is then trimmed; an eighth on a tight disk
	TrimLane  = 256 << 10 // consumed in a lane that then deserves a range deletion
	trimAfter = 5000      // ms, after which lanes are trimmed with less than TrimBytes
	trimTight = 250       // ms, the same on a tight disk

	maxSegments = 1024 // of a lane
)

// trail is what memory knows of a lane before its window.
type trail struct {
	reach    uint64    // all tasks that were ever leased have a smaller since; 0: none was
	segments *segments // nil: none has ended
	taken    int32     // bytes of records taken since the last segment ended
	listed   bool      // in trimmer.lanes
}

// segments divide the part of a lane before reach.
type segments struct {
	list []segment // in order; the last one ends at reach or before
	ripe int       // dead bytes of segments in which no lease is left
}

// segment is a part of a lane, from the end of the previous one.
//
// Invariant: leased is how many leased tasks of the lane lie in it. The other tasks in it that lie
// before the first ready one of the lane have ended or moved.
type segment struct {
	end    uint64 // the smallest since behind it
	leased int
	dead   int // about how many bytes were taken from it and are not deleted by range
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

// unlease is called when a lease ends.
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

// ripe returns how many dead bytes the ends of leases have freed in segments.
func (t *trail) ripe() int {
	if t.segments == nil {
		return 0
	}
	return t.segments.ripe
}

// at returns the segment that contains a since; nil if none does.
func (g *segments) at(since uint64) *segment {
	if i := sort.Search(len(g.list), func(i int) bool { return since < g.list[i].end }); i < len(g.list) {
		return &g.list[i]
	}
	return nil
}

// end returns where the last segment ends.
func (g *segments) end() uint64 {
	if len(g.list) == 0 {
		return 0
	}
	return g.list[len(g.list)-1].end
}

// close ends the current segment, which has those of the lane's leased tasks that lie in no other
// segment.
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
		g.list[n-1].dead += int(t.taken)
		t.taken = 0
	}
	if len(g.list) > maxSegments {
		g.halve()
	}
}

// halve merges segments in pairs.
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

// gaps calls visit with each run of segments that has no living task and enough dead bytes; no task
// before first is ready. The run becomes one segment, from which nothing has been taken.
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

// trimSoon adds a lane to those that are to be trimmed.
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
	if l.trail.taken += int32(bytes); int(l.trail.taken) >= s.config.TrimLane {
		s.trimSoon(l)
	}
}

func (t *trimmer) begin(now uint64) {
	if t.since == Never {
		t.since = now
	}
}

// notePromoted counts a record that leaves the range Scheduled, in which everything before nextDue
// and nextWait is dead.
func (s *State) notePromoted(bytes int) {
	t := &s.trimmer
	t.bytes += bytes
	if t.promoted += bytes; t.promoted >= s.config.TrimLane {
		t.begin(s.Uptime)
	}
}

// trimAt returns when lanes are to be trimmed, by uptime.
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

// trim deletes by range the dead parts of the listed lanes, and of the scheduled tasks.
func (s *State) trim() {
	t := &s.trimmer
	if !s.Group.Batch.Empty() || len(s.Group.tasks) > 0 { // load has put something into it
		return
	}
	if !s.Store.MayReclaim() { // a range deletion would drop nothing
		t.promoted = 0
	}
	if t.promoted >= s.config.TrimLane {
		lower, upper := keys.Range(keys.Scheduled)
		if first := s.firstScheduled(); first != nothingDue {
			upper = keys.AppendScheduled(nil, first.at, first.name)
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

// trimLane deletes by range the dead parts of a lane.
func (s *State) trimLane(l *Lane) {
	if l.isIdle() {
		s.Group.trimRange(keys.AppendLane(nil, l.number), keys.AppendLane(nil, l.number+1))
		l.trail = trail{}
		return
	}
	l.trail.close(int(l.leased))
	first := uint64(Never)
	if pos, ok := l.first(); ok {
		first = pos.Since
	}
	l.trail.segments.gaps(first, s.config.TrimLane, func(from, to uint64) {
		s.Group.trimRange(keys.AppendSince(nil, l.number, from), keys.AppendSince(nil, l.number, to))
	})
}
