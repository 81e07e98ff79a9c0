package codeq

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
)

// Produce stores a task and returns its ID. The task may be claimed as soon as
// its RunAt has come.
//
// An error that matches ErrUncertain leaves open whether the task was stored;
// after any other error it was not. Produce is safe for concurrent use.
func (q *Queue) Produce(ctx context.Context, t Task) (ID, error) {
	if err := t.check(&q.opts.Limits); err != nil {
		return ID{}, err
	}
	op := q.produceOp()
	op.tasks = append(op.tasks, prepare(&t, nil))
	if settled, err := q.anyShard().do(ctx, op, &op.completion); err != nil {
		if settled {
			q.recycleProduce(op)
		}
		return ID{}, err
	}
	id := op.ids[0]
	q.recycleProduce(op)
	return id, nil
}

// ProduceBatch stores all of the tasks or none, in one commit, and returns
// their IDs in the same order. Tasks of one queue, tenant and priority that
// are ready at once are claimed in the order of the batch.
//
// Errors are those of Produce; an InvalidError tells which task it is about.
func (q *Queue) ProduceBatch(ctx context.Context, tasks []Task) ([]ID, error) {
	if len(tasks) == 0 {
		return nil, nil
	}
	op := q.produceOp()
	var err error
	if op.tasks, err = q.prepareBatch("ProduceBatch", tasks, op.tasks); err != nil {
		q.recycleProduce(op)
		return nil, err
	}
	settled, err := q.anyShard().do(ctx, op, &op.completion)
	if err != nil {
		if settled {
			q.recycleProduce(op)
		}
		return nil, err
	}
	ids := slices.Clone(op.ids)
	q.recycleProduce(op)
	return ids, nil
}

// anyShard spreads new tasks evenly.
func (q *Queue) anyShard() *shard {
	if len(q.shards) == 1 {
		return q.shards[0]
	}
	return q.shards[rand.IntN(len(q.shards))]
}

// prepare does what the caller's goroutine can do of a task: encode its
// record, into a buffer of its own. REQUIRES: t is checked.
func prepare(t *Task, records *slab) newTask {
	rec := t.record()
	size := rec.MaxSize()
	var buf []byte
	if records != nil {
		buf = records.buffer(size)
	} else {
		buf = make([]byte, 0, size)
	}
	return newTask{
		key:   laneKey{queue: t.Queue, tenant: t.Tenant, priority: uint8(t.Priority)},
		runAt: rec.RunAt,
		rec:   rec.Append(buf),
	}
}

// prepareBatch checks tasks and appends them, prepared, to into.
func (q *Queue) prepareBatch(verb string, tasks []Task, into []newTask) ([]newTask, error) {
	limits := &q.opts.Limits
	if len(tasks) > limits.Batch {
		return into, &InvalidError{verb + " tasks", len(tasks), atMostTasks(limits.Batch)}
	}
	var records slab
	bytes := 0
	for i := range tasks {
		if err := tasks[i].check(limits); err != nil {
			return into, taskError(verb, i, err)
		}
		if bytes += len(tasks[i].Payload); bytes > limits.BatchBytes {
			return into, &InvalidError{verb + " payloads", bytesOf(bytes) + " and more", atMost(limits.BatchBytes)}
		}
		into = append(into, prepare(&tasks[i], &records))
	}
	return into, nil
}

// produceOp stores tasks, all or none.
type produceOp struct {
	completion
	tasks []newTask
	ids   []ID
}

func (q *Queue) produceOp() *produceOp {
	if op, ok := q.pools.produce.Get().(*produceOp); ok {
		return op
	}
	return &produceOp{completion: newCompletion()}
}

// recycleProduce keeps an operation for reuse. REQUIRES: it is settled, or was never
// handed to a shard.
func (q *Queue) recycleProduce(op *produceOp) {
	clear(op.tasks)
	op.tasks, op.ids, op.err = op.tasks[:0], op.ids[:0], nil
	q.pools.produce.Put(op)
}

// pools keep operations for reuse. They belong to a Queue and not to the
// package: in a testing/synctest bubble channels must not outlive the bubble.
type pools struct{ produce, claim, complete sync.Pool }

func (op *produceOp) resolve(s *shard) {
	s.settle(op)
	if op.err = s.hasLanes(len(op.tasks)); op.err != nil {
		return
	}
	for i := range op.tasks {
		op.ids = append(op.ids, s.admit(&op.tasks[i]))
	}
}

// do hands an operation to the shard and waits for its outcome. settled is
// false when the operation still belongs to the shard.
func (s *shard) do(ctx context.Context, op operation, c *completion) (settled bool, err error) {
	if err := s.inbox.push(ctx, op); err != nil {
		return true, err
	}
	return c.wait(ctx)
}

func atMostTasks(n int) string { return fmt.Sprintf("at most %d", n) }

func taskError(verb string, i int, err error) error {
	return fmt.Errorf("%s: task %d: %w", verb, i, err)
}
