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

// Stats returns, by name, the counts of every queue that has settings, or tasks in any state. They
// are exact and linearizable: they include the changes of every call that returned before. Shards
// are counted in turn, each queue of a shard at one moment, or all if there are less than four
// thousand. The cost does not grow with the number of tasks; other calls go on meanwhile.
//
// Errors: [ErrInvalid] and the others of reads (see [Queue]), and that of ctx.
func (q *Queue) Stats(ctx context.Context) (_ map[string]Counts, err error) {
	defer public(&err)
	if ctx, err = q.begin(ctx); err != nil {
		return nil, err
	}
	var sum map[string]Counts
	for i := range q.replicas {
		part := new(call.Stats)
		op := rule(callStats, part)
		if err := part.All(func() error { return q.ask(ctx, i, op) }, func(counts []engine.QueueCounts) {
			if sum == nil {
				sum = make(map[string]Counts, part.Queues)
			}
			for _, qc := range counts {
				qc.Counts.Add(keys.Counts(sum[qc.Queue]))
				sum[qc.Queue] = Counts(qc.Counts)
			}
		}); err != nil {
			return nil, err
		}
	}
	return sum, nil
}

// QueueInfo is what [Queue.Info] says of a queue.
type QueueInfo struct {
	Queue       string
	Counts      Counts
	OldestReady time.Time `json:",omitzero"` // since when the oldest [Ready] task waits ([TaskInfo.At]); zero: none is
	Held        int       `json:",omitzero"` // handlers of [Queue.Run] that hold limits and turns after their leases ([Queue.Cancel])
	Totals      Totals
	Settings    Settings `json:",omitzero"`
}

// Totals counts the changes of a queue's tasks that have an [Event]: a redrive is no new Produced.
type Totals struct {
	Produced  uint64
	Claimed   uint64 // leases, also by [Queue.Run]
	Completed uint64
	Retried   uint64 // failed attempts that another one follows
	Expired   uint64 // leases
	Released  uint64 // leases that ended without an attempt
	Unhandled uint64 // leases that ended since their Run has no handler of the kind ([HandleKind])
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
// ([QueueInfo.Held]), in the order of their names. A queue that has become empty stays for an hour,
// unless thousands have followed, or the queue was opened, or a shard got another leader;
// [Queue.TotalsByDay] has the totals of any. The numbers are exact, and linearizable like those of
// [Queue.Stats]; those of one queue in one shard are of the same moment, except OldestReady of a
// queue with thousands of lanes (a queue, tenant and priority). The totals are of all time; those
// of an empty queue without settings are forgotten after [TotalsDays] without a change.
//
// Info is cheap: it costs some hundred nanoseconds for each queue and shard, and for each lane with
// ready tasks; the first after [Open] reads where these begin. Other calls go on meanwhile.
//
// Errors: [ErrInvalid] and the others of reads (see [Queue]), and that of ctx.
func (q *Queue) Info(ctx context.Context) (_ []QueueInfo, err error) {
	defer public(&err)
	if ctx, err = q.begin(ctx); err != nil {
		return nil, err
	}
	all := call.NewInfoSum(len(q.replicas))
	for i := range q.replicas {
		part := &call.Info{Settings: i == 0} // shard 0 has the newest settings
		op := rule(callInfo, part)
		if err := all.Gather(i, part, func() error { return q.ask(ctx, i, op) }); err != nil {
			return nil, err
		}
	}
	for i := range q.replicas {
		if err := all.Complete(i, func(part *call.Totals) error { return q.ask(ctx, i, rule(callTotals, part)) }); err != nil {
			return nil, err
		}
	}
	return queueInfos(all)
}

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
			infos[i].Settings = settingsOf(c.Settings)
		}
	}
	return infos, nil
}

func (t *Totals) add(n *keys.Totals) {
	for kind, to := range [...]*uint64{
		EventProduced: &t.Produced, EventClaimed: &t.Claimed, EventCompleted: &t.Completed, EventRetried: &t.Retried,
		EventReleased: &t.Released, EventDeadLettered: &t.Dead, EventCanceled: &t.Canceled, EventExpired: &t.Expired,
	} {
		if kind > 0 {
			*to += n[kind-1]
		}
	}
	t.Unhandled += n[keys.Unhandled]
}

// TotalsByDay returns the totals of a queue for each of the last [TotalsDays] that has any, in
// order; none for an unknown queue. Days are those of UTC by the shard's clock, which never goes
// back. It reads a small record for each day, and is linearizable.
//
// Errors: [ErrInvalid] and the others of reads (see [Queue]), and that of ctx.
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
	// CacheBytes is the shards' common block cache; CacheHits and CacheMisses count since [Open].
	CacheBytes, CacheHits, CacheMisses int64
	// FreeBytes is the free space on the disk; -1: the file system does not say. MinFreeBytes is
	// [Options.MinFreeBytes] in force; 0: no limit, or nothing is written, as for a [Reader].
	FreeBytes, MinFreeBytes int64
}

// ShardStorage describes the store of one shard: a log, and tables sorted by key, which compactions
// merge. Counters begin at 0 when the queue is opened.
type ShardStorage struct {
	LastError  string `json:",omitzero"` // why the rest is zero: the store could not be reopened after a snapshot of a cluster
	DiskBytes  int64  // of tables, log, and files about to be deleted, without the logs of Raft
	Tables     int    // in use
	TableBytes int64  // their size
	// DeadBytes estimates how much of TableBytes is deleted records, without the last seconds. It
	// is freed within some 30 s, except some 8 MiB and a sixteenth of TableBytes.
	DeadBytes int64
	// LinkedBytes is how much of TableBytes is in files with other links, as of a
	// [Queue.Checkpoint], and is freed with the last link; 0 if unknown.
	LinkedBytes    int64
	L0Tables       int   // that no compaction has merged yet; commits wait while more than 24 overlap
	ReadAmp        int   // how many tables a read may have to search at the most
	CompactionDebt int64 // an estimate of the bytes that compactions still have to process
	MemTableBytes  int64 // the memory used for records that are in no table yet
	LogBytes       int64 // how much of the log is in no table yet, so that [Open] would read it; 0 in a cluster

	Flushes, Compactions int64 // of memory to a table, and of tables, so far
	// LoggedBytes, FlushedBytes and CompactedBytes are written to the log, by flushes and by
	// compactions so far. Their sum, divided by LoggedBytes, is the write amplification.
	LoggedBytes, FlushedBytes, CompactedBytes int64

	// Upkeep is the work of the shard's owner, by [UpkeepKind]; in a cluster as long as this node
	// leads. An operation waits for at most its own group and the one before: see [UpkeepGroup].
	Upkeep []UpkeepStats
}

// StorageStats describes the stores of this process, each shard as of a different moment; in a
// cluster the replicas of this node. It takes some microseconds for each shard and table, more for
// tables with deletions of ranges, and waits a second at most for the file system; other calls go
// on. A failed shard still has numbers; while a snapshot replaces its store, it has LastError only.
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

func (q *Queue) newStorageStats(disk vfs.DiskUsage, err error) *StorageStats {
	st := &StorageStats{Shards: make([]ShardStorage, len(q.replicas)), FreeBytes: -1}
	if err == nil {
		st.FreeBytes = int64(min(disk.AvailBytes, math.MaxInt64))
	}
	return st
}

// storage fills in the statistics of the replica's store, and of the shared cache.
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
		DiskBytes: m.DiskBytes, DeadBytes: m.DeadBytes, LinkedBytes: m.LinkedBytes,
		L0Tables: int(m.Levels[0].TablesCount), ReadAmp: m.ReadAmp(), CompactionDebt: int64(m.Compact.EstimatedDebt),
		MemTableBytes: int64(m.MemTable.Size), LogBytes: int64(m.WAL.Size), LoggedBytes: int64(m.WAL.BytesWritten),
		Flushes: m.Flush.Count, Compactions: m.Compact.Count, Upkeep: upkeepStats(t),
	}
	s.Tables, s.TableBytes, s.FlushedBytes, s.CompactedBytes = m.Tables()
	return s
}

// ProcessInfo is one process's view of a queue: the source of its metrics.
type ProcessInfo struct {
	Node       string        `json:",omitzero"` // in a cluster, its name
	Shards     []ShardInfo   // all of the queue, by their numbers, whether this process leads them or not
	Stalled    time.Duration `json:",omitzero"` // how long the log of a node, or the manifest, is stalled ([Options.StallAfter])
	Workers    []WorkerInfo  // the calls of [Queue.Run] of this process, as [Queue.Workers] lists them
	EventsLost uint64        // by subscriptions ([Subscription.Lost]), ended ones included
	// Crashed is how many tasks have come back since their process had died ([Queue.Run]), Suspects
	// how many have started slowly and are at work, for less than [Options.SuspectFor].
	Crashed  uint64
	Suspects int
	Stuck    uint64 // handlers that have gone on after their Timeout; see [RunOptions].ReplaceStuck
}

// ShardInfo is a process's view of one shard.
type ShardInfo struct {
	// Leads is whether this process leads the shard, as it does always without a cluster, and its
	// owner has answered; else the fields below LastError are zero.
	Leads     bool
	LastError string        `json:",omitzero"` // why the shard does not answer: it has failed, or ctx has ended before
	Stalled   time.Duration `json:",omitzero"` // as [ProcessInfo.Stalled], of the store of the shard
	Inbox     int           // how many operations wait for the owner
	NextTick  time.Time     `json:",omitzero"` // of any of the shard's schedules; zero: none; past: the tick is late
	Queues    []QueueInfo   // as of [Queue.Info], in this shard, without Settings; Totals only of queues that it shows
}

// ProcessInfo returns this process's view, without a call of another node. In a cluster, the sum
// over all nodes counts each task once, but tasks of a shard without a leader are missing, and
// those of one that changes its leader may be missing or twice. The shards that it leads are asked
// at once, at the cost of [Queue.Info]; without an answer until ctx ends, one has LastError.
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
	p.Stuck = q.stuck.Load()
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

// Health returns nil if this process does its part, or why not: an operation on its files does not
// return, or a shard has failed. It is for probes: it waits for nothing, and costs some hundred
// nanoseconds. [Queue.WaitReady] tells whether calls find a leader.
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

func (r *replica) failure() error {
	if r.node != nil {
		return r.group.Failure()
	}
	if base.IsClosed(r.lead.Load().done) {
		return r.failed
	}
	return nil
}

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
	if err := sum.Gather(0, &part.Info, func() error {
		settled, err := s.do(ctx, op, op.base(), limit)
		if !settled && ctx.Err() != nil {
			return base.EndOf(ctx)
		}
		return err
	}); err != nil {
		return err
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

// UpkeepKind is a kind of work of a shard's owner, which serves no call meanwhile.
type UpkeepKind uint8

// The work of a group, in order. UpkeepTrim to UpkeepTidy happen when due, bounded together.
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

// UpkeepStats describes the upkeep of one kind: how often, how long, and how much at once.
type UpkeepStats struct {
	Kind       UpkeepKind
	Count      int64         // how many times there was something to do
	Total, Max time.Duration // how long all of them took together, Max the longest
	// MaxRecords is how many entries were read and written at once at the most, MaxBytes how many
	// bytes were added to a commit, keys included. Those of [UpkeepCommit] are of the whole commit;
	// MaxRecords of [UpkeepRelease] is the callers that it woke.
	MaxRecords, MaxBytes int64
	// Buckets counts them by duration: Buckets[0] below 1 us, Buckets[i] from 2^(i-1) us to less
	// than 2^i us, and the last one also all that took longer.
	Buckets [upkeepBuckets]int64
}

// Quantile returns a duration within which the fraction f, 0 to 1, of them ended: the upper end of
// a bucket, or Max if that is less; 0 if there were none.
func (s *UpkeepStats) Quantile(f float64) time.Duration {
	st := owner.UpkeepStats{Count: s.Count, Longest: s.Max, Buckets: s.Buckets}
	return st.Quantile(f)
}

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
