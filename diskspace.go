package codeq

import (
	"errors"
	"fmt"
	"math"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/engine"
	"codeq/internal/failstop"
	"codeq/internal/store"
)

// diskSpace is what a shard's owner knows of the room on its disk, and what waits
// for room. What is full is refused before anything of it is written: a store whose
// log cannot be written fails until it is opened again.
//
// The owner asks the file system before a group, if it has committed some MiB
// since it asked last, or some time has passed. A file system that cannot tell is
// not full until a table, or the log, cannot be written for want of space: memory and the log
// have room for the group under way, the log by a reserve (failstop), and no other is begun until Pebble,
// which tries again several times a second, has written the table, and there is the reserve again.
//
// Invariant: while the room is roomNone or roomEmpty, the owner's clock stands
// still, since those who hold leases can neither end nor extend them.
type diskSpace struct {
	fs  vfs.FS
	dir string
	low uint64 // bytes of free space below which there is not enough; 0: no limit

	denied  bool   // nothing can be written, whatever the file system says
	relaxed uint64 // when that is forgotten, by uptime: the file system need not show that there is little
	free    uint64 // bytes, when it was asked
	next    uint64 // when to ask again before a group, by uptime
	recheck uint64 // when to ask again though nobody calls, if something waits for room
	every   int    // bytes committed with which to ask again: all shards together commit a fraction of low meanwhile
	written int    // likewise since it was asked
	parked  []operation
}

const (
	lookBytes     = store.LookBytes
	lookEvery     = store.LookEvery
	denyTight     = 60_000 // ms
	lookEveryFull = store.LookEveryFull
)

func newDiskSpace(opts *Options, dir string) diskSpace {
	d := diskSpace{fs: opts.fs, dir: dir, low: uint64(max(opts.MinFreeBytes, 0)), every: lookBytes}
	if share := int(d.low / uint64(16*max(opts.Shards, 1))); share > 0 {
		d.every = min(d.every, share)
	}
	return d
}

// measure asks the file system.
func (d *diskSpace) measure() engine.Room {
	switch {
	case d.denied:
		return engine.RoomEmpty
	case d.low == 0:
		return engine.Roomy
	}
	usage, err := d.fs.GetDiskUsage(d.dir)
	if d.free = usage.AvailBytes; err != nil {
		d.free = math.MaxUint64
	}
	switch quarter := d.low / 4; {
	case d.free >= d.low:
		return engine.Roomy
	case d.free >= d.low-quarter:
		return engine.RoomLow
	case d.free >= d.low/2:
		return engine.RoomScarce
	case d.free >= quarter:
		return engine.RoomNone
	}
	return engine.RoomEmpty
}

// look measures the room if it is time to.
func (s *shard) look() {
	d := &s.space
	now, denied := s.Uptime, !s.hasSpace()
	if now < d.next && d.written < d.every && denied == d.denied {
		return
	}
	before := s.Room
	d.denied = denied
	s.Room, d.written, d.next, d.recheck = d.measure(), 0, now+lookEvery, now+lookEvery
	if denied {
		d.relaxed = now + denyTight
	}
	if s.Tight = now < d.relaxed || d.low > 0 && store.IsTight(d.free, d.low); s.Tight {
		s.Store.Reclaim(d.free)
	}
	if s.Room > engine.Roomy {
		d.next = now + lookEveryFull
	}
	if s.Room != before {
		s.opts.log.Warn("room on the disk", "shard", s.index, "free", d.free, "level", s.Room.String())
	}
	if s.Room < before {
		s.undecided.deferred = append(s.undecided.deferred, d.parked...)
		clear(d.parked)
		d.parked = d.parked[:0]
	}
	s.dropParked()
}

// dropParked refuses what waits for room if nobody waits for it any more.
func (s *shard) dropParked() {
	kept := s.space.parked[:0]
	for _, op := range s.space.parked {
		if w, ok := op.(roomWaiter); ok && !w.waitsForRoom() {
			refuse(op, s.errNoRoom())
			continue
		}
		kept = append(kept, op)
	}
	clear(s.space.parked[len(kept):])
	s.space.parked = kept
}

// hasSpace reports whether the stores that a group is written to can write their tables and logs.
func (s *shard) hasSpace() bool {
	return s.Store.HasSpace() && (s.node == nil || s.node.HasSpace())
}

// holdsBack reports whether something waits for room, or may.
func (s *shard) holdsBack() bool {
	return !s.HasRoom(engine.RoomLow) || !s.HasRoom(engine.Roomy) && s.TicksAreDue()
}

// errNoRoom is why an operation is refused.
func (s *shard) errNoRoom() error {
	if s.space.denied {
		return fmt.Errorf("%w: shard %d: nothing can be written", ErrDiskFull, s.index)
	}
	return fmt.Errorf("%w: shard %d: %d bytes are free, at least %d are wanted", ErrDiskFull, s.index, s.space.free, s.space.low)
}

// putOff has an operation wait for room if nobody would call again, and refuses
// any other.
func (s *shard) putOff(op operation) {
	if c, ok := op.(*claimOp); ok {
		if c.IsTaken() {
			c.unref()
			return
		}
		c.full = s.errNoRoom()
		c.passOn(s)
		return
	}
	if w, ok := op.(roomWaiter); op.verb().is(waitsRoom) || ok && w.waitsForRoom() {
		s.space.parked = append(s.space.parked, op)
		return
	}
	refuse(op, s.errNoRoom())
}

// roomOf is the level down to which an alteration goes on.
func roomOf(how engine.Alteration) engine.Room {
	if how == engine.AlterPurge || how == engine.AlterCancel { // a task that is kept needs more
		return engine.RoomNone
	}
	return engine.RoomLow
}

// roomWaiter is an operation that waits for room as long as its caller does.
type roomWaiter interface {
	operation
	waitsForRoom() bool
}

// roomWait is part of operations whose callers may wait for room, as Run does with
// what its handlers have returned.
type roomWait struct {
	gone <-chan struct{} // closed when the caller waits no longer; nil: it does not wait for room
	left chan struct{}   // is gone, of a caller on another node
}

func (w *roomWait) waitsForRoom() bool {
	if w.gone == nil {
		return false
	}
	select {
	case <-w.gone:
		return false
	default:
		return true
	}
}

// setWaits is for an operation of another node.
func (w *roomWait) setWaits(waits bool) {
	if waits {
		w.left = make(chan struct{})
		w.gone = w.left
	}
}

// abandon says that the caller on another node has gone.
func (w *roomWait) abandon(*shard) {
	if w.left != nil {
		close(w.left)
	}
}

// diskFull has an error that tells of a full disk match ErrDiskFull.
func diskFull(err error) error {
	if err == nil || !failstop.IsNoSpace(err) || errors.Is(err, ErrDiskFull) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrDiskFull, err)
}
