package engine

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/container/arena"
	"codeq/internal/keys"
	"codeq/internal/ready"
	"codeq/internal/store"
)

// refiller reads ready tasks into memory before claims need them: for the rings that ask for it,
// the lanes next in turn. One pass a group reads the lanes in the order of their keys with one
// iterator. Its lanes, bytes and time are bounded, so that claims of other queues do not wait for
// it.
type refiller struct {
	wants []*ring // first come, first served
	rest  []*ring // its memory is used for the next wants
	heads []*Lane // of which the first ready task is asked for
	plan  []*Lane // lanes that the current pass reads
	most  int     // lanes that a pass may read, by the time that the last ones took

	key, end     []byte
	count, bytes int // tasks that the pass has read, and the bytes of their records

	// What the passes have read since the shard was loaded.
	passes, lanes, tasks, read uint64
}

const (
	refillTasks = 1024    // end a pass; also the limit of one lane in a pass
	refillBytes = 1 << 20 // end a pass
	refillLanes = 1024    // that a pass reads at most
	refillLooks = 4096    // lanes that a pass looks at for each ring, whether it reads them or not

	refillTime = time.Millisecond     // that a pass should take
	refillStop = 4 * time.Millisecond // ends a pass
)

// want asks for the ring to be refilled before the next group.
func (s *State) want(r *ring) {
	if !r.wanted {
		r.wanted = true
		r.reach = min(max(2*r.reach, ringReach), r.lanes)
		s.refiller.wants = append(s.refiller.wants, r)
	}
}

// least is how many tasks a lane that is ahead should have in memory, if it has so many: those of
// one turn, or more if the lanes are few, so that a refill is worthwhile.
func (s *State) least(r *ring, l *Lane) int {
	few := s.config.WindowTasks / 4
	return max(1, min(few, max(few/r.lanes, int(l.longestTurn()))))
}

// enough reports whether a lane needs no refill.
func (s *State) enough(r *ring, l *Lane) bool {
	n := l.window.Len()
	return l.complete || n >= s.least(r, l) ||
		n > 0 && (l.pass == s.windows.pass || l.window.Size() >= s.windows.laneShare(l)/2)
}

// advance moves the edge of a ring past the lanes that have enough, and removes lanes that turn out
// to be drained. It looks at most at so many lanes. done says that nothing remains to be brought
// ahead. The ring may be empty afterwards.
func (s *State) advance(r *ring, looks int) (done bool) {
	for ; looks > 0 && r.ahead < r.lanes; looks-- {
		l := r.edge
		switch {
		case l.drained():
			s.leaveRing(l)
			continue
		case !s.enough(r, l):
			return r.ahead >= r.reach
		}
		share := s.windows.share()
		if r.ahead > 0 && r.bytes+l.window.Footprint() > share {
			if most := s.windows.laneShare(l); l.window.Size() > 2*most && l.pass != s.windows.pass {
				s.windows.trim(l, most) // its share was larger when there were fewer lanes
				continue
			}
			r.reach = r.ahead
			return true
		}
		if l.isShared() {
			s.renewShare(l)
		}
		r.goAhead()
	}
	return r.ahead == r.lanes
}

// Refill brings the next tasks of the rings that ask for it into memory, as far as one pass goes.
// It returns false if none asks.
// REQUIRES: the group is empty, so that disk has every task.
func (s *State) Refill() bool {
	if !s.wantsRefill() {
		return false
	}
	f := &s.refiller
	if len(f.heads) > 0 {
		if s.Broken = s.findHeads(); s.Broken != nil || len(f.wants) == 0 {
			return true
		}
	}
	if f.most == 0 {
		f.most = ringReach
	}
	f.plan = f.plan[:0]
	part := max(1, f.most/len(f.wants))
	n := 0
	for ; n < len(f.wants) && len(f.plan) < f.most; n++ {
		r := f.wants[n]
		done := s.advance(r, refillLooks)
		if r.lanes > 0 && (!done || r.urgent || r.first.window.Len() > 0) {
			s.plan(r, min(part, f.most-len(f.plan)))
		}
	}
	full := false
	if len(f.plan) > 0 && s.Broken == nil {
		full, s.Broken = s.pass()
	}
	rest := append(f.rest[:0], f.wants[n:]...)
	for _, r := range f.wants[:n] {
		if r.lanes == 0 && s.Queues[r.queue.Name] != r.queue {
			s.dropRing(r) // its queue was forgotten
			continue
		}
		done := s.advance(r, refillLooks)
		r.urgent = r.urgent && r.lanes > 0 && r.first.window.Len() == 0 && !r.first.complete
		s.feed(r.queue)
		s.show(r.queue)
		if r.urgent { // other lanes were read before it
			f.most = max(1, f.most/2)
		}
		switch {
		case r.lanes == 0:
			s.dropRing(r)
		case done && !r.urgent, full && !r.urgent:
			r.wanted = false
		default:
			rest = append(rest, r)
		}
	}
	clear(f.wants)
	f.wants, f.rest = rest, f.wants[:0]
	return true
}

// plan adds at most so many lanes of a ring to those that the pass reads: first those ahead that
// have lost their tasks, then those at the edge.
func (s *State) plan(r *ring, most int) {
	f := &s.refiller
	most += len(f.plan)
	looks := refillLooks
	l := r.first
	if r.urgent || l.window.Len() > 0 && !s.enough(r, l) {
		for i := 0; i < r.ahead && looks > 0 && len(f.plan) < most; i++ {
			if i == 0 && !s.enough(r, l) || i > 0 && r.urgent && l.window.Len() == 0 && !l.complete {
				f.plan = append(f.plan, l)
			}
			l = l.ringNext
			looks--
		}
	}
	l = r.edge
	for i := r.ahead; i < min(r.reach, r.lanes) && looks > 0 && len(f.plan) < most; i++ {
		if !s.enough(r, l) {
			f.plan = append(f.plan, l)
		}
		l = l.ringNext
		looks--
	}
}

// pass reads the next tasks of the planned lanes. full says that it ended because all memory holds
// what it has just read.
func (s *State) pass() (full bool, err error) {
	f := &s.refiller
	slices.SortFunc(f.plan, func(a, b *Lane) int { return cmp.Compare(a.number, b.number) })
	begin := s.config.Elapsed()
	it, err := s.Store.DB().NewIter(&pebble.IterOptions{
		LowerBound: keys.AppendLane(nil, f.plan[0].number),
		UpperBound: keys.AppendLane(nil, f.plan[len(f.plan)-1].number+1),
	})
	if err != nil {
		return false, store.Error(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	f.passes++
	f.count, f.bytes = 0, 0
	var records arena.Arena
	var took time.Duration
	stopped := false
	for i, l := range f.plan {
		if full, err = s.fill(it, l, &records); err != nil {
			return false, err
		}
		took = s.config.Elapsed() - begin
		if stopped = full || i+1 < len(f.plan) && (f.count >= refillTasks || f.bytes >= s.passBytes() || took >= refillStop); stopped {
			break
		}
	}
	switch {
	case stopped && !full || took > 2*refillTime:
		f.most = max(1, f.most/2)
	// otherwise an urgent one would never be alone
	case took < refillTime && len(f.plan) == f.most && !full:
		f.most = min(2*f.most, refillLanes)
	}
	f.tasks += uint64(f.count)
	f.read += uint64(f.bytes)
	clear(f.plan)
	return full, nil
}

func (s *State) passBytes() int { return max(1, min(refillBytes, s.windows.limit/8)) }

// fill reads the next tasks of a lane, up to its share. full says that there was no memory for the
// next one.
func (s *State) fill(it *pebble.Iterator, l *Lane, records *arena.Arena) (full bool, err error) {
	f, w := &s.refiller, &l.window
	f.lanes++
	f.key = keys.AppendFrom(f.key[:0], l.number, l.next.Since, l.next.ID)
	f.end = keys.AppendLane(f.end[:0], l.number+1)
	room := min(refillTasks, s.config.WindowTasks-w.Len())
	share := s.windows.laneShare(l)
	s.windows.renew(l)
	l.pass = s.windows.pass
	looks := refillLooks
	at := it.SeekGEWithLimit(f.key, f.end)
	for ; at == pebble.IterValid && room > 0 && looks > 0 && (f.bytes < s.passBytes() || w.Len() == 0); at = it.NextWithLimit(f.end) {
		_, since, id, err := keys.ParseTask(it.Key())
		if err != nil {
			return false, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		pos := ready.Pos{Since: since, ID: id}
		if s.leases.byID[id] != nil {
			l.next, l.exact = pos.Next(), false
			looks--
			continue
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return false, store.Error(err)
		}
		if w.Len() > 0 && w.Size()+ready.SizeOf(len(v)) > share {
			break
		}
		if w.Len() == 0 && s.windows.bytes+w.Growth(len(v)) > s.windows.limit {
			s.windows.forget(l) // its free slots may be all memory that can be given back
		}
		if !s.windows.makeRoom(w.Growth(len(v)), l) {
			full = true
			break
		}
		before := w.Footprint()
		w.Append(ready.Item{Pos: pos, Record: records.Clone(v)})
		s.windows.resized(l, before)
		l.next, l.exact = pos.Next(), false
		room--
		s.noteRead(len(v))
		f.count++
		f.bytes += len(v)
	}
	if err := it.Error(); err != nil {
		return false, store.Error(err)
	}
	if l.complete = false; at != pebble.IterValid {
		s.completed(l)
	}
	return full, nil
}

// completed notes that no ready task of a lane is at or after next.
func (s *State) completed(l *Lane) {
	if l.complete = true; l.spilled > 0 {
		l.spilled = 0
		s.Store.RemoveDeepLane(l.number)
	}
	s.noteIdle(l)
}
