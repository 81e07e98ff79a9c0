package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"codeq/internal/base"
	"codeq/internal/manifest"
	"codeq/internal/peer"
)

// A node with an older copy of its directory would vote, and acknowledge, without its
// acknowledgements since the copy. Every member remembers the last incarnation that it has seen of
// each directory of the others (manifest.Incarnations), and refuses all connections to and from a
// copy from before that incarnation. So that all members know its incarnation, a node greets each
// member in each of its incarnations; and since a machine may be reset to a moment within an
// incarnation, a new incarnation begins from time to time. A node that is refused fails, and has
// another ID when it is opened again, as after a power loss. When an incarnation begins while the
// node works, a connection under way may carry the incarnation before, and be refused; so only the
// answer to a greeting counts.

const (
	incarnationLength = 10 * time.Minute // of the directory, if the others have learned it
	// maxSeen is the number of directories above which those of former members are dropped.
	maxSeen = 64
	// maxGreetPause times HeartbeatTimeout is the longest pause between two attempts to reach a
	// member that does not know the current incarnation.
	maxGreetPause = 32
)

// checkIncarnations is peer.Config.CheckIncarnations. Its changes are durable when it returns.
func (n *Node) checkIncarnations(ctx context.Context, other peer.Identity, incarnations peer.Incarnations) error {
	select {
	case <-n.opened:
	case <-ctx.Done():
		return fmt.Errorf("%w: this node is being opened", peer.ErrEarly)
	}
	if err := n.checkProcess(ctx, other, incarnations); err != nil {
		return err
	}
	if err := n.see(ctx, other.ID.String(), incarnations.All); err != nil {
		return err
	}
	n.peer.Admit(other.ID, incarnations.Birth)
	return nil
}

// see durably stores the incarnations of the directory of another node, or refuses an older copy.
func (n *Node) see(ctx context.Context, id string, incarnations []uint64) error {
	n.membership.mu.Lock()
	isNew, err := n.c.Directory.Draft().See(id, incarnations)
	if err == nil {
		delete(n.membership.suspects, id) // the directory is open
	}
	n.membership.mu.Unlock()
	if err != nil || !isNew {
		return err // no wait for other changes
	}
	return n.changeManifestUntil(ctx, func(d *manifest.Directory) (bool, error) {
		isNew, err := d.See(id, incarnations)
		if err == nil && isNew && len(d.Seen) > maxSeen && n.ready.Load() {
			members := n.known()
			maps.DeleteFunc(d.Seen, func(o string, _ uint64) bool {
				return o != id && !slices.ContainsFunc(members, func(p Peer) bool { return p.ID == o })
			})
		}
		return isNew, err
	})
}

// makeKnown greets all members in the current incarnation, as they come and go, until the node is
// about to be closed, or is an older copy.
func (n *Node) makeKnown() {
	ctx := n.membership.ctx
	greeted, began, pause := make(map[string]bool), time.Now(), n.c.HeartbeatTimeout
	for {
		others := n.others(ctx)
		strangers := slices.DeleteFunc(slices.Clone(others), func(p Peer) bool { return greeted[p.ID] && !n.isRefused(p) })
		for i, err := range n.greet(ctx, strangers) {
			switch id := strangers[i].ID; {
			case err == nil && !greeted[id]:
				greeted[id], pause = true, n.c.HeartbeatTimeout
			case refusesCopy(err):
				n.outdate(err)
				return
			}
		}
		n.tellAddress(ctx, others)
		maps.DeleteFunc(greeted, func(id string, _ bool) bool {
			return !slices.ContainsFunc(others, func(p Peer) bool { return p.ID == id })
		})
		if len(greeted) > 0 && 2*len(greeted) >= len(others) {
			over := time.Since(began) >= incarnationLength
			switch err := n.nextIncarnation(over); {
			case err != nil:
				n.log.Warn("the incarnation of the node is not noted", "err", err) // stored later
			case over:
				greeted, began, pause = make(map[string]bool), time.Now(), n.c.HeartbeatTimeout
				continue
			}
		}
		if !sleep(ctx, pause) {
			return
		}
		pause = min(2*pause, maxGreetPause*n.c.HeartbeatTimeout)
	}
}

// refusesCopy reports whether another node has refused this one as an older copy.
func refusesCopy(err error) bool {
	var refused *peer.RefusedError
	return errors.As(err, &refused) && refused.Reason == peer.RefusedCopy
}

// isRefused reports whether a node has refused the last connection of this one as that of an older
// copy. A node that knew the current incarnation may do so when the machine was reset together with
// its memory.
func (n *Node) isRefused(p Peer) bool {
	to, err := p.target()
	return err == nil && refusesCopy(n.peer.Failure(to))
}

// others are the other members; each has one of its addresses, should it have several. A node that
// knows none may be a copy from before it had any: then they are those of its peers that belong to
// its cluster.
func (n *Node) others(ctx context.Context) (others []Peer) {
	members := n.known()
	if len(members) == 0 && n.Cluster() != "" {
		ctx, cancel := context.WithTimeout(ctx, n.c.HeartbeatTimeout)
		defer cancel()
		for _, a := range n.introduceAll(ctx, n.c.Peers) {
			if a.err == nil && a.Cluster == n.Cluster() {
				members = append(members, a.peer())
			}
		}
	}
	for _, p := range members {
		if p.ID != n.self.ID && !slices.ContainsFunc(others, func(o Peer) bool { return o.ID == p.ID }) {
			others = append(others, p)
		}
	}
	return others
}

// greet makes this node known to others, and returns the outcomes.
func (n *Node) greet(ctx context.Context, others []Peer) []error {
	return n.together("greeting", len(others), func(i int) error {
		to, err := others[i].target()
		if err != nil {
			return err
		}
		return n.peer.Greet(ctx, to)
	})
}

// nextIncarnation records that a majority knows the current incarnation, and begins the next one if
// over is set.
func (n *Node) nextIncarnation(over bool) error {
	var incarnations []uint64
	err := n.changeManifest(func(d *manifest.Directory) (bool, error) {
		if len(d.Earlier) == 0 && !over {
			return false, nil
		}
		d.ForgetEarlier()
		if over {
			d.BeginIncarnation()
		}
		incarnations = d.Incarnations()
		return true, nil
	})
	if err == nil && over {
		n.peer.SetIncarnations(peer.Incarnations{All: incarnations, Birth: n.birth})
	}
	return err
}

// outdate ends the node because its directory is an older copy. It has another ID when it is opened
// again.
func (n *Node) outdate(cause error) {
	err := n.changeManifest(func(d *manifest.Directory) (bool, error) { // after an error this is found again
		d.Outdated = true
		return true, nil
	})
	n.failAll(errors.Join(fmt.Errorf("%w; opened again, it comes back without a vote until it has what it lacks: %w",
		base.ErrOldCopy, cause), err))
}
