package codeq

import (
	"errors"
	"sync/atomic"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"pgregory.net/rapid"

	"codeq/internal/engine"
)

// roomyDisk is a file system with as much room as somebody says.
type roomyDisk struct {
	vfs.FS
	free *atomic.Int64 // bytes
}

func (d *roomyDisk) GetDiskUsage(string) (vfs.DiskUsage, error) {
	return vfs.DiskUsage{AvailBytes: uint64(d.free.Load()), TotalBytes: 1 << 40}, nil
}

// lowDisk is the action of calls while there is less room on the disk, and perhaps
// of time that passes meanwhile: calls are refused by the level and change nothing,
// or do what they always do. What they let go on does so when there is room.
func (m *model) lowDisk(*rapid.T) {
	level := engine.RoomLow
	if m.plain { // what goes on later with tasks that are bound to others may come in another order
		level = engine.Room(rapid.IntRange(int(engine.RoomLow), int(engine.RoomEmpty)).Draw(m.t, "level"))
	}
	m.hurried = level > engine.RoomLow
	defer func() { m.hurried = false }()
	draws := []func(*model) call{(*model).drawProduce, (*model).drawComplete, (*model).drawFinish, (*model).drawExtend}
	if level > engine.RoomLow {
		draws = append(draws, (*model).drawClaim)
	}
	first := []func(*model) call{(*model).drawControl, (*model).drawPurge, (*model).drawReleaseKey} // later, by what has not gone on yet
	c := rapid.SampledFrom(append(first, draws...)).Draw(m.t, "call")(m)                            // or there is none to draw
	m.setRoom(level)
	m.reopened = level > engine.RoomLow
	for i := range rapid.IntRange(1, 4).Draw(m.t, "calls") {
		if i > 0 && len(m.receipts) == 0 {
			break
		} else if i > 0 {
			c = rapid.SampledFrom(draws).Draw(m.t, "call")(m)
		}
		if refused, err := m.lacksRoom(c, level); refused {
			c.do(m.q)
			synctest.Wait()
			if !errors.Is(err(), ErrDiskFull) {
				m.t.Fatalf("%T %+v on a disk at level %s: %v", c, c, level, err())
			}
			continue
		}
		if level == engine.RoomLow {
			m.run(c)
			continue
		}
		c.do(m.q)
		synctest.Wait()
		c.apply(m)
	}
	if level > engine.RoomScarce {
		d := rapid.SampledFrom([]time.Duration{0, time.Second, 10 * time.Second}).Draw(m.t, "time without room")
		time.Sleep(d)
		for _, t := range m.tasks {
			if t.want.State == Leased {
				t.deadline += uint64(d.Milliseconds())
			}
		}
	}
	m.setRoom(engine.Roomy)
	synctest.Wait()
	m.sync()
	m.reopened = false
	m.settle(level == engine.RoomLow)
}

// setRoom sets the level of room, and has all shards find it.
func (m *model) setRoom(level engine.Room) {
	m.free.Store(diskTestLevels[level])
	for _, s := range m.q.led() {
		m.noError(s.probe(func(s *shard) error {
			s.space.next = 0
			return nil
		}))
		m.noError(s.probe(func(*shard) error { return nil }))
	}
}

// lacksRoom reports whether a call is to be refused at a level of room; err is what
// it has returned.
func (m *model) lacksRoom(c call, level engine.Room) (refused bool, err func() error) {
	kept := func(t *modelTask) bool { return t != nil && m.retention(t) != 0 }
	down := engine.RoomScarce // the level down to which it goes on
	switch c := c.(type) {
	case *produceCall:
		down, err = engine.Roomy, func() error { return c.err }
		if m.refuses(c.tasks, -1) {
			down = engine.RoomEmpty
		}
	case *claimCall:
		down, err = engine.RoomLow, func() error { return c.err }
	case *controlCall:
		down, err = engine.RoomLow, func() error { return c.err }
		if t := m.tasks[c.id]; c.verb == "cancel" {
			down = engine.RoomNone
			if kept(t) && t.want.State != Done && t.want.State != Canceled {
				down = engine.RoomScarce
			}
		}
	case *purgeCall:
		down, err = engine.RoomEmpty, func() error { return c.err }
		for _, t := range m.tasks {
			if c.covers(m, t) {
				down = engine.RoomNone
			}
		}
	case *releaseKeyCall:
		down, err = engine.RoomNone, func() error { return c.err }
	case *finishCall:
		err = func() error { return c.err }
		switch {
		case c.verb != "complete":
		case m.refuses(c.next, c.receipt.ID.shard(m.opts.Shards)):
			down = engine.RoomEmpty
		case len(c.next) == 0 && !kept(m.held(c.receipt)):
			down = engine.RoomNone
		}
	}
	return level > down, err
}
