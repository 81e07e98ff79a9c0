// Package slowlock has a mutex that is held while a disk or a commit works.
package slowlock

import "time"

// Lock is a mutex. A wait for it can end early; and a fake clock (testing/synctest) advances while
// a goroutine waits for it, unlike for a sync.Mutex.
type Lock chan struct{} // capacity 1: an element while it is held

// New returns a Lock that is free.
func New() Lock { return make(Lock, 1) }

// Lock waits until the lock is free, and takes it.
func (l Lock) Lock() { l <- struct{}{} }

// Unlock frees the lock.
func (l Lock) Unlock() { <-l }

// LockUntil is Lock, or false if end is closed first.
func (l Lock) LockUntil(end <-chan struct{}) bool {
	select {
	case l <- struct{}{}:
		return true
	case <-end:
		return false
	}
}

// LockWithin is Lock, or false if the lock is not free in time.
func (l Lock) LockWithin(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case l <- struct{}{}:
		return true
	case <-t.C:
		return false
	}
}
