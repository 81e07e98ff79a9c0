// Package simtest has what the simulation of a cluster consists of beside queues: the machine that
// a node runs on, the network between nodes ([Net]), and the history of what clients were told,
// with its checks. All of it lives in a bubble of testing/synctest, but for History.Check. Tests
// also look at the stores of closed queues by it, and change them ([StoreContents], [AlterStore]).
package simtest

import (
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/crashfs"
)

// Machine is what a node has that outlives its processes: a disk, the terms and votes of Raft, and
// clocks, all in memory. Each process on it has a Life of its own. Any goroutine may call its
// methods.
type Machine struct {
	Wall WallClock
	Mono MonoClock

	reads, stores watcher // of the log of Raft

	mu    sync.Mutex // guards the fields below
	disk  *crashfs.Disk
	votes *Votes
	boot  int
}

func NewMachine() *Machine {
	m := &Machine{disk: crashfs.New(), votes: NewVotes()}
	m.Wall.begin()
	m.Mono.begin()
	return m
}

// Disk is the disk that the next Life has, without the faults of a Life.
func (m *Machine) Disk() *crashfs.Disk {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.disk
}

// Votes are those that the next Life has.
func (m *Machine) Votes() *Votes {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.votes
}

// Put gives the machine another disk and other votes. A Life that has begun keeps its own.
func (m *Machine) Put(disk *crashfs.Disk, votes *Votes) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.disk, m.votes = disk, votes
}

// Wipe gives the machine a new disk, and no votes.
func (m *Machine) Wipe() { m.Put(crashfs.New(), NewVotes()) }

// Image is a copy of the disk, with what was not synced, and of the votes.
func (m *Machine) Image() (*crashfs.Disk, *Votes) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.disk.Clone(), m.votes.Clone()
}

// Crash ends the process on the machine as a kill -9 does, if percent is 100, or else a power loss,
// which leaves so many percent of what was not synced. What is left of the process changes nothing
// that the next Life has.
func (m *Machine) Crash(percent int, seed uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if percent < 100 {
		m.boot++
		m.disk = m.disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rand.New(rand.NewPCG(seed, 3))})
	} else {
		m.disk = m.disk.Clone()
	}
	m.votes = m.votes.Clone() // last: Raft stores a term before the entries of the term
}

// Reboot boots the machine again. REQUIRES: no process runs on it.
func (m *Machine) Reboot() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boot++
}

// HideBoots makes the machine say that it has run on since its first boot.
func (m *Machine) HideBoots() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boot = 0
}

// Boot tells the boots of the machine apart.
func (m *Machine) Boot() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return bootName(m.boot)
}

func bootName(boot int) string { return fmt.Sprint("boot ", boot) }

// WatchReads tells seen how many bytes each entry has that is read from the log of Raft. nil ends
// that.
func (m *Machine) WatchReads(seen func(bytes int)) { m.reads.set(seen) }

// WatchStores tells seen how many bytes are stored in the log of Raft at once, for a follower what
// a message has brought. nil ends that.
func (m *Machine) WatchStores(seen func(bytes int)) { m.stores.set(seen) }
