package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"codeq/internal/base"
	"codeq/internal/manifest"
)

// ErrIsMember: the new node of a replacement is already part of the cluster.
var ErrIsMember = errors.New("a member already")

// Replace adds a node and then removes another one, if all shards can do without that one. A node
// at the address of the other one is added after the removal. The number of nodes stays the same: a
// new node that already votes is refused, unless it has joined on its own while Replace waited; and
// replacements are made one after the other, on whichever nodes they are called.
func (n *Node) Replace(ctx context.Context, old string, p Peer) error {
	if err := n.checkSelf(); err != nil {
		return err
	}
	before := n.Status(ctx)
	if old == p.Node || votesInAll(before, p.Node) {
		return ErrIsMember
	}
	ctx, end, err := n.beginReplacement(ctx, old, p)
	if err != nil {
		return err
	}
	defer end()
	if now := n.Status(ctx); votesInAll(now, p.Node) {
		gone := func(r ReplicaStatus) bool { return !now[0].hasName(r.Node) }
		if before[0].Leader == "" || slices.ContainsFunc(before[0].Replicas, gone) {
			return ErrIsMember // in place of another one
		}
		return n.Remove(ctx, old)
	}
	if slices.ContainsFunc(n.known(), func(m Peer) bool { return m.Node == old && m.Address == p.Address }) {
		if err := n.Remove(ctx, old); err != nil {
			return err
		}
		return n.Add(ctx, p)
	}
	if err := n.check(ctx, CheckReplacement, old); err != nil {
		return err
	}
	if err := n.Add(ctx, p); err != nil {
		return err
	}
	return n.Remove(ctx, old)
}

// votesInAll reports whether a node votes in all shards, as far as their leaders are known.
func votesInAll(shards []ShardStatus, node string) bool {
	return !slices.ContainsFunc(shards, func(sh ShardStatus) bool {
		return sh.Leader == "" || !slices.ContainsFunc(sh.Replicas, func(r ReplicaStatus) bool { return r.Node == node && r.Voter })
	})
}

// Two replacements of one node at once would add two nodes and remove one. So the leader of the
// first shard permits one at a time: the one with the latest confirmation. A replacement confirms
// itself again and again until it has ended; a leader that has just begun waits until it must have
// had the confirmation of a running one. A replacement without a confirmation for half of that time
// gives up.

// replacementLease times ElectionTimeout is how long a replacement goes on without a confirmation.
const replacementLease = 20

// errReplacing: another replacement is under way. It is sent as ErrNotLeader; its text identifies
// it.
var errReplacing = fmt.Errorf("%w: one replacement of a node at a time", base.ErrNotLeader)

// replacement is the one that the leader of the first shard permits.
type replacement struct {
	mu    sync.Mutex // guards the fields below
	token string     // "": none
	what  string
	until time.Time
}

// change begins, confirms or ends a replacement, of a node by the one at p.Address; p.ID is its
// token. A leader that began at the given time knows all that were confirmed since.
func (r *replacement) change(how Change, p Peer, began time.Time, lease time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	other := r.token != p.ID && r.token != "" && now.Before(r.until)
	switch {
	case how == EndReplacement && !other:
		r.token = ""
	case how == EndReplacement:
	case other:
		return fmt.Errorf("%w: %s is under way", errReplacing, r.what)
	case how == BeginReplacement && r.token == "" && now.Before(began.Add(lease)):
		return fmt.Errorf("%w: the leader has just begun, and may not have heard of another one", errReplacing)
	case how == KeepReplacement && r.token == "" && !now.Before(began.Add(lease)):
		return fmt.Errorf("%w: that of node %q by %q has ended", errReplacing, p.Node, p.Address)
	default:
		r.token, r.what, r.until = p.ID, fmt.Sprintf("that of node %q by %q", p.Node, p.Address), now.Add(lease)
	}
	return nil
}

// changeReplacement begins, confirms or ends a replacement.
func (g *Group) changeReplacement(how Change, p Peer) error {
	g.leading.mu.Lock()
	began := g.leading.begun
	g.leading.mu.Unlock()
	return g.node.replacement.change(how, p, began, replacementLease*g.node.c.ElectionTimeout)
}

// beginReplacement waits until no other replacement is under way. The returned ctx ends when this
// one may no longer be the only one; end ends the replacement.
func (n *Node) beginReplacement(ctx context.Context, old string, by Peer) (_ context.Context, end func(), err error) {
	p, lease := Peer{Node: old, Address: by.Node, ID: manifest.NewID()}, replacementLease*n.c.ElectionTimeout
	waits := n.newWait()
	var why error
	err = n.poll(ctx, func() (bool, error) {
		err := n.c.Leaders.Change(ctx, 0, BeginReplacement, p)
		if err == nil || !strings.Contains(err.Error(), errReplacing.Error()) {
			return true, err
		}
		why = err
		waits.note("another node is being replaced", err)
		return false, nil
	})
	if err != nil {
		if why != nil && ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", err, why)
		}
		return nil, nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	n.run("confirmation of a replacement", func() { n.confirmReplacement(ctx, cancel, p, lease) }, cancel)
	return ctx, func() {
		cancel(nil)
		ctx, cancel := context.WithTimeout(n.ctx, n.c.ElectionTimeout)
		defer cancel()
		_ = n.c.Leaders.Change(ctx, 0, EndReplacement, p) // or its lease ends
	}, nil
}

// confirmReplacement confirms a replacement repeatedly until ctx ends.
func (n *Node) confirmReplacement(ctx context.Context, cancel context.CancelCauseFunc, p Peer, lease time.Duration) {
	over := time.AfterFunc(lease/2, func() {
		cancel(fmt.Errorf("%w: the leader of the first shard does not confirm that the replacement is the only one", base.ErrUncertain))
	})
	defer over.Stop()
	for ctx.Err() == nil {
		err := n.c.Leaders.Change(ctx, 0, KeepReplacement, p)
		if err != nil && strings.Contains(err.Error(), errReplacing.Error()) {
			cancel(fmt.Errorf("%w: %w", base.ErrUncertain, err))
		}
		if err != nil {
			base.Pause(ctx, nil)
			continue
		}
		over.Reset(lease / 2)
		sleep(ctx, lease/8)
	}
}
