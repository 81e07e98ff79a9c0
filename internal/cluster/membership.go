package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"codeq/internal/base"
	"codeq/internal/peer"
)

// Add makes a node part of the cluster: in the group of every shard it first follows, and votes
// when it has caught up.
func (n *Node) Add(ctx context.Context, p Peer) error {
	if err := n.checkSelf(); err != nil {
		return err
	}
	j, err := n.invite(ctx, p)
	if err != nil {
		return err
	}
	return n.admit(ctx, j)
}

// invite makes a node part of this cluster before it is added, and returns it with its IDs. It
// waits until the node answers.
func (n *Node) invite(ctx context.Context, p Peer) (joining, error) {
	j := joining{Peer: p, Join: true}
	var away error // why the node has not answered the last time
	waits := n.newWait()
	err := n.poll(ctx, func() (bool, error) {
		i, err := n.introduce(ctx, p)
		var refused *peer.RefusedError
		if errors.As(err, &refused) {
			return false, refusal(err)
		}
		if away = err; err != nil {
			waits.note("node that is to be added does not answer", away)
			return false, nil
		}
		if i.Cluster != "" && i.Cluster != n.Cluster() {
			return false, fmt.Errorf("%w: node %q is of cluster %s, not %s", base.ErrNotMember, p.Node, i.Cluster, n.Cluster())
		}
		j.ID, j.Former = i.ID, i.Former
		known := n.known()
		if err := cmp.Or(namesake(known, j.Peer), addressee(known, j.Peer)); err != nil || i.Cluster != "" {
			return true, err
		}
		_, err = n.peer.Introduce(ctx, peer.Target{Name: p.Node, Address: p.Address}, kindAdopt, []byte(n.Cluster()))
		if err != nil {
			return false, n.callError(ctx, err)
		}
		return true, nil
	})
	if err != nil && away != nil {
		err = fmt.Errorf("add node %s: %w: %w", p.Node, err, away)
	}
	return j, err
}

// refusal turns the refusal of a connection into the error for the application.
func refusal(err error) error {
	var refused *peer.RefusedError
	switch {
	case !errors.As(err, &refused):
		return err
	case refused.Reason == peer.RefusedGroups:
		return fmt.Errorf("%w: %w", base.ErrShardCount, err)
	case refused.Reason == peer.RefusedCluster, refused.Reason == peer.RefusedNode:
		return fmt.Errorf("%w: %w", base.ErrNotMember, err)
	case refused.Reason == peer.RefusedVersion, refused.Reason == peer.RefusedFormat:
		return fmt.Errorf("%w: %w", base.ErrFormat, err)
	}
	return err
}

// addressee returns an error if another member has the address of a node.
func addressee(members []Peer, p Peer) error {
	at := slices.IndexFunc(members, func(m Peer) bool { return m.Address == p.Address && m.ID != p.ID })
	if at < 0 {
		return nil
	}
	return fmt.Errorf("%w: address %s is that of node %q, which is to be removed first, or to be added with another address",
		base.ErrNotMember, p.Address, members[at].Node)
}

func (n *Node) add(ctx context.Context, p Peer) error {
	for i := range n.groups {
		if err := n.c.Leaders.Change(ctx, i, AddNode, p); err != nil {
			return fmt.Errorf("add node %s to shard %d: %w", p.Node, i, err)
		}
	}
	return n.giveVotes(ctx, p)
}

// ErrBehind: a node has not caught up with a shard, and gets no vote yet.
var ErrBehind = errors.New("codeq: node has not caught up")

// giveVotes gives a member a vote in each shard, as soon as it has caught up.
func (n *Node) giveVotes(ctx context.Context, p Peer) error {
	for i := range n.groups {
		if err := n.giveVote(ctx, i, p); err != nil {
			return fmt.Errorf("give node %s a vote in shard %d: %w", p.Node, i, err)
		}
	}
	return nil
}

func (n *Node) giveVote(ctx context.Context, shard int, p Peer) error {
	var behind error // the last error before the end of ctx
	waits := n.newWait()
	err := n.poll(ctx, func() (bool, error) {
		err := n.countBehind(ctx, shard, p)
		if err == nil {
			err = n.c.Leaders.Change(ctx, shard, GiveVote, p)
		}
		if !errors.Is(err, ErrBehind) {
			return true, err
		}
		if gone := n.c.Leaders.Change(ctx, shard, CheckMember, p); errors.Is(gone, base.ErrNotMember) {
			return true, gone // the node was removed, and makes no more progress
		}
		if ctx.Err() != nil && behind != nil {
			return false, nil // err may only report the end of ctx
		}
		behind = err
		waits.note("node does not vote yet", behind, "member", p.Node, "shard", shard)
		return false, nil
	})
	if err != nil && behind != nil && ctx.Err() != nil {
		return fmt.Errorf("%w: %w", err, behind)
	}
	return err
}

// closeBehind is how many entries a node may lack when a leader is asked to give it a vote.
const closeBehind = MaxAppend * closeMessages

// countBehind returns an error if a node lacks many entries, or all: the log may not have them. The
// leader also checks the content of its log, and its size, if its build does so.
func (n *Node) countBehind(ctx context.Context, shard int, p Peer) error {
	applied, err := n.c.Leaders.Applied(ctx, shard)
	if err != nil {
		return err
	}
	states, err := n.stateOf(ctx, p)
	if err == nil && shard >= len(states) {
		err = ErrMalformedCall
	}
	if err != nil {
		return fmt.Errorf("%w: node %s: %s", ErrBehind, p.Node, err.Error())
	}
	if states[shard].Failed { // until the node is opened again
		return fmt.Errorf("%w: node %s: its replica", base.ErrFailed, p.Node)
	}
	if has := states[shard].Applied; has+closeBehind <= applied || has == 0 && applied > 0 {
		return fmt.Errorf("%w: node %s has applied %d of %d entries", ErrBehind, p.Node, has, applied)
	}
	return nil
}

// wait is a wait for a node, perhaps a long one, that the log mentions now and then.
type wait struct {
	log  *slog.Logger
	next time.Time // time of the next message
}

// waitNote is the time between two messages about a wait.
const waitNote = 10 * time.Second

func (n *Node) newWait() *wait { return &wait{n.log, time.Now().Add(waitNote)} }

// note logs the reason why the wait goes on, if waitNote has passed.
func (w *wait) note(what string, why error, args ...any) {
	if now := time.Now(); !now.Before(w.next) {
		w.next = now.Add(waitNote)
		w.log.Warn(what, append(args, "err", why)...)
	}
}

// Remove takes a node out of the cluster. Before the first change it checks that all shards can do
// without the node.
//
// Removals are made one after the other, on whichever nodes they are called: each is decided by the
// first shard, which refuses the next one until all shards have made the last. If two nodes were
// removed from different shards first, each shard could lose its majority to the other removal.
//
// A message that adds the node may still be under way. So the first shard remembers the directories
// that it has removed, and never takes them back; and the other shards add only members of the
// first one.
func (n *Node) Remove(ctx context.Context, node string) error {
	finished, err := n.finishRemovals(ctx)
	if err != nil || slices.Contains(finished, node) {
		return err
	}
	if err := n.check(ctx, CheckRemoval, node); err != nil {
		return err
	}
	if err := n.remove(ctx, 0, Peer{Node: node}); err != nil {
		return err
	}
	return n.forget(ctx, node)
}

// remove removes a node from the shards, beginning with shard first. If p has an ID, only that
// directory is removed.
func (n *Node) remove(ctx context.Context, first int, p Peer) error {
	for i := first; i < len(n.groups); i++ {
		if err := n.c.Leaders.Change(ctx, i, RemoveNode, p); err != nil {
			if i > 0 {
				err = halfway(err)
			}
			return fmt.Errorf("remove node %s from shard %d: %w", p.Node, i, err)
		}
	}
	return nil
}

// halfway is the outcome of a change that has begun, and then failed: it must not say that nothing
// was done.
func halfway(err error) error {
	if errors.Is(err, base.ErrClosed) || errors.Is(err, base.ErrNoMajority) {
		return fmt.Errorf("%w: %s", base.ErrUncertain, err.Error())
	}
	return fmt.Errorf("%w: %w", base.ErrUncertain, err)
}

// errForget: a node was removed, but a shard still keeps its record of the node's produces.
var errForget = errors.New("the shard keeps what it knows of its produces")

// forget deletes the data that the shards keep for a node that was removed.
func (n *Node) forget(ctx context.Context, node string) error {
	for i := range n.groups {
		if err := n.c.Leaders.Forget(ctx, i, node); err != nil {
			return fmt.Errorf("node %s was removed; shard %d: %w: %w", node, i, errForget, halfway(err))
		}
	}
	return nil
}

// finishRemovals removes the nodes that the first shard has removed, and others not yet, and
// returns their names. It identifies them by their directories: meanwhile the removal may be
// finished, and another directory added under the name.
func (n *Node) finishRemovals(ctx context.Context) (finished []string, err error) {
	for _, p := range removing(n.Status(ctx)) {
		err := n.c.Leaders.Change(ctx, 0, CheckMember, p)
		if err == nil {
			continue // this node had an old state
		}
		if !errors.Is(err, base.ErrNotMember) {
			return finished, fmt.Errorf("remove node %s: %w", p.Node, err)
		}
		if err = n.remove(ctx, 1, p); err == nil {
			err = n.forget(ctx, p.Node)
		}
		if err != nil {
			return finished, err
		}
		finished = append(finished, p.Node)
	}
	return finished, nil
}

// removing is the nodes, by their directories, that shards still have although the first one has
// none of their name, as far as the leaders are known.
func removing(shards []ShardStatus) (nodes []Peer) {
	if shards[0].Leader == "" {
		return nil
	}
	for _, sh := range shards[1:] {
		for _, r := range sh.Replicas {
			p := Peer{Node: r.Node, Address: r.Address, ID: r.ID}
			if sh.Leader != "" && !shards[0].hasName(r.Node) && !slices.Contains(nodes, p) {
				nodes = append(nodes, p)
			}
		}
	}
	return nodes
}

// check asks the leaders of all shards whether a node, which at least one of them has, can be
// removed.
func (n *Node) check(ctx context.Context, how Change, node string) error {
	var unknown error
	known := false
	for i := range n.groups {
		switch err := n.c.Leaders.Change(ctx, i, how, Peer{Node: node}); {
		case err == nil:
			known = true
		case errors.Is(err, base.ErrNotMember):
			unknown = err
		default:
			return fmt.Errorf("remove node %s: %w", node, err)
		}
	}
	if known {
		return nil
	}
	return unknown
}

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
