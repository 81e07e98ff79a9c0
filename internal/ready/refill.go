package ready

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/container/arena"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// refiller reads ready tasks into memory before claims need them: for the rings that ask for it,
// the lanes next in turn. One pass a group reads the lanes in the order of their keys with one
// iterator. Its lanes, bytes and time are bounded, so that claims of other queues do not wait for
// it.
type refiller struct {
	wants []*ring // first come, first served
	rest  []*ring // its memory is used for the next wants
	heads []*Lane // Ask wants their first ready tasks
	plan  []*Lane // lanes that the current pass reads
	most  int     // lanes that a pass may read, by the time that the last ones took

	key, end     []byte
	count, bytes int // tasks that the pass has read, and the bytes of their records

	done Refilled // by the current refill

	// The sum of all passes since the load of the shard.
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
func (t *Tasks) want(r *ring) {
	if !r.wanted {
		r.wanted = true
		r.reach = min(max(2*r.reach, ringReach), r.lanes)
		t.refiller.wants = append(t.refiller.wants, r)
	}
}

// least is how many tasks a lane that is ahead should have in memory, if it has so many: those of
// one turn, or more if the lanes are few, so that a refill is worthwhile.
func (t *Tasks) least(r *ring, l *Lane) int {
	few := t.config.WindowTasks / 4
	return max(1, min(few, max(few/r.lanes, int(l.longestTurn()))))
}

// enough reports whether a lane needs no refill.
func (t *Tasks) enough(r *ring, l *Lane) bool {
	n := l.window.Len()
	return l.complete || n >= t.least(r, l) ||
		n > 0 && (l.pass == t.windows.pass || l.window.Size() >= t.windows.laneShare(l)/2)
}

// advance moves the edge of a ring past the lanes that have enough, and removes lanes that turn out
// to be drained. It looks at most at so many lanes. done says that nothing remains to be brought
// ahead. The ring may be empty afterwards.
func (t *Tasks) advance(r *ring, looks int) (done bool) {
	for ; looks > 0 && r.ahead < r.lanes; looks-- {
		l := r.edge
		switch {
		case l.drained():
			t.leaveRing(l)
			continue
		case !t.enough(r, l):
			return r.ahead >= r.reach
		}
		share := t.windows.share()
		if r.ahead > 0 && r.bytes+l.window.Footprint() > share {
			if most := t.windows.laneShare(l); l.window.Size() > 2*most && l.pass != t.windows.pass {
				t.windows.trim(l, most) // its share was larger when there were fewer lanes
				continue
			}
			r.reach = r.ahead
			return true
		}
		if l.isShared() {
			t.renewShare(l)
		}
		r.goAhead()
	}
	return r.ahead == r.lanes
}

// WantsRefill reports whether Refill should read ready tasks into memory before the next group.
func (t *Tasks) WantsRefill() bool { return len(t.refiller.wants)+len(t.refiller.heads) > 0 }

// Refilled is the result of a refill. It is valid until the next one.
type Refilled struct {
	Fed            []*Queue // a claim may get more of them than before
	Shown          []*Queue // their first ready tasks are known
	Entries, Bytes int      // read
}

// Refill brings the next tasks of the rings that ask for it into memory, as far as one pass goes.
// REQUIRES: the group is empty, so that disk has every task.
func (t *Tasks) Refill() (done Refilled, err error) {
	f := &t.refiller
	clear(f.done.Fed)
	clear(f.done.Shown)
	f.done = Refilled{Fed: f.done.Fed[:0], Shown: f.done.Shown[:0]}
	if len(f.heads) > 0 {
		err = t.findHeads()
	}
	if err == nil && len(f.wants) > 0 {
		err = t.refill()
	}
	return f.done, err
}

// refill does one pass for the rings that ask for it.
func (t *Tasks) refill() error {
	f := &t.refiller
	if f.most == 0 {
		f.most = ringReach
	}
	f.plan = f.plan[:0]
	part := max(1, f.most/len(f.wants))
	n := 0
	for ; n < len(f.wants) && len(f.plan) < f.most; n++ {
		r := f.wants[n]
		done := t.advance(r, refillLooks)
		if r.lanes > 0 && (!done || r.urgent || r.first.window.Len() > 0) {
			t.plan(r, min(part, f.most-len(f.plan)))
		}
	}
	full := false
	if len(f.plan) > 0 {
		var err error
		if full, err = t.pass(); err != nil {
			return err
		}
	}
	rest := append(f.rest[:0], f.wants[n:]...)
	for _, r := range f.wants[:n] {
		done := t.advance(r, refillLooks)
		r.urgent = r.urgent && r.lanes > 0 && r.first.window.Len() == 0 && !r.first.complete
		f.done.Fed = append(f.done.Fed, r.queue)
		if r.urgent { // other lanes were read before it
			f.most = max(1, f.most/2)
		}
		switch {
		case r.lanes == 0:
			t.dropRing(r)
		case done && !r.urgent, full && !r.urgent:
			r.wanted = false
		default:
			rest = append(rest, r)
		}
	}
	clear(f.wants)
	f.wants, f.rest = rest, f.wants[:0]
	return nil
}

// plan adds at most so many lanes of a ring to those that the pass reads: first those ahead that
// have lost their tasks, then those at the edge.
func (t *Tasks) plan(r *ring, most int) {
	f := &t.refiller
	most += len(f.plan)
	looks := refillLooks
	l := r.first
	if r.urgent || l.window.Len() > 0 && !t.enough(r, l) {
		for i := 0; i < r.ahead && looks > 0 && len(f.plan) < most; i++ {
			if i == 0 && !t.enough(r, l) || i > 0 && r.urgent && l.window.Len() == 0 && !l.complete {
				f.plan = append(f.plan, l)
			}
			l = l.ringNext
			looks--
		}
	}
	l = r.edge
	for i := r.ahead; i < min(r.reach, r.lanes) && looks > 0 && len(f.plan) < most; i++ {
		if !t.enough(r, l) {
			f.plan = append(f.plan, l)
		}
		l = l.ringNext
		looks--
	}
}

// pass reads the next tasks of the planned lanes. full: it ended because its own tasks fill the
// memory.
func (t *Tasks) pass() (full bool, err error) {
	f := &t.refiller
	slices.SortFunc(f.plan, func(a, b *Lane) int { return cmp.Compare(a.Number, b.Number) })
	begin := t.config.Elapsed()
	it, err := t.store.DB().NewIter(&pebble.IterOptions{
		LowerBound: keys.AppendLane(nil, f.plan[0].Number),
		UpperBound: keys.AppendLane(nil, f.plan[len(f.plan)-1].Number+1),
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
		if full, err = t.fill(it, l, &records); err != nil {
			return false, err
		}
		took = t.config.Elapsed() - begin
		if stopped = full || i+1 < len(f.plan) && (f.count >= refillTasks || f.bytes >= t.passBytes() || took >= refillStop); stopped {
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

func (t *Tasks) passBytes() int { return max(1, min(refillBytes, t.windows.limit/8)) }

// fill reads the next tasks of a lane, up to its share. full says that there was no memory for the
// next one.
func (t *Tasks) fill(it *pebble.Iterator, l *Lane, records *arena.Arena) (full bool, err error) {
	f, w := &t.refiller, &l.window
	f.lanes++
	f.key = keys.AppendFrom(f.key[:0], l.Number, l.next.Since, l.next.ID)
	f.end = keys.AppendLane(f.end[:0], l.Number+1)
	room := min(refillTasks, t.config.WindowTasks-w.Len())
	share := t.windows.laneShare(l)
	t.windows.renew(l)
	l.pass = t.windows.pass
	looks := refillLooks
	at := it.SeekGEWithLimit(f.key, f.end)
	for ; at == pebble.IterValid && room > 0 && looks > 0 && (f.bytes < t.passBytes() || w.Len() == 0); at = it.NextWithLimit(f.end) {
		_, since, id, err := keys.ParseTask(it.Key())
		if err != nil {
			return false, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		pos := Pos{Since: since, ID: id}
		if t.config.Leased(id) {
			l.next, l.exact = pos.next(), false
			looks--
			continue
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return false, store.Error(err)
		}
		if w.Len() > 0 && w.Size()+sizeOf(len(v)) > share {
			break
		}
		if w.Len() == 0 && t.windows.bytes+w.Growth(len(v)) > t.windows.limit {
			t.windows.forget(l) // its free slots may be all memory that can be given back
		}
		if !t.windows.makeRoom(w.Growth(len(v)), l) {
			full = true
			break
		}
		before := w.Footprint()
		w.Append(Item{Pos: pos, Record: records.Clone(v)})
		t.windows.resized(l, before)
		l.next, l.exact = pos.next(), false
		room--
		f.done.Entries++
		f.done.Bytes += len(v)
		f.count++
		f.bytes += len(v)
	}
	if err := it.Error(); err != nil {
		return false, store.Error(err)
	}
	if l.complete = false; at != pebble.IterValid {
		t.completed(l)
	}
	return full, nil
}

// completed notes that no ready task of a lane is at or after next.
func (t *Tasks) completed(l *Lane) {
	if l.complete = true; l.spilled > 0 {
		l.spilled = 0
		t.store.RemoveDeepLane(l.Number)
	}
	t.noteIdle(l)
}
