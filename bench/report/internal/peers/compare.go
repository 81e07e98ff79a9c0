package peers

import (
	"fmt"
	"math"
)

// rate returns the cycles a second; NaN if the row was not measured, or failed.
func (r row) rate() float64 {
	if r.result == nil || r.result.Err != nil {
		return math.NaN()
	}
	return r.result.Rate()
}

// fastest returns the fitting row with the highest rate; false if none has a rate.
func fastest(rows []row, fits func(row) bool) (best row, ok bool) {
	for _, r := range rows {
		if fits(r) && !math.IsNaN(r.rate()) && (!ok || r.rate() > best.rate()) {
			best, ok = r, true
		}
	}
	return best, ok
}

// codeqAt returns codeq at a durability, by single calls or by batches, with completed tasks kept
// or deleted.
func codeqAt(rows []row, c class, batches, retains bool) (row, bool) {
	return fastest(rows, func(r row) bool {
		return r.Queue == codeqName && r.Class == c && (r.Batch > 1) == batches && r.Retains == retains
	})
}

// ratio returns codeq's rate divided by the row's, at the same class, both by single calls or both
// by batches, both with completed tasks kept or both with them deleted; NaN if one of them has no
// rate.
func ratio(rows []row, r row) float64 {
	q, ok := codeqAt(rows, r.Class, r.Batch > 1, r.Retains)
	if !ok || r.rate() == 0 {
		return math.NaN()
	}
	return q.rate() / r.rate()
}

// target is a wanted speed of codeq, in multiples of the fastest peer with leases.
type target struct {
	class   class
	batches bool
	times   float64
}

var targets = []target{{process, false, 7}, {process, true, 10}, {disk, false, 10}}

func (t target) String() string {
	way := "single calls"
	if t.batches {
		way = "batches with Run"
	}
	return way + " at " + t.class.String()
}

// reading selects the peers of a target.
type reading struct {
	equal bool // only peers of the same class, and not the weaker ones
	any   bool // driven in any way, not only in the same way
}

func (t target) readings() []reading {
	if t.class == disk {
		return []reading{{false, false}, {false, true}, {true, false}, {true, true}}
	}
	return []reading{{false, false}, {false, true}}
}

func (t target) fits(g reading, r row) bool {
	return r.Queue != codeqName && r.Leases &&
		(r.Class == t.class || r.Class < t.class && !g.equal) &&
		((r.Batch > 1) == t.batches || g.any)
}

// describe returns the peers of a reading in words.
func (t target) describe(g reading) string {
	durability := "equal or weaker durability"
	if g.equal {
		durability = "equal durability"
	}
	way := "single calls"
	if t.batches {
		way = "batches"
	}
	if g.any {
		way = "driven in its best way"
	}
	return durability + ", " + way
}

// verdict is the outcome of a target in one reading.
type verdict struct {
	target
	reading
	codeq, peer row
	ok          bool // both were measured
}

func (v verdict) ratio() float64 {
	if !v.ok {
		return math.NaN()
	}
	return v.codeq.rate() / v.peer.rate()
}

// outcome returns the last column of the table.
func (v verdict) outcome() string {
	switch {
	case !v.ok:
		return "not measured"
	case v.ratio() >= v.times:
		return "met"
	}
	return fmt.Sprintf("not met: %.1f of %.0f times", v.ratio(), v.times)
}

// verdicts returns all verdicts, in the order of the targets.
func verdicts(rows []row) []verdict {
	var all []verdict
	for _, t := range targets {
		for _, g := range t.readings() {
			v := verdict{target: t, reading: g}
			var haveCodeq, havePeer bool
			v.peer, havePeer = fastest(rows, func(r row) bool { return t.fits(g, r) })
			v.codeq, haveCodeq = codeqAt(rows, t.class, t.batches, v.peer.Retains)
			v.ok = haveCodeq && havePeer
			all = append(all, v)
		}
	}
	return all
}
