// Package inspect gives outside tests, codeqtest, and the programs below bench access to unexported
// parts of codeq: private options, and the inside of an open queue. codeq sets the variables when
// it is initialised, and never reads them, so that it exports nothing for these programs.
package inspect

import (
	"cmp"
	"context"
	"net"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/platform"
	"codeq/internal/raftlog"
	"codeq/internal/store"
)

// Private are options that codeq does not export. The zero value has the defaults.
type Private struct {
	FS   vfs.FS           // default: that of the operating system
	Boot string           // of the machine. Default: that of the operating system
	Wall func() time.Time // default: time.Now; its monotonic part is not used
	Mono func() time.Time // for leases, permits and rates. Default: time.Now

	// Pebble is Pebble's format by that of the directory. Default: manifest.PebbleFormat
	Pebble func(format int) uint64

	// Bounds. Default: the constants of engine, store and cluster with these names.
	IdleLanes, SweepLanes, GroupBytes, MaxAppend    int
	TrimBytes, TrimLane, ReclaimFrom, SnapshotBytes int

	HidesRoom bool // a node does not report how full its disk is, so that entries of others are stuck

	// Of a codeq.Cluster.
	Dial   func(ctx context.Context, addr string) (net.Conn, error)
	Votes  func(path string) (raftlog.Stables, error)
	Log    func(*raftlog.Group) cluster.LogStore
	Newest int // format that the node knows. Default: manifest.Format
}

// SetDefaults sets the fields that are zero and have defaults.
func (p *Private) SetDefaults() {
	if p.FS == nil {
		p.FS = platform.FS
	}
	if p.Wall == nil {
		p.Wall = time.Now
	}
	if p.Mono == nil {
		p.Mono = time.Now
	}
	if p.Pebble == nil {
		p.Pebble = manifest.PebbleFormat
	}
	p.Boot = cmp.Or(p.Boot, platform.BootID())
	p.IdleLanes, p.SweepLanes = cmp.Or(p.IdleLanes, engine.IdleLanes), cmp.Or(p.SweepLanes, engine.SweepLanes)
	p.GroupBytes, p.MaxAppend = cmp.Or(p.GroupBytes, engine.GroupBytes), cmp.Or(p.MaxAppend, cluster.MaxAppend)
	p.TrimBytes, p.TrimLane = cmp.Or(p.TrimBytes, engine.TrimBytes), cmp.Or(p.TrimLane, engine.TrimLane)
	p.ReclaimFrom, p.SnapshotBytes = cmp.Or(p.ReclaimFrom, store.ReclaimFrom), cmp.Or(p.SnapshotBytes, cluster.SnapshotBytes)
}

// Options returns the private part of a *codeq.Options, *codeq.Cluster, *codeq.ReaderOptions or
// *codeq.VerifyOptions, to be set before these are used.
var Options func(options any) *Private

// Apply returns how a replica applies entries to its store, which is st.
var Apply func(st *store.Store) func(cluster.Entry) error

// TaskInfo returns a stored task as a *codeq.TaskInfo.
var TaskInfo func(*store.Task) any

// With sets the private part of options, and returns them.
func With[O any](options *O, private Private) *O {
	*Options(options) = private
	return options
}

// Of returns the inside of a *codeq.Queue.
var Of func(queue any) Queue

// Queue is the inside of a queue. Its methods may be called by any goroutine while it is open.
type Queue interface {
	// Shards returns how many shards the queue has.
	Shards() int
	// Leads reports whether this process decides for a shard.
	Leads(shard int) bool
	// Commits returns how many groups of operations the shards that this process leads have begun
	// to commit, each since it became the leader.
	Commits() uint64
	// Owner calls look on the goroutine that owns a shard, and returns its error. The owner waits
	// while it runs.
	Owner(shard int, look func(*Owner) error) error
	// Asleep calls look with the Owner of a shard, on the caller's goroutine. Busy is not set.
	// REQUIRES: the owner sleeps, as synctest.Wait has just said.
	Asleep(shard int, look func(*Owner))
	// Read calls f with the store that this process has of a shard, which stays open meanwhile.
	Read(shard int, f func(*store.Store) error) error
	// StartingAt returns the *codeq.Queue with a given shard in place of a random one: Produce and
	// ProduceBatch store there, Claim and ClaimBatch ask there first. Other verbs fail.
	StartingAt(shard int) any
	// OfAnotherProcess returns the *codeq.Queue of a process that shares only the shards with this
	// one.
	OfAnotherProcess() any
	// Waiting returns how many operations wait in the inbox of a shard that this process leads.
	Waiting(shard int) int
	// RunUntilEmpty is Queue.Run, with a *codeq.Mux and *codeq.RunOptions, but ends as well when
	// nothing can be claimed at the moment and no handler runs. It returns how many tasks it has
	// claimed. Messages of completions to other shards may not have arrived yet.
	RunUntilEmpty(ctx context.Context, mux, opts any) (claimed int, err error)
	// Watched reports whether the queue collects events for a subscription.
	Watched() bool

	// Options returns a copy of the *codeq.Options of the queue, with their defaults.
	Options() any
	// Directory returns the directory of the queue.
	Directory() *manifest.Directory
	// RaiseBarrier makes the owners of all shards stand still until resume is called. After an
	// error, none does.
	RaiseBarrier(context.Context) (resume func() error, err error)

	// Node returns the node; nil without a cluster.
	Node() *cluster.Node
	// Group returns the Raft group of a shard; nil without a cluster.
	Group(shard int) *cluster.Group
	// Leaders returns the node's way to the leaders of the shards.
	Leaders() cluster.Leaders
	// ClockAge returns how old the clock of leases was that the leader of a shard found, when it
	// began.
	ClockAge(shard int) time.Duration
	// Numbers returns the numbers that the node gives to its produces for a shard.
	Numbers(shard int) **call.Session
}

// Owner is the inside of the goroutine that owns a shard.
type Owner struct {
	Rules  *engine.State
	Claims *dispatch.Dispatcher
	Store  *store.Store
	// Permits are nil without a cluster. Epoch is the log position at which the leader began, or
	// zero.
	Permits *dispatch.Permits
	Epoch   uint64
	// Busy says that the owner has decided operations that it has not persisted, or has some to
	// decide by itself.
	Busy bool
	// Large is how many large operations wait for memtables.
	Large int
	// Measure makes the owner ask for the free space of the disk before its next decision.
	Measure func()
	// Awaiting returns how many callers of Await wait for a task.
	Awaiting func(keys.ID) int
	// Commit commits groups of operations. A test may wrap it.
	Commit Committer
}

// Committer commits the groups of a shard's owner.
type Committer interface {
	Commit(*pebble.Batch) error
	// Confirm makes sure that the reads of a group without a key still hold. After an error,
	// nothing was applied.
	Confirm() error
}
