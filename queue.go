package codeq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"codeq/internal/base"
	"codeq/internal/cluster"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/entries"
	"codeq/internal/failstop"
	"codeq/internal/fsck"
	"codeq/internal/guard"
	"codeq/internal/manifest"
	"codeq/internal/owner"
	"codeq/internal/store"
)

// Queue is an open queue directory, made by [Open]. Its methods are safe for concurrent use. A nil
// or zero Queue returns or yields [ErrClosed]; a nil context is an [InvalidError].
//
// The errors of changes are [ErrInvalid], [ErrDiskFull], [ErrUncertain], [ErrFailed],
// [ErrNotLeader] and [ErrClosed]; those of reads [ErrInvalid], [ErrCorrupt], [ErrFailed],
// [ErrClosed] and, in a cluster, [ErrUncertain] and [ErrNotLeader]; those of nodes [ErrInvalid],
// [ErrNoCluster], [ErrNotLeader], [ErrUncertain], [ErrFailed] and [ErrClosed].
type Queue struct {
	opts     *Options
	replicas []*replica // by the number of the shard
	dir      *manifest.Directory
	caches   *store.Caches
	pools    pools
	events   entries.Hub
	runs     entries.Runs[*runner]
	heads    *dispatch.Board // nil: there is one shard
	slow     dispatch.SlowStart
	stuck    atomic.Uint64 // handlers that have gone on after their Timeout
	node     *node         // nil: no cluster
	backend  backend

	// capacity 1: held by a call of Configure (its change is called once), Checkpoint, ServeLocal
	configuring      chan struct{}
	copying, serving chan struct{}

	disk    *failstop.Watch // of the files; nil: another process has the queue open
	closing chan struct{}   // closed by Close, before it waits for runs
	stop    sync.Once       // guards closing, and the goroutine that ends the queue
	ended   chan struct{}   // closed when that has
	err     error           // of it; valid once ended is closed
	runMu   sync.Mutex      // orders calls.Add before the Wait of Close
	calls   sync.WaitGroup  // Run, Checkpoint, ServeLocal, StorageStats, returns of late claims
	notices sync.WaitGroup  // goroutines that tell handlers of cancels; owners add
}

// backend resolves the operations of a Queue: the shards of this process (*standalone), those of a
// cluster (*node), another process (*remote), or a closed directory (*storedQueue).
type backend interface {
	// begin gives the parts of one call a limit together.
	begin(ctx context.Context) context.Context
	// do makes a shard resolve an operation, and waits for the outcome. settled is false when the
	// operation still belongs to the shard.
	do(ctx context.Context, shard int, op request) (settled bool, err error)
	produce(ctx context.Context, shard int, op *produceOp) (settled bool, err error)
	call(ctx context.Context, shard int, op *produceOp) (endOfTask, error) // produce for a task whose end the caller waits for; nil: the key of the task was taken
	await(ctx context.Context, id ID) (*engine.Outcome, error)
	// tell makes the process that has the queue open carry out a verb about a process; false: that
	// is this one, and the caller carries it out.
	tell(ctx context.Context, verb byte, argument, reply any) (told bool, err error)
}

// Open opens the queue in dir, and creates it if dir does not exist or is empty, unless
// [Options.MustExist]. A nil opts means the defaults. One [Queue] at a time may have a directory
// open, and no [Reader] beside it. Directories and files are created with modes 0700 and 0600.
//
// An error says that nothing was changed, except [ErrCorrupt] for damage found when the shards are
// loaded, and [ErrDiskFull]: there is no room for the first tables and logs.
//
// A queue of an older, known format is raised to that of this version, in place; from then on the
// older version refuses it with [ErrFormat]. A cluster rises when all nodes run this version.
//
// With cgo and the GNU C library, Open makes malloc return freed blocks of 4 MiB and more to the
// system (M_MMAP_THRESHOLD, of the process), unless the environment sets it.
//
// Errors: [ErrInvalid] (also for the dir ""), [ErrNotQueue], [ErrNotMember], [ErrShardCount],
// [ErrFormat], [ErrLocked], [ErrCopied], [ErrCorrupt], [ErrPowerLost], [ErrDiskFull],
// [ErrNotLeader] ([Cluster].Join), and those of the file system.
func Open(dir string, opts *Options) (_ *Queue, err error) {
	defer public(&err)
	q, err := open(dir, opts)
	if err != nil && opts != nil && opts.Cluster != nil && opts.Cluster.Listener != nil {
		_ = opts.Cluster.Listener.Close() // it may be closed already
	}
	return q, owner.DiskFull(err)
}

func open(dir string, opts *Options) (*Queue, error) {
	if err := checkDir("Open dir", dir); err != nil {
		return nil, err
	}
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	want := manifest.Want{Shards: o.Shards, Exists: o.MustExist}
	want.NewShards = manifest.NewShards(o.Cluster != nil, o.Durability == DurabilityDisk, runtime.GOMAXPROCS(0))
	if c := o.Cluster; c != nil {
		want.Node, want.Founds, want.Check = c.Node, c.isAlone(), c.checkOpen
	}
	d, err := manifest.Open(o.private.FS, dir, want)
	if o.Cluster == nil && !o.Tool && errors.Is(err, ErrNotMember) {
		if err = dissolve(dir, o); err == nil {
			d, err = manifest.Open(o.private.FS, dir, want)
		}
	}
	if err != nil {
		return nil, err
	}
	if d.Node != want.Node {
		d.Found(want.Node, o.Cluster.Advertise)
	}
	if err = o.settle(d); err == nil {
		err = d.Take(o.AcceptCopy, o.private.Boot, o.volatile())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("codeq: open %s: %w", dir, err), d.Close())
	}
	q := newQueue(o, d)
	if o.Cluster != nil {
		n := q.newNode()
		if err = n.Open(); err != nil {
			err = errors.Join(err, n.close())
		} else {
			n.withdrawInterests()
		}
	} else {
		err = q.openShards()
	}
	if err != nil {
		return nil, errors.Join(err, q.closeFiles())
	}
	d.Opened(q.slow.Recovered)
	return q, nil
}

func newQueue(o *Options, d *manifest.Directory) *Queue {
	disk := cluster.WatchDisk(d, o.StallAfter, o.log)
	o.private.FS = d.FS
	q := &Queue{
		disk: disk, ended: make(chan struct{}),
		opts: o, dir: d, replicas: make([]*replica, d.Shards), caches: store.NewCaches(o.CacheBytes, o.MemTableBytes, d.Shards),
		closing: make(chan struct{}), configuring: make(chan struct{}, 1), copying: make(chan struct{}, 1),
		serving: make(chan struct{}, 1),
	}
	q.backend = (*standalone)(q)
	if d.Shards > 1 {
		q.heads = new(dispatch.Board)
	}
	return q
}

func (q *Queue) openShards() error {
	shards, gates := make([]*shard, len(q.replicas)), dispatch.NewGates()
	err := q.inParallel("opening of a shard", len(shards), q.openAlone)
	if err == nil { // below DurabilityDisk, a power loss may have taken more from some than from others
		err = guarded(q.opts.log, "reconciliation of shards", func() error { return q.reconcile(false) })
	}
	if err == nil {
		err = q.dir.Agree()
	}
	if err == nil {
		err = q.inParallel("loading of a shard", len(shards), func(i int) (err error) {
			shards[i], err = q.loadAlone(i, gates)
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("codeq: open %s: %w", q.dir.Path, err)
	}
	if err = q.dir.FinishCreation(); err == nil {
		err = q.dir.FinishLeaving()
	}
	if err != nil {
		return err
	}
	for _, s := range shards {
		s.claims.Join(q.heads, &q.slow, q.opts.SuspectFor)
		s.join(shards)
		s.hub, s.runs = &q.events, &q.runs
	}
	q.slow.Begin(q.dir.Killed(), q.opts.log)
	for _, s := range shards {
		go s.runGuarded()
	}
	return nil
}

func (q *Queue) inParallel(what string, n int, do func(shard int) error) error {
	var g errgroup.Group
	for i := range n {
		g.Go(func() error {
			err := guarded(q.opts.log, what, func() error { return do(i) })
			if err != nil {
				return fmt.Errorf("shard %d: %w", i, err)
			}
			return nil
		})
	}
	return g.Wait()
}

func (q *Queue) openAlone(i int) error {
	st, err := fsck.OpenStore(q.dir, i, q.opts.storeConfigIn(q.dir.Format), q.caches)
	if err != nil {
		return err
	}
	q.replicas[i] = &replica{index: i}
	q.replicas[i].slot.Set(st)
	return nil
}

func (q *Queue) loadAlone(i int, gates *dispatch.Gates) (*shard, error) {
	r := q.replicas[i]
	s := newShard(i, q.opts, r.slot.Store(), gates)
	if err := s.load(0); err != nil {
		q.replicas[i] = nil
		_ = r.slot.Close() // the error of load is the one that matters
		return nil, err
	}
	r.lead.Store(s)
	s.replica = r
	s.upkeep.UpkeepTable = &r.upkeep
	return s, nil
}

var (
	errNotOpened = fmt.Errorf("%w: it was not opened; a Queue is made by Open", ErrClosed)
	errNoContext = &InvalidError{"ctx", "nil", "a context, such as context.Background()"}
)

// checkCall refuses a Queue that Open has not made, and no context. It is inlined.
func (q *Queue) checkCall(ctx context.Context) error {
	if q == nil || q.opts == nil {
		return errNotOpened
	}
	if ctx == nil {
		return errNoContext
	}
	return nil
}

// enter adds a call to those that Close waits for; the caller calls calls.Done.
func (q *Queue) enter() error {
	q.runMu.Lock()
	defer q.runMu.Unlock()
	if base.IsClosed(q.closing) {
		return ErrClosed
	}
	q.calls.Add(1)
	return nil
}

// untilClosing returns a context that also ends with ErrClosed when the queue is about to be
// closed, for a call that has entered, and stop as guard.Until.
func (q *Queue) untilClosing(own context.Context, what string) (_ context.Context, stop func(error) error) {
	return guard.Until(own, q.closing, ErrClosed, q.opts.log, "watch of "+what, panicError)
}

// shard is a shard that this process leads; nil if it does not.
func (q *Queue) shard(index int) *shard { return q.replicas[index].lead.Load() }

func (q *Queue) led() []*shard {
	led := make([]*shard, 0, len(q.replicas))
	for _, r := range q.replicas {
		if s := r.lead.Load(); s != nil {
			led = append(led, s)
		}
	}
	return led
}

func (q *Queue) anyShard() int {
	if len(q.replicas) == 1 {
		return 0
	}
	if q.node != nil {
		return q.node.anyShard()
	}
	return rand.IntN(len(q.replicas))
}

func (q *Queue) shardOf(id ID) int { return id.shard(len(q.replicas)) }

// needsFormat returns an error if a shard of a cluster during an upgrade has not risen to a format.
func (q *Queue) needsFormat(shard int, what string, format int) error {
	if q.node != nil {
		if f := q.replicas[shard].group.Format(); f < format {
			return fmt.Errorf("%w: shard %d has format %d, and %s need %d", ErrFormat, shard, f, what, format)
		}
	}
	return nil
}

func (q *Queue) do(ctx context.Context, shard int, op request) (settled bool, err error) {
	return q.backend.do(ctx, shard, op)
}

// ask is do for an operation that changes nothing: if ctx ends, the outcome is not uncertain.
func (q *Queue) ask(ctx context.Context, shard int, op request) error {
	settled, err := q.do(ctx, shard, op)
	if !settled && ctx.Err() != nil {
		return base.EndOf(ctx)
	}
	return err
}

// begin is checkCall for a call that asks shards in turn. The returned ctx gives it one limit.
func (q *Queue) begin(ctx context.Context) (context.Context, error) {
	if err := q.checkCall(ctx); err != nil {
		return nil, err
	}
	return q.backend.begin(ctx), nil
}

// tell is checkCall, and makes another process that has the queue open carry out a verb about a
// process. done is false if this process carries it out.
func (q *Queue) tell(ctx context.Context, verb byte, argument, reply any) (done bool, err error) {
	if err := q.checkCall(ctx); err != nil {
		return true, err
	}
	if told, err := q.backend.tell(ctx, verb, argument, reply); told {
		return true, err
	}
	if base.IsClosed(q.closing) {
		return true, ErrClosed
	}
	if ctx.Err() != nil {
		return true, base.EndOf(ctx)
	}
	return false, nil
}

func orNil[T any](v *T, err error) (*T, error) {
	if err != nil {
		return nil, err
	}
	return v, nil
}

// doFor is do for the shard that has a task, after checkCall.
func (q *Queue) doFor(ctx context.Context, id ID, op request) error {
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	_, err := q.do(ctx, q.shardOf(id), op)
	return err
}

type standalone Queue

func (q *standalone) begin(ctx context.Context) context.Context { return ctx }

func (q *standalone) do(ctx context.Context, shard int, op request) (settled bool, err error) {
	return q.replicas[shard].lead.Load().do(ctx, op, op.base(), nil)
}

func (q *standalone) produce(ctx context.Context, shard int, op *produceOp) (settled bool, err error) {
	return q.do(ctx, shard, op)
}

func (q *standalone) await(ctx context.Context, id ID) (*engine.Outcome, error) {
	return awaitBy(ctx, q, id, len(q.replicas))
}

func (q *standalone) tell(context.Context, byte, any, any) (told bool, err error) { return false, nil }

// Close ends the queue. First calls of [Queue.Run] drain and return, and calls of
// [Queue.Checkpoint] end, while other calls still work; then new work and waiting claims get
// [ErrClosed], and accepted operations are finished. When Close returns, all that was acknowledged
// is with the operating system at least, and no goroutine of the queue is left, except in an
// Observer, a log handler, or a handler of Run that does not return, and a compaction of Pebble
// that cannot read its tables. It is safe to call Close twice and at any moment, but not from a
// handler of Run, which would wait for itself.
//
// [ErrFailed] says that the storage of a shard, or of a node, has failed or could not be closed;
// the next [Open] then finds what [Durability] promises. Or the directory was moved, removed or
// replaced: the acknowledged changes are wherever it is now. [ErrStalled] says that the disk has
// not answered for twice [Options.StallAfter]: the queue goes on ending, and its directory stays
// locked until it has. Another Close waits for that.
//
// Errors: [ErrFailed], [ErrStalled], and [ErrClosed] if the queue was never opened.
func (q *Queue) Close() (err error) {
	defer public(&err)
	if err := q.checkCall(context.Background()); err != nil {
		return err
	}
	q.stop.Do(func() {
		q.runMu.Lock()
		close(q.closing)
		q.runMu.Unlock()
		go func() {
			defer close(q.ended)
			q.err = guard.Steps(q.opts.log, "Close", q.endSteps(), func(what string, value any, stack []byte) error {
				return fmt.Errorf("%w: %w", ErrFailed, panicError(what, value, stack))
			})
		}()
	})
	if part, age := q.disk.Await(q.ended); part != nil {
		return fmt.Errorf("%w: %s, for %v; the directory stays locked until it does", ErrStalled, part.Name(), age)
	}
	return q.err
}

// endSteps end the queue after closing is closed. Even if a step panics, the directory is unlocked.
func (q *Queue) endSteps() []func() error {
	if r, ok := q.backend.(*remote); ok {
		return []func() error{r.Close}
	}
	steps := []func() error{func() error { q.hurry(); q.calls.Wait(); return nil }}
	if q.node != nil {
		steps = append(steps, q.node.Leave, q.node.close)
	}
	return append(append(steps, q.endOwners), q.fileSteps()...)
}

func (q *Queue) endOwners() error {
	led := q.led()
	for _, s := range led {
		s.inbox.Stop(ErrClosed)
	}
	for _, s := range led {
		<-s.done
	}
	q.notices.Wait()
	q.events.Close()
	return nil
}

// hurry fails commits that wait for room on a full disk: Close would wait as long.
func (q *Queue) hurry() {
	for _, r := range q.replicas {
		r.slot.Hurry()
	}
	if q.node != nil {
		q.node.Hurry()
	}
}

func (q *Queue) closeFiles() (err error) {
	for _, step := range q.fileSteps() {
		err = errors.Join(err, step())
	}
	return err
}

// fileSteps close the files, and the rest that nothing else in the queue uses.
func (q *Queue) fileSteps() (steps []func() error) {
	for _, r := range q.replicas {
		if r != nil {
			steps = append(steps, r.close)
		}
	}
	return append(steps, func() error {
		q.caches.Close()
		q.disk.End()
		if err := q.dir.End(); err != nil { // it is as if the process had been killed: nothing is lost
			q.opts.Logger.Warn("the directory still says that it is open", "dir", q.dir.Path, "err", err)
		}
		return nil
	}, q.dir.Close, func() error {
		q.opts.teller.Close()
		q.opts.logs.Close()
		q.disk.Rest()
		return nil
	})
}

func configOf(index int, o *Options, seed [32]byte, elapsed func() time.Duration) engine.Config {
	return engine.Config{
		Shard: index, Shards: o.Shards, Replicated: o.Cluster != nil, Seed: seed, Elapsed: elapsed,
		WindowTasks: o.WindowTasks, WindowBytes: o.WindowBytes, MaxAttempts: o.MaxAttempts, Backoff: o.Backoff.Delay,
		SuspectFor: uint64(o.SuspectFor / time.Millisecond),
		Retention:  o.Retention, Untimed: o.Tool, IdleLanes: o.private.IdleLanes, SweepLanes: o.private.SweepLanes, GroupBytes: o.private.GroupBytes,
		TrimBytes: o.private.TrimBytes, TrimLane: o.private.TrimLane,
	}
}
