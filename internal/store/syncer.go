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

// syncer makes commits durable that are not when they return. It syncs once in syncEvery while it
// is asked to, once after the last time, and has no goroutine otherwise.
type syncer struct {
	sync func() error // nil: commits are durable when they return

	mu      sync.Mutex
	after   map[int]func() // to be called after the next sync
	running bool
	stopped bool
	stop    chan struct{} // closed when the store is closed
	ended   sync.WaitGroup
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
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return true
	}
	if s.after == nil {
		s.after = make(map[int]func())
	}
	s.after[number] = do
	if !s.running {
		s.running = true
		s.ended.Go(func() { guard.Contain(st.log, "sync", st.syncOn, func(any, []byte) { st.latch.Fail(errSyncPanic) }) })
	}
	return true
}

var errSyncPanic = errors.New("panic in a sync")

// syncOn syncs as long as commits wait for it.
func (st *Store) syncOn() {
	s := &st.syncer
	wait := time.NewTimer(syncEvery)
	defer wait.Stop()
	for {
		select {
		case <-wait.C:
		case <-s.stop:
			return
		}
		after := s.take()
		if after == nil || st.latch.Err() != nil {
			return
		}
		if err := s.sync(); err != nil { // earlier writes may be lost, and no later sync tells
			st.latch.Fail(err)
			return
		}
		for _, do := range after {
			do()
		}
		wait.Reset(syncEvery)
	}
}

// take returns the calls to make after a sync that begins now; nil: no sync is needed.
func (s *syncer) take() map[int]func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	after := s.after
	s.after, s.running = nil, after != nil
	return after
}

// close ends the syncs.
func (s *syncer) close() {
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	close(s.stop)
	s.ended.Wait()
}
