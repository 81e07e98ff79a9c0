package codeq

import (
	"log/slog"
	"time"

	"codeq/internal/guard"
)

// Observation is the activity of this process since the last one: the argument of
// [Options.Observer]. An exporter of totals adds up.
//
// It is one struct, given to one function: a call takes all that has gathered, however much that
// is, its parts are of one time, and a further measurement is one more field. An exporter gives a
// method of its own as the Observer; for several of them, a function calls one after the other.
type Observation struct {
	// Queues has the changes by commits, for each changed queue, in no order. In a cluster the
	// leader of a shard reports, so that the sum over all nodes counts each change once. No change
	// is left out, as long as calls return: if more than 16,384 queues have changed, the rest is
	// reported together, under the name "".
	Queues []QueueDelta
	// Commits is the commits of the shards that this process leads, Handlers the handlers of
	// [Queue.Run] that have returned. Each has 8192 entries at the most: the first ones, and
	// MissedCommits and MissedHandlers are how many more there have been.
	Commits                       []CommitSample
	Handlers                      []HandlerSample
	MissedCommits, MissedHandlers uint64
	// Panics is how many of the calls before have panicked, or ended their goroutine, since the
	// last one that has not. Their observations are not repeated.
	Panics uint64
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
	Attempt       int // this one included
	// Wait is how long the task had been ready when it was claimed (see [TaskInfo].At), to the
	// millisecond.
	Wait time.Duration
	Took time.Duration // by the handler, with its middleware
	// Verdict is the meaning of the call to [Queue.Run] (see [VerdictOf]): [VerdictCanceled] and
	// [VerdictLeaseLost] if the lease was lost before it returned, [VerdictReleased] also if the
	// task was given back at the end. To store it may fail; the stored changes are in
	// [Observation].Queues.
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

// Reset empties the observation.
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

// delta returns the entry of a queue.
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
