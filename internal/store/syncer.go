package store

import (
	"errors"
	"sync"
	"time"

	"codeq/internal/guard"
)

// syncEvery is the time from the first commit that waits for a sync to that sync, and so the least
// time between two syncs.
const syncEvery = time.Second

// syncer makes commits durable that are not when they return, by an Errand that syncs once in
// syncEvery while it is asked to, and once after the last time.
type syncer struct {
	sync func() error // nil: commits are durable when they return

	syncs   *guard.Errand  // its Mu guards the fields below
	after   map[int]func() // to be called after the next sync
	due     time.Time      // of that sync
	stopped bool
	living  sync.WaitGroup // the goroutine
}

// AfterSync calls do, on another goroutine, when everything that is committed now is durable, in a
// second or two; never if the store fails, or is closed before. A call takes the place of earlier
// ones of the same number that have not been carried out. It returns false, and does nothing, if
// all that is committed is durable already.
func (st *Store) AfterSync(number int, do func()) bool {
	s := &st.syncer
	if s.sync == nil {
		return false
	}
	s.syncs.Mu.Lock()
	defer s.syncs.Mu.Unlock()
	if s.stopped {
		return true
	}
	if s.after == nil {
		s.after, s.due = make(map[int]func()), time.Now().Add(syncEvery)
	}
	s.after[number] = do
	s.syncs.Wake()
	return true
}

var errSyncPanic = errors.New("panic in a sync")

// startSyncer makes the store sync by sync.
func (st *Store) startSyncer(sync func() error) {
	s := &st.syncer
	s.sync = sync
	s.syncs = guard.NewErrand("sync", st.log, st.nextSync).CountIn(&s.living).
		OnPanic(func() { st.latch.Fail(errSyncPanic) })
}

// nextSync takes the calls to make after the next sync.
func (st *Store) nextSync() (piece func(), wait time.Duration) {
	s := &st.syncer
	if st.latch.Err() != nil {
		s.after = nil
	}
	if s.stopped || s.after == nil {
		return nil, 0
	}
	if wait = time.Until(s.due); wait > 0 {
		return nil, wait
	}
	after := s.after
	s.after = nil
	return func() {
		if err := s.sync(); err != nil { // earlier writes may be lost, and no later sync tells
			st.latch.Fail(err)
			return
		}
		for _, do := range after {
			do()
		}
	}, 0
}

// close ends the syncs.
func (s *syncer) close() {
	s.syncs.Mu.Lock()
	s.stopped = true
	s.syncs.Mu.Unlock()
	s.syncs.Hurry()
	s.living.Wait()
}
