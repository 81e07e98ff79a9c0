package codeq

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/localsocket"
)

// ProcessInfo is what one process knows by itself of a queue, without asking another node: what it
// exports as metrics.
type ProcessInfo struct {
	Node string `json:",omitzero"` // in a cluster, its name
	// Shards are all of the queue, by their numbers, whether this process leads them or not.
	Shards []ShardInfo
	// Workers are the calls of [Queue.Run] of this process, as [Queue.Workers] lists them.
	Workers []WorkerInfo
	// FreeBytes is how much space is free on the disk of the directory; -1: the file system does
	// not say. MinFreeBytes is [Options.MinFreeBytes] as it is in force; 0: there is no limit.
	FreeBytes, MinFreeBytes int64
	// EventsLost is how many events the subscriptions of this process have lost (see
	// [Subscription.Lost]), those that have ended included.
	EventsLost uint64
}

// ShardInfo is what a process knows of one shard.
type ShardInfo struct {
	// Leads is whether this process leads the shard, as it does always without a cluster, and its
	// owner has answered; else the fields below LastError are zero.
	Leads bool
	// LastError is why the shard does not answer: it has failed, or ctx has ended before.
	LastError string `json:",omitzero"`
	// Inbox is how many operations wait for the owner.
	Inbox int
	// NextTick is the next tick of any of the shard's schedules; zero: there is none. Once it is
	// past, the tick is late.
	NextTick time.Time `json:",omitzero"`
	// Queues are those of [Queue.Info], ordered by name, with what this shard has of them. Settings
	// are left out, and the totals of a queue that this shard does not show.
	Queues []QueueInfo
}

// ProcessInfo returns what this process knows by itself. In a cluster, the sum of what the nodes
// return counts each task once, as long as each shard has one leader: none if it has none, and, if
// it gets another one between the calls, perhaps none or both.
//
// Each shard that this process leads is asked, all at the same time, as by [Queue.Info], which says
// what that costs. One that does not answer until ctx ends is in the result with an error.
//
// Errors: [ErrInvalid], [ErrClosed], and that of ctx if it has ended before.
func (q *Queue) ProcessInfo(ctx context.Context) (_ *ProcessInfo, err error) {
	defer public(&err)
	if q.isElsewhere() {
		info := new(ProcessInfo)
		err := q.tell(ctx, localsocket.Process, nil, info)
		localTimes(info.Workers)
		return info, err
	}
	if err := q.checkOpen(ctx); err != nil {
		return nil, err
	}
	p := &ProcessInfo{
		Shards: make([]ShardInfo, len(q.replicas)), Workers: q.ownWorkers(),
		FreeBytes: -1, MinFreeBytes: max(q.opts.MinFreeBytes, 0), EventsLost: q.events.Lost(),
	}
	if q.node != nil {
		p.Node = q.node.Self().Node
	}
	if usage, err := q.opts.fs.GetDiskUsage(q.dir.Path); err == nil {
		p.FreeBytes = int64(min(usage.AvailBytes, math.MaxInt64))
	}
	err = q.inParallel("information of a shard", len(q.replicas), func(i int) error {
		of := &p.Shards[i]
		if err := q.replicas[i].info(ctx, of); err != nil {
			*of = ShardInfo{LastError: prefixed(err).Error()}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	select {
	case <-q.closing: // meanwhile, so that shards may have refused
		return nil, ErrClosed
	default:
	}
	return p, nil
}

// info fills in what is known of a shard, if this process leads it.
func (r *replica) info(ctx context.Context, of *ShardInfo) error {
	s := r.lead.Load()
	if s == nil {
		if r.node != nil {
			return r.group.Failure()
		}
		return nil
	}
	of.Inbox = s.inbox.Len()
	sum := infoSum{at: make(map[string]int), seen: make([][]bool, 1)}
	part := new(processPart)
	op := rule(callInfo, part)
	for part.More = true; part.More; {
		part.Next()
		settled, err := s.do(ctx, op, op.base())
		if !settled {
			return base.EndOf(ctx)
		}
		if err != nil {
			return err
		}
		if err := sum.add(0, part.Infos); err != nil {
			return err
		}
	}
	slices.SortFunc(sum.list, func(a, b QueueInfo) int { return cmp.Compare(a.Queue, b.Queue) })
	of.Leads, of.Queues = true, sum.list
	if part.tick != engine.Never {
		of.NextTick = msTime(part.tick)
	}
	return nil
}

// processPart is call.Info for the process itself.
type processPart struct {
	call.Info
	tick uint64
}

func (p *processPart) Decide(s *engine.State) (engine.Verdict, error) {
	p.tick = s.NextTick()
	return p.Info.Decide(s)
}
