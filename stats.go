package codeq

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/localsocket"
	"codeq/internal/owner"
	"codeq/internal/store"
)

// Counts holds how many tasks are in each state.
type Counts struct {
	Ready, Scheduled, Blocked, Leased, Dead, Done, Canceled uint64
}

// Total returns the number of tasks in all states.
func (c Counts) Total() uint64 {
	return c.Ready + c.Scheduled + c.Blocked + c.Leased + c.Dead + c.Done + c.Canceled
}

// Stats returns, by name, the counts of every queue that has settings, or tasks in any state; a
// queue without tasks may be missing. The counts are exact: those of one queue in one shard are of
// the same moment, and so are those of all queues in a shard if there are fewer than four thousand.
// The cost is that of copying them, and does not grow with the number of tasks; other calls go on
// meanwhile.
//
// The counts are linearizable, with and without a cluster: they include the changes of every call
// that returned before Stats began. Shards are counted one after the other, each at a moment of its
// own.
//
// Errors: [ErrInvalid], [ErrUncertain] and [ErrNotLeader] (in a cluster), [ErrFailed], [ErrClosed],
// and that of ctx.
func (q *Queue) Stats(ctx context.Context) (_ map[string]Counts, err error) {
	defer public(&err)
	if ctx, err = q.begin(ctx); err != nil {
		return nil, err
	}
	var sum map[string]Counts
	for i := range q.replicas {
		part := new(call.Stats)
		op := rule(callStats, part)
		for part.More = true; part.More; {
			part.Next()
			if err := q.ask(ctx, i, op); err != nil {
				return nil, err
			}
			if sum == nil {
				sum = make(map[string]Counts, part.Queues)
			}
			for _, qc := range part.Counts {
				sum[qc.Queue] = addCounts(sum[qc.Queue], qc.Counts)
			}
		}
	}
	return sum, nil
}

func addCounts(to Counts, c keys.Counts) Counts {
	c.Add(keys.Counts(to))
	return Counts(c)
}

// QueueInfo is what [Queue.Info] says of a queue.
type QueueInfo struct {
	Queue  string
	Counts Counts
	// OldestReady is since when the oldest [Ready] task waits ([TaskInfo.At]); zero: none is.
	OldestReady time.Time `json:",omitzero"`
	// Held is how many handlers of [Queue.Run] go on after the ends of their leases, and hold
	// places of limits and turns of groups ([Queue.Cancel]). [WorkerInfo.Hung] tells which they
	// are.
	Held     int `json:",omitzero"`
	Totals   Totals
	Settings Settings `json:",omitzero"`
}

// Totals counts the changes of a queue's tasks that have an [Event]. A task that is produced again,
// such as a dead letter that is redriven, is not counted as Produced.
type Totals struct {
	Produced  uint64
	Claimed   uint64 // leases, also by [Queue.Run]
	Completed uint64
	Retried   uint64 // failed attempts that another one follows
	Expired   uint64 // leases
	Released  uint64 // leases that ended without an attempt
	Dead      uint64 // tasks that became dead letters
	Canceled  uint64
}

// TotalsDays is for how many days, the present one included, there are [DayTotals].
const TotalsDays = engine.TotalsDays

// DayTotals are the totals of one day.
type DayTotals struct {
	Day time.Time // its beginning, in UTC
	Totals
}

// Info describes every queue that has settings, tasks in any state, or handlers that hold places
// ([QueueInfo.Held]), in the order of their names. A queue that has become empty is still in it for
// an hour, unless thousands of others have become empty after it, or the queue was opened, or
// another node became the leader of a shard, meanwhile. See [Queue.TotalsByDay] for the totals of a
// queue that is not in it.
//
// All numbers are exact. The totals are of all time, and stored with the tasks: they survive all
// that the tasks survive. Those of a queue that has no tasks and no settings are forgotten when
// nothing has happened in it for [TotalsDays].
//
// Info is meant to be called often: it costs some hundred nanoseconds for each queue and shard, and
// for each combination of queue, tenant and priority that has ready tasks, and no more for many
// tasks; other calls go on meanwhile, since a shard's owner visits about a thousand of them at a
// time. After [Open], the first Info reads where the ready tasks of each combination begin.
//
// Like those of [Queue.Stats], the numbers are linearizable, and those of one queue in one shard
// are of the same moment; only OldestReady of a queue with thousands of combinations is not.
//
// Errors: [ErrInvalid], [ErrCorrupt], [ErrUncertain] and [ErrNotLeader] (in a cluster),
// [ErrFailed], [ErrClosed], and that of ctx.
func (q *Queue) Info(ctx context.Context) (_ []QueueInfo, err error) {
	defer public(&err)
	if ctx, err = q.begin(ctx); err != nil {
		return nil, err
	}
	all := call.NewInfoSum(len(q.replicas))
	for i := range q.replicas {
		part := &call.Info{Settings: i == 0} // shard 0 has the newest settings
		op := rule(callInfo, part)
		for part.More = true; part.More; {
			part.Next()
			if err := q.ask(ctx, i, op); err != nil {
				return nil, err
			}
			all.Add(i, part.Infos)
		}
	}
	for i := range q.replicas {
		for names := all.Unseen(i); len(names) > 0; {
			part := &call.Totals{Names: names[:min(infoNames, len(names))]}
			if err := q.ask(ctx, i, rule(callTotals, part)); err != nil {
				return nil, err
			}
			all.Add(i, part.Infos)
			names = names[len(part.Infos):]
		}
	}
	return queueInfos(all)
}

// infoNames is the number of queues in one question to a shard.
const infoNames = 1024

// queueInfos converts the shards' numbers of queues, in the order of their names.
func queueInfos(sum *call.InfoSum) ([]QueueInfo, error) {
	infos := make([]QueueInfo, len(sum.Queues))
	for i, of := range sum.Sorted() {
		infos[i] = QueueInfo{Queue: of.Queue, Counts: Counts(of.Counts), Held: int(of.Held)}
		infos[i].Totals.add(&of.Totals)
		if of.Oldest > 0 {
			infos[i].OldestReady = msTime(of.Oldest)
		}
		if of.Settings != nil {
			c, err := engine.ParseSettings(of.Settings)
			if err != nil {
				return nil, translated(err)
			}
			infos[i].Settings = Settings(*c.Settings)
		}
	}
	return infos, nil
}

// add adds the totals of a shard.
func (t *Totals) add(n *keys.Totals) {
	for kind, to := range [...]*uint64{
		EventProduced: &t.Produced, EventClaimed: &t.Claimed, EventCompleted: &t.Completed, EventRetried: &t.Retried,
		EventReleased: &t.Released, EventDeadLettered: &t.Dead, EventCanceled: &t.Canceled, EventExpired: &t.Expired,
	} {
		if kind > 0 {
			*to += n[kind-1]
		}
	}
}

// TotalsByDay returns the totals of a queue for each of the last [TotalsDays] that has any, in
// order. Days are those of UTC, by the clock that orders the tasks of a shard: after the wall clock
// was set back, the day goes on. The owner of each shard reads at most one small record for each
// day.
//
// It is linearizable, as [Queue.Info] is, and returns none for a queue that it does not know.
//
// Errors: [ErrInvalid], [ErrCorrupt], [ErrUncertain] and [ErrNotLeader] (in a cluster),
// [ErrFailed], [ErrClosed], and that of ctx.
func (q *Queue) TotalsByDay(ctx context.Context, queue string) (_ []DayTotals, err error) {
	defer public(&err)
	if ctx, err = q.beginOn(ctx, queue); err != nil {
		return nil, err
	}
	parts := make([]call.Days, len(q.replicas))
	for i := range parts {
		parts[i].Queue = queue
		if err := q.ask(ctx, i, rule(callDays, &parts[i])); err != nil {
			return nil, err
		}
	}
	var days []DayTotals
	for _, v := range call.SumDays(parts) {
		d := DayTotals{Day: time.Unix(int64(v.Day)*24*60*60, 0).UTC()}
		d.add(&v.OfDay)
		days = append(days, d)
	}
	return days, nil
}

// StorageStats describes the stores of one process, and their disk, for dashboards and alarms.
type StorageStats struct {
	Shards []ShardStorage // by the number of the shard
	// CacheBytes is the memory used by the block cache that the shards share. CacheHits and
	// CacheMisses are how many blocks were found in it, or were not, since [Open].
	CacheBytes, CacheHits, CacheMisses int64
	// FreeBytes is how much space is free on the disk of the directory; -1: the file system does
	// not say. MinFreeBytes is [Options.MinFreeBytes] as it is in force; 0: there is no limit, or
	// nothing is written, as for a [Reader].
	FreeBytes, MinFreeBytes int64
}

// ShardStorage describes the store of one shard: a log, and tables sorted by key, which compactions
// merge. Counters begin at 0 when the queue is opened.
type ShardStorage struct {
	// LastError is why the other fields are zero: in a cluster, the store could not be opened again
	// after a snapshot.
	LastError string `json:",omitzero"`
	// DiskBytes is the size of its files: tables, log, and files that are about to be deleted. In a
	// cluster the logs of Raft are not included.
	DiskBytes int64
	// Tables and TableBytes are the number and size of the tables in use.
	Tables     int
	TableBytes int64
	// DeadBytes is an estimate of how much of TableBytes belongs to deleted records. It is freed on
	// the disk within some 30 s, except some 8 MiB and a sixteenth of TableBytes. Only deletions
	// that are in a table count; those of the last seconds may not be.
	DeadBytes int64
	// LinkedBytes is how much of TableBytes is in files that have other links, such as those of a
	// [Queue.Checkpoint] on the same file system: their space is freed when the last link is
	// removed. 0 where that is not known.
	LinkedBytes int64
	// L0Tables is how many tables no compaction has merged yet. Commits wait while more than 24 of
	// them overlap.
	L0Tables int
	// ReadAmp is how many tables a read may have to search at the most.
	ReadAmp int
	// CompactionDebt is an estimate of the bytes that compactions still have to process.
	CompactionDebt int64
	// MemTableBytes is the memory used for records that are in no table yet.
	MemTableBytes int64
	// LogBytes is how much of the log is in no table yet, so that [Open] would read it; 0 in a
	// cluster, where Raft keeps the log.
	LogBytes int64

	// Flushes counts flushes of memory to a table, Compactions compactions of tables, so far.
	Flushes, Compactions int64
	// LoggedBytes, FlushedBytes and CompactedBytes are the bytes written to the log, by flushes and
	// by compactions so far. The sum, divided by LoggedBytes, is the write amplification.
	LoggedBytes, FlushedBytes, CompactedBytes int64

	// Upkeep is how long the work of the shard's owner has taken, one entry for each [UpkeepKind]
	// in their order. An operation waits for at most its own group and the one before: see
	// [UpkeepGroup]. In a cluster it is the work of this node as the shard's leader.
	Upkeep []UpkeepStats
}

// StorageStats describes the stores of this process, each shard as of a different moment; in a
// cluster the replicas of this node, whichever node leads them. It takes some microseconds for each
// shard and each table, and more for tables with deletions of ranges, which it reads. It disturbs
// no other call, and waits a second at most for the file system to say how much is free. A shard
// that has failed still has numbers; while a snapshot replaces its store, it has LastError only.
//
// Errors: [ErrClosed].
func (q *Queue) StorageStats() (_ *StorageStats, err error) {
	defer public(&err)
	st := new(StorageStats)
	if done, err := q.tell(context.Background(), localsocket.Storage, nil, st); done {
		return orNil(st, err)
	}
	if err := q.enter(); err != nil { // or else the file system may be asked after Close
		return nil, err
	}
	defer q.calls.Done()
	st = q.newStorageStats(q.opts.private.FS.GetDiskUsage(q.dir.Path))
	st.MinFreeBytes = max(q.opts.MinFreeBytes, 0)
	for i, r := range q.replicas {
		r.storage(st, &st.Shards[i])
	}
	return st, nil
}

// newStorageStats returns statistics of the disk, for those of the shards.
func (q *Queue) newStorageStats(disk vfs.DiskUsage, err error) *StorageStats {
	st := &StorageStats{Shards: make([]ShardStorage, len(q.replicas)), FreeBytes: -1}
	if err == nil {
		st.FreeBytes = int64(min(disk.AvailBytes, math.MaxInt64))
	}
	return st
}

// storage fills in the statistics of the replica's store, and those of the cache that the stores
// share.
func (r *replica) storage(all *StorageStats, s *ShardStorage) {
	if !r.slot.Try(func(st *store.Store) {
		m := st.Stats()
		*s = all.add(&m, &r.upkeep)
	}) {
		s.LastError = fmt.Sprintf("codeq: shard %d: its store is not open", r.index)
	}
	if r.node != nil { // the store has no log, but Pebble counts the bytes that would be in it
		s.LogBytes, s.LoggedBytes = 0, 0
	}
}

// add describes a store, and takes over the numbers of the cache that the stores share.
func (all *StorageStats) add(m *store.Stats, t *owner.UpkeepTable) ShardStorage {
	all.CacheBytes, all.CacheHits, all.CacheMisses = m.BlockCache.Size, m.BlockCache.Hits, m.BlockCache.Misses
	s := ShardStorage{
		DiskBytes:      m.DiskBytes,
		DeadBytes:      m.DeadBytes,
		LinkedBytes:    m.LinkedBytes,
		L0Tables:       int(m.Levels[0].TablesCount),
		ReadAmp:        m.ReadAmp(),
		CompactionDebt: int64(m.Compact.EstimatedDebt),
		MemTableBytes:  int64(m.MemTable.Size),
		LogBytes:       int64(m.WAL.Size),
		Flushes:        m.Flush.Count,
		Compactions:    m.Compact.Count,
		LoggedBytes:    int64(m.WAL.BytesWritten),
		Upkeep:         upkeepStats(t),
	}
	s.Tables, s.TableBytes, s.FlushedBytes, s.CompactedBytes = m.Tables()
	return s
}

// ProcessInfo is one process's view of a queue, without a call of another node: the source of its
// metrics.
type ProcessInfo struct {
	Node string `json:",omitzero"` // in a cluster, its name
	// Shards are all of the queue, by their numbers, whether this process leads them or not.
	Shards []ShardInfo
	// Stalled is for how long the log of a node, or the manifest, is stalled
	// ([Options.StallAfter]); 0: it is not.
	Stalled time.Duration `json:",omitzero"`
	// Workers are the calls of [Queue.Run] of this process, as [Queue.Workers] lists them.
	Workers []WorkerInfo
	// EventsLost is how many events the subscriptions of this process have lost (see
	// [Subscription.Lost]), those that have ended included.
	EventsLost uint64
	// Crashed is how many tasks have come back to this process since theirs had died ([Queue.Run]),
	// and Suspects how many suspects have started slowly and are at work, for less than
	// [Options.SuspectFor].
	Crashed  uint64
	Suspects int
}

// ShardInfo is a process's view of one shard.
type ShardInfo struct {
	// Leads is whether this process leads the shard, as it does always without a cluster, and its
	// owner has answered; else the fields below LastError are zero.
	Leads bool
	// LastError is why the shard does not answer: it has failed, or ctx has ended before.
	LastError string `json:",omitzero"`
	// Stalled is as [ProcessInfo.Stalled], of the store that the process has of the shard.
	Stalled time.Duration `json:",omitzero"`
	// Inbox is how many operations wait for the owner.
	Inbox int
	// NextTick is the next tick of any of the shard's schedules; zero: there is none. Once it is
	// past, the tick is late.
	NextTick time.Time `json:",omitzero"`
	// Queues are those of [Queue.Info], ordered by name, with the numbers of this shard: without
	// [QueueInfo.Settings], and without the totals of a queue that this shard does not show.
	Queues []QueueInfo
}

// ProcessInfo returns this process's view, without a call of another node. In a cluster, the sum
// over all nodes counts each task once, as long as each shard has one leader: tasks of a shard
// without a leader are missing, and those of one that gets another leader between the calls may be
// missing or counted twice.
//
// Each shard that this process leads is asked, all at the same time, as by [Queue.Info]; see there
// for the cost. One that does not answer until ctx ends is in the result with an error.
//
// Errors: [ErrInvalid], [ErrClosed], and that of ctx if it has ended before.
func (q *Queue) ProcessInfo(ctx context.Context) (_ *ProcessInfo, err error) {
	defer public(&err)
	p := new(ProcessInfo)
	if done, err := q.tell(ctx, localsocket.Process, nil, p); done {
		return orNil(p, err)
	}
	p.Shards, p.Workers, p.EventsLost = make([]ShardInfo, len(q.replicas)), q.ownWorkers(), q.events.Lost()
	if q.node != nil {
		p.Node = q.node.Self().Node
	}
	p.Crashed, p.Suspects = q.slow.Counts()
	p.Stalled = q.disk.Part(cluster.LogPart).Stalled()
	err = q.inParallel("information of a shard", len(q.replicas), func(i int) error {
		of := &p.Shards[i]
		if err := q.replicas[i].info(ctx, of); err != nil {
			*of = ShardInfo{LastError: base.Prefixed(err).Error()}
		}
		of.Stalled = q.disk.Part(cluster.FirstShard + i).Stalled()
		return nil
	})
	if err != nil {
		return nil, err
	}
	if base.IsClosed(q.closing) { // meanwhile, so that shards may have refused
		return nil, ErrClosed
	}
	return p, nil
}

// Health returns nil if this process does its part, or why it does not: an operation on its files
// does not return ([ErrStalled]), or a shard has failed ([ErrFailed]). It waits neither for the
// disk nor for other nodes, and costs some hundred nanoseconds: it is meant for probes. See
// [Queue.WaitReady] for whether calls find a leader.
//
// Errors: [ErrInvalid], [ErrStalled], [ErrFailed], [ErrClosed], and that of ctx.
func (q *Queue) Health(ctx context.Context) (err error) {
	defer public(&err)
	if done, err := q.tell(ctx, localsocket.Health, nil, nil); done {
		return err
	}
	var errs []error
	if part, age := q.disk.Stalled(); part != nil {
		errs = append(errs, fmt.Errorf("%w: %s, for %v", ErrStalled, part.Name(), age.Round(time.Millisecond)))
	}
	for _, r := range q.replicas {
		errs = append(errs, r.failure())
	}
	return errors.Join(errs...)
}

// failure is why the shard has failed here; nil if it has not.
func (r *replica) failure() error {
	if r.node != nil {
		return r.group.Failure()
	}
	if base.IsClosed(r.lead.Load().done) {
		return r.failed
	}
	return nil
}

// info fills in the fields of a shard, if this process leads it.
func (r *replica) info(ctx context.Context, of *ShardInfo) error {
	s := r.lead.Load()
	if s == nil {
		if r.node != nil {
			return r.group.Failure()
		}
		return nil
	}
	of.Inbox = s.inbox.Len()
	sum := call.NewInfoSum(1)
	part := new(processPart)
	op := rule(callInfo, part)
	limit := r.group.Limit(ctx)
	defer limit.Free()
	for part.More = true; part.More; {
		part.Next()
		settled, err := s.do(ctx, op, op.base(), limit)
		if !settled && ctx.Err() != nil {
			return base.EndOf(ctx)
		}
		if err != nil {
			return err
		}
		sum.Add(0, part.Infos)
	}
	queues, err := queueInfos(sum)
	if err != nil {
		return err
	}
	of.Leads, of.Queues = true, queues
	if part.tick != engine.Never {
		of.NextTick = msTime(part.tick)
	}
	return nil
}

// processPart is call.Info for the process itself.
type processPart struct {
	call.Info
	tick uint64
}

func (p *processPart) Decide(s *engine.State) (engine.Verdict, error) {
	p.tick = s.Times.NextTick()
	return p.Info.Decide(s)
}

// UpkeepKind is a kind of work of a shard's owner, the one goroutine that decides everything in the
// shard. While the owner does it, it serves no call.
type UpkeepKind uint8

// The work of a group, in its order. UpkeepTrim to UpkeepTidy are done only while they are due, and
// are bounded together.
const (
	UpkeepRefill     UpkeepKind = iota // reads ready tasks into memory
	UpkeepTrim                         // deletes the consumed parts of lanes by range
	UpkeepList                         // lists the keys, groups and parents that exist, after Open if they are many
	UpkeepPromote                      // makes scheduled tasks ready at their time
	UpkeepFreeKeys                     // frees expired idempotency keys
	UpkeepForget                       // deletes ended tasks after their retention
	UpkeepWake                         // makes blocked tasks ready that need not wait any longer
	UpkeepTell                         // tells waiting tasks that their parent has ended
	UpkeepRecheck                      // finds the tasks that wait for limits that have been changed
	UpkeepSend                         // sends messages to other shards
	UpkeepGates                        // opens queues for claims as their rates allow
	UpkeepReap                         // takes back tasks with expired leases; in a cluster, stores the clock of leases
	UpkeepTicks                        // produces the tasks of schedules
	UpkeepTidy                         // removes entries that are not needed any more
	UpkeepOperations                   // decides the operations of callers
	UpkeepServe                        // gives ready tasks to waiting claims
	UpkeepSeal                         // completes and orders the commit
	UpkeepCommit                       // writes the commit, in a cluster to a majority
	UpkeepRelease                      // wakes the callers
	UpkeepGroup                        // all of the above, from one reading of the inbox to the next
	endOfUpkeepKinds
)

var upkeepNames = [endOfUpkeepKinds]string{
	"refill", "trim", "list", "promote", "free-keys", "forget", "wake", "tell", "recheck", "send", "gates", "reap",
	"ticks", "tidy", "operations", "serve", "seal", "commit", "release", "group",
}

func (k UpkeepKind) String() string {
	if k < endOfUpkeepKinds {
		return upkeepNames[k]
	}
	return fmt.Sprintf("UpkeepKind(%d)", uint8(k))
}

const upkeepBuckets = owner.UpkeepBuckets

var _ [owner.MaxUpkeepKinds - endOfUpkeepKinds]struct{} // each kind has a place in a table

// UpkeepStats describes the upkeep of one kind: how often it was done, how long that took, and how
// much was done at once.
type UpkeepStats struct {
	Kind UpkeepKind
	// Count is how many times there was something to do.
	Count int64
	// Total is how long all of them took together, Max the longest.
	Total, Max time.Duration
	// MaxRecords is how many entries were read and written at once at the most, MaxBytes how many
	// bytes were added to a commit, keys included. For [UpkeepCommit] they are those of the
	// whole commit; for [UpkeepRelease], MaxRecords is the number of callers that it woke.
	MaxRecords, MaxBytes int64
	// Buckets counts them by duration: Buckets[0] those of less than 1 us, Buckets[i] those
	// from 2^(i-1) us to less than 2^i us, and the last one also all that took longer.
	Buckets [upkeepBuckets]int64
}

// Quantile returns a duration within which the fraction f of them ended, f from 0 to 1: the upper
// end of a bucket, or Max if that is less. It is 0 if there were none.
func (s *UpkeepStats) Quantile(f float64) time.Duration {
	st := owner.UpkeepStats{Count: s.Count, Longest: s.Max, Buckets: s.Buckets}
	return st.Quantile(f)
}

// upkeepStats returns the numbers of a table, in the order of the kinds.
func upkeepStats(t *owner.UpkeepTable) []UpkeepStats {
	all := make([]UpkeepStats, endOfUpkeepKinds)
	for kind := range all {
		st := t.Stats(uint8(kind))
		all[kind] = UpkeepStats{
			Kind: UpkeepKind(kind), Count: st.Count, Total: st.Total, Max: st.Longest, MaxRecords: st.Records, MaxBytes: st.Bytes, Buckets: st.Buckets,
		}
	}
	return all
}
