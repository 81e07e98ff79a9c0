package codeq

import (
	"context"

	"codeq/internal/keys"
	"codeq/internal/wire"
)

// Counts is how many tasks are in each state.
type Counts struct {
	Ready, Scheduled, Blocked, Leased, Dead, Done, Canceled uint64
}

// Total is the number of tasks that the queue has in any state.
func (c Counts) Total() uint64 {
	return c.Ready + c.Scheduled + c.Blocked + c.Leased + c.Dead + c.Done + c.Canceled
}

// Stats returns the counts of every queue that ever had a task or a schedule,
// by name. They are exact, for each shard as of one moment. The cost is that of
// copying them, whatever the number of tasks.
func (q *Queue) Stats(ctx context.Context) (map[string]Counts, error) {
	sum := make(map[string]Counts)
	for i := range q.replicas {
		op := &statsOp{completion: newCompletion()}
		if settled, err := q.do(ctx, i, op); !settled {
			return nil, context.Cause(ctx)
		} else if err != nil {
			return nil, err
		}
		for _, qc := range op.counts {
			c := keys.Counts(sum[qc.queue])
			c.Add(qc.counts)
			sum[qc.queue] = Counts(c)
		}
	}
	return sum, nil
}

// statsOp copies the counts of a shard.
type statsOp struct {
	completion
	counts []queueCounts
}

type queueCounts struct {
	queue  string
	counts keys.Counts
}

func (op *statsOp) resolve(s *shard) {
	for _, q := range s.numbers[1:] {
		op.counts = append(op.counts, queueCounts{q.name, q.counts})
	}
	s.settle(op)
}

func (op *statsOp) encode(dst []byte) (callKind, []byte) { return callStats, dst }
func (op *statsOp) decode(*wire.Reader)                  {}

func (op *statsOp) encodeReply(dst []byte) []byte {
	dst = wire.AppendUint(dst, uint64(len(op.counts)))
	for i := range op.counts {
		qc := &op.counts[i]
		dst = wire.AppendBytes(dst, qc.queue)
		var b [keys.CountersLen]byte
		keys.CountersValue{Counts: qc.counts}.Put(b[:])
		dst = append(dst, b[:]...)
	}
	return dst
}

func (op *statsOp) decodeReply(r *wire.Reader) {
	for range r.Count(1 + keys.CountersLen) {
		name := r.String()
		v, err := keys.ParseCounters(r.Take(keys.CountersLen))
		if err != nil {
			r.Fail()
			return
		}
		op.counts = append(op.counts, queueCounts{name, v.Counts})
	}
}

func (op *statsOp) repeatable() bool { return true }
func (op *statsOp) again()           { op.counts, op.err = nil, nil }
