package codeq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/wire"
)

// In a cluster, what others want to hear of a change (subscribers of events,
// callers of Await, handlers whose task is canceled) is in the log entry of the
// change, so that all nodes hear of it in the order of the log, whichever node
// led the shard then and leads it now. The interest of a node is stored in each
// shard: then the leader adds what the node wants to its entries, and so does the
// next leader. While no node is interested, entries have no broadcast.

// encodeBroadcast is what a group has to tell, for the log; nil if there is nothing.
func encodeBroadcast(f *engine.Effects) []byte {
	if len(f.Events)+len(f.Endings)+len(f.Canceled) == 0 {
		return nil
	}
	dst := wire.AppendUint(nil, uint64(len(f.Events)))
	for i := range f.Events {
		e := &f.Events[i]
		dst = append(append(dst, byte(e.Kind)), e.ID[:]...)
		dst = wire.AppendBytes(wire.AppendBytes(dst, e.Queue), e.Tenant)
		dst = wire.AppendInt(wire.AppendUint(dst, uint64(e.Attempt)), e.Time.UnixMilli())
		dst = wire.AppendBytes(dst, e.LastError)
	}
	dst = wire.AppendUint(dst, uint64(len(f.Endings)))
	for i := range f.Endings {
		e := &f.Endings[i]
		o := outcomeOf(&e.Outcome)
		dst = o.append(append(dst, e.ID[:]...))
	}
	receipts := make([]engine.Receipt, len(f.Canceled))
	for i, r := range f.Canceled {
		receipts[i] = r.Receipt
	}
	return call.AppendReceipts(dst, receipts)
}

// broadcast is what encodeBroadcast has written.
type broadcast struct {
	events   []engine.Event
	endings  []engine.Ending
	canceled []engine.CanceledLease
}

func parseBroadcast(b []byte) (n broadcast, err error) {
	r := wire.NewReader(b)
	for range r.Count(1 + keys.IDLen + 5) {
		e := engine.Event{Kind: engine.EventKind(r.Byte()), ID: keys.ReadID(r), Queue: r.String(), Tenant: r.String()}
		e.Attempt, e.Time, e.LastError = uint32(r.Uint()), msTime(uint64(r.Int())), r.String()
		n.events = append(n.events, e)
	}
	for range r.Count(keys.IDLen + 4) {
		id, o := keys.ReadID(r), readOutcome(r)
		end := engine.Outcome{State: engine.TaskState(o.State), Result: o.Result, LastError: o.LastError, Attempts: o.Attempts}
		n.endings = append(n.endings, engine.Ending{ID: id, Outcome: end})
	}
	for _, receipt := range call.ReadReceipts(r) {
		n.canceled = append(n.canceled, engine.CanceledLease{Receipt: receipt})
	}
	if err := r.Done(); err != nil {
		return broadcast{}, fmt.Errorf("%w: broadcast of a log entry: %w", ErrCorrupt, err)
	}
	return n, nil
}

// publish tells this node what an entry of the log says, which is in the store, before anybody
// learns that it has been applied.
func (r *replica) publish(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	n, err := parseBroadcast(b)
	if err != nil {
		return err
	}
	events := eventsOf(n.events)
	for _, sub := range r.node.queue.events.all() {
		sub.offer(events)
	}
	for i := range n.endings {
		r.awaits.tell(&n.endings[i])
	}
	for _, lease := range n.canceled {
		r.node.queue.runs.cancelAny(receiptOf(lease.Receipt))
	}
	return nil
}

// awaitTable is the callers of Await on this node, by task.
type awaitTable struct {
	mu     sync.Mutex // guards byTask, and the outcomes of those in it
	byTask map[ID][]*awaiter
}

// awaiter is a caller of Await.
type awaiter struct {
	outcome *Outcome                // heard of by the log
	heard   context.CancelCauseFunc // ends the question to the leader
}

func (t *awaitTable) add(id ID, w *awaiter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byTask == nil {
		t.byTask = make(map[ID][]*awaiter)
	}
	t.byTask[id] = append(t.byTask[id], w)
}

// remove returns what the caller has heard; nil: nothing.
func (t *awaitTable) remove(id ID, w *awaiter) *Outcome {
	t.mu.Lock()
	defer t.mu.Unlock()
	rest := slices.DeleteFunc(t.byTask[id], func(other *awaiter) bool { return other == w })
	if t.byTask[id] = rest; len(rest) == 0 {
		delete(t.byTask, id)
	}
	return w.outcome
}

func (t *awaitTable) tell(e *engine.Ending) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, w := range t.byTask[e.ID] {
		if w.outcome == nil {
			o := outcomeOf(&e.Outcome)
			o = o.clone()
			w.outcome = &o
			w.heard(nil)
		}
	}
}

// await is Queue.Await in a cluster. It asks the shard's leader, as ever; an end
// of the task that a leader has stored, and did not live to tell, is in the log.
func (n *node) await(ctx context.Context, id ID) (*Outcome, error) {
	r := n.queue.replicas[n.queue.shardOf(id)]
	if err := n.want(ctx, engine.WantOutcomes); err != nil {
		return nil, err
	}
	asking, heard := context.WithCancelCause(ctx)
	defer heard(nil)
	w := &awaiter{heard: heard}
	r.awaits.add(id, w)
	op := &awaitOp{completion: newCompletion(), id: id}
	settled, err := n.do(asking, r.index, op)
	if !settled {
		op.gone.Store(true)
	}
	if errors.Is(err, ErrNotFound) { // perhaps this replica has yet to apply how it ended
		_ = n.catchUp(asking, r) // if it cannot, nothing more will be heard
	}
	switch o := r.awaits.remove(id, w); {
	case o != nil:
		return o, nil
	case !settled || ctx.Err() != nil:
		return nil, base.EndOf(ctx)
	case err != nil:
		return nil, err
	}
	return &op.outcome, nil
}

// catchUp waits until this node's replica has applied what its leader has now.
func (n *node) catchUp(ctx context.Context, r *replica) error {
	applied, err := n.appliedBy(ctx, r.index)
	if err != nil {
		return err
	}
	return r.group.AwaitApplied(ctx, applied)
}

// appliedBy is the index of the last entry that the leader of a shard has applied.
func (n *node) appliedBy(ctx context.Context, shard int) (uint64, error) {
	op := &indexOp{completion: newCompletion()}
	if settled, err := n.do(ctx, shard, op); !settled {
		return 0, base.EndOf(ctx)
	} else if err != nil {
		return 0, err
	}
	return op.applied, nil
}

// indexOp asks how far the leader has applied the log.
type indexOp struct {
	completion
	applied uint64
}

func (op *indexOp) resolve(s *shard) {
	op.applied = s.replica.group.Applied()
	s.settle(op)
}

func (op *indexOp) encode(dst []byte) (callKind, []byte) { return callIndex, dst }
func (op *indexOp) decode(*wire.Reader)                  {}
func (op *indexOp) encodeReply(dst []byte) []byte        { return wire.AppendUint(dst, op.applied) }
func (op *indexOp) decodeReply(r *wire.Reader)           { op.applied = r.Uint() }

// interests is what this node wants to hear of.
type interests struct {
	turn   chan struct{}  // capacity 1: held by who changes stored
	stored engine.KindSet // in every shard; guarded by turn
	asked  atomic.Uint32  // KindSet of what is never given back: of Await and Run
}

// want asks all shards to tell this node of something, from the next change on.
func (n *node) want(ctx context.Context, kinds engine.KindSet) error {
	if engine.KindSet(n.interests.asked.Load())&kinds == kinds {
		return nil
	}
	if err := n.publishInterests(ctx, kinds); err != nil {
		return err
	}
	n.interests.asked.Or(uint32(kinds))
	return nil
}

// wantCancels is want for a Run, which waits for leaders as long as it lasts, as its claims do.
func (n *node) wantCancels(ctx context.Context) (err error) {
	ctx, stop := n.queue.untilClosing(ctx, "Run")
	defer func() { err = stop(err) }()
	for {
		change := n.Changed()
		err := n.want(ctx, engine.WantCancels)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return base.EndOf(ctx)
		case !errors.Is(err, ErrNotLeader) && !errors.Is(err, ErrUncertain):
			return err
		}
		cluster.Pause(ctx, change)
	}
}

// publishInterests tells all shards what this node wants to hear of: what it is asked for, what has
// been wanted, and what there are subscriptions to.
func (n *node) publishInterests(ctx context.Context, kinds engine.KindSet) error {
	w := &n.interests
	select {
	case w.turn <- struct{}{}:
		defer func() { <-w.turn }()
	case <-ctx.Done():
		return base.EndOf(ctx)
	}
	kinds |= engine.KindSet(w.asked.Load()) | engine.KindSet(n.queue.events.wanted.Load())
	if kinds == w.stored {
		return nil
	}
	for i := range n.queue.replicas {
		op := &interestOp{completion: newCompletion(), node: n.Self().Node, kinds: kinds}
		if settled, err := n.do(ctx, i, op); !settled {
			return base.EndOf(ctx)
		} else if err != nil {
			return err
		}
	}
	w.stored = kinds
	return nil
}

// interestOp stores what a node wants to hear of; nothing, if the node has gone.
type interestOp struct {
	completion
	node  string
	kinds engine.KindSet
	gone  bool
}

func (op *interestOp) resolve(s *shard) {
	s.settle(op)
	if op.gone {
		var member bool
		if member, op.err = s.replica.group.HasMember(op.node); member || op.err != nil {
			return // it has been added again since
		}
	}
	s.SetInterest(op.node, op.kinds, op.gone)
}

func (op *interestOp) encode(dst []byte) (callKind, []byte) {
	return callInterest, wire.AppendBool(wire.AppendUint(wire.AppendBytes(dst, op.node), uint64(op.kinds)), op.gone)
}

func (op *interestOp) decode(r *wire.Reader) {
	op.node, op.kinds, op.gone = r.String(), engine.KindSet(r.Uint()), r.Bool()
}

// runTable is the calls of Run on this node.
type runTable struct {
	mu   sync.Mutex         // guards what follows
	runs map[uint32]*runner // by number
	last uint32             // number
}

func (t *runTable) add(r *runner) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for r.number == 0 || t.runs[r.number] != nil {
		t.last++
		r.number = t.last
	}
	if t.runs == nil {
		t.runs = make(map[uint32]*runner)
	}
	t.runs[r.number] = r
}

func (t *runTable) remove(r *runner) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.runs, r.number)
}

// cancel tells a call of Run, if it has not ended, that a task of its was canceled.
func (t *runTable) cancel(number uint32, receipt Receipt) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.runs[number]; r != nil {
		r.cancel(receipt)
	}
}

// cancelAny tells whoever works on a task, if it is here, that it was canceled.
func (t *runTable) cancelAny(receipt Receipt) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range t.runs {
		r.cancel(receipt)
	}
}
