package codeq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sync/errgroup"

	"codeq/internal/base"
	"codeq/internal/wire"
)

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
	late := time.After(holdLimit / 2)
	for {
		change := r.progress.next()
		if err := r.failure(); err != nil {
			return err
		}
		if r.applied.Load() >= index {
			return nil
		}
		select {
		case <-change:
		case <-late:
			return fmt.Errorf("this node is behind: it has applied %d of %d log entries", r.applied.Load(), index)
		}
	}
}

// holdOp has an owner stand still.
type holdOp struct {
	completion
	id      uint64
	applied uint64
	gone    chan struct{} // closed when the caller has given up
}

// resolve answers at once, and not with the group: the caller is to know that the owner
// stands still.
func (op *holdOp) resolve(s *shard) {
	if s.node != nil {
		op.applied = s.replica.applied.Load()
	}
	op.settle(nil)
	s.standStill(op)
}

// standStill returns when the owner may go on: it has been told to, nobody waits
// for it any more, or it is to end.
func (s *shard) standStill(op *holdOp) {
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
			s.settle(resume)
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
	s.tick() // what follows is decided now
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
