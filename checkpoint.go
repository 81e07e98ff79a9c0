package codeq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/convert"
	"codeq/internal/localsocket"
	"codeq/internal/owner"
	"codeq/internal/store"
	"codeq/internal/wire"
)

// CheckpointOptions change what [Queue.Checkpoint] makes.
type CheckpointOptions struct {
	// Copy copies all files, so that none is shared with the queue: for a copy with files that will
	// be changed (chmod, chown, written in place) where it is. It takes as much space as the queue,
	// and the time to write it, after the shards have gone on. The default is links.
	Copy bool
}

// Checkpoint copies the queue to dir, while the queue goes on working. The copy is the whole queue
// at one moment during the call: everything that had been acknowledged before the call, in all
// shards, and nothing that began after it. It is durable when Checkpoint returns: [Open] it where
// it is, or copy its directory to another machine by any means; nothing writes to it until it is
// opened, and no queue writes to a file of the other one.
//
// Large files are shared by hard links, so dir must be on the file system of the queue. A link has
// the mode, the owner and the content of the original: do not chmod, chown or write to files of the
// copy, which would do the same to the queue at work, but of a copy of its directory, or of one
// made with [CheckpointOptions].Copy. At first a copy takes almost no space; when compactions have
// rewritten all of the queue, it takes as much as the queue did. All shards stop together while the
// rest is copied, for some hundredths of a second; calls wait meanwhile.
//
// dir must not exist, or must be empty. It becomes a queue in the last step: if a crash ends a
// Checkpoint, Open and the next Checkpoint refuse dir until it is removed. (If dir did not exist,
// it appears with a first file in it; a crash before that may leave a directory beside it, with a
// name that ends with ".unfinished".) A Checkpoint that returns an error has removed everything
// that it had made, except empty directories.
//
// In the copy, the tasks that were leased at that moment are leased: those of [Queue.Run] are ready
// again as soon as the copy is opened, for no attempt, others when their leases expire. If the copy
// is opened while the original is in use, tasks are done twice. The copy has a new identity, so
// that its shards cannot be mixed with those of the original.
//
// In a cluster Checkpoint may be called on any node. The node copies its own replicas of all
// shards, after they have caught up with their leaders; the shards stop for this time too, for 5 s
// at the most. When a leader is lost meanwhile, Checkpoint begins again, twice at the most: it may
// wait three times [Cluster].CallTimeout for one. The copy is a queue without [Options.Cluster].
//
// Checkpoint returns an error that matches [ErrInvalid] if dir is "", within the queue or on
// another file system, fs.ErrExist if it is not empty, [ErrLocked] if another call or process is
// about to make a queue of it, [ErrDiskFull] below half of [Options.MinFreeBytes] or if there is no
// room for the copy (with Copy: if it would leave less than MinFreeBytes), [ErrFailed] if a shard
// has failed, [ErrClosed] if the queue is closed before all shards have stopped, or, in a cluster,
// [ErrNotLeader] or [ErrUncertain] if they did not stop for long enough. Checkpoint is safe for
// concurrent use; calls follow each other.
//
// Errors: [ErrInvalid], [io/fs.ErrExist], [ErrLocked], [ErrDiskFull], [ErrCorrupt], [ErrFailed],
// [ErrNotLeader], [ErrUncertain], [ErrClosed], that of ctx if it ends before all shards have
// stopped (with Copy: before all files are copied), and those of the file system.
func (q *Queue) Checkpoint(ctx context.Context, dir string, opts ...CheckpointOptions) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	isCopy := slices.ContainsFunc(opts, func(o CheckpointOptions) bool { return o.Copy })
	if err := checkDir("Checkpoint dir", dir); err != nil {
		return err
	}
	path, err := filepath.Abs(dir) // for a process that may be in another directory
	if err != nil {
		return err
	}
	kind := localsocket.Checkpoint
	if isCopy {
		kind = localsocket.FullCopy
	}
	if done, err := q.tell(ctx, kind, path, nil); done {
		return err
	}
	if err := q.enter(); err != nil {
		return err
	}
	defer q.calls.Done()
	ctx, stop := q.untilClosing(ctx, "Checkpoint")
	defer func() { err = stop(err) }()
	select {
	case q.copying <- struct{}{}:
		defer func() { <-q.copying }()
	case <-ctx.Done():
		return base.EndOf(ctx)
	}
	if err := q.checkpoint(ctx, dir, isCopy); err != nil {
		return fmt.Errorf("codeq: checkpoint to %s: %w", dir, owner.DiskFull(err))
	}
	return nil
}

func (q *Queue) checkpoint(ctx context.Context, dir string, isCopy bool) (err error) {
	c, err := q.beginCopy(dir)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Remove())
		}
		err = errors.Join(err, c.Close())
	}()
	// Memory is flushed while the shards are running, so that little is left to be copied while
	// they stand still.
	err = q.eachReplica(func(r *replica) error {
		return r.slot.Use(func(st *store.Store) error { return st.Flush(ctx) })
	})
	if err != nil {
		return err
	}
	if err := q.cut(ctx, c); err != nil {
		return err
	}
	if isCopy {
		if err := c.Unshare(ctx, uint64(max(q.opts.MinFreeBytes, 0))); err != nil {
			return err
		}
	}
	if q.node != nil {
		c.Format = q.node.Format() // which all of its nodes know
	}
	c.Crashed = q.opts.Tool && q.dir.Crashed // its leases are those of the process that died
	err = q.eachReplica(func(r *replica) error { return c.Adopt(r.index, q.opts.storeConfigIn(c.Format), q.caches) })
	if err != nil {
		return err
	}
	return c.Finish()
}

// beginCopy makes the directory of a copy.
func (q *Queue) beginCopy(dir string) (*convert.Copy, error) {
	c, err := convert.BeginCopy(q.opts.private.FS, dir, q.dir.Path, len(q.replicas), q.opts.stored)
	switch {
	case errors.Is(err, convert.ErrInside):
		err = &InvalidError{"Checkpoint dir", dir, "outside of the queue, " + q.dir.Path}
	case errors.Is(err, convert.ErrElsewhere):
		err = fmt.Errorf("%w: %w", &InvalidError{"Checkpoint dir", dir, "one on the file system of the queue"}, err)
	}
	return c, err
}

// eachReplica calls do for all shards at the same time.
func (q *Queue) eachReplica(do func(r *replica) error) error {
	return q.inParallel("copy of a shard", len(q.replicas), func(i int) error { return do(q.replicas[i]) })
}

// cutTries is how often a copy is tried at the most, if shards have not stood still to the end.
const cutTries = 3

// cut copies the stores at one moment, while all shards stand still. So no copy contains a later
// change than another one; above all, none has taken a message that another one has not sent.
func (q *Queue) cut(ctx context.Context, c *convert.Copy) error {
	var last error // of the try before
	for tries := 1; ; tries++ {
		err := q.tryCut(ctx, c)
		ended := ctx.Err() != nil && errors.Is(err, ctx.Err())
		if ended && last != nil {
			err = fmt.Errorf("%w: %w", last, err)
		}
		if last = err; q.node == nil || tries == cutTries || ended || !errors.Is(err, ErrNotLeader) && !errors.Is(err, ErrUncertain) {
			return err
		}
		if err := c.Empty(); err != nil {
			return err
		}
	}
}

func (q *Queue) tryCut(ctx context.Context, c *convert.Copy) error {
	b, err := q.raiseBarrier(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	err = q.eachReplica(func(r *replica) error {
		if err := r.group.Reach(b.applied[r.index], barrierLimit/2); err != nil { // so that there is time left to read
			return err
		}
		return r.slot.Use(func(st *store.Store) error {
			return st.CheckpointUnsynced(c.Path, c.ShardDir(r.index))
		})
	})
	if err := errors.Join(err, b.resume()); err != nil {
		return err
	}
	q.opts.log.Info("shards stood still for a checkpoint", "dir", c.Path, "for", time.Since(began))
	return nil
}

// At a barrier the owners of all shards stand still at the same time. Each stops between
// two operations, when its disk has everything that it has acknowledged and sent, and goes on when
// it gets a resumeOp. From the moment at which the last owner has stopped, no shard changes
// anything, and so the stores, read meanwhile, are the queue at one moment.
//
// In a cluster the owners on the leading nodes stand still, and the stores of any node may be read
// after they have applied the entries of the leaders. When an owner goes on, a majority confirms
// that its node still leads, or stores its decisions from before it stopped. So no other leader has
// stored anything before that, and the data that was read is that of the owner. Without that
// confirmation a barrier is invalid.

// barrier is one that has been raised.
type barrier struct {
	queue   *Queue
	id      uint64   // random
	asked   int      // number of shards that stand still, or may
	applied []uint64 // in a cluster: by shard, the applied index of its leader
}

// barrierLimit is how long an owner stands still at the most in a cluster, as the caller's node may
// have died meanwhile.
const barrierLimit = 5 * time.Second

// errNoBarrier is the answer of an owner that has not stood still until the resumeOp.
var errNoBarrier = fmt.Errorf("%w: the shard has not stood still", ErrUncertain)

// raiseBarrier returns when all owners stand still, or with an error none. They stop in the order
// of their shards, so that if two nodes raise a barrier, one waits for the other.
func (q *Queue) raiseBarrier(ctx context.Context) (*barrier, error) {
	b := &barrier{queue: q, id: rand.Uint64()}
	for i := range q.replicas {
		op := &barrierOp{completion: newCompletion(callBarrier), Barrier: call.Barrier{ID: b.id}, gone: make(chan struct{})}
		settled, err := q.do(ctx, i, op)
		switch {
		case !settled:
			op.abandon(nil)
		case err == nil, errors.Is(err, ErrUncertain):
			b.asked++
		}
		if err != nil {
			b.giveUp()
			if ctx.Err() != nil && !errors.Is(err, ctx.Err()) {
				err = fmt.Errorf("%w: %w", err, base.EndOf(ctx))
			}
			return nil, fmt.Errorf("shard %d: %w", i, err)
		}
		b.applied = append(b.applied, op.Applied)
	}
	return b, nil
}

// resume makes the owners go on. After an error the barrier is invalid.
func (b *barrier) resume() error {
	ctx := context.Background()
	if b.queue.node != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, barrierLimit)
		defer cancel()
	}
	return b.queue.inParallel("end of a barrier", b.asked, func(i int) error {
		_, err := b.queue.do(ctx, i, &resumeOp{completion: newCompletion(callResume), Resume: call.Resume{ID: b.id}})
		return err
	})
}

// giveUp resumes the owners that may stand still. It does not wait for other nodes: owners that it
// does not reach go on after barrierLimit.
func (b *barrier) giveUp() {
	if n := b.queue.node; n != nil {
		n.background.Go(func() { contain(n.log, "end of a given up barrier", func() { _ = b.resume() }, nil) })
		return
	}
	_ = b.resume()
}

// barrierOp makes an owner stand still.
type barrierOp struct {
	completion
	call.Barrier
	gone chan struct{} // closed when the caller has given up
}

// resolve ends the group: the owner stands still after the group has persisted.
func (op *barrierOp) resolve(s *shard) { s.undecided.barrier = op }

// standStill answers the caller, and returns when the owner may go on: after a resumeOp, when the
// caller has given up, or when the owner has to end. REQUIRES: the group is empty.
func (op *barrierOp) standStill(s *shard) {
	if s.node != nil {
		op.Applied = s.replica.group.Applied()
	}
	op.settle(nil)
	var limit <-chan time.Time
	if s.node != nil {
		t := time.NewTimer(barrierLimit)
		defer t.Stop()
		limit = t.C
		defer s.replica.group.StandStill()()
	}
	ends := func(next operation) bool {
		r, ok := next.(*resumeOp)
		return ok && r.ID == op.ID
	}
	if resume, ok := s.inbox.Await(ends, op.gone, limit); ok {
		s.settleAfterCommit(resume) // in a separate group, which confirms that this node has led all the time
	}
}

func (op *barrierOp) abandon(*shard) { close(op.gone) }

func (op *barrierOp) Read(r *wire.Reader) {
	op.Barrier.Read(r)
	op.gone = make(chan struct{})
}

// resumeOp ends the wait of an owner: standStill finds it in the inbox. One that is resolved has
// come too late, or too early.
type resumeOp struct {
	completion
	call.Resume
}

func (op *resumeOp) resolve(s *shard) {
	op.err = errNoBarrier
	s.settleAfterCommit(op)
}
