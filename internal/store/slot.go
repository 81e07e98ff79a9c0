package store

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
)

// Slot holds the store that a process has of a shard. In a cluster the store may be replaced.
type Slot struct {
	// Check, if it is not nil, says why the store must not be used.
	Check func() error

	// mu is held for reading by users of the store other than the shard's owner, for writing to
	// close or replace it.
	mu    sync.RWMutex
	store *Store // nil: none is open

	latest  atomic.Pointer[Store] // was opened last; may be closed
	hurried atomic.Bool
}

// errReplaced says that a store is closed, or another one is open by now.
var errReplaced = errors.New("the store has been replaced")

// Store returns the store; nil if none is open. REQUIRES: it is not being replaced or closed.
func (s *Slot) Store() *Store { return s.store }

// Set sets the store.
func (s *Slot) Set(st *Store) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set(st)
}

func (s *Slot) set(st *Store) {
	s.store = st
	if s.latest.Store(st); st != nil && s.hurried.Load() {
		st.Hurry()
	}
}

// Replace closes the store, if one is open, and opens another one.
func (s *Slot) Replace(open func() (*Store, error)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.close(); err != nil {
		return err
	}
	st, err := open()
	if err == nil {
		s.set(st)
	}
	return err
}

// Close closes the store, if one is open. REQUIRES: the shard has ended.
func (s *Slot) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.close()
}

func (s *Slot) close() error {
	st := s.store
	if s.store = nil; st == nil {
		return nil
	}
	return st.Close()
}

// Hurry is that of the store, and of each later one. It waits for nothing.
func (s *Slot) Hurry() {
	s.hurried.Store(true)
	if st := s.latest.Load(); st != nil {
		st.Hurry()
	}
}

// Use keeps the store open while f uses it.
func (s *Slot) Use(f func(*Store) error) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.Check != nil {
		if err := s.Check(); err != nil {
			return err
		}
	}
	if s.store == nil {
		return errReplaced
	}
	return f(s.store)
}

// Try is Use that waits for nothing, and does not check; false: no store is open.
func (s *Slot) Try(f func(*Store)) bool {
	if !s.mu.TryRLock() {
		return false
	}
	defer s.mu.RUnlock()
	if s.store != nil {
		f(s.store)
	}
	return s.store != nil
}

// View is a store between two commits. Reading it does not disturb the owner; the store cannot
// close before the view is closed.
type View struct {
	*Snapshot
	slot *Slot
	snap *pebble.Snapshot
}

// View returns a view without leases. REQUIRES: the caller is the shard's owner, and no batch is
// under way.
func (s *Slot) View() *View {
	s.mu.RLock() // does not block: before the store is closed, the owner has ended
	snap := s.store.DB().NewSnapshot()
	v := &View{NewSnapshot(snap), s, snap}
	v.Leases = make(map[keys.ID]Lease)
	return v
}

// Done closes the view.
func (v *View) Done() {
	_ = v.snap.Close() // fails only when closed twice
	v.slot.mu.RUnlock()
}

// Failure returns why the store has failed; nil if it has not.
func (v *View) Failure() error { return v.slot.store.Failure() }

// Live is a store while it is open: snapshots are made of it.
type Live struct {
	slot  *Slot
	store *Store
}

// Live returns the store; false: none is open.
func (s *Slot) Live() (Live, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return Live{s, s.store}, s.store != nil
}

func (l Live) use(f func(*Store) error) error {
	return l.slot.Use(func(st *Store) error {
		if st != l.store {
			return errReplaced
		}
		return f(st)
	})
}

// Flush makes all applied entries durable.
func (l Live) Flush() error { return l.use(flush) }

func flush(st *Store) error { return st.Flush(context.Background()) }

// Checkpoint copies all applied entries, by hard links.
func (l Live) Checkpoint(dir string) error {
	return l.use(func(st *Store) error {
		if err := flush(st); err != nil {
			return err
		}
		return st.Checkpoint(dir)
	})
}
