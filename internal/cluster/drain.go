package cluster

import (
	"context"
	"fmt"
	"sync"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
)

// A drained node votes, stores and forwards calls, but leads nothing if another node can: it hands
// over what it leads, and no other node hands over to it. It notes that in its manifest, and tells
// it with its state.

// Drain durably makes the node one that leads nothing, and returns when that is so. If another node
// cannot lead within CallTimeout, it says why; the node goes on trying.
func (n *Node) Drain(ctx context.Context) error {
	if err := n.checkSelf(); err != nil {
		return err
	}
	if err := n.setDrained(true); err != nil {
		return err
	}
	for again := n.NewPatience(); ; {
		change := n.routes.next()
		err := n.giveAway()
		if err == nil {
			return nil
		}
		if !again.Wait(ctx, change) {
			if ctx.Err() != nil {
				err = fmt.Errorf("%w: %w", base.EndOf(ctx), err)
			}
			return err
		}
	}
}

// Undrain undoes Drain.
func (n *Node) Undrain() error {
	if err := n.checkSelf(); err != nil {
		return err
	}
	return n.setDrained(false)
}

func (n *Node) drained() bool {
	n.membership.mu.Lock()
	defer n.membership.mu.Unlock()
	return n.c.Directory.Drained
}

func (n *Node) setDrained(drained bool) error {
	n.membership.mu.Lock()
	defer n.membership.mu.Unlock()
	d := n.c.Directory
	if n.membership.ctx.Err() != nil { // or else another life of the node may have written it
		return base.ErrClosed
	}
	if d.Drained == drained {
		return nil
	}
	d.Drained = drained
	if err := d.Write(); err != nil {
		d.Drained = !drained
		return fmt.Errorf("%w: write %s: %w", base.ErrFailed, d.Path, err)
	}
	return nil
}

// giveAway hands over the shards that this node leads, as far as others can take them, and returns
// why one of them is still led here.
func (n *Node) giveAway() error {
	var handing sync.WaitGroup
	stays := make([]error, len(n.groups))
	for i, g := range n.groups {
		if g.raft.State() == raft.Leader {
			handing.Go(func() { stays[i] = n.guarded("end of a leadership", g.handOver) })
		}
	}
	handing.Wait()
	for i, g := range n.groups {
		switch {
		case g.raft.State() != raft.Leader:
		case stays[i] != nil:
			return stays[i]
		default:
			return fmt.Errorf("%w: shard %d has come back to this node", base.ErrCannotLead, i)
		}
	}
	return nil
}
