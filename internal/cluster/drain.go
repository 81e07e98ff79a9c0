package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/manifest"
)

// A drained node votes, stores and forwards calls, but leads nothing if another node can: it hands
// over its shards, and no other node hands over to it. Its manifest says so, and its state tells
// the others.

// Drain durably marks the node as drained, and returns when it leads nothing. If no other node can
// lead within CallTimeout, the error says why; the node goes on trying.
func (n *Node) Drain(ctx context.Context) error {
	if err := n.checkSelf(); err != nil {
		return err
	}
	if err := n.setDrained(ctx, true); err != nil {
		return err
	}
	for again := n.NewPatience(); ; {
		change := n.routes.next()
		err := n.giveAwayUntil(ctx)
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
func (n *Node) Undrain(ctx context.Context) error {
	if err := n.checkSelf(); err != nil {
		return err
	}
	return n.setDrained(ctx, false)
}

func (n *Node) drained() bool {
	n.membership.mu.Lock()
	defer n.membership.mu.Unlock()
	return n.c.Directory.Drained
}

// setDrained durably stores whether the node is drained. If the disk does not answer until ctx
// ends, or for CallTimeout, it may be stored later.
func (n *Node) setDrained(ctx context.Context, drained bool) error {
	written := n.inBackground("note of a drain", func() error {
		return n.changeManifest(func(d *manifest.Directory) (bool, error) {
			changed := d.Drained != drained
			d.Drained = drained
			return changed, nil
		})
	})
	patience := time.NewTimer(n.c.CallTimeout)
	defer patience.Stop()
	select {
	case err := <-written:
		if err == nil || errors.Is(err, base.ErrClosed) {
			return err
		}
		return fmt.Errorf("%w: %w", base.ErrFailed, err)
	case <-ctx.Done():
		return fmt.Errorf("%w: the manifest is being written: %w", base.ErrUncertain, base.EndOf(ctx))
	case <-patience.C:
		return fmt.Errorf("%w: the manifest is being written for %v: %w", base.ErrUncertain, n.c.CallTimeout, base.ErrStalled)
	}
}

// giveAwayUntil is giveAway, but returns when ctx ends.
func (n *Node) giveAwayUntil(ctx context.Context) error {
	select {
	case err := <-n.inBackground("end of leaderships", n.giveAway):
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: shards are being handed over", base.ErrUncertain)
	}
}

// inBackground runs do for a caller that may not wait for its end. Close waits for it; once Close
// has begun, do is not run.
func (n *Node) inBackground(what string, do func() error) <-chan error {
	done, m := make(chan error, 1), &n.membership
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ctx.Err() != nil { // the next incarnation of the node may have the directory soon
		done <- base.ErrClosed
	} else {
		n.background.Go(func() { done <- n.guarded(what, do) })
	}
	return done
}

// giveAway hands over the shards that this node leads, as far as others can take them, and returns
// the reason why one of them is still led here.
func (n *Node) giveAway() error {
	stays := n.together("end of a leadership", len(n.groups), func(i int) error {
		if g := n.groups[i]; g.raft.State() == raft.Leader {
			return g.handOver()
		}
		return nil
	})
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
