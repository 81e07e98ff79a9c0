package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
)

// A call that waits for nothing but a shard ends CallTimeout after its begin, unless the shard
// makes progress: it commits, confirms a read, or gets a large message to a voter. A node that does
// not lead the shard learns this from heartbeats, and counts the entries that it applies itself.

// workDone grows when the shard makes progress.
func (g *Group) workDone() uint64 { return g.workHere() + g.told.Load() + g.Applied() }

// workHere is the part of workDone that this node adds as the leader.
func (g *Group) workHere() uint64 {
	if g.still.Load() {
		g.work.Add(1)
	}
	return g.work.Load() + g.proposing.moves.Load()
}

// StandStill makes calls wait while the leader on this node waits, on purpose and for a bounded
// time, until the returned function is called.
func (g *Group) StandStill() (end func()) {
	g.still.Store(true)
	return func() { g.still.Store(false) }
}

// moved records that a part of a large message is on its way to a node. Parts for a node that
// refuses the message do not count: they are sent again and again without progress.
func (g *Group) moved(to raft.ServerAddress) {
	members, err := g.members()
	if err == nil && slices.ContainsFunc(members, func(m raft.Server) bool {
		at, err := reach(m.ID, m.Address)
		return err == nil && at == to && m.Suffrage == raft.Voter && !g.health.refuses(m.ID)
	}) {
		g.proposing.moves.Add(1)
	}
}

// Begin makes ctx the context of one call with several parts, which may ask several shards: its
// Limits begin now, or with the enclosing call if ctx already belongs to one.
func (n *Node) Begin(ctx context.Context) context.Context { return n.BeginAt(ctx, time.Now()) }

// BeginAt is Begin for a call that began at a given time.
func (n *Node) BeginAt(ctx context.Context, begin time.Time) context.Context {
	if _, ok := ctx.Value(beginKey{}).(*callContext); ok {
		return ctx
	}
	return &callContext{ctx, begin, n.c.CallTimeout}
}

// callContext is the ctx of a call with several parts.
type callContext struct {
	context.Context
	begin   time.Time
	timeout time.Duration
}

// Late returns a channel for the end of CallTimeout, by the ctx of Begin; nil: it is another ctx.
func Late(ctx context.Context) <-chan time.Time {
	c, ok := ctx.Value(beginKey{}).(*callContext)
	if !ok {
		return nil
	}
	return time.After(c.timeout - time.Since(c.begin))
}

type beginKey struct{}

// Value is context.Context's.
func (c *callContext) Value(key any) any {
	if key == (beginKey{}) {
		return c
	}
	return c.Context.Value(key)
}

// begunAt is the begin of the call that ctx belongs to.
func begunAt(ctx context.Context) time.Time {
	if c, ok := ctx.Value(beginKey{}).(*callContext); ok {
		return c.begin
	}
	return time.Now()
}

// Limit is the limit of a call with ctx. Its caller frees it. A nil Group has none.
func (g *Group) Limit(ctx context.Context) *base.Limit {
	if g == nil {
		return nil
	}
	return g.limits.New(begunAt(ctx))
}

// Limit is the limit of a call that any shard may answer.
func (n *Node) Limit(ctx context.Context) *base.Limit { return n.limits.New(begunAt(ctx)) }

// workDone grows when any shard makes progress.
func (n *Node) workDone() (sum uint64) {
	for _, g := range n.groups {
		sum += g.workDone()
	}
	return sum
}

// Late adds, to the error of a call after its Limit, the reason why the shard makes no progress. If
// the call only reads, nothing is uncertain.
func (g *Group) Late(err error, reads bool) error {
	if !errors.Is(err, base.ErrLate) {
		return err
	}
	if reads {
		err = fmt.Errorf("%w: %w", base.ErrNotLeader, base.ErrLate)
	}
	if addr, id := g.leaderNow(); addr != "" && id != g.node.self.ServerID() {
		return fmt.Errorf("%w: shard %d: node %q leads, and has not answered for %v", err, g.index, peerOf(raft.Server{ID: id}).Node, g.node.c.CallTimeout)
	}
	return fmt.Errorf("%w: shard %d: %s", err, g.index, g.hindrance())
}
