package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/crashfs"
	"codeq/internal/failstop"
	"codeq/internal/snapshot"
)

const testMinFree = 4 << 20

var errBroken = errors.New("the disk is broken")

// loneGroup is a group without Raft.
func loneGroup(disk vfs.FS, m StateMachine) *Group {
	n := &Node{log: slog.New(slog.DiscardHandler)}
	n.c.Disk = failstop.NewWatch(time.Hour, n.log, partNames(1)...)
	n.c.MaxAppend, n.c.SnapshotBytes = MaxAppend, SnapshotBytes
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.c.PanicError = func(what string, value any, _ []byte) error { return fmt.Errorf("%s: %v", what, value) }
	n.room = newLogRoom(disk, "dir", testMinFree, n.log)
	g := newGroup(n, 0, m)
	g.running, g.continues = true, true
	return g
}

// sizedDisk says how much is free.
type sizedDisk struct {
	vfs.FS
	left  atomic.Int64
	asked atomic.Int64  // calls of GetDiskUsage
	hangs chan struct{} // until it is closed, so do they; nil: they do not
}

func newSizedDisk(free int64) *sizedDisk {
	d := &sizedDisk{FS: crashfs.New()}
	d.free(free)
	return d
}

func (d *sizedDisk) free(bytes int64) { d.left.Store(bytes) }

func (d *sizedDisk) GetDiskUsage(string) (vfs.DiskUsage, error) {
	d.asked.Add(1)
	if d.hangs != nil {
		<-d.hangs
	}
	return vfs.DiskUsage{AvailBytes: uint64(d.left.Load())}, nil
}

// notes is a state machine that notes its calls.
type notes struct {
	applied []Entry
	err     error    // of Apply
	last    Position // in the store when it is opened
	live    snapshot.Live
}

func (m *notes) Apply(e Entry) error {
	m.applied = append(m.applied, e)
	return m.err
}

func (m *notes) Open(install func() error) (Position, error) { return m.last, install() }
func (m *notes) Live() snapshot.Live                         { return m.live }
func (m *notes) Lead(uint64) (Leader, error)                 { return nil, errBroken }
func (m *notes) Raise(uint64, int) error                     { return errBroken }
func (m *notes) IsForgotten(string) (bool, error)            { return false, nil }
