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
	"codeq/internal/integrity"
)

// reclaimer gives back the space that dead records take in a store's tables. Pebble itself writes
// the deletions in its memory to a table when there are enough of them, and merges tables by their
// number and size: there are never enough deletions of large records, and an idle store does
// neither.
//
// After deletions by range (trimmer) it flushes the memory: then whole tables are dropped without
// being read. Where live and dead records are mixed, it compacts key ranges, one after the other,
// by their share of dead bytes. On a tight disk it does both at once, otherwise when it checks:
// some time after a commit. It does not check a small store, and stops checking when nothing is
// committed any more. In a cluster each node does so for its replicas, also for those that it does
// not lead.
type reclaimer struct {
	store  *Store
	from   int64           // Config.ReclaimFrom
	wake   chan struct{}   // capacity 1
	ended  chan struct{}   // closed when its goroutine has ended; nil: it was not started
	ctx    context.Context // ends with the reclaimer
	cancel context.CancelFunc

	sampled map[uint64]sample         // of tables with deletions, by table number
	sizes   atomic.Pointer[deadSizes] // as of the last check; nil: none was made

	tables   atomic.Int64 // bytes in tables
	written  atomic.Int64 // bytes committed since the store was opened
	total    atomic.Int64 // entries committed since then
	flushed  committed    // commits that are in tables at least
	begun    committed    // commits at the beginning of the last flush
	before   committed    // the same for the flush before
	rangeAt  atomic.Int64 // value of written when hasRange was set
	hasRange atomic.Bool  // range deletions have been committed, and not flushed
	hasTrim  atomic.Bool  // the trimmer's are among them, which justify a flush at once
	hurried  atomic.Bool
	free     atomic.Uint64 // free bytes on the disk when it was last tight
	armed    atomic.Bool   // a check is planned
	merged   atomic.Bool   // a flush or a compaction has ended

	next         time.Time // time of the next check; zero: none before the next commit
	awaitsPebble bool      // it waits until Pebble counts the flushed deletions
	quietAt      int64     // value of total when it began to wait for it
	known        uint64    // dead bytes in tables that the last check found and left
	expected     int64     // dead bytes that the last flush should show; 0: none
	flushDelayed bool      // a flush was put off until flushAt
	flushAt      time.Time
	pause        time.Duration // until flushAt, when it was last set

	thoroughAt time.Time     // when a thorough sample may be taken although the store is busy
	rushAt     time.Time     // when to check again on a tight disk
	idle       time.Duration // time until rushAt: grows with successive checks that find nothing
	rushed     int64         // value of total when it last hurried; negative: it has not
}

// ReclaimFrom is the minimum size, in bytes, of a store's tables for reclaiming to gain anything;
// also how many of them are dead before it begins, usually.
const ReclaimFrom = 8 << 20

const (
	reclaimFlush  = 8 << 20  // after so many committed bytes, Pebble flushes soon
	reclaimUnsure = 64 << 10 // bytes around the beginning of a flush that may be in either memory
	// Size of the piece that is compacted at once, about; at most a quarter of the free bytes on a
	// tight disk.
	reclaimPiece = 128 << 20
	reclaimPart  = 16 // ReclaimFrom, and one in so many of the bytes in tables, may be dead
	reclaimShare = 4  // a range is compacted if one in so many of its bytes is dead
	reclaimQuiet = 10 // the same when nothing is committed
	reclaimMin   = 16 // if fewer than one in so many bytes turn out dead, flushes are delayed

	reclaimLook     = 10 * time.Second
	reclaimPause    = 160 * time.Second // at most
	reclaimSettle   = time.Second
	reclaimThorough = time.Minute
	reclaimRush     = 100 * time.Millisecond // reclaimSettle on a tight disk
	reclaimIdle     = 2 * time.Second        // at most between checks on a tight disk
)

func newReclaimer(from int) *reclaimer {
	r := &reclaimer{from: int64(from), wake: make(chan struct{}, 1), rushed: -1}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// start begins to check an open store.
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

// stop ends it. A compaction that is running goes on; Pebble waits for it.
func (r *reclaimer) stop() {
	r.cancel()
	if r.ended == nil {
		return
	}
	select {
	case <-r.ended:
	case <-r.store.latch.Parked(): // it may wait for locks that a panic of Pebble has left locked
	}
}

// committed is how much was committed.
type committed struct{ bytes, entries atomic.Int64 }

func (c *committed) store(bytes, entries int64) {
	c.bytes.Store(bytes)
	c.entries.Store(entries)
}

// FlushBegins, FlushEnds and CompactionEnds are called by the latch. The flush writes memory that
// was filled by now, or some of it; it includes the memory that was being filled when the flush
// before began.
func (r *reclaimer) FlushBegins() {
	r.before.store(r.begun.bytes.Load(), r.begun.entries.Load())
	r.begun.store(r.written.Load(), r.total.Load())
}

func (r *reclaimer) FlushEnds() {
	bytes := r.before.bytes.Load()
	r.flushed.store(bytes, r.before.entries.Load())
	if r.rangeAt.Load()+reclaimUnsure < bytes {
		r.hasTrim.Store(false)
		r.hasRange.Store(false)
	}
	r.CompactionEnds()
}

func (r *reclaimer) CompactionEnds() {
	r.merged.Store(true)
	r.wakeUp()
}

func (r *reclaimer) wakeUp() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// wrote is called after each commit.
func (r *reclaimer) wrote(bytes int, entries uint32) {
	r.written.Add(int64(bytes))
	r.total.Add(int64(entries))
	if r.hasTables() && !r.armed.Load() && !r.armed.Swap(true) {
		r.wakeUp()
	}
}

// ranged is called after a commit with range deletions; trimmed: those of the trimmer.
func (r *reclaimer) ranged(trimmed bool) {
	r.rangeAt.Store(r.written.Load())
	r.hasRange.Store(true)
	if trimmed {
		r.hasTrim.Store(true)
		r.wakeUp()
	}
}

// hurry is called when the disk is tight, with the number of free bytes.
func (r *reclaimer) hurry(free uint64) {
	r.free.Store(free)
	if !r.hurried.Load() && !r.hurried.Swap(true) {
		r.wakeUp()
	}
}

// hasTables reports whether tables may have enough dead bytes to be reclaimed.
func (r *reclaimer) hasTables() bool { return r.tables.Load() >= r.from }

// trimWaits reports whether range deletions wait for a flush that will not come soon by itself.
func (r *reclaimer) trimWaits() bool {
	return r.hasTrim.Load() && r.written.Load()-r.flushed.bytes.Load() < reclaimFlush
}

// measure reads the size of the tables.
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

// step does the work that is due:
//
//	asleep   next is zero: the next commit, or a tight disk, ends it
//	planned  at next, look flushes deletions that Pebble would keep in memory
//	settling awaitsPebble: at next, Pebble knows the dead bytes of the flush, and settle compacts
//
// A tight disk does the same at once (rush). The trimmer's deletions are always flushed at once.
func (r *reclaimer) step() {
	if r.merged.Swap(false) {
		had := r.hasTables()
		if r.measure(); !had && r.hasTables() { // earlier commits are not checked yet
			r.armed.Store(true)
		}
	}
	if !r.hasTables() {
		r.sleep()
		return
	}
	now := time.Now()
	if r.next.IsZero() && r.armed.Load() {
		r.next = now.Add(reclaimLook)
	}
	if r.hurried.Load() && !r.awaitsPebble {
		r.rush(now)
		return
	}
	if r.trimWaits() {
		r.flush()
	}
	switch {
	case r.next.IsZero() || now.Before(r.next):
	case r.awaitsPebble:
		r.settle()
	default:
		r.look(now)
	}
}

// rush flushes deletions on a tight disk, unless nothing was committed since it did so last.
func (r *reclaimer) rush(now time.Time) {
	total := r.total.Load()
	if total == r.rushed {
		r.hurried.Store(false)
		return
	}
	if now.Before(r.rushAt) {
		r.next = r.rushAt
		return
	}
	r.rushed, r.expected = total, 0
	if r.hasRange.Load() || r.unflushed() >= r.from/8 {
		r.flush()
	}
	r.waitForPebble(reclaimRush)
}

// look flushes deletions: those of ranges, and those of so many keys that much may be dead.
func (r *reclaimer) look(now time.Time) {
	much := r.unflushed()
	r.expected, r.flushDelayed = 0, false
	switch {
	case r.hasRange.Load():
		r.flush()
	case much < r.from:
	case now.Before(r.flushAt):
		r.flushDelayed = true
	default:
		r.expected = much
		r.flush()
	}
	r.waitForPebble(reclaimSettle)
}

// settle compacts, and plans the next look: none if nothing was committed since the last one.
func (r *reclaimer) settle() {
	r.awaitsPebble = false
	if found := r.compact(); found || !r.hurried.Load() {
		r.idle = 0
	} else {
		r.idle = min(max(2*r.idle, reclaimRush), reclaimIdle)
	}
	r.rushAt = time.Now().Add(r.idle)
	r.hurried.Store(false)
	if r.isQuiet() && r.flushDelayed { // nothing else flushes the last commits
		r.next = r.flushAt
		return
	}
	if r.isQuiet() {
		r.sleep()
		if r.isQuiet() { // else a commit may have come before armed was cleared
			return
		}
		r.armed.Store(true)
	}
	r.next = time.Now().Add(reclaimLook)
}

// isQuiet reports whether nothing was committed since the last waitForPebble.
func (r *reclaimer) isQuiet() bool { return r.total.Load() == r.quietAt }

// adjustPause delays the next flush if the last one found few dead bytes: each flush adds a table
// that Pebble must merge with live ones.
func (r *reclaimer) adjustPause(found uint64) {
	switch {
	case r.expected == 0:
	case found < uint64(r.expected)/reclaimMin:
		r.pause = min(max(2*r.pause, reclaimLook), reclaimPause)
		r.flushAt = time.Now().Add(r.pause)
	default:
		r.pause = 0
	}
}

// sleep waits until something is committed.
func (r *reclaimer) sleep() {
	r.next, r.awaitsPebble = time.Time{}, false
	r.hurried.Store(false)
	r.armed.Store(false)
}

// waitForPebble waits until Pebble knows which tables and records it can drop.
func (r *reclaimer) waitForPebble(after time.Duration) {
	r.awaitsPebble, r.quietAt = true, r.total.Load()
	r.next = time.Now().Add(after)
}

// flush writes the store's memory to tables. Pebble retries what fails, or the store fails.
func (r *reclaimer) flush() {
	r.hasTrim.Store(false)
	r.hasRange.Store(false)
	if err := r.store.Flush(r.ctx); err != nil && r.ctx.Err() == nil {
		r.store.log.Warn("deletions could not be flushed", "err", err)
	}
}

// unflushed returns an upper bound of the dead bytes that no table shows yet: as if each key that
// was committed since the last flush deleted an entry of the largest average size.
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
	dead        uint64 // bytes that are in tables only because of deletions in it
	size        uint64 // size of the tables below
}

// deadRanges returns the ranges with deletions above records, in the order of their keys. The bytes
// that the deletion of a key deletes are estimated by sizes, or else by the records below.
// Deletions of ranges are read: Pebble drops the tables that they cover when it has written them,
// but not tables in a compaction at that time.
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

// lowerTables visits the tables below a table of a level that have keys of a range and may be
// older.
func lowerTables(levels [][]pebble.SSTableInfo, level int, t *pebble.SSTableInfo, r *deadRange, visit func(*pebble.SSTableInfo)) {
	for l := level; l < len(levels); l++ {
		if l == level && l > 0 {
			continue
		}
		tables, first := levels[l], 0
		if l > 0 { // sorted by key
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

// rangeDeletions reads those of a table; none if it was just removed, or cannot be read.
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

// pathOf returns the path of a table.
func (st *Store) pathOf(t *pebble.SSTableInfo) string {
	return st.fs.PathJoin(st.dir, t.BackingSSTNum.String()+integrity.TableSuffix)
}

func (sp *deadRange) overlaps(t *pebble.SSTableInfo) bool {
	return bytes.Compare(sp.first, t.Largest.UserKey) <= 0 && bytes.Compare(t.Smallest.UserKey, sp.last) <= 0
}

// compact compacts the ranges with many dead bytes, if there are enough of them in total. It
// reports whether there were such ranges.
func (r *reclaimer) compact() (found bool) {
	levels := r.levels()
	limit := uint64(max(r.from, 0) + r.tables.Load()/reclaimPart)
	share, most := uint64(reclaimShare), uint64(reclaimPiece)
	quiet := r.isQuiet()
	if quiet {
		share = reclaimQuiet
	}
	if r.hurried.Load() {
		limit, share, most = limit/8, reclaimQuiet, min(most, r.free.Load()/4)
	}
	ranges, dead := r.estimate(levels, nil)
	perhaps := dead >= limit
	thorough := perhaps && quiet // then this is the last check for now
	if !thorough {
		ranges, dead = r.estimate(levels, r.sample(levels, usualSample))
		thorough = perhaps && dead < limit && !time.Now().Before(r.thoroughAt)
	}
	if thorough {
		r.thoroughAt = time.Now().Add(reclaimThorough)
		ranges, dead = r.estimate(levels, r.sample(levels, thoroughSample))
	}
	r.adjustPause(dead - min(dead, r.known))
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

// estimate returns the ranges with dead bytes, and their total.
func (r *reclaimer) estimate(levels [][]pebble.SSTableInfo, sizes *deadSizes) (ranges []deadRange, dead uint64) {
	ranges = r.store.deadRanges(levels, sizes)
	for i := range ranges {
		dead += ranges[i].dead
	}
	return ranges, dead
}

// divide divides a range into pieces of a limited size, at the beginnings of tables.
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
