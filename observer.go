package codeq

import (
	"log/slog"
	"time"

	"codeq/internal/guard"
)

// Observation is the activity of this process since the last one, for [Options.Observer]. An
// exporter of totals adds up, and gives a method of its own as the Observer; several share a
// function that calls one after the other.
type Observation struct {
	// Queues has the changes by commits, for each changed queue, in no order. In a cluster the
	// leader of a shard reports, so the sum over all nodes counts each change once. Beyond 16,384
	// changed queues, the name "" has the rest.
	Queues []QueueDelta
	// Commits are those of the shards that this process leads, Handlers the returned handlers of
	// [Queue.Run]: the first 8192 of each; MissedCommits and MissedHandlers count the rest.
	Commits                       []CommitSample
	Handlers                      []HandlerSample
	MissedCommits, MissedHandlers uint64
	Panics                        uint64 // calls since the last good one that panicked or ended their goroutine, and are not repeated
}

// QueueDelta has the changes to the tasks of a queue.
type QueueDelta struct {
	Queue string
	Totals
}

// CommitSample is one commit of a shard.
type CommitSample struct {
	Shard      int
	Operations int           // of callers
	Took       time.Duration // to write it; in a cluster to a majority
}

// HandlerSample is one call of a handler by [Queue.Run].
type HandlerSample struct {
	Queue, Tenant string
	Attempt       int           // this one included
	Wait          time.Duration // for which the task was ready when it was claimed ([TaskInfo].At), to the millisecond
	Took          time.Duration // by the handler, with its middleware
	Batch         int           // how many tasks their handler had together ([HandleBatch]); in the sample of one of them
	// Verdict is that of [VerdictOf]; if the lease was lost before, [VerdictCanceled] or
	// [VerdictLeaseLost]; given back at the end of [Queue.Run], [VerdictReleased].
	Verdict Verdict
}

const (
	observedQueues  = 1 << 14
	observedSamples = 1 << 13
	keptQueues      = 1 << 10 // memory for so many is kept for reuse
)

// observed is an Observation while it is made.
type observed struct {
	Observation
	index guard.NameIndex // in Queues
}

type teller = guard.Teller[*observed]

// newTeller returns what calls tell; nil if that is nil.
func newTeller(tell func(*Observation), log *slog.Logger) *teller {
	if tell == nil {
		return nil
	}
	return guard.NewTeller("Observer", func(o *observed) { tell(&o.Observation) }, log, new(observed), new(observed))
}

func (o *observed) Reset() {
	clear(o.Queues)
	clear(o.Handlers) // which hold names
	queues, index := o.Queues[:0], o.index
	if cap(queues) > keptQueues {
		queues, index = nil, nil
	}
	clear(index)
	*o = observed{Observation{Queues: queues, Commits: o.Commits[:0], Handlers: o.Handlers[:0]}, index}
}

// Lose notes that a call has not returned.
func (o *observed) Lose(lost *observed) { o.Panics += 1 + lost.Panics }

// isFull reports whether the observation should be told before more samples come.
func (o *observed) isFull() bool { return max(len(o.Commits), len(o.Handlers)) >= observedSamples/4 }

func (o *observed) addCommit(sample CommitSample) {
	o.Commits = guard.KeepSamples(o.Commits, sample, observedSamples, &o.MissedCommits)
}

func (o *observed) delta(queue string) *QueueDelta {
	i, name, isNew := o.index.Of(queue, observedQueues)
	if isNew {
		o.Queues = append(o.Queues, QueueDelta{Queue: name})
	}
	return &o.Queues[i]
}

func (o *observed) addHandler(sample HandlerSample) {
	o.Handlers = guard.KeepSamples(o.Handlers, sample, observedSamples, &o.MissedHandlers)
}
