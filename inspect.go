package codeq

import (
	"context"
	"fmt"
	"math"
	"time"

	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/convert"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/store"
)

func init() {
	inspect.Options = func(options any) *inspect.Private {
		switch o := options.(type) {
		case *Options:
			return &o.private
		case *Cluster:
			return &o.private
		case *ReaderOptions:
			return &o.private
		case *VerifyOptions:
			return &o.private
		}
		panic(fmt.Sprintf("codeq: %T has no private options", options))
	}
	inspect.Apply = func(st *store.Store) func(cluster.Entry) error {
		r := &replica{mono: time.Now}
		r.slot.Set(st)
		m := newStateMachine(r)
		m.writer.Adopt = func([]byte) error { return nil }
		return m.Apply
	}
	inspect.TaskInfo = func(t *store.Task) any { return taskInfo(t) }
	inspect.Of = func(queue any) inspect.Queue { return inspected{queue.(*Queue)} }
}

// inspected is the inside of a queue, for tests.
type inspected struct{ q *Queue }

func (i inspected) Shards() int { return len(i.q.replicas) }

func (i inspected) Leads(shard int) bool { return i.q.shard(shard) != nil }

func (i inspected) Commits() (n uint64) {
	for _, s := range i.q.led() {
		n += s.commits.Load()
	}
	return n
}

// inspection calls look in its turn among the operations of a shard.
type inspection struct {
	completion
	look func(*inspect.Owner) error
}

func (s *shard) inspect() *inspect.Owner {
	return &inspect.Owner{
		Rules: &s.rules, Claims: s.claims, Store: s.rules.Store, Permits: s.permits, Epoch: s.epoch, Commit: s.commit,
		Large:    len(s.undecided.large.All()),
		Measure:  func() { s.space.Written = math.MaxInt },
		Awaiting: func(id keys.ID) int { return len(s.awaits.Of(ID(id))) },
	}
}

func (op *inspection) resolve(s *shard) {
	o := s.inspect()
	o.Busy = s.undecided.HasDeferred() || len(s.undecided.batches) > 0 || s.claims.MayServe() || s.due()
	op.err = op.look(o)
	s.commit = o.Commit
	s.settleAfterCommit(op)
}

func (op *inspection) verb() *verb { return &internal }

func (i inspected) Owner(shard int, look func(*inspect.Owner) error) error {
	s := i.q.shard(shard)
	if s == nil {
		return fmt.Errorf("shard %d: %w", shard, ErrNotLeader)
	}
	op := &inspection{completion: newCompletion(0), look: look}
	_, err := s.do(context.Background(), op, &op.completion, nil)
	return err
}

func (i inspected) Asleep(shard int, look func(*inspect.Owner)) {
	s := i.q.shard(shard)
	look(s.inspect())
	s.inbox.Len() // its lock orders this before the next step of the owner
}

func (i inspected) Read(shard int, f func(*store.Store) error) error {
	return i.q.replicas[shard].slot.Use(f)
}

func (i inspected) StartingAt(shard int) any {
	return i.view(i.q.replicas[shard : shard+1])
}

func (i inspected) OfAnotherProcess() any { return i.view(i.q.replicas) }

// view returns a second Queue over shards of the queue.
func (i inspected) view(replicas []*replica) *Queue {
	q := &Queue{opts: i.q.opts, replicas: replicas, configuring: make(chan struct{}, 1)}
	q.backend = (*standalone)(q)
	return q
}

func (i inspected) Waiting(shard int) int { return i.q.shard(shard).inbox.Len() }

func (i inspected) RunUntilEmpty(ctx context.Context, mux, opts any) (int, error) {
	return i.q.runMux(ctx, mux.(*Mux), opts.(*RunOptions), true)
}

func (i inspected) Watched() bool { return i.q.events.Wanted() != 0 }

func (i inspected) Options() any {
	o := *i.q.opts
	return &o
}

func (i inspected) Directory() *manifest.Directory { return i.q.dir }

func (i inspected) RaiseBarrier(ctx context.Context) (resume func() error, err error) {
	b, err := convert.Raise(ctx, (*owners)(i.q))
	return b.Resume, err
}

func (i inspected) Leaders() cluster.Leaders { return (*leaders)(i.q.node) }

func (i inspected) ClockAge(shard int) time.Duration {
	return time.Duration(i.q.shard(shard).rules.Leases.ClockAge) * time.Millisecond
}

func (i inspected) Numbers(shard int) **call.Session { return &i.q.replicas[shard].producing }

func (i inspected) Node() *cluster.Node {
	if i.q.node == nil {
		return nil
	}
	return i.q.node.Node
}

func (i inspected) Group(shard int) *cluster.Group { return i.q.replicas[shard].group }
