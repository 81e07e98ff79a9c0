package failstop

import "sync/atomic"

// Memory bounds the bytes that wait for flushes in several stores together. When it is used up, the
// memtables of each may take one less than otherwise. A store that has more waits for its own
// flush: never for that of another store, which may have nothing to flush, or no room for it.
type Memory struct {
	bytes int64
	waits atomic.Int64 // bytes that wait
}

// NewMemory returns a Memory of so many bytes.
func NewMemory(bytes int) *Memory { return &Memory{bytes: int64(bytes)} }

// memory bounds the memtables of one store.
type memory struct {
	most     int64   // bytes before commits wait for flushes; 0: there is no limit
	memTable int64   // bytes of the memtable that is being filled
	shared   *Memory // with other stores
	waits    atomic.Int64
}

// note notes how many bytes the memtables take.
func (m *memory) note(size int64) {
	if m.shared != nil {
		waits := max(size-m.memTable, 0)
		m.shared.waits.Add(waits - m.waits.Swap(waits))
	}
}

// limit is how many bytes the memtables may take now.
func (m *memory) limit() int64 {
	if m.shared.waits.Load() >= m.shared.bytes {
		return m.most - m.memTable
	}
	return m.most
}

// isUsed reports whether memtables take so many bytes that a commit must wait.
func (m *memory) isUsed(size int64) bool { return m.most > 0 && size >= m.limit() }

// isLow reports whether memtables take so many bytes that a commit may soon have to wait.
func (m *memory) isLow(size int64) bool { return size > m.limit()-m.memTable }
