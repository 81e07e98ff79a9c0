package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"codeq/internal/base"
	"codeq/internal/manifest"
	"codeq/internal/peer"
)

// A node whose directory is an older copy of itself would vote, and acknowledge, without what it
// had acknowledged since. Every member remembers in which life it has seen the directories of the
// others last (manifest.Lives), and refuses all connections to and from a copy that does not know
// of that. So that all know, a node makes itself known to each member, in each of its lives; and
// since a machine may be put back to a moment amid a life, a new one begins from time to time. A
// node that is refused fails, and when it is opened again it has another ID, as if its power had
// failed. When a life begins amid the node's work, a connection that was under way may say the one
// before, and be refused; so only what a greeting is told counts.

const (
	lifeLength = 10 * time.Minute // how long the directory has one life, if others know of it
	// maxSeen is from how many directories on those that are no members are dropped.
	maxSeen = 64
	// maxGreetPause is how many times HeartbeatTimeout the longest pause is between two tries to
	// reach a member that does not know the current life.
	maxGreetPause = 32
)

// checkLives is peer.Config.CheckLives. What it has noted is durable when it returns.
func (n *Node) checkLives(ctx context.Context, other peer.Identity, lives peer.Lives) error {
	id := other.ID.String()
	if lives.Birth > 0 { // or else nothing more than the directory is asked for
		select {
		case <-n.opened:
		case <-ctx.Done():
			return fmt.Errorf("%w: this node is being opened", peer.ErrEarly)
		}
		if err := n.checkProcess(ctx, other, lives); err != nil {
			return err
		}
	}
	if err := n.see(ctx, id, lives.All); err != nil {
		return err
	}
	if lives.Birth > 0 {
		n.peer.Admit(other.ID, lives.Birth)
	}
	return nil
}

// see durably notes the lives of the directory of another node, or refuses an older copy.
func (n *Node) see(ctx context.Context, id string, lives []uint64) error {
	n.membership.mu.Lock()
	isNew, err := n.c.Directory.Draft().See(id, lives)
	if err == nil {
		delete(n.membership.suspects, id) // it is there
	}
	n.membership.mu.Unlock()
	if err != nil || !isNew {
		return err // without a wait for another change
	}
	return n.changeManifestUntil(ctx, func(d *manifest.Directory) (bool, error) {
		isNew, err := d.See(id, lives)
		if err == nil && isNew && len(d.Seen) > maxSeen && n.ready.Load() {
			members := n.known()
			maps.DeleteFunc(d.Seen, func(o string, _ uint64) bool {
				return o != id && !slices.ContainsFunc(members, func(p Peer) bool { return p.ID == o })
			})
		}
		return isNew, err
	})
}

// makeKnown makes the current life of this node known to all members, as they come and go, until
// the node is about to be closed, or is an older copy.
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
			over := time.Since(began) >= lifeLength
			switch err := n.nextLife(over); {
			case err != nil:
				n.log.Warn("the life of the node is not noted", "err", err) // later, then
			case over:
				greeted, began, pause = make(map[string]bool), time.Now(), n.c.HeartbeatTimeout
				continue
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
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
// copy. One that knew the current life may do so when the machine was put back with its memory.
func (n *Node) isRefused(p Peer) bool {
	to, err := p.target()
	return err == nil && refusesCopy(n.peer.Failure(to))
}

// others are the other members; each of them has one of its addresses, should it have several. A
// node that knows none may be a copy from before it had any: then they are those of its peers that
// are of its cluster.
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

// greet makes this node known to others, and returns what has become of that.
func (n *Node) greet(ctx context.Context, others []Peer) []error {
	errs := make([]error, len(others))
	var greeting sync.WaitGroup
	for i, p := range others {
		greeting.Go(func() {
			errs[i] = n.guarded("greeting", func() error {
				to, err := p.target()
				if err != nil {
					return err
				}
				return n.peer.Greet(ctx, to)
			})
		})
	}
	greeting.Wait()
	return errs
}

// nextLife notes that a majority knows the current life, and begins the next one if that is over.
func (n *Node) nextLife(over bool) error {
	var lives []uint64
	err := n.changeManifest(func(d *manifest.Directory) (bool, error) {
		if len(d.Earlier) == 0 && !over {
			return false, nil
		}
		d.ForgetEarlier()
		if over {
			d.BeginLife()
		}
		lives = d.Lives()
		return true, nil
	})
	if err == nil && over {
		n.peer.SetLives(peer.Lives{All: lives, Birth: n.birth})
	}
	return err
}

// outdate ends the node, whose directory is an older copy. It has another ID when it is opened
// again.
func (n *Node) outdate(cause error) {
	err := n.changeManifest(func(d *manifest.Directory) (bool, error) { // or else it is noticed again
		d.Outdated = true
		return true, nil
	})
	n.failAll(errors.Join(fmt.Errorf("%w; opened again, it comes back without a vote until it has what it lacks: %w",
		base.ErrOldCopy, cause), err))
}
