package cluster

import (
	"context"
	"errors"
	"sync"
	"time"

	"codeq/internal/base"
)

// Leave takes this node out of the cluster if LeaveOnClose asks for it, and it is a member. If
// other nodes leave, too, it waits for its turn. The last one stays a member, and waits until the
// others are removed from all shards: they need it for that, and it could not lead a shard later
// that still has one of them.
func (n *Node) Leave() error {
	if !n.c.LeaveOnClose || n.Cluster() == "" {
		return nil
	}
	for members := len(n.groups) * len(n.known()); ; {
		left, err := n.tryLeave()
		waits := errors.Is(err, base.ErrNotLeader) || errors.Is(err, base.ErrUncertain)
		if errors.Is(err, base.ErrInvalid) {
			n.letLeave()
			return err
		}
		if !waits || left >= members {
			return err
		}
		members = left // others have left meanwhile
	}
}

// letLeave finishes the removals of all other nodes, as the only member of the first shard.
func (n *Node) letLeave() {
	ctx, cancel := context.WithTimeout(n.ctx, n.c.CallTimeout)
	defer cancel()
	_ = n.poll(ctx, func() (bool, error) {
		if _, err := n.finishRemovals(ctx); err != nil {
			return false, nil // no leader yet
		}
		_, all := n.membersOf(ctx)
		return all == len(n.groups), nil
	}) // the end of ctx is no error
	time.Sleep(2 * n.c.ElectionTimeout) // nodes that have just left may not know it yet
}

// tryLeave also returns how many members all shards have together. While it removes this node it
// asks the others whether that is done: another node may have finished it, and be about to be
// closed.
func (n *Node) tryLeave() (left int, err error) {
	ctx, cancel := context.WithTimeout(n.ctx, n.c.CallTimeout)
	defer cancel()
	var removed bool
	var asking sync.WaitGroup
	asking.Go(func() {
		n.contain("question for the members", func() {
			_ = n.poll(ctx, func() (bool, error) {
				member, _ := n.membersOf(ctx)
				removed = !member
				return removed, nil
			}) // the end of ctx is no error
			if removed {
				cancel()
			}
		}, nil)
	})
	if err = n.Remove(ctx, n.self.Node); !IsRemoval(err) {
		cancel()
	} // or else another node finishes it
	asking.Wait()
	if removed || errors.Is(err, base.ErrNotMember) || errors.Is(err, errForget) {
		return 0, nil
	}
	_, left = n.membersOf(n.ctx)
	return left, err
}

// membersOf returns whether this node may be a member of a shard, and how many members all shards
// have together.
func (n *Node) membersOf(ctx context.Context) (member bool, all int) {
	ids := n.ids()
	for _, sh := range n.Status(ctx) {
		all += len(sh.Replicas)
		member = member || sh.Leader == "" || sh.has(ids)
	}
	return member, all
}
