package codeq

import (
	"context"
	"fmt"

	"codeq/internal/call"
	"codeq/internal/keys"
	"codeq/internal/localsocket"
	"codeq/internal/steps"
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
// The cost is that of copying them, whatever the number of tasks; other calls go on meanwhile.
//
// The counts are linearizable, on a queue by itself as in a cluster: they include what any call had
// done that returned before Stats began. Shards are counted one after the other, each at a moment
// of its own.
//
// Errors: [ErrInvalid], [ErrUncertain] and [ErrNotLeader] (in a cluster), [ErrFailed], [ErrClosed],
// and that of ctx.
func (q *Queue) Stats(ctx context.Context) (_ map[string]Counts, err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
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

// StorageStats describes the stores of one process, for dashboards and alarms.
type StorageStats struct {
	Shards []ShardStorage // by the number of the shard
	// CacheBytes is the memory used by the block cache that the shards share. CacheHits and
	// CacheMisses are how many blocks were found in it, or were not, since [Open].
	CacheBytes, CacheHits, CacheMisses int64
}

// ShardStorage describes the store of one shard: a log, and tables sorted by key, which compactions
// merge. Counters begin at 0 when the queue is opened.
type ShardStorage struct {
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

	// Steps is how long the steps of the shard's owner have taken, one entry for each [StepKind] in
	// their order. An operation waits for at most its own group and the one before: see
	// [StepGroup]. In a cluster they are the steps that this node has taken as the shard's leader.
	Steps []StepStats
}

// StorageStats describes the stores of this process, each shard as of a different moment; in a
// cluster the replicas of this node, whichever node leads them. It takes some microseconds for each
// shard and each table, and more for tables with deletions of ranges, which it reads. It disturbs
// no other call; it waits while a store is being replaced by a snapshot. A shard that has failed
// still has numbers. It returns [ErrClosed] once [Queue.Close] has begun, and [ErrFailed] if a
// store could not be opened again after a snapshot.
//
// Errors: [ErrFailed], [ErrClosed].
func (q *Queue) StorageStats() (_ *StorageStats, err error) {
	defer public(&err)
	if err := q.checkCall(context.Background()); err != nil {
		return nil, err
	}
	st := &StorageStats{Shards: make([]ShardStorage, len(q.replicas))}
	if q.elsewhere != nil {
		return st, q.tell(context.Background(), localsocket.Storage, nil, st)
	}
	for i, r := range q.replicas {
		if err := r.storage(q.closing, st, &st.Shards[i]); err != nil {
			return nil, err
		}
	}
	return st, nil
}

// storage fills in the statistics of the replica's store, and those of the cache that the stores
// share.
func (r *replica) storage(closing <-chan struct{}, all *StorageStats, s *ShardStorage) error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	select {
	case <-closing: // the store may be closed
		return ErrClosed
	default:
	}
	if r.node != nil && r.source == nil {
		return fmt.Errorf("%w: shard %d: its store is not open", ErrFailed, r.index)
	}
	m := r.store.Stats()
	*s = all.add(&m, &r.steps)
	if r.node != nil { // the store has no log, but Pebble counts the bytes that would be in it
		s.LogBytes, s.LoggedBytes = 0, 0
	}
	return nil
}

// add describes a store, and takes over what is said of the cache that the stores share.
func (all *StorageStats) add(m *store.Stats, t *steps.Table) ShardStorage {
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
		Steps:          stepStats(t),
	}
	for i := range m.Levels {
		l := &m.Levels[i]
		s.Tables += int(l.TablesCount)
		s.TableBytes += l.TablesSize
		s.FlushedBytes += int64(l.TableBytesFlushed)
		s.CompactedBytes += int64(l.TableBytesCompacted)
	}
	return s
}
