package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/integrity"
	"codeq/internal/store"
	"codeq/internal/wire"
)

// logRoom tracks whether the disk of a node has room for the data that leaders send. A follower
// decides nothing; but a log that reaches the end of its disk fails until the node is opened again.
// So a write that would leave less than a quarter of Config.MinFree is refused before it begins;
// its leader tries again. A leader has refused its callers long before: the answers to its
// heartbeats report the room (rooms).
//
// For entries the file system is asked as often as by the owners of shards, for files of a snapshot
// at each piece. All replicas of a node share it; all methods may be called concurrently.
type logRoom struct {
	fs    vfs.FS
	dir   string
	least uint64 // bytes; 0: no limit
	log   *slog.Logger
	lost  func(error) // called with integrity.ErrLost: the directory is gone; nil: not called

	begin  time.Time    // zero of the times in next
	next   atomic.Int64 // when to ask again, in ms
	stored atomic.Int64 // bytes since the last question
	isFull atomic.Bool
	asking atomic.Bool   // a goroutine asks; a disk that hangs is asked once
	tight  atomic.Uint64 // free bytes while space must be reclaimed; 0: it need not be
	free   atomic.Uint64 // free bytes at the last question; MaxUint64: not known
	total  atomic.Uint64 // bytes of the disk at the last question; 0: not known
}

// errNoRoom is made once: a leader tries again and again.
var errNoRoom = fmt.Errorf("%w: %w", errNotStored, base.ErrDiskFull)

func newLogRoom(fs vfs.FS, dir string, minFree int64, log *slog.Logger) *logRoom {
	d := &logRoom{fs: fs, dir: dir, least: uint64(max(minFree, 0)) / 4, log: log, begin: time.Now()}
	d.free.Store(math.MaxUint64)
	return d
}

// full reports whether so many bytes must not be stored.
func (d *logRoom) full(bytes int) bool {
	if d.least == 0 {
		return false
	}
	if now, ok := d.isTime(bytes); ok {
		d.measure(now)
	}
	return d.isFull.Load() // another goroutine asks, if it is time to
}

// isTime reports whether the file system must be asked before so many bytes are stored. Then no
// other goroutine asks until measure has returned.
func (d *logRoom) isTime(bytes int) (now int64, ok bool) {
	now = time.Since(d.begin).Milliseconds()
	next := d.next.Load()
	if now < next && d.stored.Add(int64(bytes)) < store.LookBytes {
		return now, false
	}
	if !d.asking.CompareAndSwap(false, true) {
		return now, false
	}
	d.next.Store(now + store.LookEveryFull)
	return now, true
}

// measure asks the file system. REQUIRES: isTime was true.
func (d *logRoom) measure(now int64) {
	defer d.asking.Store(false)
	d.stored.Store(0)
	usage, err := d.usage()
	full := err == nil && usage.AvailBytes < d.least
	tight := uint64(0)
	if err == nil && store.IsTight(usage.AvailBytes, 4*d.least) {
		tight = max(usage.AvailBytes, 1)
	}
	d.tight.Store(tight)
	if err != nil {
		usage.AvailBytes = math.MaxUint64
	}
	d.free.Store(usage.AvailBytes)
	d.total.Store(usage.TotalBytes)
	if !full {
		d.next.Store(now + store.LookEvery)
	}
	if d.isFull.Swap(full) != full {
		d.log.Warn("room on the disk for what leaders send", "free", usage.AvailBytes, "refused", full)
	}
}

// fits returns an error if there is no room for so many more bytes.
func (d *logRoom) fits(bytes int64) error {
	if d.least == 0 {
		return nil
	}
	usage, err := d.usage()
	if err == nil && usage.AvailBytes < d.least+uint64(bytes) {
		return fmt.Errorf("%w: %d bytes are to come, %d are free", errNoRoom, bytes, usage.AvailBytes)
	}
	return nil // an unknown room refuses nothing
}

func (d *logRoom) usage() (vfs.DiskUsage, error) {
	u, err := d.fs.GetDiskUsage(d.dir)
	if errors.Is(err, integrity.ErrLost) && d.lost != nil {
		d.lost(err)
	}
	return u, err
}

// reclaim is the number of free bytes while space must be reclaimed; 0: it need not be.
func (d *logRoom) reclaim() uint64 { return d.tight.Load() }

// diskRoom is a node's report on the room on its disk.
type diskRoom struct {
	shortage     int    // store.Shortage; 4 as well if nothing can be written
	free, wanted uint64 // bytes
}

func (r diskRoom) String() string {
	if r.free >= r.wanted {
		return "nothing can be written"
	}
	return fmt.Sprintf("%d bytes are free, at least %d are wanted", r.free, r.wanted)
}

// diskRoom is the report of this node, from the last measurement. If the next one is due, it is
// made without a wait.
func (n *Node) diskRoom() diskRoom {
	if n.c.HidesRoom {
		return diskRoom{}
	}
	d := n.room
	if d.least > 0 {
		if now, ok := d.isTime(0); ok {
			n.run("look at the disk", func() { d.measure(now) }, nil)
		}
	}
	r := diskRoom{free: d.free.Load(), wanted: 4 * d.least}
	if r.shortage = store.Shortage(r.free, r.wanted); !n.logs.HasSpace() {
		r.shortage = 4
	}
	return r
}

// diskBytes is the size of this node's disk and how much of it is free, as of the last measurement;
// 0: not known, as without a limit, since then the disk is not measured.
func (n *Node) diskBytes() (free, total int64) {
	d := n.room
	if n.c.HidesRoom || d.least == 0 || d.free.Load() == math.MaxUint64 {
		return 0, 0
	}
	return int64(d.free.Load()), int64(min(d.total.Load(), math.MaxInt64))
}

func (r diskRoom) append(dst []byte) []byte {
	return wire.AppendUint(wire.AppendUint(wire.AppendUint(dst, uint64(r.shortage)), r.free), r.wanted)
}

func readDiskRoom(r *wire.Reader) diskRoom {
	return diskRoom{int(min(r.Uint(), 4)), r.Uint(), r.Uint()}
}

// rooms is the room on the disks of other nodes. The zero value is ready for use.
type rooms struct {
	short atomic.Int32 // nodes with a shortage
	mu    sync.Mutex   // guards of
	of    map[raft.ServerID]roomAnswer
}

// roomAnswer is a node's report, and its time.
type roomAnswer struct {
	diskRoom
	at time.Time
}

// note stores the report of a node.
func (rs *rooms) note(id raft.ServerID, r diskRoom) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	put(&rs.of, id, roomAnswer{r, time.Now()})
	short := int32(0)
	for id, a := range rs.of {
		if time.Since(a.at) >= answerAge {
			delete(rs.of, id)
		} else if a.shortage > 0 {
			short++
		}
	}
	rs.short.Store(short)
}

func (rs *rooms) get(id raft.ServerID) diskRoom {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if a := rs.of[id]; time.Since(a.at) < answerAge {
		return a.diskRoom
	}
	return diskRoom{}
}

// shortNode is a node and the room on its disk.
type shortNode struct {
	node string
	diskRoom
}

// Shortage is the smallest shortage of room that a majority of the voters has, without this node,
// by their reports: no majority commits an entry that needs more. Nodes that do not answer count in
// no majority; if there is none without them, disks are not the reason.
func (g *Group) Shortage() int {
	if g.node.rooms.short.Load() == 0 && !g.health.anyRefuses() {
		return 0
	}
	members, _ := g.members() // none if the group has ended
	shortage, _ := g.shortageOf(members)
	return shortage
}

// Short names the nodes that have the Shortage.
func (g *Group) Short() string {
	members, _ := g.members()
	_, why := g.shortageOf(members)
	return cmp.Or(why, "a majority of the nodes had too little room on their disks a moment ago")
}

func (g *Group) shortageOf(members []raft.Server) (shortage int, why string) {
	var others []shortNode
	term, voters := g.raft.CurrentTerm(), votersOf(members)
	needed := len(voters)/2 + 1
	for _, m := range voters {
		if m.ID == g.node.self.ServerID() {
			needed--
			continue
		}
		r := g.node.rooms.get(m.ID)
		if g.health.refuses(m.ID) {
			r.shortage = 4
		}
		if g.health.outage(m.ID, term) == nil {
			others = append(others, shortNode{peerOf(m).Node, r})
		}
	}
	if needed < 1 || needed > len(others) {
		return 0, ""
	}
	slices.SortFunc(others, func(a, b shortNode) int { return cmp.Compare(a.shortage, b.shortage) })
	if shortage = others[needed-1].shortage; shortage == 0 {
		return 0, ""
	}
	var nodes []string
	for _, o := range others {
		if o.shortage >= shortage {
			nodes = append(nodes, fmt.Sprintf("node %q: %v", o.node, o.diskRoom))
		}
	}
	return shortage, strings.Join(nodes, "; ")
}
