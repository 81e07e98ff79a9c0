package store

import (
	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/platform"
)

// Stats describes the content of a store, and its writes since it was opened.
type Stats struct {
	*pebble.Metrics
	DiskBytes   int64 // the size of its files
	DeadBytes   int64 // how much of its tables is deleted records: an estimate
	LinkedBytes int64 // how much of them is in files with other links; 0: unknown
}

// Stats returns the statistics of the store. It reads the tables that have range deletions.
func (st *Store) Stats() Stats {
	m := st.db.Metrics()
	s := Stats{
		Metrics: m,
		// Pebble does not count the growth of the current log
		DiskBytes: int64(m.DiskSpaceUsage() - m.WAL.PhysicalSize + max(m.WAL.PhysicalSize, m.WAL.Size)),
	}
	levels := st.reclaimer.levels()
	for _, dead := range st.deadRanges(levels, st.reclaimer.sizes.Load()) {
		s.DeadBytes += int64(dead.dead)
	}
	size := int64(0)
	for i := range m.Levels {
		size += m.Levels[i].TablesSize
	}
	s.DeadBytes = min(s.DeadBytes, size)
	s.LinkedBytes = st.linkedBytes(levels)
	return s
}

// linkedBytes returns the size of the tables that have other links.
func (st *Store) linkedBytes(levels [][]pebble.SSTableInfo) (bytes int64) {
	for _, level := range levels {
		for i := range level {
			if info, err := st.fs.Stat(st.pathOf(&level[i])); err == nil && platform.LinkCount(info) > 1 {
				bytes += int64(level[i].Size)
			}
		}
	}
	return bytes
}

// Tables returns the number and the bytes of the tables, and how many bytes flushes and compactions
// have written.
func (s *Stats) Tables() (n int, size, flushed, compacted int64) {
	for i := range s.Levels {
		l := &s.Levels[i]
		n += int(l.TablesCount)
		size += l.TablesSize
		flushed += int64(l.TableBytesFlushed)
		compacted += int64(l.TableBytesCompacted)
	}
	return n, size, flushed, compacted
}
