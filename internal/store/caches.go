package store

import (
	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/failstop"
)

// Caches are shared by the stores of all shards, and with them the memory for memtables that wait
// for flushes.
//
// Pebble subtracts the memory of memtables from the block cache, so that a cache of CacheBytes
// would hold nothing. The cache is therefore larger, by the most that memtables can take, and each
// store reserves what its own memtables do not take at the moment (memTableShare): the rest,
// CacheBytes, is for readers.
type Caches struct {
	blocks    *pebble.Cache
	files     *pebble.FileCache
	memTables *failstop.Memory
}

const openFiles = 1000

// NewCaches returns the caches for a number of stores, with cacheBytes for readers.
func NewCaches(cacheBytes int64, memTableBytes, stores int) *Caches {
	blocks := pebble.NewCache(cacheBytes + int64(stores)*memTableShareOf(memTableBytes))
	return &Caches{
		blocks: blocks, files: pebble.NewFileCache(stores, openFiles),
		memTables: failstop.NewMemory((stores + MemTables - 2) * memTableBytes), // one each is flushed
	}
}

// Close releases the caches. REQUIRES: the stores are closed.
func (c *Caches) Close() {
	c.files.Unref()
	c.blocks.Unref()
}

// memTableShareOf returns how much of the cache is for the memtables of a store: those that are
// filled before commits wait for flushes, one that a commit begins nevertheless, and one that
// Pebble keeps for later.
func memTableShareOf(memTableBytes int) int64 { return int64(MemTables+2) * int64(memTableBytes) }

// memTableShare is the part of the block cache that a store reserves for its memtables, beyond
// their present size. Only the goroutine that commits uses it.
type memTableShare struct {
	cache    *pebble.Cache
	size     int64  // memTableShareOf
	memTable int64  // Config.MemTableBytes
	kept     int64  // bytes
	release  func() // ends the reservation; nil: there is none
}

// fit reserves the part of the share that the store's memtables do not use. Unless Pebble keeps a
// free memtable, it leaves room for the next one, which may begin before fit is called again.
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

// end ends the reservation.
func (s *memTableShare) end() {
	if s.release != nil {
		s.release()
	}
	s.kept, s.release = 0, nil
}
