package codeq

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// diskSpace is what a shard's owner knows of the room on its disk, and what waits
// for room. What is full is refused before anything of it is written: a store whose
// log cannot be written fails until it is opened again.
//
// The owner asks the file system before a group, if it has committed lookBytes
// since it asked last, or some time has passed. A file system that cannot tell is
// never full.
type diskSpace struct {
	fs        vfs.FS
	dir       string
	low, full uint64 // bytes of free space below which it is so

	level   room
	free    uint64 // bytes, when it was asked
	next    uint64 // when to ask again before a group; monotonic clock, ms
	recheck uint64 // when to ask again though nobody calls, if something waits for room
	written int    // bytes committed since it was asked
	parked  []operation
}

// room is how much of it there is.
type room uint8

const (
	roomy    room = iota
	roomLow       // what adds data is refused
	roomNone      // whatever writes is refused
)

const (
	lookBytes     = 4 << 20
	lookEvery     = 1000 // ms, while there is room
	lookEveryFull = 100  // ms, while there is not and somebody calls
)

func newDiskSpace(opts *Options, dir string) diskSpace {
	low := uint64(max(opts.MinFreeBytes, 0))
	return diskSpace{fs: opts.fs, dir: dir, low: low, full: low / 2}
}

// look asks the file system if it is time to.
func (s *shard) look() {
	d := &s.space
	if s.now < d.next && d.written < lookBytes {
		return
	}
	before := d.level
	d.level, d.written, d.next, d.recheck = roomy, 0, s.now+lookEvery, s.now+lookEvery
	if d.low == 0 {
		return
	}
	usage, err := d.fs.GetDiskUsage(d.dir)
	if d.free = usage.AvailBytes; err == nil && d.free < d.low {
		d.level, d.next = roomLow, s.now+lookEveryFull
		if d.free < d.full {
			d.level = roomNone
		}
	}
	if d.level != before {
		s.opts.log.Warn("room on the disk", "shard", s.index, "free", d.free, "level", d.level.String())
	}
	if d.level == roomNone {
		s.dropParked()
	} else if len(d.parked) > 0 {
		s.deferred = append(s.deferred, d.parked...)
		clear(d.parked)
		d.parked = d.parked[:0]
	}
}

func (r room) String() string {
	return [...]string{"enough", "low", "none"}[r]
}

// dropParked forgets claims whose callers have gone.
func (s *shard) dropParked() {
	kept := s.space.parked[:0]
	for _, op := range s.space.parked {
		if c, ok := op.(*claimOp); ok && c.isTaken() {
			c.unref()
			continue
		}
		kept = append(kept, op)
	}
	clear(s.space.parked[len(kept):])
	s.space.parked = kept
}

// holdsBack reports whether something that is due waits for room.
func (s *shard) holdsBack() bool {
	switch s.space.level {
	case roomy:
		return false
	case roomLow:
		return s.recurring.next <= s.wall // a tick
	}
	return true
}

// decide resolves an operation, if there is room for what it writes. Otherwise
// it refuses it, or parks it if nobody would call again.
func (s *shard) decide(op operation) {
	if s.space.level == roomy || s.space.hasRoom(op) {
		op.resolve(s)
		return
	}
	if s.space.level == roomNone && waitsForRoom(op) {
		s.space.parked = append(s.space.parked, op)
		return
	}
	refuse(op, fmt.Errorf("%w: shard %d: %d bytes are free, at least %d are wanted", ErrDiskFull, s.index, s.space.free, s.space.low))
}

// hasRoom reports whether an operation may go on. REQUIRES: the disk is not roomy.
func (d *diskSpace) hasRoom(op operation) bool {
	if d.level == roomLow {
		switch op := op.(type) {
		case *produceOp, *setScheduleOp:
			return false
		case *completeOp:
			return len(op.next) == 0
		}
		return true
	}
	switch op.(type) {
	case *readOp, *statsOp, *schedulesOp, *settingsOp, *idleOp, *awaitOp, *indexOp, *leaveOp, *sweepOp: // they write nothing
		return true
	case *renewOp, *permitsOp, *permitsTold, *askPermitsOp: // nor what is worth mentioning
		return true
	}
	return false
}

// waitsForRoom reports whether an operation is a claim that waits, or one of
// codeq itself.
func waitsForRoom(op operation) bool {
	switch op := op.(type) {
	case *claimOp:
		return !op.noWait
	case *parcel, *confirmOp, *joinOp, *interestOp, *permitsAnswer, *serveOp:
		return true
	}
	return false
}
