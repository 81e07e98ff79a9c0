package codeq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"codeq/internal/arena"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// Produce stores a task and returns its ID. The task can be claimed as soon as its RunAt has come
// and nothing else holds it back.
//
// If the idempotency key of the task is taken, Produce stores nothing, and returns the ID of the
// task that has it, with a [*DuplicateError] ([ErrDuplicate]). An error that matches [ErrUncertain]
// leaves open whether the task was stored; after any other error it was not. Produce is safe for
// concurrent use.
//
// Errors: [ErrInvalid], [ErrDuplicate], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrNotMember], [ErrClosed], and that of ctx.
func (q *Queue) Produce(ctx context.Context, t Task) (_ ID, err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return ID{}, err
	}
	if err := t.check(&q.opts.Limits); err != nil {
		return ID{}, err
	}
	if err := checkNth(&t, 0); err != nil {
		return ID{}, err
	}
	op := q.produceOp()
	op.tasks = append(op.tasks, prepare(&t, nil))
	var cost commitCost
	if err := cost.add(&op.tasks[0], &q.opts.Limits); err != nil {
		q.recycleProduce(op)
		return ID{}, err
	}
	shard, bound := op.tasks[0].Home(len(q.replicas))
	if !bound {
		shard = q.anyShard()
	}
	if settled, err := q.doProduce(ctx, shard, op); err != nil {
		if settled {
			q.recycleProduce(op)
		}
		return ID{}, err
	}
	id, duplicate := op.IDs[0], len(op.Duplicates) > 0
	q.recycleProduce(op)
	if duplicate {
		return id, &DuplicateError{Key: t.Unique.Key, ID: id}
	}
	return id, nil
}

// ProduceBatch stores all of the tasks or none, in one commit, and returns their IDs in the same
// order. Tasks of one queue, tenant and priority that are ready at once are claimed in the order of
// the batch.
//
// A task whose idempotency key is taken is not stored, but the others are: its ID is that of the
// task that has the key, and the error joins a [*DuplicateError] ([ErrDuplicate]) for each such
// task. Other errors are those of Produce; the error of an invalid task contains its index.
//
// With several shards, tasks with a LimitKey, Group or idempotency key belong to a certain shard,
// and a batch that belongs to several shards is stored in one commit for each. If one of these
// fails, its tasks and those of later ones are not stored: their IDs are zero. Shards whose tasks
// have only an idempotency key come first. So it is safe to produce a batch again if each of its
// tasks has only an idempotency key, or none of the three.
//
// Errors: [ErrInvalid], [ErrDuplicate], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrNotMember], [ErrClosed], and that of ctx.
func (q *Queue) ProduceBatch(ctx context.Context, tasks []Task) (_ []ID, err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return nil, err
	}
	if len(tasks) == 0 {
		return nil, nil
	}
	op := q.produceOp()
	if op.tasks, err = q.prepareBatch("ProduceBatch", tasks, op.tasks); err != nil {
		q.recycleProduce(op)
		return nil, err
	}
	parts := q.split(op.tasks)
	if parts == nil {
		ids := make([]ID, len(tasks))
		return ids, q.produce(ctx, q.anyShard(), op, tasks, func(i int) int { return i }, ids)
	}
	if len(parts) > 1 && refersToSiblings(op.tasks) {
		q.recycleProduce(op)
		return nil, errScattered("ProduceBatch")
	}
	all := op.tasks
	ids := make([]ID, len(tasks))
	var duplicates []error
	for _, part := range parts {
		next := op
		if len(parts) > 1 {
			next = q.produceOp()
			for _, i := range part.tasks {
				next.tasks = append(next.tasks, all[i])
			}
			findTwins(next.tasks)
		}
		err := q.produce(ctx, part.shard, next, tasks, func(i int) int { return part.tasks[i] }, ids)
		if err != nil {
			duplicates = append(duplicates, err)
			if !errors.Is(err, ErrDuplicate) {
				break
			}
		}
	}
	return ids, errors.Join(duplicates...)
}

// produce stores the tasks of op in a shard, recycles op, and puts the IDs into ids. at returns the
// index in tasks of the operation's i-th task.
func (q *Queue) produce(ctx context.Context, shard int, op *produceOp, tasks []Task, at func(int) int, ids []ID) error {
	settled, err := q.doProduce(ctx, shard, op)
	if settled {
		defer q.recycleProduce(op)
	}
	if err != nil {
		return err
	}
	for i, id := range op.IDs {
		ids[at(i)] = id
	}
	var errs []error
	for _, i := range op.Duplicates {
		errs = append(errs, &DuplicateError{Key: tasks[at(i)].Unique.Key, ID: op.IDs[i], Index: at(i)})
	}
	return errors.Join(errs...)
}

// doProduce is do for a produce, which has a number in a cluster.
func (q *Queue) doProduce(ctx context.Context, shard int, op *produceOp) (settled bool, err error) {
	if q.node != nil {
		return q.node.produce(ctx, shard, op)
	}
	return q.do(ctx, shard, op)
}

// part holds the tasks of a batch that one shard stores.
type part struct {
	shard int
	tasks []int // indexes
	bound bool  // some of them would be stored again if the batch were
}

// split divides a batch between the shards that store it: nil means that any shard may store all
// tasks.
func (q *Queue) split(tasks []engine.NewTask) []part {
	isBound := func(t engine.NewTask) bool {
		_, bound := t.Home(len(q.replicas))
		return bound
	}
	if !slices.ContainsFunc(tasks, isBound) {
		return nil
	}
	var parts []part
	var free []int
	for i := range tasks {
		home, bound := tasks[i].Home(len(q.replicas))
		if !bound {
			free = append(free, i)
			continue
		}
		n := slices.IndexFunc(parts, func(p part) bool { return p.shard == home })
		if n < 0 {
			n = len(parts)
			parts = append(parts, part{shard: home})
		}
		parts[n].tasks = append(parts[n].tasks, i)
		parts[n].bound = parts[n].bound || tasks[i].Tied.Unique == [keys.UniqueLen]byte{}
	}
	slices.SortStableFunc(parts, func(a, b part) int {
		switch {
		case a.bound == b.bound:
			return 0
		case a.bound:
			return 1
		}
		return -1
	})
	last := &parts[len(parts)-1]
	last.tasks = append(last.tasks, free...)
	slices.Sort(last.tasks)
	return parts
}

// prepare does the part of a produce that the caller's goroutine can do: it encodes the record into
// a separate buffer. REQUIRES: t is checked.
func prepare(t *Task, records *arena.Arena) (n engine.NewTask) {
	var rec record.Record
	t.fill(&rec)
	size := rec.MaxSize()
	var buf []byte
	if records != nil {
		buf = records.Buffer(size)
	} else {
		buf = make([]byte, 0, size)
	}
	n.Key.Queue, n.Key.Tenant, n.Key.Priority = t.Queue, t.Tenant, uint8(t.Priority)
	n.Encode(&rec, buf)
	return n
}

// commitCost is about how much new tasks write in their commit.
type commitCost struct{ bytes, parents int }

// The bytes that a new task writes at the most in addition to its record: its keys, and entries in
// the catalogue and counters; and those for each parent, a key or a message.
const (
	taskCost   = 300
	parentCost = 64
)

// add adds a task. The error says which limit is exceeded.
func (c *commitCost) add(t *engine.NewTask, l *Limits) error {
	c.bytes += len(t.Rec) + len(t.Key.Queue) + len(t.Key.Tenant) + taskCost
	if t.Tied != nil {
		c.parents += len(t.Tied.Parents)
		c.bytes += len(t.Tied.Parents) * parentCost
	}
	switch {
	case c.parents > l.Parents:
		return &InvalidError{"parents of the batch", fmt.Sprint(c.parents, " and more"), atMostTasks(l.Parents)}
	case c.bytes > l.CommitBytes:
		return &InvalidError{"bytes to be written at once", bytesOf(c.bytes) + " and more", atMost(l.CommitBytes)}
	}
	return nil
}

// batch collects the tasks of a verb: it checks them, and encodes them into its own memory, as they
// are added.
type batch struct {
	verb    string
	tasks   []engine.NewTask
	records arena.Arena
	bytes   int // of the payloads
	cost    commitCost
	tied    bool // some are bound to others
}

// prepareBatch checks and prepares tasks, and appends them to into, which is empty.
func (q *Queue) prepareBatch(verb string, tasks []Task, into []engine.NewTask) ([]engine.NewTask, error) {
	b := batch{verb: verb, tasks: into}
	err := b.add(tasks, &q.opts.Limits)
	if err == nil {
		err = b.finish()
	}
	return b.tasks, err
}

// add adds tasks. After an error the batch must not be used.
func (b *batch) add(tasks []Task, limits *Limits) error {
	if n := len(b.tasks) + len(tasks); n > limits.Batch {
		return &InvalidError{b.verb + " tasks", n, atMostTasks(limits.Batch)}
	}
	for i := range tasks {
		t, n := &tasks[i], len(b.tasks)
		if err := t.check(limits); err != nil {
			return taskError(b.verb, n, err)
		}
		if err := checkNth(t, n); err != nil {
			return taskError(b.verb, n, err)
		}
		if b.bytes += len(t.Payload); b.bytes > limits.BatchBytes {
			return &InvalidError{b.verb + " payloads", bytesOf(b.bytes) + " and more", atMost(limits.BatchBytes)}
		}
		b.tasks = append(b.tasks, prepare(t, &b.records))
		if err := b.cost.add(&b.tasks[n], limits); err != nil {
			return taskError(b.verb, n, err)
		}
		b.tied = b.tied || t.tied()
	}
	return nil
}

// finish finds twins and parents among the tasks, after all have been added.
func (b *batch) finish() error {
	if !b.tied {
		return nil
	}
	if i := findTwins(b.tasks); i >= 0 {
		return taskError(b.verb, i, &InvalidError{
			"Task.Unique.Key", b.tasks[i].UniqueKey(), "one task of a batch with the same key and Replace",
		})
	}
	markParents(b.tasks)
	return nil
}

// checkNth refuses a task that waits for one of its batch that does not come before it.
func checkNth(t *Task, index int) error {
	for _, id := range t.After {
		if i, ok := keys.NthOf(id); ok && i >= index {
			allowed := fmt.Sprintf("tasks of the batch before the task itself, %d", index)
			return &InvalidError{"Task.After", fmt.Sprintf("Nth(%d)", i), allowed}
		}
		if id == (ID{}) {
			return &InvalidError{"Task.After", id, "IDs of tasks"}
		}
	}
	return nil
}

func refersToSiblings(tasks []engine.NewTask) bool {
	return slices.ContainsFunc(tasks, func(t engine.NewTask) bool { return t.RefersToSiblings() })
}

func errScattered(verb string) error {
	return &InvalidError{
		verb + " tasks", "Nth together with LimitKey, Group or Unique.Key", "such tasks in one shard only",
	}
}

// markParents sets Parent in the records of tasks for which others of the batch wait, directly or
// through a twin that is not stored. REQUIRES: the twins are found.
func markParents(tasks []engine.NewTask) {
	for i := range tasks {
		if tasks[i].Tied == nil {
			continue
		}
		for _, p := range tasks[i].Tied.Parents {
			n, ok := keys.NthOf(p)
			if !ok {
				continue
			}
			parent := &tasks[n]
			if parent.Tied != nil && parent.Tied.Twin >= 0 {
				parent = &tasks[parent.Tied.Twin]
			}
			if parent.Tied == nil {
				parent.Tied = &engine.Tied{Twin: -1}
			}
			if !parent.Tied.Parent {
				parent.Tied.Parent = true
				rec, err := record.Decode(parent.Rec)
				if err != nil {
					panic("codeq: a record that was just encoded: " + err.Error())
				}
				rec.Parent = true
				parent.Rec = rec.Encode()
			}
		}
	}
}

// findTwins finds the tasks of a batch that have the same idempotency key as an earlier one. It
// returns the index of the first one that would have to replace the earlier one, or -1.
func findTwins(tasks []engine.NewTask) int {
	first := make(map[[keys.UniqueLen]byte]int)
	for i := range tasks {
		t := tasks[i].Tied
		if t == nil || t.Unique == [keys.UniqueLen]byte{} {
			continue
		}
		n, ok := first[t.Unique]
		if !ok {
			first[t.Unique] = i
			continue
		}
		if t.Flags&record.ReplaceWaiting != 0 {
			return i
		}
		t.Twin = n
	}
	return -1
}

// produceOp stores all of its tasks, or none.
type produceOp struct {
	completion
	tasks []engine.NewTask
	call  engine.CallNumber
	engine.Produced
}

func (q *Queue) produceOp() *produceOp {
	if op, ok := q.pools.produce.Get().(*produceOp); ok {
		return op
	}
	return &produceOp{completion: newCompletion()}
}

// recycleProduce keeps an operation for reuse. REQUIRES: it is settled, or was never given to a
// shard.
func (q *Queue) recycleProduce(op *produceOp) {
	clear(op.tasks)
	op.tasks, op.IDs, op.Duplicates, op.err = op.tasks[:0], op.IDs[:0], op.Duplicates[:0], nil
	op.call = engine.CallNumber{}
	q.pools.produce.Put(op)
}

// pools keep operations for reuse. They belong to a Queue and not to the package, since channels of
// a testing/synctest bubble must not outlive it.
type pools struct{ produce, claim, complete sync.Pool }

func (op *produceOp) resolve(s *shard) {
	if err := s.checkCaller(&op.call); err != nil {
		s.conclude(op, &op.completion, engine.Decided, err)
		return
	}
	v, err := s.Produce(op.tasks, &op.call, &op.Produced)
	s.conclude(op, &op.completion, v, err)
}

// checkCaller refuses a produce that would begin a session of a node that is no member. Who has
// been removed may not know, and a message of before the removal may come late.
func (s *shard) checkCaller(call *engine.CallNumber) error {
	if call.Node == "" || s.Continues(call) {
		return nil
	}
	member, err := s.replica.group.HasMember(call.Node)
	if err == nil && !member {
		err = fmt.Errorf("%w: node %q, from which the call comes", ErrNotMember, call.Node)
	}
	return err
}

func (op *produceOp) encode(dst []byte) (callKind, []byte) {
	dst = wire.AppendUint(dst, op.call.Life)
	dst = wire.AppendUint(dst, op.call.Seq)
	dst = wire.AppendUint(dst, op.call.Low)
	return callProduce, appendTasks(dst, op.tasks)
}

// decode does not read the node in op.call, which newProduce has set from the connection.
func (op *produceOp) decode(r *wire.Reader) {
	op.call.Life, op.call.Seq, op.call.Low = r.Uint(), r.Uint(), r.Uint()
	op.tasks = readTasks(r)
}

func (op *produceOp) encodeReply(dst []byte) []byte {
	return keys.AppendIndexes(keys.AppendIDs(dst, op.IDs), op.Duplicates)
}

func (op *produceOp) decodeReply(r *wire.Reader) {
	op.IDs = append(op.IDs, keys.ReadIDs(r)...)
	op.Duplicates = append(op.Duplicates, keys.ReadIndexes(r)...)
	if len(op.IDs) != len(op.tasks) {
		r.Fail()
	}
}

func (op *produceOp) again() { op.IDs, op.Duplicates, op.err = op.IDs[:0], op.Duplicates[:0], nil }

func atMostTasks(n int) string { return fmt.Sprintf("at most %d", n) }

func taskError(verb string, i int, err error) error {
	return fmt.Errorf("%s: task %d: %w", verb, i, err)
}

// appendTasks appends new tasks to a call of another node. Their records contain what binds them to
// others.
func appendTasks(dst []byte, tasks []engine.NewTask) []byte {
	dst = wire.AppendUint(dst, uint64(len(tasks)))
	for i := range tasks {
		t := &tasks[i]
		dst = wire.AppendBytes(dst, t.Key.Queue)
		dst = wire.AppendBytes(dst, t.Key.Tenant)
		dst = append(dst, t.Key.Priority)
		dst = wire.AppendBool(dst, t.Tied != nil)
		dst = wire.AppendBytes(dst, t.Rec)
	}
	return dst
}

// farLimits bound the batches of other nodes, which may have different limits.
var farLimits = Limits{Parents: maxBatchParents, CommitBytes: maxCommitBytes}

// readTasks reads tasks written by appendTasks. The records alias the message.
func readTasks(r *wire.Reader) []engine.NewTask {
	n := r.Count(5)
	if n == 0 {
		return nil
	}
	tasks := make([]engine.NewTask, n)
	tied, cost := false, commitCost{}
	for i := range tasks {
		t := &tasks[i]
		t.Key = engine.LaneKey{Queue: r.String(), Tenant: r.String(), Priority: r.Byte()}
		bound := r.Bool()
		t.Rec = r.Bytes()
		rec, err := record.Decode(t.Rec)
		if err != nil || !t.Valid(&rec, i) {
			r.Fail()
			return nil
		}
		t.RunAt = rec.RunAt
		if bound {
			t.Tied, tied = engine.TiedOf(&rec), true
		}
		if cost.add(t, &farLimits) != nil {
			r.Fail()
			return nil
		}
	}
	if tied {
		findTwins(tasks)
	}
	return tasks
}
