package codeq

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/guard"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/store"
)

// Durability says where an operation's writes are when its call returns without an error.
type Durability uint8

const (
	DurabilityDefault Durability = iota // DurabilityDisk
	// DurabilityProcess: handed to the operating system. The end of the process, even by kill -9,
	// loses no acknowledged change; a power loss may lose the last ones, of some shards more than
	// of others: the queue stays consistent. In a cluster nothing is lost while a majority keeps
	// its power: a node that has lost it counts again once they take it back. Otherwise the cluster
	// stands still ([ErrPowerLost]). Except on Linux and macOS, a kill counts as a power loss.
	DurabilityProcess
	// DurabilityDisk: forced to the disk, by one fsync for many callers. A power loss loses no
	// acknowledged change, if the disk keeps the data that it confirms.
	DurabilityDisk
	// DurabilityNone: held in memory up to 32 KiB of log, or until [Queue.Close]. The end of the
	// process may lose these changes, as a power loss with DurabilityProcess.
	DurabilityNone
)

var durabilities = newEnum[Durability]("Durability", "default", "process", "disk", "none")

// String returns "default", "process", "disk" or "none".
func (d Durability) String() string { return durabilities.Text(d) }

// MarshalText returns the text of String, and [ErrInvalid] for any other value.
func (d Durability) MarshalText() ([]byte, error) { return durabilities.Marshal(d) }

// UnmarshalText reads the text of MarshalText, and returns [ErrInvalid] for any other.
func (d *Durability) UnmarshalText(b []byte) error { return durabilities.Unmarshal(d, b) }

// Options are the options of [Open]. A zero field means its documented default; a nil *Options
// means all defaults. Open makes a deep copy of them, except Listener, Logger and Observer.
type Options struct {
	// Shards is how many independent stores share the tasks, each with a log and an owner
	// goroutine: 1 to 256, for good (0: as before). Default of a new queue: a sixth of GOMAXPROCS,
	// below [DurabilityDisk] a third, rounded up, at most 8; with Cluster 3, the same on all nodes.
	Shards     int
	Durability Durability // may differ at each [Open]. Default: [DurabilityDisk].

	LeaseFor    time.Duration // how long a lease lasts if neither the claim nor the task sets it. Default: 30 s.
	MaxAttempts int           // for tasks that do not set it. Default: 25.
	SuspectFor  time.Duration // how long a suspect ([Queue.Run]) is at work until further ones start. 1 ms to 24 h. Default: 1 minute.
	Backoff     Backoff       // the wait between the attempts of a task
	Retention   time.Duration // how long completed tasks are kept, if neither task nor queue sets it. Default: 0.
	Limits      Limits        // of tasks and batches

	GroupCap    int // how many operations of a shard one commit contains at the most. Default: 1024.
	InboxDepth  int // operations that may wait for a shard; others wait, as long as their ctx. Default: 4096.
	WindowTasks int // ready tasks of a lane (queue, tenant, priority) in memory; others on disk. Default: 4096.
	WindowBytes int // bytes of all windows together. Default: 32 MiB.
	// CacheBytes is the size of the block cache of all shards, which may also use the room of idle
	// memtables. These usually take 2 MemTableBytes for each shard, at most 4 and 2 more of all;
	// more only for batches as large as half of one. Default: 16 MiB.
	CacheBytes int64
	// MemTableBytes is how much each shard collects in memory before it writes a sorted table.
	// Default: 16 MiB; with Cluster 24 MiB divided by the number of shards, but 4 to 16 MiB.
	MemTableBytes int

	// MinFreeBytes is how much of the disk has to stay free. Below it, calls return [ErrDiskFull]:
	//
	//   - below MinFreeBytes, no tasks are added: [Queue.Produce], [Queue.ProduceBatch] and
	//     [Queue.SetSchedule] are refused, ticks of schedules wait.
	//   - below 3/4, no leases are granted: a claim waits, or is refused with NoWait, as are
	//     [Queue.RedriveDead], [Queue.SetPriority] and [Queue.SetRunAt]; no scheduled or blocked
	//     task becomes ready. Leases can still be ended, with follow-ups too, and extended.
	//   - below 1/2, only operations that free space run: [Queue.Complete] without follow-ups and
	//     [Queue.Cancel], of tasks without retention, [Queue.PurgeDead], [Queue.DeleteSchedule],
	//     [Queue.ReleaseKey] (of an ended task), and the end of retentions. No lease expires; after
	//     [Open], leases of [Queue.Claim] begin again. [Queue.Run] keeps its outcomes.
	//   - below 1/4, nothing is written; nor without inodes or quota for tables or the log, or,
	//     with a negative MinFreeBytes, from a full disk on until 4 MiB are free for each shard.
	//
	// Below 1.5 MinFreeBytes, deleted records free their space at once, not within half a minute.
	// Reads always work, other calls as soon as there is room. The file system is asked at most
	// once in a second or 4 MiB (0.1 s when little is free): another program may fill the disk
	// faster. In a cluster the disk of a shard's leader counts; followers accept nothing below 1/4.
	// Negative: no limit. Default: 64 MiB, plus 4 MemTableBytes for each shard.
	MinFreeBytes int64

	// StallAfter is how long an operation on the queue's files (write, sync, read) may take. Beyond
	// it the disk is stalled: the log, [Queue.Health], [Queue.ProcessInfo] and [ReplicaStatus] say
	// so, and other nodes lead its shards, if a majority is better off. 20 ms to 24 h, more than
	// [Cluster.HeartbeatTimeout]. Default: 5 s, or 4 HeartbeatTimeouts if that is more.
	StallAfter time.Duration

	// Producing wraps the storing of tasks; the first one is the outermost. Default: none.
	Producing []ProduceMiddleware

	Cluster *Cluster // makes this process one of several nodes. Default: nil, no other nodes and no socket.

	// MustExist makes [Open] refuse, with [ErrNotQueue], a directory that is not a queue yet,
	// before anything is written: a missing or empty one, or one of a first Open that did not
	// return; for a node, one that is not yet a member of its cluster. Default: false.
	MustExist bool
	// Tool says that the program opens an application's queue to steer it. Nothing happens by time
	// then: no lease expires, no task becomes due, no schedule ticks, nothing is deleted.
	// Durability, LeaseFor, MaxAttempts, Backoff, Retention, Limits and MinFreeBytes are the
	// application's, and must not be set. A node's queue, one of an older format, and a missing one
	// are refused. Claims, [Queue.Run] and [Queue.ServeLocal] return [errors.ErrUnsupported].
	Tool bool
	// AcceptCopy makes [Open] accept a directory that it would refuse with [ErrCopied]. Set it if
	// you know that nothing wrote the files during the copy: the process had died and its directory
	// was moved to another file system, or restored from one snapshot. On file systems without
	// birth times or lasting inodes (some of FUSE, some of networks), set it always: after a crash
	// and a new mount, a queue may be taken for a copy. Windows has no such check. Default: false.
	AcceptCopy bool
	// Logger gets the messages for operators, on a separate goroutine: up to 1024 records wait,
	// further ones are dropped, and counted before the next. [Queue.Close] waits a second at most.
	// The logger of [LoggerFrom] calls the handler directly. Default: nothing is logged.
	Logger *slog.Logger
	// Observer gets measurements for metrics. Its goroutine makes one call at a time, within some
	// 10 ms of a change. It may be slow: changes meanwhile are added up, within some 6 MiB. The
	// [Observation] must not be changed, nor used after the call; strings in it may be kept. Panics
	// are counted, and the first of a row logged. [Queue.Close] makes the last call, after
	// everything else, and waits a second at most. Default: none, and nothing is measured for it.
	Observer func(*Observation)

	teller *teller           // of Observer; nil: there is none
	stored *manifest.Options // of the application, in the directory; nil: there are none

	log  *slog.Logger    // logs to Logger without waiting
	logs *guard.LogQueue // of log; nil: nothing is logged

	private inspect.Private
}

// Limits bound tasks and batches. An [InvalidError] refuses larger ones before anything is written.
type Limits struct {
	Payload    int // bytes of a payload or a result. Default: 1 MiB; at most 64 MiB
	Headers    int // bytes of all names and values of a task's headers. Default: 16 KiB
	Name       int // bytes of the name of a queue or tenant. Default: 255
	Batch      int // tasks of a ProduceBatch, a ClaimBatch or the follow-ups of a Complete. Default: 10,000
	BatchBytes int // bytes of all payloads of such a batch. Default: 16 MiB; at most 256 MiB
	Parents    int // parents of all tasks of such a batch. Default: 100,000
	// CommitBytes bounds the bytes of such a batch's one commit, during which the shard serves no
	// other call: payloads, headers, names and keys, some 300 for each task, 64 for each parent.
	// Default: twice BatchBytes or four times Payload, the larger, at least 32 MiB; at most 1 GiB.
	CommitBytes int
}

func (l *Limits) ofCommit() call.BatchLimits {
	return call.BatchLimits{Parents: l.Parents, Bytes: l.CommitBytes}
}

const (
	maxShards = manifest.MaxShards
	maxLease  = manifest.MaxLease
	minLease  = manifest.MinLease
	maxStall  = 24 * time.Hour
)

func (o *Options) withDefaults() (*Options, error) {
	var c Options
	if o != nil {
		c = *o
	}
	if c.Cluster != nil {
		var err error
		if c.Cluster, err = c.Cluster.withDefaults(); err != nil {
			return nil, err
		}
	}
	switch {
	case !c.Tool:
	case c.Cluster != nil:
		return nil, &InvalidError{"Options.Tool", "with Options.Cluster", "a standalone queue"}
	case c.deciding() != (manifest.Options{Durability: DurabilityDefault.String()}):
		return nil, &InvalidError{"Options.Tool", "with Durability, LeaseFor, MaxAttempts, Backoff, Retention, Limits or MinFreeBytes", "those of the application, which are stored"}
	}
	c.MustExist = c.MustExist || c.Tool
	c.Durability = cmp.Or(c.Durability, DurabilityDisk)
	for _, f := range []struct {
		name          string
		value         *int
		low, def, max int
	}{
		{"Options.Shards", &c.Shards, 1, 0, maxShards}, // 0: as in the directory, or manifest.NewShards
		{"Options.GroupCap", &c.GroupCap, 1, 1024, 1 << 16},
		{"Options.InboxDepth", &c.InboxDepth, 1, 4096, 1 << 20},
		{"Options.WindowTasks", &c.WindowTasks, 1, 4096, 1 << 20},
		{"Options.WindowBytes", &c.WindowBytes, 1, 32 << 20, math.MaxInt32},
		{"Options.MemTableBytes", &c.MemTableBytes, 256 << 10, 0, 1 << 30}, // 0: setShards
	} {
		if *f.value == 0 {
			*f.value = f.def
		} else if *f.value < f.low || *f.value > f.max {
			return nil, &InvalidError{f.name, *f.value, fmt.Sprintf("%d to %d", f.low, f.max)}
		}
	}
	deciding := c.deciding()
	if field, value, limit := deciding.SetDefaults(call.MaxBatchLimits.Parents, call.MaxBatchLimits.Bytes); limit != "" {
		return nil, &InvalidError{"Options." + field, value, limit}
	}
	if c.Durability > DurabilityNone {
		return nil, &InvalidError{"Options.Durability", c.Durability, "DurabilityProcess, DurabilityDisk, DurabilityNone"}
	}
	if err := c.decideBy(&deciding); err != nil {
		return nil, err
	}
	low := cluster.MinTimeout
	if c.Cluster != nil {
		low = max(low, c.Cluster.HeartbeatTimeout+1)
	}
	if c.StallAfter = cmp.Or(c.StallAfter, max(5*time.Second, 4*low)); c.StallAfter < low || c.StallAfter > maxStall {
		return nil, &InvalidError{"Options.StallAfter", c.StallAfter, fmt.Sprintf("%v to %v, and more than HeartbeatTimeout", cluster.MinTimeout, maxStall)}
	}
	if c.SuspectFor = cmp.Or(c.SuspectFor, time.Minute); c.SuspectFor < time.Millisecond || c.SuspectFor > maxStall {
		return nil, &InvalidError{"Options.SuspectFor", c.SuspectFor, fmt.Sprint(time.Millisecond, " to ", maxStall)}
	}
	if c.CacheBytes = cmp.Or(c.CacheBytes, 16<<20); c.CacheBytes < 0 {
		return nil, &InvalidError{"Options.CacheBytes", c.CacheBytes, "0 or more"}
	}
	c.Producing = slices.Clone(c.Producing)
	for i, mw := range c.Producing {
		if mw == nil {
			return nil, &InvalidError{fmt.Sprintf("Options.Producing %d", i), "nil", "a function"}
		}
	}
	c.log = silence
	if c.Logger == nil {
		c.Logger = silence
	} else {
		c.log, c.logs = guard.NewLogQueue(c.Logger.Handler())
	}
	c.teller = newTeller(c.Observer, c.log)
	c.private.SetDefaults()
	return &c, nil
}

func (o *Options) deciding() manifest.Options {
	return manifest.Options{
		Durability: o.Durability.String(), LeaseFor: o.LeaseFor, MaxAttempts: o.MaxAttempts, Backoff: base.Backoff(o.Backoff),
		Retention: o.Retention, Limits: manifest.Limits(o.Limits), MinFreeBytes: o.MinFreeBytes,
	}
}

// decideBy takes over the application's options that decide about tasks; nil: none are stored.
func (o *Options) decideBy(a *manifest.Options) error {
	if a == nil {
		return nil
	}
	o.LeaseFor, o.MaxAttempts, o.Backoff, o.Retention = a.LeaseFor, a.MaxAttempts, Backoff(a.Backoff), a.Retention
	o.Limits, o.MinFreeBytes = Limits(a.Limits), a.MinFreeBytes
	return o.Durability.UnmarshalText([]byte(a.Durability))
}

// settle sets the options that depend on the directory, and gives it the options of an application.
func (o *Options) settle(d *manifest.Directory) (err error) {
	if o.Tool {
		err = errors.Join(d.CheckTool(), o.decideBy(d.Options))
	}
	o.setShards(d.Shards)
	if d.Tool = o.Tool; !o.Tool {
		deciding := o.deciding()
		d.Options = &deciding
	}
	o.stored = d.Options
	return err
}

// setShards sets the number of shards and the defaults that depend on it.
func (o *Options) setShards(shards int) {
	o.Shards = shards
	o.MemTableBytes = cmp.Or(o.MemTableBytes, store.MemTableBytes(shards, o.Cluster != nil))
	unflushed := store.MemTables * int64(shards) * int64(o.MemTableBytes)
	o.MinFreeBytes = cmp.Or(o.MinFreeBytes, 64<<20+unflushed)
}

// storeConfigIn returns the configuration of the shards' stores in a directory of a format.
func (o *Options) storeConfigIn(format int) store.Config {
	c := store.Config{
		FS: o.private.FS, Log: o.log, Format: o.private.Pebble(format), MemTableBytes: o.MemTableBytes, ReclaimFrom: o.private.ReclaimFrom,
		Durability: [...]store.Durability{DurabilityProcess: store.Process, DurabilityDisk: store.Disk, DurabilityNone: store.None}[o.Durability],
	}
	if o.Cluster != nil {
		c.Durability = store.Replicated
	}
	return c
}

// checkDir refuses "" as a directory: paths below it would be in the working directory.
func checkDir(field, dir string) error {
	if !manifest.IsPath(dir) {
		return &InvalidError{field, fmt.Sprintf("%q", dir), "the path of a directory"}
	}
	return nil
}

// volatile describes how acknowledged changes are stored.
func (o *Options) volatile() *manifest.Volatile {
	return manifest.VolatileOf(o.Durability.String(), o.private.Boot)
}
