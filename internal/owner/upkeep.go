package owner

import (
	"math/bits"
	"sync/atomic"
	"time"
)

const (
	// MaxUpkeepKinds is more than the largest kind.
	MaxUpkeepKinds = 32
	// UpkeepBuckets is enough for upkeep of a minute; longer ones are in the last bucket.
	UpkeepBuckets = 27
)

// UpkeepTable holds the histograms of the kinds of upkeep. Only one goroutine writes them; any may
// read them.
type UpkeepTable [MaxUpkeepKinds]struct {
	buckets                 [UpkeepBuckets]atomic.Int64
	total                   atomic.Int64
	longest, records, bytes atomic.Int64
}

// UpkeepStats describes the upkeep of one kind.
type UpkeepStats struct {
	Count          int64
	Total, Longest time.Duration
	Records, Bytes int64 // at once at the most
	Buckets        [UpkeepBuckets]int64
}

// Note adds upkeep of a kind.
func (t *UpkeepTable) Note(kind uint8, took time.Duration, records, bytes int) {
	h := &t[kind]
	h.buckets[min(bits.Len64(uint64(took/time.Microsecond)), UpkeepBuckets-1)].Add(1)
	h.total.Store(h.total.Load() + int64(took)) // no other goroutine does
	raise(&h.longest, int64(took))
	raise(&h.records, int64(records))
	raise(&h.bytes, int64(bytes))
}

// raise sets a maximum. REQUIRES: no other goroutine sets it.
func raise(most *atomic.Int64, v int64) {
	if v > most.Load() {
		most.Store(v)
	}
}

// UpkeepStats returns the histogram of a kind.
func (t *UpkeepTable) Stats(kind uint8) (s UpkeepStats) {
	h := &t[kind]
	s.Total = time.Duration(h.total.Load())
	s.Longest, s.Records, s.Bytes = time.Duration(h.longest.Load()), h.records.Load(), h.bytes.Load()
	for i := range s.Buckets {
		s.Buckets[i] = h.buckets[i].Load()
		s.Count += s.Buckets[i]
	}
	return s
}

// Quantile returns a duration within which the fraction f of them ended.
func (s *UpkeepStats) Quantile(f float64) time.Duration {
	left := int64(f * float64(s.Count))
	for i, n := range s.Buckets {
		if left -= n; left <= 0 && n > 0 {
			return min(s.Longest, time.Microsecond<<i)
		}
	}
	return s.Longest
}

// UpkeepMark is a place between two kinds of upkeep: the time, and the work so far.
type UpkeepMark struct {
	At             time.Duration
	Records, Bytes int
}

// UpkeepClock measures the upkeep of a round: where one kind ends, the next one begins.
type UpkeepClock struct {
	*UpkeepTable
	UpkeepMark            // where the last one has ended
	begin      UpkeepMark // of the round

	Took time.Duration // by the last one that has ended
}

// Begin notes that a round begins.
func (c *UpkeepClock) Begin(now UpkeepMark) { c.UpkeepMark, c.begin = now, now }

// End notes that upkeep of a kind ends, and the next one begins.
func (c *UpkeepClock) End(kind uint8, now UpkeepMark) {
	c.EndOf(kind, now, now.Records-c.Records, now.Bytes-c.Bytes)
}

// EndOf is End for upkeep with another size than the marks tell.
func (c *UpkeepClock) EndOf(kind uint8, now UpkeepMark, records, bytes int) {
	c.Took = now.At - c.At
	c.Note(kind, c.Took, records, bytes)
	c.UpkeepMark = now
}

// EndRound notes that a round ends.
func (c *UpkeepClock) EndRound(kind uint8) {
	c.Note(kind, c.At-c.begin.At, c.Records-c.begin.Records, c.Bytes-c.begin.Bytes)
}
