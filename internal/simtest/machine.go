// Package simtest has the parts of a simulated cluster besides queues: the machine of a node, the
// network between nodes ([Net]), and the history of the clients' calls with its checks. All of it
// runs in a bubble of testing/synctest, except History.Check. Tests also use it to inspect and
// change the stores of closed queues ([StoreContents], [AlterStore]).
package simtest

import (
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/crashfs"
)

// Machine has the parts of a node that outlive its processes: a disk, the terms and votes of Raft,
// and clocks, all in memory. Each process on it has its own Life. The methods are safe for
// concurrent use.
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

// Disk returns the disk of the next Life, without injected faults.
func (m *Machine) Disk() *crashfs.Disk {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.disk
}

// Votes returns the terms and votes of the next Life.
func (m *Machine) Votes() *Votes {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.votes
}

// Put replaces the disk and the votes. An existing Life keeps its own.
func (m *Machine) Put(disk *crashfs.Disk, votes *Votes) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.disk, m.votes = disk, votes
}

// Wipe replaces the disk and the votes by empty ones.
func (m *Machine) Wipe() { m.Put(crashfs.New(), NewVotes()) }

// Image returns a copy of the disk, unsynced data included, and of the votes.
func (m *Machine) Image() (*crashfs.Disk, *Votes) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.disk.Clone(), m.votes.Clone()
}

// Crash ends the process on the machine: by kill -9 if percent is 100, otherwise by a power loss
// that keeps percent of the unsynced data. Goroutines of the old process change nothing of the next
// Life.
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

// HideBoots makes the machine report its first boot again.
func (m *Machine) HideBoots() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boot = 0
}

// Boot returns the identity of the current boot.
func (m *Machine) Boot() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return bootName(m.boot)
}

func bootName(boot int) string { return fmt.Sprint("boot ", boot) }

// WatchReads calls seen with the size of each entry read from the log of Raft. nil ends that.
func (m *Machine) WatchReads(seen func(bytes int)) { m.reads.set(seen) }

// WatchStores calls seen with the bytes of each store to the log of Raft; on a follower, the
// entries of one message. nil ends that.
func (m *Machine) WatchStores(seen func(bytes int)) { m.stores.set(seen) }
