package codeq

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math"
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
	// DurabilityDefault is DurabilityDisk.
	DurabilityDefault Durability = iota
	// DurabilityProcess: handed to the operating system. The end of the process, even by kill -9,
	// loses no acknowledged change; a power loss may lose the last operations, from some shards
	// more than from others, but the queue stays consistent (see the README). It is for tasks that
	// can be made again, and for fast single calls of one caller. In a cluster nothing is lost as
	// long as a majority of the nodes keeps its power: a node that has lost it does not count until
	// the others have taken it back, which they do by themselves. If a majority has lost it, the
	// cluster stands still ([ErrPowerLost]). Linux and macOS tell whether the machine was booted;
	// on other systems a killed node counts as one that has lost power.
	DurabilityProcess
	// DurabilityDisk: forced to the disk, with one fsync for each group of operations. A power loss
	// loses no acknowledged change, as long as the disk keeps the data that it confirms. A caller
	// waits for the disk; many callers share a sync, so that they lose less by it than one.
	DurabilityDisk
	// DurabilityNone: held in memory until there are 32 KiB of log, or until [Queue.Close]. The end
	// of the process may lose the operations since then, even after seconds of idleness, but the
	// queue stays consistent. In a cluster it is as a power loss with DurabilityProcess.
	DurabilityNone
)

var durabilities = newEnum[Durability]("Durability", "default", "process", "disk", "none")

// String returns "default", "process", "disk" or "none".
func (d Durability) String() string { return durabilities.Text(d) }

// MarshalText returns the text of String, and [ErrInvalid] for any other value.
func (d Durability) MarshalText() ([]byte, error) { return durabilities.Marshal(d) }

// UnmarshalText reads the text of MarshalText, and returns [ErrInvalid] for any other; so
// flag.TextVar makes a flag of a Durability.
func (d *Durability) UnmarshalText(b []byte) error { return durabilities.Unmarshal(d, b) }

// Options are the options of [Open]. A zero field means its documented default; a nil *Options
// means all defaults. Open makes a deep copy of them, except Listener, Logger and Observer.
type Options struct {
	// Shards is how many independent stores share the tasks, each with its own log and its own
	// owner goroutine. It is fixed when the queue is created; later Opens take 0 or the same
	// number. 1 to 256. Default of a new queue, at most 8: a sixth of GOMAXPROCS rounded up (12
	// cores: 2; up to 6 cores: 1), and below [DurabilityDisk] a third (12 cores: 4; 2 cores: 1);
	// with Cluster 3, and the number must be the same on all nodes.
	Shards int
	// Durability may be different at each [Open]. Default: [DurabilityDisk].
	Durability Durability

	// LeaseFor is how long a lease lasts if neither the claim nor the task sets it. Default: 30 s.
	LeaseFor time.Duration
	// MaxAttempts is for tasks that do not set it. Default: 25.
	MaxAttempts int
	// SuspectFor is how long a task that is suspected of having ended the process ([Queue.Run]) is
	// at work until further suspects start. 1 ms to 24 h. Default: 1 minute.
	SuspectFor time.Duration
	// Backoff is the wait between the attempts of a task.
	Backoff Backoff
	// Retention is how long completed tasks are kept with their results, if neither the task nor
	// the queue sets it. Default: 0, not at all.
	Retention time.Duration
	// Limits bound tasks and batches.
	Limits Limits

	// GroupCap is how many operations of a shard one commit contains at the most. Default: 1024.
	GroupCap int
	// InboxDepth is how many operations may wait for a shard; a further caller waits for room until
	// its ctx ends. Default: 4096.
	InboxDepth int
	// WindowTasks is how many ready tasks of a lane (queue, tenant, priority) are in memory at the
	// most; further ones are read from disk before they are needed. Default: 4096.
	WindowTasks int
	// WindowBytes bounds the memory of all windows together. Default: 32 MiB.
	WindowBytes int
	// CacheBytes is the size of the block cache that all shards share. In addition, memtables
	// usually take 2 MemTableBytes for each shard, at most 4 and 2 more of all; and more only for
	// batches as large as half of one. While a shard does not commit, the cache may use what its
	// memtables do not need. Default: 16 MiB.
	CacheBytes int64
	// MemTableBytes is how much each shard collects in memory before it writes a sorted table.
	// Default: 16 MiB; with Cluster 24 MiB divided by the number of shards, but 4 to 16 MiB.
	MemTableBytes int

	// MinFreeBytes is how much space has to stay free on the disk. While less is free, calls that
	// need more room than there is return [ErrDiskFull], level by level; the room between two
	// levels is for the operations that still run at the lower one:
	//
	//   - below MinFreeBytes, no tasks are added: [Queue.Produce], [Queue.ProduceBatch] and
	//     [Queue.SetSchedule] are refused, ticks of schedules wait.
	//   - below 3/4 of it, no leases are granted: a claim that waits goes on waiting, one with
	//     NoWait is refused, and so are [Queue.RedriveDead], [Queue.SetPriority] and
	//     [Queue.SetRunAt]; scheduled and blocked tasks do not become ready. Leases can still be
	//     ended and extended, also by [Queue.Complete] with follow-ups.
	//   - below 1/2, only operations that free space run: Complete without follow-ups and
	//     [Queue.Cancel], of tasks without retention, [Queue.PurgeDead], [Queue.DeleteSchedule],
	//     [Queue.ReleaseKey] (of a task that has ended), and the end of retentions. No lease
	//     expires, since none can be extended; if the queue is opened meanwhile, leases of
	//     [Queue.Claim] begin again. [Queue.Run] keeps the outcomes of its handlers.
	//   - below 1/4, nothing is written. The same holds while tables or the log cannot be written
	//     for want of inodes or because of a quota, or while the disk is full with a negative
	//     MinFreeBytes, until 4 MiB are free for each shard.
	//
	// Below one and a half times MinFreeBytes, the space of deleted records is freed at once, and
	// not within half a minute.
	//
	// [Queue.Get], [Queue.List] and [Queue.Stats] always work, and all other calls work again as
	// soon as there is room. The file system is asked at most once in a second or 4 MiB (0.1 s when
	// little is free), so that it may be noticed too late when another program fills the disk fast.
	// In a cluster the disk of a shard's leader counts; followers accept nothing below 1/4.
	// Negative: no limit. Default: 64 MiB, plus 4 MemTableBytes for each shard.
	MinFreeBytes int64

	// StallAfter is how long an operation on the files of the queue (a write, a sync, a read) may
	// take. While one takes longer, the disk is stalled: the log, [Queue.Health],
	// [Queue.ProcessInfo] and [ReplicaStatus] say so, and other nodes lead the shards of this one,
	// if a majority has no such trouble. 20 ms to 24 h, and longer than [Cluster.HeartbeatTimeout].
	// Default: 5 s, or 4 times HeartbeatTimeout if that is more.
	StallAfter time.Duration

	// Cluster makes this process one of several nodes. Default: nil, no other nodes and no socket.
	Cluster *Cluster

	// MustExist makes [Open] refuse, with [ErrNotQueue], a directory that is not a queue yet: one
	// that does not exist or is empty, or was left by a first Open that did not return, so that
	// nothing was ever stored in it; for a node of a cluster, one that has not become a member.
	// Nothing is written then. Set it in programs that never make a queue. Default: false.
	MustExist bool
	// Tool says that the program opens the queue of an application to steer it, and closes it
	// again. Nothing happens then because its time has come: no lease expires, no task becomes due,
	// no schedule ticks, nothing is deleted; the application does that when it opens it next. The
	// last [Open] by it has stored the options that decide about tasks: Durability, LeaseFor,
	// MaxAttempts, Backoff, Retention, Limits and MinFreeBytes; the tool goes by them, and must not
	// set them. A queue that is not there yet, is a node's, or of an older format is refused.
	// Claims, [Queue.Run] and [Queue.ServeLocal] return [errors.ErrUnsupported].
	Tool bool
	// AcceptCopy makes [Open] accept a directory that it would refuse with [ErrCopied]. Set it if
	// you know that nothing wrote the files while they were copied: if the process had died and its
	// directory was moved to another file system, or restored from a snapshot of all its files at
	// one moment. A queue that was closed may be copied by any means, and needs no AcceptCopy; nor
	// does a rename, or a clone of a whole volume. On Windows copies are not recognized. On file
	// systems that neither say when a file was made nor have lasting inodes (some of FUSE, some of
	// networks), a queue may be taken for a copy when its process has died and the file system was
	// mounted again: set AcceptCopy there always. Default: false.
	AcceptCopy bool
	// Logger gets the messages for operators. Its handler is called on a separate goroutine, and so
	// may be slow: up to 1024 records wait, further ones are dropped, and the next record is
	// preceded by one that counts the dropped ones. [Queue.Close] waits for it, but not longer than
	// a second. The logger of [LoggerFrom] calls the handler directly. Default: nothing is logged.
	Logger *slog.Logger
	// Observer gets measurements: how many tasks of each queue have changed and how, how long
	// commits and handlers have taken. Metrics are made of it. It is called on a goroutine of its
	// own, one call at a time, some 10 ms after something has happened at the latest, and so may be
	// slow: changes meanwhile are added up, within some 6 MiB, and reported by the next call. It is
	// not called while nothing happens. The [Observation] must not be changed, and not be used
	// after the call; strings in it may be kept. A call that panics is counted, and logged unless
	// the call before has panicked too; the next one is made as ever. [Queue.Close] makes the last
	// call, after everything else, and waits for it, but not longer than a second. Default: none,
	// and nothing is measured for it.
	Observer func(*Observation)

	teller *teller           // of Observer; nil: there is none
	stored *manifest.Options // of the application, in the directory; nil: there are none

	log  *slog.Logger    // logs to Logger without waiting
	logs *guard.LogQueue // of log; nil: nothing is logged

	private inspect.Private
}

// Limits bound tasks and batches; those that exceed them are refused with an [InvalidError] before
// anything is written.
type Limits struct {
	Payload    int // bytes of a payload or a result. Default: 1 MiB; at most 64 MiB
	Headers    int // bytes of all names and values of a task's headers. Default: 16 KiB
	Name       int // bytes of the name of a queue or tenant. Default: 255
	Batch      int // tasks of a ProduceBatch, a ClaimBatch or the follow-ups of a Complete. Default: 10,000
	BatchBytes int // bytes of all payloads of such a batch. Default: 16 MiB; at most 256 MiB
	Parents    int // parents of all tasks of such a batch. Default: 100,000
	// CommitBytes is how many bytes such a batch may write, since it is one commit: the stored form
	// of its tasks (payloads, headers, names, keys, parents), some 300 bytes for each task, and 64
	// for each parent. While it is written, the shard serves no other call. Default: the larger of
	// twice BatchBytes and four times Payload, but at least 32 MiB; at most 1 GiB.
	CommitBytes int
}

// ofCommit returns the limits of one commit.
func (l *Limits) ofCommit() call.BatchLimits {
	return call.BatchLimits{Parents: l.Parents, Bytes: l.CommitBytes}
}

const (
	maxShards = manifest.MaxShards
	maxLease  = manifest.MaxLease
	minLease  = manifest.MinLease
	maxStall  = 24 * time.Hour
)

// withDefaults returns a checked copy.
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
	if c.Durability == DurabilityDefault {
		c.Durability = DurabilityDisk
	}
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
		return nil, &InvalidError{
			"Options.Durability", c.Durability, "DurabilityProcess, DurabilityDisk, DurabilityNone",
		}
	}
	if err := c.decideBy(&deciding); err != nil {
		return nil, err
	}
	low := cluster.MinTimeout
	if c.Cluster != nil {
		low = max(low, c.Cluster.HeartbeatTimeout+1)
	}
	c.StallAfter = cmp.Or(c.StallAfter, max(5*time.Second, 4*low))
	if c.StallAfter < low || c.StallAfter > maxStall {
		return nil, &InvalidError{"Options.StallAfter", c.StallAfter, fmt.Sprintf("%v to %v, and more than HeartbeatTimeout", cluster.MinTimeout, maxStall)}
	}
	if c.SuspectFor = cmp.Or(c.SuspectFor, time.Minute); c.SuspectFor < time.Millisecond || c.SuspectFor > maxStall {
		return nil, &InvalidError{"Options.SuspectFor", c.SuspectFor, fmt.Sprint(time.Millisecond, " to ", maxStall)}
	}
	c.CacheBytes = cmp.Or(c.CacheBytes, 16<<20)
	if c.CacheBytes < 0 {
		return nil, &InvalidError{"Options.CacheBytes", c.CacheBytes, "0 or more"}
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

// deciding returns the options that decide about tasks.
func (o *Options) deciding() manifest.Options {
	return manifest.Options{
		Durability: o.Durability.String(), LeaseFor: o.LeaseFor, MaxAttempts: o.MaxAttempts, Backoff: base.Backoff(o.Backoff),
		Retention: o.Retention, Limits: manifest.Limits(o.Limits), MinFreeBytes: o.MinFreeBytes,
	}
}

// decideBy makes the options that decide about tasks those of the application; nil: it has stored
// none.
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
		FS: o.private.FS, Log: o.log, Durability: store.Process, Format: o.private.Pebble(format),
		MemTableBytes: o.MemTableBytes, ReclaimFrom: o.private.ReclaimFrom,
	}
	switch {
	case o.Cluster != nil:
		c.Durability = store.Replicated
	case o.Durability == DurabilityDisk:
		c.Durability = store.Disk
	case o.Durability == DurabilityNone:
		c.Durability = store.None
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
