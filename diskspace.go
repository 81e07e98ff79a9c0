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

// diskSpace is what a shard's owner knows of the free space on its disk, and the operations that
// wait for space. An operation without room is refused before anything of it is written, since a
// store whose log cannot be written fails until it is opened again.
//
// The owner asks the file system before a group, if it has committed some MiB since it asked last,
// or some time has passed. If the file system cannot say, the disk counts as full only once a
// table, or the log, cannot be written for want of space. Memory and the log have room for the
// group under way, the log because of a reserve (failstop). No other group begins until Pebble,
// which tries again several times a second, has written the table, and the reserve exists again.
//
// Invariant: while the room is RoomNone or RoomEmpty, the owner's clock stands still, since workers
// can neither end nor extend their leases.
type diskSpace struct {
	fs  vfs.FS
	dir string
	low uint64 // bytes of free space below which there is not enough; 0: no limit

	denied  bool   // nothing can be written, whatever the file system says
	relaxed uint64 // until when space is tight after denied, by uptime, whatever the file system says
	free    uint64 // bytes, when the file system was last asked
	next    uint64 // when to ask again before a group, by uptime
	recheck uint64 // when to ask again without a call, by uptime, if something waits for room
	every   int    // committed bytes after which to ask again: in all shards together a fraction of low
	written int    // bytes committed since the file system was asked
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

// measure asks the file system for the free space.
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

// look measures the free space if that is due.
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

// dropParked refuses operations that wait for room but whose callers do not wait any more.
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

// hasSpace reports whether the stores to which a group is written can write their tables and logs.
func (s *shard) hasSpace() bool {
	return s.Store.HasSpace() && (s.node == nil || s.node.HasSpace())
}

// holdsBack reports whether something waits for room, or may.
func (s *shard) holdsBack() bool {
	return !s.HasRoom(engine.RoomLow) || !s.HasRoom(engine.Roomy) && s.TicksAreDue()
}

// errNoRoom returns why an operation is refused.
func (s *shard) errNoRoom() error {
	if s.space.denied {
		return fmt.Errorf("%w: shard %d: nothing can be written", ErrDiskFull, s.index)
	}
	return fmt.Errorf("%w: shard %d: %d bytes are free, at least %d are wanted",
		ErrDiskFull, s.index, s.space.free, s.space.low)
}

// putOff lets an operation wait for room if nobody would call again, and refuses any other.
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

// roomOf returns the level of free space down to which an alteration still runs.
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

// roomWait is embedded in operations whose callers may wait for room, as Run does with the outcomes
// of its handlers.
type roomWait struct {
	gone <-chan struct{} // closed when the caller waits no longer; nil: it does not wait for room
	left chan struct{}   // the same channel as gone, if the caller is on another node
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

// setWaits sets whether the caller on another node waits for room.
func (w *roomWait) setWaits(waits bool) {
	if waits {
		w.left = make(chan struct{})
		w.gone = w.left
	}
}

// abandon is called when the caller on another node has gone.
func (w *roomWait) abandon(*shard) {
	if w.left != nil {
		close(w.left)
	}
}

// diskFull makes an error that reports a full disk match ErrDiskFull.
func diskFull(err error) error {
	if err == nil || !failstop.IsNoSpace(err) || errors.Is(err, ErrDiskFull) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrDiskFull, err)
}
