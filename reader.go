package codeq

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/offline"
	"codeq/internal/owner"
	"codeq/internal/platform"
)

// Reader shows the stored content of a queue that no process has open, made by [OpenReadOnly], by
// the reading verbs of a [Queue]. No lease ends meanwhile, no schedule ticks, no task becomes ready
// or leaves. It is safe for concurrent use; a nil or zero one returns or yields [ErrClosed].
type Reader struct {
	q      *Queue
	stored *offline.Queue
}

// ReaderOptions are the options of [OpenReadOnly]. A nil *ReaderOptions means all defaults.
type ReaderOptions struct {
	AcceptCopy bool // [Options.AcceptCopy]; the results may contradict each other. Default: false.

	private inspect.Private
}

// OpenReadOnly opens the queue in dir for reading, and changes nothing in dir, which may be on a
// read-only file system, of a standalone queue or any node of a cluster, of this format or an older
// one. The logs of a killed process are read into memory; [Reader.Staleness] describes the result.
// Like [Open], it loads names of queues, leases and schedules; the number of tasks does not matter.
//
// Any number of processes may have dir open as a [Reader], each any number of times, but no [Queue]
// beside them: whichever comes later gets [ErrLocked].
//
// Errors: [ErrInvalid] (dir is ""), [ErrNotQueue] (also if nothing was ever stored), [ErrLocked],
// [ErrFormat], [ErrCopied], [ErrCorrupt], and those of the file system.
func OpenReadOnly(dir string, opts *ReaderOptions) (_ *Reader, err error) {
	defer public(&err)
	if err := checkDir("OpenReadOnly dir", dir); err != nil {
		return nil, err
	}
	o, err := (*Options)(nil).withDefaults()
	if err != nil {
		return nil, err
	}
	c := offline.Config{CacheBytes: o.CacheBytes, Rules: func(m *manifest.Manifest, shard int) engine.Config {
		rules := configOf(shard, o, [32]byte{}, func() time.Duration { return 0 })
		rules.Shards, rules.Replicated = m.Shards, m.Node != ""
		return rules
	}}
	fs := platform.FS
	if opts != nil {
		c.AcceptCopy = opts.AcceptCopy
		if opts.private.FS != nil {
			fs = opts.private.FS
		}
	}
	stored, err := offline.Open(fs, dir, c)
	if err != nil {
		return nil, err
	}
	if err := o.decideBy(stored.Options()); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: options of %s: %w", ErrCorrupt, dir, err), stored.Close())
	}
	q := &Queue{opts: o, replicas: make([]*replica, stored.Shards()), backend: &storedQueue{stored: stored}}
	return &Reader{q, stored}, nil
}

func (r *Reader) queue() *Queue {
	if r == nil {
		return nil
	}
	return r.q
}

// storedQueue answers the operations of a Reader, which only read.
type storedQueue struct {
	backend // nil: there are no other verbs
	stored  *offline.Queue
}

func (q *storedQueue) begin(ctx context.Context) context.Context { return ctx }

func (q *storedQueue) do(ctx context.Context, shard int, op request) (settled bool, err error) {
	if ctx.Err() != nil {
		return true, base.EndOf(ctx)
	}
	switch op := op.(type) {
	case *ruling:
		return true, q.stored.Decide(shard, op.Body)
	case *readOp:
		return true, q.stored.Read(shard, op.lookup)
	}
	panic("it reads nothing that is stored")
}

// Stats is [Queue.Stats].
// Errors: [ErrInvalid], [ErrCorrupt], [ErrClosed], and that of ctx.
func (r *Reader) Stats(ctx context.Context) (map[string]Counts, error) { return r.queue().Stats(ctx) }

// Info is [Queue.Info].
// Errors: [ErrInvalid], [ErrCorrupt], [ErrClosed], and that of ctx.
func (r *Reader) Info(ctx context.Context) ([]QueueInfo, error) { return r.queue().Info(ctx) }

// TotalsByDay is [Queue.TotalsByDay]; the last day is the present one.
// Errors: [ErrInvalid], [ErrCorrupt], [ErrClosed], and that of ctx.
func (r *Reader) TotalsByDay(ctx context.Context, queue string) ([]DayTotals, error) {
	return r.queue().TotalsByDay(ctx, queue)
}

// Get is [Queue.Get].
// Errors: [ErrInvalid], [ErrNotFound], [ErrCorrupt], [ErrClosed], and that of ctx.
func (r *Reader) Get(ctx context.Context, id ID) (*TaskInfo, error) { return r.queue().Get(ctx, id) }

// List is [Queue.List], with the dead letters if [ListOptions.State] is [Dead].
// Errors: [ErrInvalid], [ErrCorrupt], [ErrClosed], and that of ctx.
func (r *Reader) List(ctx context.Context, opts ListOptions) iter.Seq2[*TaskInfo, error] {
	return r.queue().List(ctx, opts)
}

// ListPage is [Queue.ListPage].
// Errors: [ErrInvalid], [ErrCorrupt], [ErrClosed], and that of ctx.
func (r *Reader) ListPage(ctx context.Context, opts PageOptions) (*Page, error) {
	return r.queue().ListPage(ctx, opts)
}

// FindByKey is [Queue.FindByKey].
// Errors: [ErrInvalid], [ErrNotFound], [ErrCorrupt], [ErrClosed], and that of ctx.
func (r *Reader) FindByKey(ctx context.Context, k UniqueKey) (*TaskInfo, error) {
	return r.queue().FindByKey(ctx, k)
}

// Schedules is [Queue.Schedules]. A Next that has passed is a tick that has not happened yet.
// Errors: [ErrInvalid], [ErrCorrupt], [ErrClosed], and that of ctx.
func (r *Reader) Schedules(ctx context.Context) ([]ScheduleInfo, error) {
	return r.queue().Schedules(ctx)
}

// Settings is [Queue.Settings].
// Errors: [ErrInvalid], [ErrCorrupt], [ErrClosed].
func (r *Reader) Settings(queue string) (Settings, error) { return r.queue().Settings(queue) }

// StorageStats is [Queue.StorageStats], with the MemTableBytes of logs read.
//
// Errors: [ErrClosed].
func (r *Reader) StorageStats() (_ *StorageStats, err error) {
	defer public(&err)
	q := r.queue()
	if err := q.checkCall(context.Background()); err != nil {
		return nil, err
	}
	st := q.newStorageStats(r.stored.DiskUsage())
	for i := range st.Shards {
		m, err := r.stored.Stats(i)
		if err != nil {
			return nil, err
		}
		st.Shards[i] = st.add(&m, new(owner.UpkeepTable))
	}
	return st, nil
}

// Staleness says how current the directory of a [Reader] is.
type Staleness struct {
	// Closed: in order. Otherwise its process was killed, or its storage has failed: the [Reader]
	// shows the state after the next [Open], as the [Durability] promises.
	Closed bool
	Node   string // the node that owns the directory; "": no cluster
	// Shards says how far each replica of a node is; nil without a cluster. They are shown as they
	// are, perhaps of different moments, without what other nodes have acknowledged since.
	Shards []ShardStaleness
}

// ShardStaleness is how far the replica of a shard is.
type ShardStaleness struct {
	Applied uint64 // the last entry of the shard's log that is in its store, and so is shown
	// Logged is the last entry of the node. Those after Applied are not shown: a node applies
	// committed ones when it is opened, and writes tables when there are many, not at its close.
	Logged uint64
}

// Staleness says how current the directory is, also after [Reader.Close]; zero: it was not opened.
func (r *Reader) Staleness() Staleness {
	if r.queue() == nil {
		return Staleness{}
	}
	from := r.stored.Staleness()
	s := Staleness{Closed: from.Closed, Node: from.Node}
	if s.Node != "" {
		for _, p := range from.Shards {
			s.Shards = append(s.Shards, ShardStaleness(p))
		}
	}
	return s
}

// Close releases the directory. It waits for running calls; later ones return [ErrClosed], and a
// later Close does nothing. An error that matches [ErrCorrupt] says again that damage was found.
//
// Errors: [ErrCorrupt], those of the file system, and [ErrClosed] if the [Reader] was never opened.
func (r *Reader) Close() (err error) {
	defer public(&err)
	if err := r.queue().checkCall(context.Background()); err != nil {
		return err
	}
	return r.stored.Close()
}
