package codeq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"codeq/internal/base"
	"codeq/internal/checkpoint"
	"codeq/internal/store"
	"codeq/internal/wire"
)

// Checkpoint copies the queue, which goes on working meanwhile, to dir. The copy
// is the whole queue at one moment during the call: everything that had been
// acknowledged before the call, in all shards, and nothing that began after it.
// It is durable when Checkpoint returns, and a queue of its own: Open it where
// it is, or copy it to where it is needed. To move it off the machine, copy the
// directory by whatever means; nobody writes it until it is opened.
//
// What is large is shared by hard links, so dir must be on the file system of
// the queue. A copy takes next to no space at first, and as much as the queue
// had in the end, when compactions have rewritten all of it. All shards stand
// still together while the rest is copied, for some hundredths of a second; calls
// wait meanwhile.
//
// dir must not exist, or be empty. It becomes a queue in the last step: what is left of a
// Checkpoint that a crash has ended is refused by Open, and by the next Checkpoint, until it is
// removed. (If dir did not exist, it appears with a first file in it; before, an empty directory
// beside it may be left, whose name ends with ".unfinished".) A Checkpoint that returns an error
// has removed what it had made, but for empty directories.
//
// In the copy, the tasks that workers had at that moment are leased: those of
// Run are ready again as soon as the copy is opened, others when their leases
// expire. Whoever opens the copy while the original is at work does its tasks
// twice. The copy has an identity of its own, so that its shards cannot
// be mixed with those of the original.
//
// In a cluster it may be called on any node, which copies what it has itself: all
// shards, once it has caught up with their leaders, for which they stand still as well: 5 s
// at the most. When a leader is lost meanwhile, Checkpoint begins again, twice at the
// most. The copy is that of a queue by itself, without [Options.Cluster].
//
// Checkpoint returns an error that matches [ErrInvalid] if dir is within the queue or on another
// file system, fs.ErrExist if it is not empty, [ErrLocked] if somebody else is about to make a
// queue of it, [ErrDiskFull] below half of [Options.MinFreeBytes] or if the copy finds no room,
// [ErrFailed] if a shard has failed, [ErrClosed] if the queue is closed before all shards stand
// still, or, in a cluster, [ErrNotLeader] or [ErrUncertain] if they did not stand still for as long
// as it takes. If ctx ends before they do, it returns its cause. It is safe for concurrent use;
// calls follow each other.
func (q *Queue) Checkpoint(ctx context.Context, dir string) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	if err := q.enter(); err != nil {
		return err
	}
	defer q.calls.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	var closer sync.WaitGroup
	defer closer.Wait()
	defer cancel(nil)
	closer.Go(func() {
		contain(q.opts.log, "watch of Checkpoint", func() {
			select {
			case <-q.closing:
				cancel(ErrClosed)
			case <-ctx.Done():
			}
		}, cancel)
	})
	select {
	case q.copying <- struct{}{}:
		defer func() { <-q.copying }()
	case <-ctx.Done():
		return base.EndOf(ctx)
	}
	if err := q.checkpoint(ctx, dir); err != nil {
		return fmt.Errorf("codeq: checkpoint to %s: %w", dir, diskFull(err))
	}
	return nil
}

func (q *Queue) checkpoint(ctx context.Context, dir string) (err error) {
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
	// What is in memory is written while the shards are at work, so that little is
	// left to be copied while they are not.
	err = q.eachReplica(func(r *replica) error {
		return r.use(func(st *store.Store) error { return st.Flush(ctx) })
	})
	if err != nil {
		return err
	}
	if err := q.cut(ctx, c); err != nil {
		return err
	}
	err = q.eachReplica(func(r *replica) error { return c.Adopt(r.index, q.opts.storeConfig(), q.caches) })
	if err != nil {
		return err
	}
	return c.Finish()
}

// beginCopy makes the directory of a copy.
func (q *Queue) beginCopy(dir string) (*checkpoint.Copy, error) {
	path, err := checkpoint.Place(q.opts.fs, dir)
	if err != nil {
		return nil, err
	}
	rel, err := filepath.Rel(q.dir.Path, path)
	if dir == "" || err == nil && rel != ".." && !strings.HasPrefix(rel, ".."+string(filepath.Separator)) {
		return nil, &InvalidError{"Checkpoint dir", dir, "outside of the queue, " + q.dir.Path}
	}
	c, err := checkpoint.Begin(q.opts.fs, path, q.dir.Path, len(q.replicas))
	if errors.Is(err, checkpoint.ErrElsewhere) {
		err = fmt.Errorf("%w: %w", &InvalidError{"Checkpoint dir", dir, "one on the file system of the queue"}, err)
	}
	return c, err
}

// eachReplica calls do for all shards at the same time.
func (q *Queue) eachReplica(do func(r *replica) error) error {
	var g errgroup.Group
	for i, r := range q.replicas {
		g.Go(func() error {
			err := guarded(q.opts.log, "copy of a shard", func() error { return do(r) })
			if err != nil {
				return fmt.Errorf("shard %d: %w", i, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// cutTries is how often a copy is begun whose shards have not stood still to the end.
const cutTries = 3

// cut copies the stores at one moment: while all shards stand still, so that no
// copy has anything that was done after another one's; above all, no message has been
// taken in one of them and not been sent in another.
func (q *Queue) cut(ctx context.Context, c *checkpoint.Copy) error {
	for tries := 1; ; tries++ {
		err := q.tryCut(ctx, c)
		if q.node == nil || tries == cutTries || !errors.Is(err, ErrNotLeader) && !errors.Is(err, ErrUncertain) {
			return err
		}
		if err := c.Empty(); err != nil {
			return err
		}
	}
}

func (q *Queue) tryCut(ctx context.Context, c *checkpoint.Copy) error {
	h, err := q.hold(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	err = q.eachReplica(func(r *replica) error {
		if err := r.reach(h.applied[r.index]); err != nil {
			return err
		}
		return r.use(func(st *store.Store) error {
			return st.CheckpointUnsynced(c.Path, c.ShardDir(r.index))
		})
	})
	if err := errors.Join(err, h.resume()); err != nil {
		return err
	}
	q.opts.log.Info("shards stood still for a checkpoint", "dir", c.Path, "for", time.Since(began))
	return nil
}

// A hold has the owners of all shards stand still at the same time: each stops
// between two operations, when its disk is all that it has acknowledged and sent,
// and goes on when it is told to. Since nobody can have heard of anything that was
// done after the moment at which the last one stopped, what is read of all stores
// meanwhile is the queue at one moment.
//
// In a cluster it is the owners on the leading nodes that stand still, and the stores
// of any node may be read, once they have applied what the leaders had. When an owner
// goes on, a majority confirms that its node still leads, or stores what it decided
// before it stopped. So no other leader has stored anything before that, and what was
// read is what the owner had. A hold without that confirmation is void.

// hold is one that has begun.
type hold struct {
	queue   *Queue
	id      uint64   // random
	asked   int      // shards that stand still, or may
	applied []uint64 // in a cluster: by shard, where its log was
}

// holdLimit is how long an owner stands still at the most for the sake of another node,
// which may have died meanwhile.
const holdLimit = 5 * time.Second

// errNotHeld is what an owner says that has not stood still until it was told to go on.
var errNotHeld = fmt.Errorf("%w: the shard has not stood still", ErrUncertain)

// hold returns when all owners stand still, or none. They stop in the order of their
// shards, so that of the holds of two nodes one waits for the other.
func (q *Queue) hold(ctx context.Context) (*hold, error) {
	h := &hold{queue: q, id: rand.Uint64()}
	for i := range q.replicas {
		op := &holdOp{completion: newCompletion(), id: h.id, gone: make(chan struct{})}
		settled, err := q.do(ctx, i, op)
		switch {
		case !settled:
			op.abandon(nil)
		case err == nil, errors.Is(err, ErrUncertain):
			h.asked++
		}
		if err != nil {
			h.giveUp()
			if ctx.Err() != nil {
				return nil, base.EndOf(ctx)
			}
			return nil, fmt.Errorf("shard %d: %w", i, err)
		}
		h.applied = append(h.applied, op.applied)
	}
	return h, nil
}

// resume has the owners go on. After an error the hold is void.
func (h *hold) resume() error {
	ctx := context.Background()
	if h.queue.node != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, holdLimit)
		defer cancel()
	}
	var g errgroup.Group
	for i := range h.asked {
		g.Go(func() error {
			err := guarded(h.queue.opts.log, "end of a hold", func() error {
				op := &resumeOp{completion: newCompletion(), id: h.id}
				_, err := h.queue.do(ctx, i, op)
				return err
			})
			if err != nil {
				return fmt.Errorf("shard %d: %w", i, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// giveUp has the owners go on that may stand still. It does not wait for other nodes: whoever
// is not reached goes on after holdLimit.
func (h *hold) giveUp() {
	if n := h.queue.node; n != nil {
		n.background.Go(func() { contain(n.log, "end of a given up hold", func() { _ = h.resume() }, nil) })
		return
	}
	_ = h.resume()
}

// reach waits until the store has what the log had at an index, for so long that there is
// time left to read it.
func (r *replica) reach(index uint64) error {
	if r.node == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), holdLimit/2)
	defer cancel()
	err := r.group.AwaitApplied(ctx, index)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("this node is behind: it has applied %d of %d log entries", r.group.Applied(), index)
	}
	return err
}

// holdOp has an owner stand still.
type holdOp struct {
	completion
	id      uint64
	applied uint64
	gone    chan struct{} // closed when the caller has given up
}

// resolve ends the group: the owner stands still when it has persisted.
func (op *holdOp) resolve(s *shard) { s.undecided.hold = op }

// standStill answers the caller, and returns when the owner may go on: it has been told to, nobody
// waits for it any more, or it is to end. REQUIRES: the group is empty.
func (op *holdOp) standStill(s *shard) {
	if s.node != nil {
		op.applied = s.replica.group.Applied()
	}
	op.settle(nil)
	var limit <-chan time.Time
	if s.node != nil {
		t := time.NewTimer(holdLimit)
		defer t.Stop()
		limit = t.C
	}
	ends := func(next operation) bool {
		r, ok := next.(*resumeOp)
		return ok && r.id == op.id
	}
	for known := 0; ; {
		var resume operation
		var refused error
		resume, known, refused = s.inbox.pick(known, ends)
		if resume != nil {
			s.settle(resume) // with a group of its own, which confirms that this node has led all the time
			break
		}
		if refused != nil {
			break
		}
		select {
		case <-s.inbox.wake:
			continue
		case <-op.gone:
		case <-limit:
		}
		s.inbox.awake()
		break
	}
}

func (op *holdOp) abandon(*shard) { close(op.gone) }

func (op *holdOp) encode(dst []byte) (callKind, []byte) {
	return callHold, wire.AppendUint(dst, op.id)
}

func (op *holdOp) decode(r *wire.Reader) {
	op.id, op.gone = r.Uint(), make(chan struct{})
}

func (op *holdOp) encodeReply(dst []byte) []byte { return wire.AppendUint(dst, op.applied) }
func (op *holdOp) decodeReply(r *wire.Reader)    { op.applied = r.Uint() }

// resumeOp has an owner that stands still go on: standStill looks for it. One that is
// resolved has come too late, or too early.
type resumeOp struct {
	completion
	id uint64
}

func (op *resumeOp) resolve(s *shard) {
	op.err = errNotHeld
	s.settle(op)
}

func (op *resumeOp) encode(dst []byte) (callKind, []byte) {
	return callResume, wire.AppendUint(dst, op.id)
}

func (op *resumeOp) decode(r *wire.Reader) { op.id = r.Uint() }
