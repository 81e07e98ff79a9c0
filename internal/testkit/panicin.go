package testkit

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"codeq/internal/guard"
)

// PanicIn makes the guarded functions of each name panic once while it is armed.
type PanicIn struct {
	Names []string
	First string // another name that panics once; "": none
	Armed atomic.Bool

	begun atomic.Bool

	mu  sync.Mutex // guards hit
	hit []string
}

func (p *PanicIn) hits(what string) bool {
	if what == p.First && p.begun.CompareAndSwap(false, true) {
		return true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Contains(p.Names, what) || slices.Contains(p.hit, what) {
		return false
	}
	p.hit = append(p.hit, what)
	return true
}

// Left returns the names that have not panicked.
func (p *PanicIn) Left() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(p.Names), func(name string) bool { return slices.Contains(p.hit, name) })
}

// Begin watches the guarded functions until the test ends.
func (p *PanicIn) Begin(t *testing.T) {
	guard.SetHook(func(what string) {
		if p.Armed.Load() && p.hits(what) {
			panic(Injected("into " + what))
		}
	})
	t.Cleanup(func() { guard.SetHook(nil) })
}

// Reset disarms p, and First may panic again.
func (p *PanicIn) Reset() {
	p.Armed.Store(false)
	p.begun.Store(false)
}
