package codeq

import (
	"context"

	"codeq/internal/base"
	"codeq/internal/engine"
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

// Stats returns the counts of every queue that has tasks, in whatever state, or
// settings, by name; one without tasks may be forgotten. The counts are exact, of each
// queue and shard as of one moment, and of less than four thousand queues all as of
// the same. The cost is that of copying them, whatever the number of tasks; other
// calls go on meanwhile.
//
// Errors: [ErrInvalid], [ErrUncertain] and [ErrNotLeader] (in a cluster), [ErrFailed], [ErrClosed],
// and that of ctx.
func (q *Queue) Stats(ctx context.Context) (_ map[string]Counts, err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return nil, err
	}
	var sum map[string]Counts
	for i := range q.replicas {
		op := &statsOp{completion: newCompletion()}
		for more := true; more; more = op.more {
			op.counts = op.counts[:0]
			if settled, err := q.do(ctx, i, op); !settled {
				return nil, base.EndOf(ctx)
			} else if err != nil {
				return nil, err
			}
			if sum == nil {
				sum = make(map[string]Counts, op.queues)
			}
			for _, qc := range op.counts {
				sum[qc.Queue] = addCounts(sum[qc.Queue], qc.Counts)
			}
		}
	}
	return sum, nil
}

func addCounts(to Counts, c keys.Counts) Counts {
	c.Add(keys.Counts(to))
	return Counts(c)
}

// statsStep is how many queues one visit of a shard's owner copies.
const statsStep = 4096

// statsOp copies the counts of a part of a shard's queues.
type statsOp struct {
	completion
	engine.Place
	more   bool // there are queues behind the place
	queues int  // about how many there are
	counts []engine.QueueCounts
}

func (op *statsOp) resolve(s *shard) {
	op.counts, op.more = s.Counts(&op.Place, statsStep, op.counts)
	op.queues = len(s.Queues)
	s.settle(op)
}

func (op *statsOp) encode(dst []byte) (callKind, []byte) {
	return callStats, appendPlace(dst, op.Place)
}

func (op *statsOp) decode(r *wire.Reader) { op.Place = readStatsPlace(r) }

func appendPlace(dst []byte, p engine.Place) []byte {
	return wire.AppendUint(wire.AppendUint(wire.AppendBool(dst, p.Unnumbered), uint64(p.Next)), p.Begun)
}

func readStatsPlace(r *wire.Reader) engine.Place {
	return engine.Place{Unnumbered: r.Bool(), Next: int(r.Uint32()), Begun: r.Uint()}
}

func (op *statsOp) encodeReply(dst []byte) []byte {
	dst = wire.AppendUint(wire.AppendBool(appendPlace(dst, op.Place), op.more), uint64(op.queues))
	dst = wire.AppendUint(dst, uint64(len(op.counts)))
	for i := range op.counts {
		qc := &op.counts[i]
		dst = wire.AppendBytes(dst, qc.Queue)
		var b [keys.CountersLen]byte
		keys.CountersValue{Counts: qc.Counts}.Put(b[:])
		dst = append(dst, b[:]...)
	}
	return dst
}

func (op *statsOp) decodeReply(r *wire.Reader) {
	op.Place, op.more, op.queues = readStatsPlace(r), r.Bool(), int(r.Uint32())
	for range r.Count(1 + keys.CountersLen) {
		name := r.String()
		v, err := keys.ParseCounters(r.Take(keys.CountersLen))
		if err != nil {
			r.Fail()
			return
		}
		op.counts = append(op.counts, engine.QueueCounts{Queue: name, Counts: v.Counts})
	}
}

func (op *statsOp) again() { op.counts, op.err = op.counts[:0], nil }
