package simtest

import (
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/raftlog"
	"codeq/internal/testkit"
)

// DiskSize is how many bytes a disk has.
const DiskSize int64 = 1 << 40

// Life is what a process on a machine has of it, from its start to its end, and what befalls it:
// operations on its disk fail or hang, the disk is full, or the process ends amid its work.
type Life struct {
	machine *Machine
	votes   *Votes
	boot    string

	left  atomic.Int64 // operations before the crash; 0: none is to come
	crash atomic.Pointer[func()]
	fails atomic.Pointer[func(op, name string) bool]
	hang  atomic.Pointer[hang]

	room *testkit.SmallDisk // what there is
	free atomic.Int64       // what is reported, whatever there is
	full atomic.Bool        // whatever of the two is little
}

// Start begins a life with what the machine has now.
func (m *Machine) Start() *Life {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := &Life{machine: m, votes: m.votes, boot: bootName(m.boot), room: testkit.NewSmallDisk(DiskSize)}
	l.room.FS = m.disk
	l.free.Store(DiskSize)
	return l
}

// Boot is that of the machine in which the life has begun.
func (l *Life) Boot() string { return l.boot }

// FS is the disk.
func (l *Life) FS() vfs.FS {
	return disk{&testkit.HookFS{FS: l.room, Before: l.before, Read: func(name string) { l.await("read", name) }}, l}
}

// Stables has the terms and votes. To store one is an operation on the disk, "write" of "votes".
func (l *Life) Stables() raftlog.Stables { return stables{l.votes, l} }

// Log is a log of Raft on the disk. What is read from it fails if "read" of "log" does, whether it
// has the entry in memory or not.
func (l *Life) Log(g *raftlog.Group) *Log { return &Log{g, l} }

// CrashAfter calls crash before the last of so many operations on the disk. (Time in a bubble
// passes only when all goroutines wait, and so does a crash that comes at a certain time.) It is
// false if a crash is to come already.
func (l *Life) CrashAfter(operations int64, crash func()) bool {
	if l.left.Load() != 0 {
		return false
	}
	l.crash.Store(&crash)
	l.left.Store(operations)
	return true
}

// Fail makes the operations fail, with testkit.ErrBroken, for which fails is true. They are those
// of testkit.HookFS, of Stables and of Log.
func (l *Life) Fail(fails func(op, name string) bool) { l.fails.Store(&fails) }

// hang is operations that do not return.
type hang struct {
	hangs func(op, name string) bool
	over  chan struct{} // closed at its end
}

// Hang makes the operations hang for which hangs is true, until Answer is called. They are those of
// Fail that change something, "read" of a file and "statfs". It is false if some hang already.
func (l *Life) Hang(hangs func(op, name string) bool) bool {
	return l.hang.CompareAndSwap(nil, &hang{hangs, make(chan struct{})})
}

// Answer lets operations that hang go on, if any do.
func (l *Life) Answer() {
	if h := l.hang.Swap(nil); h != nil {
		close(h.over)
	}
}

// SetFree makes the file system report so many free bytes, whatever there is.
func (l *Life) SetFree(bytes int64) { l.free.Store(bytes) }

// Limit leaves so many bytes on the disk: what needs more fails. The file system says so, or, as
// with a quota, does not.
func (l *Life) Limit(bytes int64, said bool) {
	l.room.Free(bytes)
	if said {
		l.free.Store(bytes)
	}
}

// Fill notes that the disk is about to be full. It is false if it is already.
func (l *Life) Fill() bool { return !l.full.Swap(true) }

// IsFull reports whether the disk was filled, and there is no room again.
func (l *Life) IsFull() bool { return l.full.Load() }

// MakeRoom ends what Fill, Limit and SetFree have begun.
func (l *Life) MakeRoom() {
	l.room.Free(DiskSize)
	l.free.Store(DiskSize)
	l.full.Store(false)
}

// before is called before each operation.
func (l *Life) before(op, name string) error {
	if l.left.Load() > 0 && l.left.Add(-1) == 0 {
		(*l.crash.Load())()
	}
	l.await(op, name)
	return l.failure(op, name)
}

// await waits for the end of the operations that hang, if this is one.
func (l *Life) await(op, name string) {
	if h := l.hang.Load(); h != nil && h.hangs(op, name) {
		<-h.over
	}
}

func (l *Life) failure(op, name string) error {
	if fails := l.fails.Load(); fails != nil && (*fails)(op, name) {
		return testkit.ErrBroken
	}
	return nil
}

// disk is the disk of a life, which says what it is made to say of its room.
type disk struct {
	*testkit.HookFS
	life *Life
}

func (d disk) GetDiskUsage(name string) (vfs.DiskUsage, error) {
	d.life.await("statfs", name)
	free := uint64(d.life.free.Load())
	return vfs.DiskUsage{AvailBytes: free, TotalBytes: uint64(DiskSize), UsedBytes: uint64(DiskSize) - free}, nil
}
