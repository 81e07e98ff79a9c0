package simtest

import (
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/raftlog"
	"codeq/internal/testkit"
)

// DiskSize is the size of a disk, in bytes.
const DiskSize int64 = 1 << 40

// Life is a process's view of its machine, from its start to its end, with injected faults:
// operations on the disk fail or hang, the disk is full, or the process crashes.
type Life struct {
	machine *Machine
	votes   *Votes
	boot    string

	left  atomic.Int64 // operations before the crash; 0: no crash is planned
	crash atomic.Pointer[func()]
	fails atomic.Pointer[func(op, name string) bool]
	hang  atomic.Pointer[hang]

	room *testkit.SmallDisk // the room on the disk
	free atomic.Int64       // the reported free bytes, independent of room
	full atomic.Bool        // set by Fill
}

// Start begins a life with the current state of the machine.
func (m *Machine) Start() *Life {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := &Life{machine: m, votes: m.votes, boot: bootName(m.boot), room: testkit.NewSmallDisk(DiskSize)}
	l.room.FS = m.disk
	l.free.Store(DiskSize)
	return l
}

// Boot returns the machine's boot at the start of the life.
func (l *Life) Boot() string { return l.boot }

// FS returns the disk with the faults of the life.
func (l *Life) FS() vfs.FS {
	return disk{&testkit.HookFS{FS: l.room, Before: l.before, Read: func(name string) { l.await("read", name) }}, l}
}

// Stables returns the terms and votes. Storing one is an operation on the disk, "write" of "votes".
func (l *Life) Stables() raftlog.Stables { return stables{l.votes, l} }

// Log returns a log of Raft on the disk. Reads fail if "read" of "log" does, also for entries in
// memory.
func (l *Life) Log(g *raftlog.Group) *Log { return &Log{g, l} }

// CrashAfter calls crash before the last of so many operations on the disk. (A crash at a given
// time would come only when all goroutines wait, since time in a bubble passes only then.) It
// returns false if a crash is already planned.
func (l *Life) CrashAfter(operations int64, crash func()) bool {
	if l.left.Load() != 0 {
		return false
	}
	l.crash.Store(&crash)
	l.left.Store(operations)
	return true
}

// Fail makes all operations that fails selects return testkit.ErrBroken. The operations are those
// of testkit.HookFS, of Stables and of Log.
func (l *Life) Fail(fails func(op, name string) bool) { l.fails.Store(&fails) }

// hang selects operations that do not return.
type hang struct {
	hangs func(op, name string) bool
	over  chan struct{} // closed at its end
}

// Hang makes all operations that hangs selects hang until Answer is called. The operations are the
// changing ones of Fail, "read" of a file and "statfs". It returns false if some hang already.
func (l *Life) Hang(hangs func(op, name string) bool) bool {
	return l.hang.CompareAndSwap(nil, &hang{hangs, make(chan struct{})})
}

// Answer continues the operations that hang, if any.
func (l *Life) Answer() {
	if h := l.hang.Swap(nil); h != nil {
		close(h.over)
	}
}

// SetFree sets the reported free bytes, independent of the room.
func (l *Life) SetFree(bytes int64) { l.free.Store(bytes) }

// Limit leaves so many bytes on the disk: writes beyond fail. If said, the file system reports the
// limit; otherwise it does not, as with a quota.
func (l *Life) Limit(bytes int64, said bool) {
	l.room.Free(bytes)
	if said {
		l.free.Store(bytes)
	}
}

// Fill records that the disk is filled. It returns false if it already was.
func (l *Life) Fill() bool { return !l.full.Swap(true) }

// IsFull reports whether Fill was called, and MakeRoom not yet.
func (l *Life) IsFull() bool { return l.full.Load() }

// MakeRoom undoes Fill, Limit and SetFree.
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

// await waits for Answer if the operation hangs.
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

// disk is the disk of a life. It reports Life.free.
type disk struct {
	*testkit.HookFS
	life *Life
}

func (d disk) GetDiskUsage(name string) (vfs.DiskUsage, error) {
	d.life.await("statfs", name)
	free := uint64(d.life.free.Load())
	return vfs.DiskUsage{AvailBytes: free, TotalBytes: uint64(DiskSize), UsedBytes: uint64(DiskSize) - free}, nil
}
