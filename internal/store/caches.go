package store

import "github.com/cockroachdb/pebble/v2"

// Caches are shared by the stores of all shards.
//
// Pebble takes what memtables occupy out of the block cache, so that one of CacheBytes would hold
// nothing. The cache is therefore larger, by what memtables occupy at the most, and each store
// keeps for itself what its own do not occupy at the time (memTableShare): what is left,
// CacheBytes, is for readers.
type Caches struct {
	blocks *pebble.Cache
	files  *pebble.FileCache
}

const openFiles = 1000

// NewCaches returns the caches of so many stores, with cacheBytes for readers.
func NewCaches(cacheBytes int64, memTableBytes, stores int) *Caches {
	blocks := pebble.NewCache(cacheBytes + int64(stores)*memTableShareOf(memTableBytes))
	return &Caches{blocks: blocks, files: pebble.NewFileCache(stores, openFiles)}
}

// Close releases the caches. REQUIRES: the stores are closed.
func (c *Caches) Close() {
	c.files.Unref()
	c.blocks.Unref()
}

// memTableShareOf is how much of the cache is for the memtables of a store: those that are filled
// before commits wait for flushes, one that a commit begins nevertheless, and one that Pebble keeps
// for the next.
func memTableShareOf(memTableBytes int) int64 { return int64(MemTables+2) * int64(memTableBytes) }

// memTableShare is what a store keeps of the block cache for its memtables, beside what those
// occupy. The goroutine that commits owns it.
type memTableShare struct {
	cache    *pebble.Cache
	size     int64  // memTableShareOf
	memTable int64  // Config.MemTableBytes
	kept     int64  // bytes
	release  func() // gives back what is kept; nil: nothing is
}

// fit keeps what the store's memtables do not occupy. Unless Pebble has a memtable in reserve, it
// leaves room for the next one, which may be begun before fit is called again.
func (s *memTableShare) fit(m *pebble.Metrics) {
	occupied := int64(m.MemTable.Size + m.MemTable.ZombieSize)
	kept := s.size - occupied
	if int64(m.MemTable.ZombieSize) < s.memTable {
		kept -= s.memTable
	}
	if kept = max(kept, 0); kept == s.kept {
		return
	}
	s.end()
	s.kept, s.release = kept, s.cache.Reserve(int(kept))
}

// end gives back what is kept.
func (s *memTableShare) end() {
	if s.release != nil {
		s.release()
	}
	s.kept, s.release = 0, nil
}
