package store

import (
	"bytes"
	"context"
	"slices"
	"sort"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/sstable"

	"codeq/internal/guard"
)

// reclaimer gives the space back that dead records take in a store's tables. By itself Pebble
// writes the deletions in its memory to a table when it has enough of them, and merges tables by
// their number and size: of large records there are never enough, and an idle store does neither.
//
// After deletions by range (trimmer) it flushes the memory: then whole tables go without being
// read. Where the living and the dead are mixed, it compacts key ranges, one after the other, by
// the share of dead bytes in them. On a tight disk it does both at once, else when it looks: a
// while after something was committed. It looks at no store that is small, and no more when nothing
// is committed any more. In a cluster each node does so for its replicas, whoever leads them.
type reclaimer struct {
	store  *Store
	from   int64           // Config.ReclaimFrom
	wake   chan struct{}   // capacity 1
	ended  chan struct{}   // closed when its goroutine has ended; nil: it was not started
	ctx    context.Context // ends with the reclaimer
	cancel context.CancelFunc

	sampled map[uint64]sample         // of tables with deletions, by their numbers
	sizes   atomic.Pointer[deadSizes] // when it looked last; nil: it has not

	tables   atomic.Int64 // bytes in tables
	written  atomic.Int64 // bytes committed since the store was opened
	total    atomic.Int64 // likewise entries
	flushed  committed    // what is in tables, at least
	begun    committed    // what was committed when the last flush began
	before   committed    // likewise the one before
	rangeAt  atomic.Int64 // written when hasRange was set
	hasRange atomic.Bool  // range deletions have been committed, and not flushed
	hasTrim  atomic.Bool  // those of the trimmer have, which are worth a flush at once
	hurried  atomic.Bool
	free     atomic.Uint64 // bytes on the disk, when it was tight last
	armed    atomic.Bool   // it is going to look
	merged   atomic.Bool   // a flush or a compaction has ended

	next    time.Time // when it looks; zero: not before something is committed
	settles bool      // what it has flushed is being taken into account by Pebble
	quietAt int64     // total when it began to settle
	known   uint64    // dead bytes of which tables knew when it looked last, and that have been left
	hoped   int64     // bytes that might have been dead, for which it has flushed; 0: it has not, or for something else
	putOff  bool      // it would have, but not before flushAt
	flushAt time.Time
	pause   time.Duration // to flushAt, the last time

	thoroughAt time.Time     // when a thorough sample may be taken though the store is at work
	rushAt     time.Time     // when to look again on a tight disk
	idle       time.Duration // to rushAt: the longer, the more looks in succession have found nothing
	rushed     int64         // total when it last hurried; negative: it has not
}

// ReclaimFrom is how many bytes the tables of a store have, below which there is nothing to be
// gained by reclaiming; and how many of them are dead, as a rule.
const ReclaimFrom = 8 << 20

const (
	reclaimFlush    = 8 << 20   // bytes committed with which a flush comes by itself soon
	reclaimDoubt    = 64 << 10  // bytes committed around the beginning of a flush, of which it is not known which memory has them
	reclaimPiece    = 128 << 20 // bytes in tables that are compacted at once, about; on a tight disk a quarter of what is free
	reclaimPart     = 16        // one in so many of the bytes in tables may be dead, beside ReclaimFrom
	reclaimShare    = 4         // of the bytes in a range to be compacted one in so many is dead, at least
	reclaimQuiet    = 10        // likewise when nothing is committed
	reclaimVain     = 16        // of what a flush was for one in so many bytes turns out to be dead, at least, or the next one waits
	reclaimLook     = 10 * time.Second
	reclaimPause    = 160 * time.Second // at the most
	reclaimSettle   = time.Second
	reclaimThorough = time.Minute
	reclaimRush     = 100 * time.Millisecond // reclaimSettle on a tight disk
	reclaimIdle     = 2 * time.Second        // at the most between looks there
)

func newReclaimer(from int) *reclaimer {
	r := &reclaimer{from: int64(from), wake: make(chan struct{}, 1), rushed: -1}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// start begins to look after a store that has been opened.
func (r *reclaimer) start(st *Store) {
	r.store = st
	r.armed.Store(true)
	r.next = time.Now().Add(reclaimLook)
	r.measure()
	r.ended = make(chan struct{})
	go func() {
		defer close(r.ended)
		guard.Contain(st.log, "reclaimer", r.run, nil)
	}()
}

// stop ends it. A compaction that has begun goes on; Pebble waits for it.
func (r *reclaimer) stop() {
	r.cancel()
	if r.ended == nil {
		return
	}
	select {
	case <-r.ended:
	case <-r.store.latch.Parked(): // it may wait for what a panic of Pebble's has left locked
	}
}

// committed is how much has been.
type committed struct{ bytes, entries atomic.Int64 }

func (c *committed) store(bytes, entries int64) {
	c.bytes.Store(bytes)
	c.entries.Store(entries)
}

// FlushBegins is the listener's of the latch, as what follows. The flush is of the memory that was
// filled by now, or of some of it; that of which commits were part when the flush before began is
// among it.
func (r *reclaimer) FlushBegins() {
	r.before.store(r.begun.bytes.Load(), r.begun.entries.Load())
	r.begun.store(r.written.Load(), r.total.Load())
}

func (r *reclaimer) FlushEnds() {
	bytes := r.before.bytes.Load()
	r.flushed.store(bytes, r.before.entries.Load())
	if r.rangeAt.Load()+reclaimDoubt < bytes {
		r.hasTrim.Store(false)
		r.hasRange.Store(false)
	}
	r.CompactionEnds()
}

func (r *reclaimer) CompactionEnds() {
	r.merged.Store(true)
	r.poke()
}

func (r *reclaimer) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// wrote says what was committed.
func (r *reclaimer) wrote(bytes int, entries uint32) {
	r.written.Add(int64(bytes))
	r.total.Add(int64(entries))
	if r.hasTables() && !r.armed.Load() && !r.armed.Swap(true) {
		r.poke()
	}
}

// ranged says that a commit has deleted by range; trimmed, what is consumed of lanes, by the
// trimmer.
func (r *reclaimer) ranged(trimmed bool) {
	r.rangeAt.Store(r.written.Load())
	r.hasRange.Store(true)
	if trimmed {
		r.hasTrim.Store(true)
		r.poke()
	}
}

// hurry says that the disk is tight, and how many bytes are free.
func (r *reclaimer) hurry(free uint64) {
	r.free.Store(free)
	if !r.hurried.Load() && !r.hurried.Swap(true) {
		r.poke()
	}
}

// hasTables reports whether there may be dead bytes in tables that are worth an effort.
func (r *reclaimer) hasTables() bool { return r.tables.Load() >= r.from }

// trimWaits reports whether range deletions wait for a flush that will not come by itself soon.
func (r *reclaimer) trimWaits() bool {
	return r.hasTrim.Load() && r.written.Load()-r.flushed.bytes.Load() < reclaimFlush
}

// measure notes what the tables have.
func (r *reclaimer) measure() {
	m := r.store.db.Metrics()
	size := int64(0)
	for i := range m.Levels {
		size += m.Levels[i].TablesSize
	}
	r.tables.Store(size)
}

func (r *reclaimer) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		if r.next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(time.Until(r.next))
		}
		select {
		case <-r.ctx.Done():
			return
		case <-r.wake:
		case <-timer.C:
		}
		r.step()
	}
}

// step does what there is to do.
func (r *reclaimer) step() {
	if r.merged.Swap(false) {
		had := r.hasTables()
		if r.measure(); !had && r.hasTables() { // of what was committed before
			r.armed.Store(true)
		}
	}
	if !r.hasTables() {
		r.rest()
		return
	}
	now := time.Now()
	if r.next.IsZero() && r.armed.Load() {
		r.next = now.Add(reclaimLook)
	}
	if rush := r.hurried.Load(); rush && !r.settles {
		switch total := r.total.Load(); {
		case total == r.rushed:
			r.hurried.Store(false)
		case now.Before(r.rushAt):
			r.next = r.rushAt
		default:
			r.rushed, r.hoped = total, 0
			if r.hasRange.Load() || r.unflushed() >= r.from/8 {
				r.flush()
			}
			r.settle(reclaimRush)
		}
		return
	}
	if r.trimWaits() {
		r.flush()
	}
	switch {
	case r.next.IsZero() || now.Before(r.next):
	case !r.settles:
		much := r.unflushed()
		r.hoped, r.putOff = 0, false
		switch {
		case r.hasRange.Load():
			r.flush()
		case much < r.from:
		case now.Before(r.flushAt):
			r.putOff = true
		default:
			r.hoped = much
			r.flush()
		}
		r.settle(reclaimSettle)
	default:
		r.settles = false
		if found := r.compact(); found || !r.hurried.Load() {
			r.idle = 0
		} else {
			r.idle = min(max(2*r.idle, reclaimRush), reclaimIdle)
		}
		r.rushAt = time.Now().Add(r.idle)
		r.hurried.Store(false)
		if r.total.Load() == r.quietAt && r.putOff { // nothing else flushes what was committed last
			r.next = r.flushAt
			return
		}
		if r.total.Load() == r.quietAt {
			r.rest()
			if r.total.Load() == r.quietAt { // else it may have come before the rest
				return
			}
			r.armed.Store(true)
		}
		r.next = time.Now().Add(reclaimLook)
	}
}

// judge delays the next flush if the last one has brought few dead bytes: it makes one more table
// for Pebble to merge with those of the living.
func (r *reclaimer) judge(brought uint64) {
	switch {
	case r.hoped == 0:
	case brought < uint64(r.hoped)/reclaimVain:
		r.pause = min(max(2*r.pause, reclaimLook), reclaimPause)
		r.flushAt = time.Now().Add(r.pause)
	default:
		r.pause = 0
	}
}

// rest waits until something is committed.
func (r *reclaimer) rest() {
	r.next, r.settles = time.Time{}, false
	r.hurried.Store(false)
	r.armed.Store(false)
}

// settle waits until Pebble knows what it can drop.
func (r *reclaimer) settle(after time.Duration) {
	r.settles, r.quietAt = true, r.total.Load()
	r.next = time.Now().Add(after)
}

// flush writes the store's memory to tables. What fails is tried again by Pebble, or ends the
// store.
func (r *reclaimer) flush() {
	r.hasTrim.Store(false)
	r.hasRange.Store(false)
	if err := r.store.Flush(r.ctx); err != nil && r.ctx.Err() == nil {
		r.store.log.Warn("deletions could not be flushed", "err", err)
	}
}

// unflushed is how many bytes are dead of which no table knows, at the most: if each key that has
// been committed since the last flush deletes an entry as large as those of the largest kind are.
func (r *reclaimer) unflushed() int64 {
	type kind struct{ size, entries uint64 }
	kinds := make(map[byte]*kind)
	for _, level := range r.levels() {
		for i := range level {
			t := &level[i]
			if t.TableStats.NumEntries == 0 {
				continue
			}
			k := kinds[t.Smallest.UserKey[0]]
			if k == nil {
				k = new(kind)
				kinds[t.Smallest.UserKey[0]] = k
			}
			k.size += t.Size
			k.entries += t.TableStats.NumEntries
		}
	}
	most := uint64(0)
	for _, k := range kinds {
		most = max(most, k.size/k.entries)
	}
	return int64(most) * (r.total.Load() - r.flushed.entries.Load())
}

func (r *reclaimer) levels() [][]pebble.SSTableInfo {
	levels, err := r.store.db.SSTables()
	if err != nil { // the objects of another store
		r.store.log.Warn("tables are not known", "err", err)
	}
	return levels
}

// deadRange is a range of keys in tables.
type deadRange struct {
	first, last []byte
	dead        uint64 // bytes that deletions in it, and nothing else, keep in tables
	size        uint64 // of the tables below
}

// deadRanges returns the ranges in which deletions lie above what they delete, in the order of
// their keys. What a deletion of a key deletes is estimated by sizes, else by the records that lie
// below. Deletions of ranges are read: Pebble drops what lies in them when it has written them, but
// not what a compaction has in hand then.
func (st *Store) deadRanges(levels [][]pebble.SSTableInfo, sizes *deadSizes) (ranges []deadRange) {
	for n, level := range levels {
		for i := range level {
			t := &level[i]
			if t.TableStats.NumDeletions == 0 {
				continue
			}
			r := deadRange{first: t.Smallest.UserKey, last: t.Largest.UserKey}
			records, below := uint64(0), uint64(0)
			lowerTables(levels, n, t, &r, func(o *pebble.SSTableInfo) {
				below += o.Size
				records += o.TableStats.NumEntries - o.TableStats.NumDeletions
			})
			if records == 0 {
				continue
			}
			r.dead, r.size = min(t.TableStats.NumDeletions*sizes.of(t, below/records), below), t.Size+below
			ranges = append(ranges, r)
			if t.Smallest.Kind() != pebble.InternalKeyKindRangeDelete && t.TableStats.RangeDeletionsBytesEstimate == 0 {
				continue
			}
			for _, r := range st.rangeDeletions(t) {
				lowerTables(levels, n, t, &r, func(o *pebble.SSTableInfo) {
					r.size += o.Size
					if bytes.Compare(r.first, o.Smallest.UserKey) <= 0 && bytes.Compare(o.Largest.UserKey, r.last) < 0 {
						r.dead += o.Size
					} else {
						r.dead += o.Size / 2
					}
				})
				if r.dead > 0 {
					ranges = append(ranges, r)
				}
			}
		}
	}
	slices.SortFunc(ranges, func(a, b deadRange) int { return bytes.Compare(a.first, b.first) })
	merged := ranges[:0]
	for _, sp := range ranges {
		n := len(merged)
		if n == 0 || bytes.Compare(merged[n-1].last, sp.first) < 0 {
			merged = append(merged, sp)
			continue
		}
		m := &merged[n-1]
		if bytes.Compare(m.last, sp.last) < 0 {
			m.last = sp.last
		}
		m.dead += sp.dead
		m.size += sp.size
	}
	return merged
}

// lowerTables visits the tables below one of a level that have keys of a range and may be older.
func lowerTables(levels [][]pebble.SSTableInfo, level int, t *pebble.SSTableInfo, r *deadRange, visit func(*pebble.SSTableInfo)) {
	for l := level; l < len(levels); l++ {
		if l == level && l > 0 {
			continue
		}
		tables, first := levels[l], 0
		if l > 0 { // they are in order there
			first = sort.Search(len(tables), func(i int) bool { return bytes.Compare(tables[i].Largest.UserKey, r.first) >= 0 })
		}
		for i := first; i < len(tables); i++ {
			o := &tables[i]
			if l > 0 && bytes.Compare(o.Smallest.UserKey, r.last) > 0 {
				break
			}
			if o != t && r.overlaps(o) && o.SmallestSeqNum < t.LargestSeqNum {
				visit(o)
			}
		}
	}
}

// rangeDeletions reads those of a table; none if it has just gone, or cannot be read.
func (st *Store) rangeDeletions(t *pebble.SSTableInfo) (all []deadRange) {
	err := Protect(func() error {
		r, err := OpenTable(st.fs, st.pathOf(t))
		if err != nil {
			return err
		}
		defer func() { _ = r.Close() }() // nothing was written
		it, err := r.NewRawRangeDelIter(context.Background(), sstable.NoFragmentTransforms, sstable.NoReadEnv)
		if err != nil || it == nil {
			return err
		}
		defer it.Close()
		for s, err := it.First(); s != nil && err == nil; s, err = it.Next() {
			all = append(all, deadRange{first: bytes.Clone(s.Start), last: bytes.Clone(s.End)})
		}
		return nil
	})
	if err != nil {
		return nil
	}
	return all
}

// pathOf is the file of a table.
func (st *Store) pathOf(t *pebble.SSTableInfo) string {
	return st.fs.PathJoin(st.dir, t.BackingSSTNum.String()+TableSuffix)
}

func (sp *deadRange) overlaps(t *pebble.SSTableInfo) bool {
	return bytes.Compare(sp.first, t.Largest.UserKey) <= 0 && bytes.Compare(t.Smallest.UserKey, sp.last) <= 0
}

// compact compacts the ranges in which much is dead, if all in all that is much. It reports whether
// there are such.
func (r *reclaimer) compact() (found bool) {
	levels := r.levels()
	limit := uint64(max(r.from, 0) + r.tables.Load()/reclaimPart)
	share, most := uint64(reclaimShare), uint64(reclaimPiece)
	quiet := r.total.Load() == r.quietAt
	if quiet {
		share = reclaimQuiet
	}
	if r.hurried.Load() {
		limit, share, most = limit/8, reclaimQuiet, min(most, r.free.Load()/4)
	}
	ranges, dead := r.estimate(levels, nil)
	perhaps := dead >= limit
	thorough := perhaps && quiet // this look is the last one then
	if !thorough {
		ranges, dead = r.estimate(levels, r.sample(levels, usualSample))
		thorough = perhaps && dead < limit && !time.Now().Before(r.thoroughAt)
	}
	if thorough {
		r.thoroughAt = time.Now().Add(reclaimThorough)
		ranges, dead = r.estimate(levels, r.sample(levels, thoroughSample))
	}
	r.judge(dead - min(dead, r.known))
	r.known = dead
	if dead < limit {
		return false
	}
	r.known = 0
	var pieces []deadRange
	for i := range ranges {
		if ranges[i].dead*share >= ranges[i].size {
			pieces = append(pieces, ranges[i].divide(levels, most)...)
		}
	}
	for i := range pieces {
		if r.ctx.Err() != nil || r.store.Failure() != nil {
			return true
		}
		if r.trimWaits() {
			r.flush()
		}
		p := &pieces[i]
		if err := r.store.db.Compact(r.ctx, p.first, append(slices.Clone(p.last), 0), false); err != nil && r.ctx.Err() == nil {
			r.store.log.Warn("dead records could not be compacted", "err", err)
			return true
		}
	}
	return len(pieces) > 0
}

// estimate returns the ranges in which bytes are dead, and how many are in all.
func (r *reclaimer) estimate(levels [][]pebble.SSTableInfo, sizes *deadSizes) (ranges []deadRange, dead uint64) {
	ranges = r.store.deadRanges(levels, sizes)
	for i := range ranges {
		dead += ranges[i].dead
	}
	return ranges, dead
}

// divide divides a range into pieces of a bounded size, where tables begin.
func (sp *deadRange) divide(levels [][]pebble.SSTableInfo, most uint64) (pieces []deadRange) {
	type border struct {
		key  []byte
		size uint64
	}
	var borders []border
	for _, level := range levels {
		for i := range level {
			if t := &level[i]; sp.overlaps(t) {
				borders = append(borders, border{t.Smallest.UserKey, t.Size})
			}
		}
	}
	slices.SortFunc(borders, func(a, b border) int { return bytes.Compare(a.key, b.key) })
	piece := deadRange{first: sp.first}
	for _, b := range borders {
		if piece.size += b.size; piece.size > most && bytes.Compare(piece.first, b.key) < 0 {
			piece.last = b.key
			pieces = append(pieces, piece)
			piece = deadRange{first: b.key, size: b.size}
		}
	}
	piece.last = sp.last
	return append(pieces, piece)
}
