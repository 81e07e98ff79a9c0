package ready

import (
	"slices"
	"sort"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
)

// trimmer deletes the consumed parts of lanes by range. The removal of a task leaves its record in
// Pebble's tables until a compaction has read it, and large records have so few keys that Pebble
// sees no reason for one. A range deletion drops whole tables without reading them.
//
// Before the first ready task of a lane only leased tasks are alive. The records between them are
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
	trimAfter = 5000 // ms; then lanes with less than Config.TrimBytes are trimmed too
	trimTight = 250  // ms, the same on a tight disk

	maxSegments = 1024 // of a lane
)

// trail describes the part of a lane before its window.
type trail struct {
	reach    uint64    // all tasks that were ever leased have a smaller since; 0: none was
	segments *segments // nil: none has ended
}

// segments divide the part of a lane before reach.
type segments struct {
	list []segment // in order; the last one ends at reach or before
	ripe int       // dead bytes of segments without leases
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

// end returns the end of the last segment.
func (g *segments) end() uint64 {
	if len(g.list) == 0 {
		return 0
	}
	return g.list[len(g.list)-1].end
}

// close ends the current segment. It contains the leased tasks of the lane that lie in no other
// segment, and gets the taken bytes. close returns taken if there is no segment, otherwise 0.
func (t *trail) close(leased int, taken int32) (left int32) {
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
		g.list[n-1].dead += int(taken)
		taken = 0
	}
	if len(g.list) > maxSegments {
		g.halve()
	}
	return taken
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
// before first is ready. The run becomes one segment without dead bytes.
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

// trimSoon adds a lane to the trimmer's list.
func (t *Tasks) trimSoon(l *Lane) {
	if !l.listed {
		l.listed = true
		t.trimmer.lanes = append(t.trimmer.lanes, l)
		t.trimmer.begin(t.uptime)
	}
}

// consumed counts a record that leaves a lane.
func (t *Tasks) consumed(l *Lane, bytes int) {
	t.trimmer.bytes += bytes
	if l.taken += int32(bytes); int(l.taken) >= t.config.TrimLane {
		t.trimSoon(l)
	}
}

func (t *trimmer) begin(now uint64) {
	if t.since == Never {
		t.since = now
	}
}

// Promoted counts a record that leaves the range Scheduled. Everything before the first scheduled
// task is dead there.
func (t *Tasks) Promoted(bytes int) {
	r := &t.trimmer
	r.bytes += bytes
	if r.promoted += bytes; r.promoted >= t.config.TrimLane {
		r.begin(t.uptime)
	}
}

// TrimAt returns when Trim is due, by uptime; Never: it is not. tight: space should be given back
// at once.
func (t *Tasks) TrimAt(tight bool) uint64 {
	r := &t.trimmer
	switch {
	case r.since == Never:
		return Never
	case tight && r.bytes >= t.config.TrimBytes/8, r.bytes >= t.config.TrimBytes:
		return 0
	case tight:
		return r.since + trimTight
	}
	return r.since + trimAfter
}

// Trim deletes by range the dead part of the range Scheduled, which ends at a key, and those of the
// listed lanes, until spent returns true. It returns how many ranges it has added to a batch.
// REQUIRES: the batch and the group are empty.
func (t *Tasks) Trim(to *pebble.Batch, scheduled []byte, spent func() bool) (ranges int) {
	r := &t.trimmer
	reclaims := t.store.MayReclaim() // otherwise a range deletion would drop nothing
	if reclaims && r.promoted >= t.config.TrimLane {
		trimRange(to, []byte{keys.Scheduled}, scheduled)
	}
	if !reclaims || r.promoted >= t.config.TrimLane {
		r.promoted = 0
	}
	for n := len(r.lanes); n > 0 && !spent(); n = len(r.lanes) {
		l := r.lanes[n-1]
		r.lanes[n-1], r.lanes = nil, r.lanes[:n-1]
		l.listed = false
		switch {
		case l.Queue == nil: // it has left memory
		case !reclaims:
			l.taken, l.trail.segments = 0, nil
		default:
			t.trimLane(to, l)
		}
	}
	if len(r.lanes) == 0 {
		r.bytes, r.since = 0, Never
	}
	return int(to.Count())
}

func trimRange(to *pebble.Batch, lower, upper []byte) {
	_ = to.DeleteRange(lower, upper, nil) // fails for indexed batches only
}

// trimLane deletes by range the dead parts of a lane.
func (t *Tasks) trimLane(to *pebble.Batch, l *Lane) {
	if l.isIdle() {
		trimRange(to, keys.AppendLane(nil, l.Number), keys.AppendLane(nil, l.Number+1))
		l.trail, l.taken = trail{}, 0
		return
	}
	l.taken = l.trail.close(int(l.leased), l.taken)
	first := uint64(Never)
	if pos, _, ok := l.First(); ok {
		first = pos.Since
	}
	l.trail.segments.gaps(first, t.config.TrimLane, func(from, end uint64) {
		trimRange(to, keys.AppendSince(nil, l.Number, from), keys.AppendSince(nil, l.Number, end))
	})
}
