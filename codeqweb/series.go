package codeqweb

import (
	"math"
	"slices"
	"time"

	"codeq"
)

// point is the state of a queue, or of all queues, at one time.
type point struct {
	at                                      uint32 // seconds since 1970
	ready, scheduled, blocked, leased, dead uint32 // tasks, capped
	produced, completed, failed             uint32 // since the point before
	oldest                                  uint32 // age of the oldest ready task, in seconds
}

// resolution is the distance of the points of a ring.
type resolution int

const (
	bySecond resolution = iota
	byMinute
	byTenMinutes
)

// resolutions has the distance and the number of the points that are kept: of five minutes, of two
// days, so that a day has the one before it, and of eight days.
var resolutions = [...]struct {
	every time.Duration
	kept  int
}{{time.Second, 300}, {time.Minute, 2880}, {10 * time.Minute, 1152}}

// series has the points of a queue.
type series struct {
	rings [len(resolutions)]ring
	used  time.Time // last activity of the queue, or last view
}

// ring has the points of one resolution.
//
// Invariant: it is filled from 0 on, and then overwritten from next on.
type ring struct {
	points []point
	next   int
	totals totals // at the last point
}

func (r *ring) push(p point, kept int) {
	if len(r.points) < kept {
		if len(r.points) == cap(r.points) { // append would allocate too much
			r.points = slices.Grow(r.points, min(kept, max(16, 2*len(r.points)))-len(r.points))
		}
		r.points = append(r.points, p)
		return
	}
	r.points[r.next] = p
	r.next = (r.next + 1) % kept
}

// merge adds a point. It merges it with the last one in the same second. If the clock was set back,
// the points after it go: the times of a chart ascend.
func (r *ring) merge(p point, kept int) {
	last := r.last()
	if last != nil && last.at > p.at {
		all := r.all()
		for len(all) > 0 && all[len(all)-1].at > p.at {
			all = all[:len(all)-1]
		}
		r.points, r.next = all, 0
		last = r.last()
	}
	if last != nil && last.at == p.at {
		p.produced, p.completed, p.failed = p.produced+last.produced, p.completed+last.completed, p.failed+last.failed
		*last = p
		return
	}
	r.push(p, kept)
}

// last returns the newest point; nil: there is none.
func (r *ring) last() *point {
	if len(r.points) == 0 {
		return nil
	}
	return &r.points[(r.next+len(r.points)-1)%len(r.points)]
}

// all returns a copy, the oldest first.
func (r *ring) all() []point {
	return append(slices.Clone(r.points[r.next:]), r.points[:r.next]...)
}

// start makes the next points count from totals.
func (s *series) start(from totals) {
	for i := range s.rings {
		s.rings[i].totals = from
	}
}

// add adds a sample. There is at most one point in each interval of a resolution.
func (s *series) add(now, before *row, at, last time.Time, begins bool) {
	if begins {
		s.start(now.totals)
	}
	if now.totals.since(before.totals) != (totals{}) {
		s.used = at
	}
	for i := range s.rings {
		ring, res := &s.rings[i], resolutions[i]
		if resolution(i) != bySecond && !begins && at.Truncate(res.every).Equal(last.Truncate(res.every)) {
			continue
		}
		ring.merge(pointOf(now, now.totals.since(ring.totals), at), res.kept)
		ring.totals = now.totals
	}
}

func pointOf(r *row, d totals, at time.Time) point {
	return point{
		at: uint32(at.Unix()), ready: fit(r.Counts.Ready), scheduled: fit(r.Counts.Scheduled), blocked: fit(r.Counts.Blocked),
		leased: fit(r.Counts.Leased), dead: fit(r.Counts.Dead), produced: fit(d.produced), completed: fit(d.completed), failed: fit(d.failed),
		oldest: fit(uint64(r.wait(at) / time.Second)),
	}
}

func fit(n uint64) uint32 { return uint32(min(n, math.MaxUint32)) }

// totals has the sums of codeq.Totals for a chart.
type totals struct{ produced, completed, failed uint64 }

func totalsOf(t *codeq.Totals) totals {
	return totals{t.Produced, t.Completed, t.Retried + t.Expired + t.Dead}
}

// since returns the difference to before; zero if the totals were reset.
func (t totals) since(before totals) totals {
	if t.produced < before.produced || t.completed < before.completed || t.failed < before.failed {
		return totals{}
	}
	return totals{t.produced - before.produced, t.completed - before.completed, t.failed - before.failed}
}

func (t *totals) add(o totals) {
	t.produced, t.completed, t.failed = t.produced+o.produced, t.completed+o.completed, t.failed+o.failed
}
