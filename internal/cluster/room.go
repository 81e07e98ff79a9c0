package cluster

import (
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/failstop"
	"codeq/internal/store"
)

// logRoom is whether there is room on the disk of a node for what leaders send it.
// A follower decides nothing, so nobody looks at the disk for it; but a log that meets the
// end of its disk fails until the node is opened again. So it is refused, before
// any of it is written, what would leave less than a quarter of Config.MinFree;
// its leader tries again. A leader has refused its callers long before.
//
// For entries the file system is asked as often as by those who decide, for files of a snapshot at
// each piece. All replicas of a node share it; all methods may be called concurrently.
type logRoom struct {
	fs    vfs.FS
	dir   string
	least uint64 // bytes; 0: no limit
	log   *slog.Logger
	lost  func(error) // called with failstop.ErrLost: the directory is not there any more; nil: nobody is

	begin  time.Time    // of the clock of next
	next   atomic.Int64 // when to ask again, in ms
	stored atomic.Int64 // bytes since it was asked
	isFull atomic.Bool
	tight  atomic.Uint64 // bytes that were free, if space is to be reclaimed; 0: it is not
}

// errNoRoom is made once: a leader tries again and again.
var errNoRoom = fmt.Errorf("%w: %w", errNotStored, base.ErrDiskFull)

func newLogRoom(fs vfs.FS, dir string, minFree int64, log *slog.Logger) *logRoom {
	return &logRoom{fs: fs, dir: dir, least: uint64(max(minFree, 0)) / 4, log: log, begin: time.Now()}
}

// full reports whether so many bytes must not be stored.
func (d *logRoom) full(bytes int) bool {
	if d.least == 0 {
		return false
	}
	now, next := time.Since(d.begin).Milliseconds(), d.next.Load()
	if now < next && d.stored.Add(int64(bytes)) < store.LookBytes || !d.next.CompareAndSwap(next, now+store.LookEveryFull) {
		return d.isFull.Load() // somebody else asks, if it is time to
	}
	d.stored.Store(0)
	usage, err := d.usage()
	full := err == nil && usage.AvailBytes < d.least
	tight := uint64(0)
	if err == nil && store.IsTight(usage.AvailBytes, 4*d.least) {
		tight = max(usage.AvailBytes, 1)
	}
	d.tight.Store(tight)
	if !full {
		d.next.Store(now + store.LookEvery)
	}
	if d.isFull.Swap(full) != full {
		d.log.Warn("room on the disk for what leaders send", "free", usage.AvailBytes, "refused", full)
	}
	return full
}

// fits returns an error if there is no room for so many bytes that are about to come.
func (d *logRoom) fits(bytes int64) error {
	if d.least == 0 {
		return nil
	}
	usage, err := d.usage()
	if err == nil && usage.AvailBytes < d.least+uint64(bytes) {
		return fmt.Errorf("%w: %d bytes are to come, %d are free", errNoRoom, bytes, usage.AvailBytes)
	}
	return nil // who cannot say how much is free refuses nothing
}

func (d *logRoom) usage() (vfs.DiskUsage, error) {
	u, err := d.fs.GetDiskUsage(d.dir)
	if errors.Is(err, failstop.ErrLost) && d.lost != nil {
		d.lost(err)
	}
	return u, err
}

// reclaim is how many bytes are free if space is to be reclaimed; 0: it is not.
func (d *logRoom) reclaim() uint64 { return d.tight.Load() }
