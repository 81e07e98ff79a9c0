package owner

import (
	"errors"
	"fmt"
	"math"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/failstop"
	"codeq/internal/store"
)

// DiskWatch asks the file system before a group, if the shard has committed some MiB since it asked
// last, or some time has passed. If the file system cannot say, the disk counts as full only once a
// table, or the log, cannot be written for want of space.
type DiskWatch struct {
	// Written is how many bytes were committed since the file system was asked.
	Written int
	// Recheck is when to ask again without a call, by uptime, if something waits for room.
	Recheck uint64
	// Cluster is the other nodes that store the shard's commits; nil: there are none.
	Cluster DiskCluster

	disk    disk
	low     uint64      // bytes of free space below which there is not enough; 0: no limit
	denied  bool        // writes fail, even if the file system reports free space
	relaxed uint64      // space is tight until then, by uptime, after denied
	free    uint64      // bytes, when the file system was last asked
	next    uint64      // when to ask again before a group, by uptime
	own     engine.Room // level of this disk
	others  engine.Room // level of the other nodes
	every   int         // committed bytes between two looks: in all shards together a fraction of low
}

// DiskCluster is the nodes that store the commits of a shard.
type DiskCluster interface {
	// Shortage is that of a majority of the nodes (store.Shortage), as this one knows.
	Shortage() int
	// Short says which nodes have it.
	Short() string
}

// denyTight is how long space is tight after a write has found none: ms.
const denyTight = 60_000

// disk is a store, which fails if it finds that its directory is not there any more.
type disk interface {
	DiskUsage() (vfs.DiskUsage, error)
}

// NewDiskWatch returns a DiskWatch for the store of one of so many shards. low is how many bytes
// should stay free; 0: any number.
func NewDiskWatch(d disk, low int64, shards int) DiskWatch {
	w := DiskWatch{disk: d, low: uint64(max(low, 0)), every: store.LookBytes}
	if share := int(w.low / uint64(16*max(shards, 1))); share > 0 {
		w.every = min(w.every, share)
	}
	return w
}

// Look measures the free space if that is due. denied: writes fail, even if the file system reports
// free space. The room is that of this disk, or that of a majority's disks if they have less.
func (w *DiskWatch) Look(now uint64, denied bool) (room engine.Room, looked bool) {
	others := engine.Roomy
	if w.Cluster != nil {
		others = engine.Room(w.Cluster.Shortage())
	}
	if now < w.next && w.Written < w.every && denied == w.denied && others == w.others {
		return 0, false
	}
	w.denied = denied
	w.own, w.others = w.measure(), others
	room = max(w.own, others)
	w.Written, w.next, w.Recheck = 0, now+store.LookEvery, now+store.LookEvery
	if denied {
		w.relaxed = now + denyTight
	}
	if room > engine.Roomy {
		w.next = now + store.LookEveryFull
	}
	return room, true
}

// measure asks the file system for the free space.
func (w *DiskWatch) measure() engine.Room {
	switch {
	case w.denied:
		return engine.RoomEmpty
	case w.low == 0:
		return engine.Roomy
	}
	usage, err := w.disk.DiskUsage()
	if w.free = usage.AvailBytes; err != nil {
		w.free = math.MaxUint64
	}
	return engine.Room(store.Shortage(w.free, w.low))
}

// Free returns the free bytes when the file system was last asked.
func (w *DiskWatch) Free() uint64 { return w.free }

// IsTight reports whether the store should reclaim space at once.
func (w *DiskWatch) IsTight(now uint64) bool {
	return now < w.relaxed || w.low > 0 && store.IsTight(w.free, w.low)
}

// Refusal returns why an operation of a shard is refused.
func (w *DiskWatch) Refusal(shard int) error {
	switch {
	case w.others > w.own:
		return fmt.Errorf("%w: shard %d: %s", base.ErrDiskFull, shard, w.Cluster.Short())
	case w.denied:
		return fmt.Errorf("%w: shard %d: %s", base.ErrDiskFull, shard, w.denial())
	}
	return fmt.Errorf("%w: shard %d: %d bytes are free, at least %d are wanted (Options.MinFreeBytes): make room on the disk", base.ErrDiskFull, shard, w.free, w.low)
}

// denial says why nothing can be written, and what to do. There may be free bytes: inodes run out,
// too, and so do quotas.
func (w *DiskWatch) denial() string {
	if usage, err := w.disk.DiskUsage(); err == nil && usage.AvailBytes > max(w.low, deniedFree) {
		return fmt.Sprintf("nothing can be written though %d bytes are free: free inodes (df -i), or raise the quota of the user", usage.AvailBytes)
	}
	return "nothing can be written: make room on the disk"
}

// deniedFree is more free space than a file system keeps from its users, or a file needs, in bytes.
const deniedFree = 64 << 20

// DiskFull makes an error that reports a full disk match base.ErrDiskFull.
func DiskFull(err error) error {
	if err == nil || !failstop.IsNoSpace(err) || errors.Is(err, base.ErrDiskFull) {
		return err
	}
	return fmt.Errorf("%w: %w", base.ErrDiskFull, err)
}
