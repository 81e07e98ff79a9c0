package failstop

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"syscall"

	"github.com/cockroachdb/pebble/v2"
)

// Each Open writes the log of the process before to tables: one for each range of keys in it that
// has tables of its own, however little that is. Pebble merges tables that overlap. Those of a
// range that grows at its end, as most do, overlap nothing and would stay as they are: a program
// that opens a queue each minute, for a moment, would leave thousands of them, and each Open has to
// check all tables.
//
// So small tables are merged after Open, once there are many. The work is bounded by their size:
// large tables are left alone, unless many small ones lie within one.
const (
	smallTable = 64 << 10 // neighbors are merged if their tables have fewer bytes on average
	mergeFrom  = 24       // tables more than one for each range
	mergeRun   = 1 << 20  // bytes that are merged at once, about
	mergeBytes = 4 << 20  // bytes that are merged by one Open, at most
	mergeRoom  = 8 * mergeBytes
)

// tableRun is some small tables that follow each other, and all that overlap them.
type tableRun struct {
	spans  []tableSpan
	bytes  uint64
	excess int // tables beyond one for each span
}

// tableSpan is tables of one range.
type tableSpan struct {
	first, last []byte // keys
	tables      int
}

// MergeSmall merges small tables of an open store if there are many. The tables of a range have
// keys that share so many first bytes. REQUIRES: no commits meanwhile. Without it everything works,
// more slowly, and so an error is only logged.
func (l *Latch) MergeSmall(db *pebble.DB, shared int) {
	levels, err := db.SSTables()
	if err != nil {
		l.log.Warn("tables are not known", "err", err)
		return
	}
	runs, excess := smallRuns(levels, shared), 0
	for i := range runs {
		excess += runs[i].excess
	}
	if excess < mergeFrom {
		return
	}
	if u, err := l.usage(); err == nil && u.AvailBytes < mergeRoom {
		return
	}
	slices.SortStableFunc(runs, func(a, b tableRun) int { return cmp.Compare(b.excess, a.excess) })
	left := uint64(mergeBytes)
	for i := range runs {
		if runs[i].bytes > left {
			continue
		}
		left -= runs[i].bytes
		if err := l.merge(db, &runs[i]); err != nil {
			l.log.Warn("small tables could not be merged", "err", err)
			return
		}
	}
}

// smallRuns returns the small tables that may be merged.
func smallRuns(levels [][]pebble.SSTableInfo, shared int) (runs []tableRun) {
	var tables []*pebble.SSTableInfo
	for _, level := range levels {
		for i := range level {
			tables = append(tables, &level[i])
		}
	}
	slices.SortFunc(tables, func(a, b *pebble.SSTableInfo) int {
		return bytes.Compare(a.Smallest.UserKey, b.Smallest.UserKey)
	})
	var run tableRun
	end := func() {
		if run.excess > 0 {
			runs = append(runs, run)
		}
		run = tableRun{}
	}
	for len(tables) > 0 {
		n, size := overlapping(tables)
		if size >= uint64(n)*smallTable {
			end()
		} else {
			if run.bytes+size > mergeRun {
				end()
			}
			for _, t := range tables[:n] {
				run.add(t, shared)
			}
		}
		tables = tables[n:]
	}
	end()
	return runs
}

// overlapping returns how many of the tables, which are in the order of their smallest keys, reach
// into each other, from the first one on, and their size.
func overlapping(tables []*pebble.SSTableInfo) (n int, size uint64) {
	last := tables[0].Largest.UserKey
	for ; n < len(tables) && bytes.Compare(tables[n].Smallest.UserKey, last) <= 0; n++ {
		size += tables[n].Size
		if bytes.Compare(tables[n].Largest.UserKey, last) > 0 {
			last = tables[n].Largest.UserKey
		}
	}
	return n, size
}

// add adds a table. REQUIRES: its smallest key is not before those of the others.
func (r *tableRun) add(t *pebble.SSTableInfo, shared int) {
	r.bytes += t.Size
	if n := len(r.spans); n > 0 && bytes.Equal(r.spans[n-1].first[:shared], t.Smallest.UserKey[:shared]) {
		s := &r.spans[n-1]
		s.tables++
		r.excess++
		if bytes.Compare(t.Largest.UserKey, s.last) > 0 {
			s.last = t.Largest.UserKey
		}
		return
	}
	r.spans = append(r.spans, tableSpan{t.Smallest.UserKey, t.Largest.UserKey, 1})
}

// merge compacts a run. Pebble compacts tables of the last level only with those above that overlap
// them. So a table that spans them is written first: with deletions of range keys, and a store has
// no range keys.
func (l *Latch) merge(db *pebble.DB, r *tableRun) error {
	b := db.NewBatch()
	defer func() { _ = b.Close() }() // its memory only
	for _, s := range r.spans {
		if s.tables > 1 {
			if err := b.RangeKeyDelete(s.first, after(s.last), nil); err != nil {
				return err
			}
		}
	}
	if err := db.Apply(b, pebble.NoSync); err != nil {
		return err
	}
	if err := l.Flush(context.Background(), db); err != nil {
		return err
	}
	if err := db.Compact(context.Background(), r.spans[0].first, after(r.spans[len(r.spans)-1].last), false); err != nil {
		return err
	}
	return l.Err()
}

// Flush writes all commits to tables, and waits for that until ctx ends. It returns the first
// error: Pebble would retry for ever. It begins a log, so it may use the reserve: while that is
// used, it returns ENOSPC.
func (l *Latch) Flush(ctx context.Context, db *pebble.DB) error {
	if err := l.Err(); err != nil {
		return err
	}
	flushed, err := l.beginFlush(db)
	if err != nil {
		return err
	}
	select {
	case <-flushed:
		return l.Err()
	case err := <-l.trouble:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// beginFlush begins one flush at a time: the reserve has files for one log.
func (l *Latch) beginFlush(db *pebble.DB) (flushed <-chan struct{}, err error) {
	l.flushing.Lock()
	defer l.flushing.Unlock()
	if l.isPressed() {
		return nil, syscall.ENOSPC
	}
	select {
	case <-l.trouble: // of an earlier time
	default:
	}
	return db.AsyncFlush()
}

// after returns the first key after a key.
func after(key []byte) []byte { return append(slices.Clip(key), 0) }
