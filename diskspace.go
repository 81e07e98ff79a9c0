package codeq

import (
	"codeq/internal/diskspace"
	"codeq/internal/engine"
)

// An operation without room on the disk is refused before anything of it is written, since a store
// whose log cannot be written fails until it is opened again. Memory and the log have room for the
// group under way, the log because of a reserve (failstop). No other group begins until Pebble,
// which tries again several times a second, has written the table, and the reserve exists again.
//
// Invariant: while the room is RoomNone or RoomEmpty, the owner's clock stands still, since workers
// can neither end nor extend their leases.

// diskSpace is what a shard's owner knows of the free space, and the operations that wait for it.
type diskSpace struct {
	diskspace.Watch
	parked []operation
}

// look measures the free space if that is due.
func (s *shard) look() {
	d, before := &s.space, s.Room
	room, looked := d.Look(s.Uptime, !s.hasSpace())
	if !looked {
		return
	}
	s.Room = room
	if s.Tight = d.IsTight(s.Uptime); s.Tight {
		s.Store.Reclaim(d.Free())
	}
	if room != before {
		s.opts.log.Warn("room on the disk", "shard", s.index, "free", d.Free(), "level", room.String())
	}
	if room < before {
		s.undecided.deferred = append(s.undecided.deferred, d.parked...)
		clear(d.parked)
		d.parked = d.parked[:0]
	}
	s.dropParked()
	if !s.HasRoom(engine.RoomLow) { // no message is sent or taken
		s.takers.Dismiss(func(t *takenOp) { t.settle(d.Refusal(s.index)) })
	}
}

// dropParked refuses operations that wait for room but whose callers do not wait any more.
func (s *shard) dropParked() {
	kept := s.space.parked[:0]
	for _, op := range s.space.parked {
		if w, ok := op.(roomWaiter); ok && !w.WaitsForRoom() {
			refuse(op, s.space.Refusal(s.index))
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
	return !s.HasRoom(engine.RoomLow) || !s.HasRoom(engine.Roomy) && s.TicksAreDue() || s.takers.Wait()
}

// parkOrRefuse lets an operation wait for room if nobody would call again, and refuses any other.
func (s *shard) parkOrRefuse(op operation) {
	if shared, ok := op.(sharedOp); ok {
		shared.noRoom(s)
		return
	}
	if w, ok := op.(roomWaiter); op.verb().is(waitsRoom) || ok && w.WaitsForRoom() {
		s.space.parked = append(s.space.parked, op)
		return
	}
	refuse(op, s.space.Refusal(s.index))
}

// roomWaiter is an operation that waits for room as long as its caller does.
type roomWaiter interface {
	operation
	WaitsForRoom() bool
}

// roomWait is embedded in operations whose callers may wait for room.
type roomWait struct{ diskspace.Wait }

// abandon is called when the caller on another node has gone.
func (w *roomWait) abandon(*shard) { w.Leave() }
