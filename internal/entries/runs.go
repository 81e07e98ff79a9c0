package entries

import (
	"sync"

	"codeq/internal/engine"
)

// Runs is the calls of Run of a process, which learn of leases that cancels have ended. Cancel of a
// call must not block.
type Runs[R interface{ Cancel(engine.Receipt) }] struct {
	mu   sync.Mutex   // guards the fields below
	runs map[uint32]R // by number
	last uint32       // number
}

// Add adds a call, and returns its number, which is not 0.
func (t *Runs[R]) Add(r R) uint32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.runs == nil {
		t.runs = make(map[uint32]R)
	}
	t.last++
	for _, used := t.runs[t.last]; used || t.last == 0; _, used = t.runs[t.last] {
		t.last++
	}
	t.runs[t.last] = r
	return t.last
}

// Remove removes a call.
func (t *Runs[R]) Remove(number uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.runs, number)
}

// Cancel tells a call, if it has not ended, that a lease of its has.
func (t *Runs[R]) Cancel(number uint32, lease engine.Receipt) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r, ok := t.runs[number]; ok {
		r.Cancel(lease)
	}
}

// CancelAny tells the holder of a lease, if it is here, that the lease has ended.
func (t *Runs[R]) CancelAny(lease engine.Receipt) {
	for r := range t.All {
		r.Cancel(lease)
	}
}

// All yields the calls.
func (t *Runs[R]) All(yield func(R) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range t.runs {
		if !yield(r) {
			return
		}
	}
}
