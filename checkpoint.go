package codeq

import (
	"context"
	"errors"
	"fmt"
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
	// Copy copies all files in place of links, so that they can be changed (chmod, chown, written)
	// where they are. It takes the space of the queue, and time after the shards have gone on.
	Copy bool
}

// Checkpoint copies the queue to dir, while the queue goes on working. The copy is the whole queue
// at one moment during the call: all that was acknowledged before, in all shards, and nothing that
// began after it. It is durable when Checkpoint returns: [Open] it there, or move it by any means;
// neither queue writes to a file of the other.
//
// Large files are hard links, so dir must be on the file system of the queue: chmod, chown or write
// to files of a copy of dir only, or of [CheckpointOptions].Copy. At first they take almost no
// space; when compactions have rewritten all of the queue, as much as the queue did. All shards
// stop while the rest is copied, for some hundredths of a second. Checkpoints follow each other.
//
// dir must not exist, or must be empty. It becomes a queue in the last step: if a crash ends a
// Checkpoint, Open and the next one refuse dir until it is removed. (Before a new dir appears, a
// crash may leave one beside it, with a name that ends with ".unfinished".) After an error, all is
// removed except empty directories.
//
// In the copy, leased tasks are leased: those of [Queue.Run] are ready when it is opened, for no
// attempt, others when their leases expire. If it is opened while the original is in use, tasks are
// done twice. It has a new identity: its shards cannot be mixed with others.
//
// In a cluster any node copies its own replicas, after they have caught up with their leaders; the
// shards stop for this time too, for 5 s at the most. When a leader is lost, Checkpoint begins
// again, twice at the most, and waits for [Cluster].CallTimeout. The copy has no [Options.Cluster].
//
// Errors: [ErrInvalid] (dir is "", within the queue or on another file system), [io/fs.ErrExist]
// (it is not empty), [ErrLocked] (another call makes a queue of it), [ErrDiskFull] (less is free
// than half of [Options.MinFreeBytes], or than the copy needs; with Copy: than it needs and
// MinFreeBytes), [ErrCorrupt], [ErrFailed], [ErrNotLeader] and [ErrUncertain] (in a cluster, if the
// shards did not stop for long enough), [ErrClosed] and that of ctx (before all shards have
// stopped; with Copy that of ctx before all files are copied), and those of the file system.
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
	// Memory is flushed while the shards run, so that little is copied while they stand still.
	err = q.eachReplica(func(r *replica) error {
		return r.slot.Use(func(st *store.Store) error { return st.Flush(ctx) })
	})
	if err != nil {
		return err
	}
	stood, err := c.Cut(ctx, (*owners)(q), func(applied []uint64) error {
		return q.eachReplica(func(r *replica) error {
			if err := r.group.Reach(applied[r.index], convert.BarrierLimit/2); err != nil { // so that there is time left to read
				return err
			}
			return r.slot.Use(func(st *store.Store) error { return st.CheckpointUnsynced(c.Path, c.ShardDir(r.index)) })
		})
	})
	if err != nil {
		return err
	}
	q.opts.log.Info("shards stood still for a checkpoint", "dir", c.Path, "for", stood)
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

func (q *Queue) eachReplica(do func(r *replica) error) error {
	return q.inParallel("copy of a shard", len(q.replicas), func(i int) error { return do(q.replicas[i]) })
}

// errNoBarrier is the answer of an owner that has not stood still until the resumeOp.
var errNoBarrier = fmt.Errorf("%w: the shard has not stood still", ErrUncertain)

// owners are those of the queue's shards, on whichever nodes.
type owners Queue

func (o *owners) Count() (shards int, cluster bool) { return len(o.replicas), o.node != nil }

func (o *owners) Stop(ctx context.Context, shard int, barrier uint64) (applied uint64, stands bool, err error) {
	op := &barrierOp{completion: newCompletion(callBarrier), Barrier: call.Barrier{ID: barrier}, gone: make(chan struct{})}
	settled, err := o.backend.do(ctx, shard, op)
	if !settled {
		op.abandon(nil)
		return 0, false, err
	}
	return op.Applied, err == nil || errors.Is(err, ErrUncertain), err
}

func (o *owners) Resume(ctx context.Context, n int, barrier uint64) error {
	return (*Queue)(o).inParallel("end of a barrier", n, func(i int) error {
		_, err := o.backend.do(ctx, i, &resumeOp{completion: newCompletion(callResume), Resume: call.Resume{ID: barrier}})
		return err
	})
}

func (o *owners) Aside(f func()) {
	n := o.node
	n.background.Go(func() { contain(n.log, "end of a given up barrier", f, nil) })
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
		t := time.NewTimer(convert.BarrierLimit)
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

// resumeOp ends the wait of an owner: standStill finds it in the inbox. Resolved, it is late.
type resumeOp struct {
	completion
	call.Resume
}

func (op *resumeOp) resolve(s *shard) {
	op.err = errNoBarrier
	s.settleAfterCommit(op)
}
