package codeq

import (
	"cmp"
	lists "container/list"
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
)

// The commit pipeline of a shard:
//
//	sequence   callers append operations to the inbox
//	resolve    the owner decides them one by one, and gathers their keys in a group
//	persist    the group is committed once
//	release    the callers of the group are woken
//
// Persist is one call and not a stage of its own goroutine: while a group
// persists the next one gathers in the inbox, and whatever resolve reads from
// disk is the whole history, with nothing of it still under way. A second
// group in flight would need resolve to know which of its reads are behind.

// operation is one unit of work of a shard.
type operation interface {
	// resolve decides the operation against the shard's memory and adds its
	// keys to the group. It calls shard.settle once it is decided, now or,
	// for a claim that waits, in a later group.
	resolve(s *shard)
	// verb is what else there is to know of the operation.
	verb() *verb
	// settle wakes the caller. A nil err means that the group persisted, and
	// the caller gets what resolve decided.
	settle(err error)
}

// completion is the part of an operation that its caller waits on.
type completion struct {
	done chan error // capacity 1: a caller that has gone does not block the owner
	err  error      // decided by resolve
	// reply is called in place of sending to done, if the caller is elsewhere.
	// It must not block.
	reply func(error)
}

func newCompletion() completion { return completion{done: make(chan error, 1)} }

func (c *completion) base() *completion { return c }

func (c *completion) settle(err error) {
	if err == nil {
		err = c.err
	}
	if c.reply != nil {
		c.reply(err)
		return
	}
	c.done <- err
}

// wait returns the outcome. When ctx ends first, settled is false: the
// operation is under way and its memory still belongs to the shard.
func (c *completion) wait(ctx context.Context) (settled bool, err error) {
	cancel := ctx.Done()
	if cancel == nil {
		return true, <-c.done
	}
	select {
	case err := <-c.done:
		return true, err
	case <-cancel:
		return false, fmt.Errorf("%w: %w", ErrUncertain, context.Cause(ctx))
	}
}

// inbox is the bounded queue of operations before a shard.
type inbox struct {
	depth int
	wake  chan struct{} // capacity 1; sent by whoever ends the owner's sleep
	woken uint64        // when that was, ms since origin; the owner reads it when it was woken

	origin   time.Time
	mu       sync.Mutex // guards what follows
	ops      []operation
	late     lists.List    // of uint64: when operations on leases came that wait for room, ms since origin
	let      uint64        // when the first of those of ops came that have waited; never: none has
	refuse   error         // non-nil: nothing is accepted any more
	sleeping bool          // the owner waits on wake
	room     chan struct{} // non-nil while callers wait for room; closed by take
}

func newInbox(depth int, origin time.Time) *inbox {
	return &inbox{depth: depth, wake: make(chan struct{}, 1), origin: origin, let: never}
}

// push appends an operation, waiting for room until ctx ends. An error means
// that the operation was not applied.
func (in *inbox) push(ctx context.Context, op operation) error {
	var late *lists.Element
	for {
		over := ctx.Err() // may be the caller's own code: nothing is locked
		if over != nil {
			over = context.Cause(ctx)
		}
		in.mu.Lock()
		err := in.refuse
		if over != nil {
			err = over
		}
		if late != nil && (err != nil || len(in.ops) < in.depth) {
			in.let = min(in.let, in.late.Remove(late).(uint64))
		}
		if err != nil {
			in.mu.Unlock()
			return err
		}
		if len(in.ops) < in.depth {
			in.append(op)
			return nil
		}
		if late == nil && op.verb().is(onLease) {
			late = in.late.PushBack(millisSince(in.origin))
		}
		if in.room == nil {
			in.room = make(chan struct{})
		}
		room := in.room
		in.mu.Unlock()
		select {
		case <-room:
		case <-ctx.Done():
		}
	}
}

// pass appends an operation of another shard's owner, which must not wait: the
// operation's caller waits for it, so that there are no more of them than
// callers.
func (in *inbox) pass(op operation) error {
	in.mu.Lock()
	if in.refuse != nil {
		defer in.mu.Unlock()
		return in.refuse
	}
	in.append(op)
	return nil
}

// append adds op and unlocks. REQUIRES: mu is held.
func (in *inbox) append(op operation) {
	in.ops = append(in.ops, op)
	in.unlock()
}

// unlock ends the owner's sleep. REQUIRES: mu is held.
func (in *inbox) unlock() {
	wake := in.sleeping
	in.sleeping = false
	if wake {
		in.woken = millisSince(in.origin)
	}
	in.mu.Unlock()
	if wake {
		in.wake <- struct{}{}
	}
}

// take swaps the waiting operations for the empty slice into. When there are
// none and sleep is set, the owner is taken to wait on wake from now on.
// refused is why nothing will follow.
func (in *inbox) take(into []operation, sleep bool) (ops []operation, late lateness, refused error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	late = lateness{in.let, never}
	in.let = never
	if first := in.late.Front(); first != nil {
		late.left = first.Value.(uint64)
	}
	if len(in.ops) == 0 {
		in.sleeping = sleep && in.refuse == nil
		return into, late, in.refuse
	}
	ops, in.ops = in.ops, into
	if in.room != nil {
		close(in.room)
		in.room = nil
	}
	return ops, late, in.refuse
}

// lateness is when the first operations on leases came that have had to wait for room,
// of those taken and of those that still wait: ms since origin; never: none has.
type lateness struct{ taken, left uint64 }

// pick takes out an operation that matches; the first of the given number of
// operations are known not to. When there is none, the owner is taken to wait on wake
// from now on, and known is how many do not match. refused is why no other will follow.
func (in *inbox) pick(known int, match func(operation) bool) (op operation, _ int, refused error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for i, op := range in.ops[known:] {
		if match(op) {
			in.ops = slices.Delete(in.ops, known+i, known+i+1)
			return op, 0, nil
		}
	}
	in.sleeping = in.refuse == nil
	return nil, len(in.ops), in.refuse
}

func (in *inbox) len() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return len(in.ops)
}

// awake undoes the sleep of take after a timer has ended it. It returns when somebody, or
// else the timer, ended the sleep, ms since origin.
func (in *inbox) awake() uint64 {
	in.mu.Lock()
	asleep := in.sleeping
	in.sleeping = false
	if asleep {
		in.woken = millisSince(in.origin)
	}
	in.mu.Unlock()
	if !asleep {
		<-in.wake // whoever saw the sleep has sent, or is about to
	}
	return in.woken
}

// stop refuses further operations with reason, the first one given or
// ErrClosed; those accepted before stay.
func (in *inbox) stop(reason error) {
	in.mu.Lock()
	if in.refuse == nil || reason == ErrClosed {
		in.refuse = reason
	}
	if in.room != nil {
		close(in.room)
		in.room = nil
	}
	in.unlock()
}

// committer makes a batch durable. After an error it is unknown whether the
// batch was applied.
type committer interface {
	Commit(*pebble.Batch) error
	// Confirm makes sure that what a group without a key has read is still so.
	// After an error, nothing was applied.
	Confirm() error
}

// group is what one commit persists. Its keys are written in an order that
// suits Pebble's memtable, which inserts a run of ascending keys of one range
// at a fraction of the cost of scattered ones: first whatever resolve adds
// itself, then new tasks, then the removals of keys that are never written
// again, both in the order of their keys.
type group struct {
	batch     *pebble.Batch
	order     batchOrder
	settled   []operation    // to be woken when the group has persisted
	answered  []operation    // likewise, of other nodes
	waking    operation      // whose caller is being woken; nil: none
	tasks     []taskOp       // new tasks, and those whose key was written once and goes
	granted   []*leaseRecord // lease records to be written
	finished  []uint64       // lease records, by sequence number, without a lease left
	touched   []*queueState  // whose counts changed
	buckets   []*bucket      // whose sizes changed
	ranged    bool           // something is deleted by range
	trimmed   bool           // what is consumed of lanes is
	unclocked bool           // counters go, which might be those with the latest clock: nobody's have it then

	taskBytes int    // of the records in tasks
	lane      uint32 // of the last of tasks
	scattered bool   // tasks are of several lanes

	groupView
	checked int        // of tasks: the removed ones before are in the view
	news    eventBatch // what subscribers learn of it
}

type taskKey struct {
	lane  uint32
	since uint64
	id    ID
}

// compare is the order of the keys of tasks in their first places.
func (k *taskKey) compare(o *taskKey) int {
	if k.lane != o.lane {
		return cmp.Compare(k.lane, o.lane)
	}
	return cmp.Compare(k.since, o.since)
}

// taskOp writes a new task to its first place, or removes it from there for good.
type taskOp struct {
	taskKey
	rec []byte // nil: it is removed
}

// groupBytes is what callers' operations may add to a group: a batch that is larger
// than this gains nothing from company.
const groupBytes = 1 << 20

// size is how many bytes have been gathered, about.
func (g *group) size() int { return g.batch.Len() + g.taskBytes }

// entries is how many keys have been gathered.
func (g *group) entries() int { return int(g.batch.Count()) + len(g.tasks) }

func (g *group) set(key, value []byte) {
	op := g.batch.SetDeferred(len(key), len(value))
	copy(op.Key, key)
	copy(op.Value, value)
	_ = op.Finish() // fails for indexed batches only, and this is none
}

func (g *group) delete(key []byte) {
	op := g.batch.DeleteDeferred(len(key))
	copy(op.Key, key)
	_ = op.Finish()
}

// singleDelete deletes a key that has been written once since it did not exist.
func (g *group) singleDelete(key []byte) {
	op := g.batch.SingleDeleteDeferred(len(key))
	copy(op.Key, key)
	_ = op.Finish()
}

// deleteRange deletes the keys from lower to before upper, at the cost of one.
func (g *group) deleteRange(lower, upper []byte) {
	g.ranged = true
	_ = g.batch.DeleteRange(lower, upper, nil) // fails for indexed batches only
}

// trimRange is deleteRange of what nobody has. REQUIRES: the group is empty, but for others like it.
func (g *group) trimRange(lower, upper []byte) {
	g.trimmed = true
	g.deleteRange(lower, upper)
}

// hasChanged reports whether disk is behind with a task.
func (g *group) hasChanged(id ID) bool {
	g.noteRemoved()
	_, ok := g.changed[id]
	return ok
}

// setTask writes the record of a task that becomes ready.
func (g *group) setTask(lane uint32, since uint64, id ID, rec []byte) {
	op := g.batch.SetDeferred(keys.TaskLen(since), len(rec))
	keys.PutTask(op.Key, lane, since, id)
	copy(op.Value, rec)
	_ = op.Finish()
}

// noteRemoved adds what tasks removes to what has changed.
func (g *group) noteRemoved() {
	for ; g.checked < len(g.tasks); g.checked++ {
		if t := &g.tasks[g.checked]; t.rec == nil {
			g.change(t.id)
		}
	}
}

// setFresh writes the record of a new task that becomes ready.
func (g *group) setFresh(lane uint32, since uint64, id ID, rec []byte) {
	g.add(taskOp{taskKey{lane, since, id}, rec})
	g.taskBytes += len(rec)
}

func (g *group) add(t taskOp) {
	if t.lane != g.lane {
		g.scattered = g.scattered || len(g.tasks) > 0
		g.lane = t.lane
	}
	g.tasks = append(g.tasks, t)
}

// flushTasks adds tasks to the batch: what follows comes after them. Those of
// one lane have come in the order of their IDs, the new ones after those that go.
func (g *group) flushTasks() {
	if g.scattered {
		slices.SortFunc(g.tasks, func(a, b taskOp) int { return a.compare(&b.taskKey) })
		for i := range g.tasks {
			g.write(&g.tasks[i])
		}
	} else {
		for _, removed := range [...]bool{false, true} {
			for i := range g.tasks {
				if t := &g.tasks[i]; (t.rec == nil) == removed {
					g.write(t)
				}
			}
		}
	}
	clear(g.tasks)
	g.tasks, g.taskBytes, g.checked, g.scattered = g.tasks[:0], 0, 0, false
}

func (g *group) write(t *taskOp) {
	if t.rec != nil {
		g.setTask(t.lane, t.since, t.id, t.rec)
		return
	}
	op := g.batch.SingleDeleteDeferred(keys.TaskLen(t.since))
	keys.PutTask(op.Key, t.lane, t.since, t.id)
	_ = op.Finish()
}

// removeTask takes a task from its place. once says that its key has been
// written once in the life of the store and will not be again, which is what
// makes SINGLEDEL legal for it. Any other key is deleted in the order of the
// group.
func (g *group) removeTask(lane uint32, since uint64, id ID, once bool) {
	if once {
		g.add(taskOp{taskKey: taskKey{lane, since, id}})
		return
	}
	g.noteRemoved()
	g.flushTasks() // it may be one of them
	op := g.batch.DeleteDeferred(keys.TaskLen(since))
	keys.PutTask(op.Key, lane, since, id)
	_ = op.Finish()
}

// seal adds what has been gathered beside the batch, and brings that into order.
func (g *group) seal(clock uint64, db *pebble.DB) {
	if g.batch.Count() >= sortFrom {
		defer func() { g.batch = g.order.sort(db, g.batch) }()
	}
	g.flushTasks()
	for _, r := range g.granted {
		if r.live == 0 { // every lease in it was replaced within the group
			continue
		}
		op := g.batch.SetDeferred(keys.LeaseLen, len(r.value))
		keys.PutLease(op.Key, r.seq)
		copy(op.Value, r.value)
		_ = op.Finish()
		r.written = true
	}
	for _, seq := range g.finished {
		op := g.batch.SingleDeleteDeferred(keys.LeaseLen)
		keys.PutLease(op.Key, seq)
		_ = op.Finish()
	}
	for _, q := range g.touched {
		op := g.batch.SetDeferred(1+4, keys.CountersLen)
		keys.AppendNumbered(op.Key[:0], keys.Counters, q.number)
		keys.CountersValue{Counts: q.counts, Clock: clock}.Put(op.Value)
		_ = op.Finish()
		q.touched = false
	}
	if g.unclocked {
		op := g.batch.SetDeferred(1+4, keys.CountersLen)
		keys.AppendNumbered(op.Key[:0], keys.Counters, 0)
		keys.CountersValue{Clock: clock}.Put(op.Value)
		_ = op.Finish()
		g.unclocked = false
	}
	for _, b := range g.buckets {
		b.seal(g)
	}
}

// wake wakes a caller, unless that was done before the owner panicked.
func (g *group) wake(op operation, err error) {
	if op != nil {
		g.waking = op
		op.settle(err)
	}
}

// release wakes the callers and empties the group.
func (g *group) release(err error) {
	g.news.release(err) // first: who is woken finds the event of what it did
	if len(g.answered) > 0 {
		for i, op := range g.answered {
			g.answered[i] = nil
			g.wake(op, err)
		}
		g.answered = g.answered[:0]
		runtime.Gosched() // so that the answers are written before the callers here take the processor
	}
	for i, op := range g.settled {
		g.settled[i] = nil
		g.wake(op, err)
	}
	g.waking = nil
	clear(g.granted)
	clear(g.tasks)
	g.tasks, g.taskBytes = g.tasks[:0], 0
	g.settled, g.granted = g.settled[:0], g.granted[:0]
	g.finished, g.touched, g.buckets = g.finished[:0], g.touched[:0], g.buckets[:0]
	g.groupView.clear()
	g.checked, g.scattered, g.ranged, g.trimmed = 0, false, false, false
	g.batch.Reset()
}
