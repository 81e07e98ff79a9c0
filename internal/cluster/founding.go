package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/failstop"
	"codeq/internal/manifest"
	"codeq/internal/peer"
	"codeq/internal/wire"
)

// A new cluster begins when all its founders have introduced themselves to the first of them by
// name: that one makes the ID of the cluster, and the first configuration of each group. The others
// ask until they learn it. A node with a new directory never founds a cluster while one of its
// peers belongs to one, and never joins one that knows its name with another directory: it would
// vote, and acknowledge, without the data of that directory.

// introduction is the answer of a node to kindWho.
type introduction struct {
	Node, ID string
	Address  string
	Cluster  string   // "": no cluster yet
	Members  []Peer   // of that cluster, as far as it knows
	Former   []string `json:",omitempty"` // former IDs by which it may still be a member
	Founders []string // without a cluster: the names of the founders of its future one
}

func (n *Node) introduction() introduction {
	i := introduction{Node: n.self.Node, ID: n.self.ID, Address: n.self.Address, Cluster: n.Cluster()}
	if i.Cluster == "" {
		if !n.c.Join {
			for _, p := range n.founders() {
				i.Founders = append(i.Founders, p.Node)
			}
		}
		return i
	}
	i.Members, i.Former = n.known(), n.former()
	return i
}

// known is every member of any group.
func (n *Node) known() (all []Peer) {
	for _, g := range n.groups {
		members, err := g.members()
		if err != nil {
			continue // the group has ended here
		}
		for _, m := range members {
			if p := peerOf(m); !slices.Contains(all, p) {
				all = append(all, p)
			}
		}
	}
	return all
}

// namesake returns an error if a node with another directory has the name.
func namesake(members []Peer, p Peer) error {
	at := slices.IndexFunc(members, func(m Peer) bool { return m.Node == p.Node && m.ID != p.ID })
	if at < 0 {
		return nil
	}
	return fmt.Errorf("%w: the cluster knows node %q with another directory; one that is lost is replaced by a node with "+
		"another name (ReplaceNode)", base.ErrNotMember, p.Node)
}

// founders are the first nodes of a new cluster, by name.
func (n *Node) founders() []Peer {
	all := slices.Clone(n.c.Peers)
	if !slices.ContainsFunc(all, func(p Peer) bool { return p.Node == n.self.Node }) {
		all = append(all, n.self)
	}
	for i := range all {
		if all[i].Node == n.self.Node {
			all[i].ID = n.self.ID
		}
	}
	slices.SortFunc(all, func(a, b Peer) int { return cmp.Compare(a.Node, b.Node) })
	return all
}

// found makes a node without a cluster part of one: of the new one that it founds together with
// others, or of the one that another node adds it to. If the others answer soon, found returns that
// outcome; otherwise the node asks on in the background.
func (n *Node) found() error {
	ctx, cancel := context.WithTimeout(n.ctx, n.c.HeartbeatTimeout/foundingShare)
	defer cancel()
	decided, err := n.askFounders(ctx)
	if decided || err != nil {
		return err
	}
	n.watch("founding of a cluster", n.foundLater, n.failAll)
	return nil
}

// foundingShare is the part of HeartbeatTimeout that Open waits for the others' answers.
const foundingShare = 4

// foundLater asks the other founders until the node is part of a cluster, or closed: often at
// first, as those of a new cluster are opened at one time.
func (n *Node) foundLater() {
	for pause := n.c.HeartbeatTimeout / firstPauses; ; pause = min(2*pause, n.c.HeartbeatTimeout) {
		if !sleep(n.membership.ctx, pause) || n.Cluster() != "" { // another node has added this one
			return
		}
		ctx, cancel := context.WithTimeout(n.membership.ctx, raftTimeout)
		decided, err := n.askFounders(ctx)
		cancel()
		if failstop.IsNoSpace(err) && n.Cluster() == "" { // nothing was stored
			n.membership.wait("the cluster has not begun", err, n.log)
			continue
		}
		if err != nil {
			n.failAll(err)
		}
		if decided || err != nil {
			return
		}
	}
}

// firstPauses is the fraction of HeartbeatTimeout that the first pause between two questions takes.
const firstPauses = 16

// failAll ends all groups here.
func (n *Node) failAll(err error) {
	for _, g := range n.groups {
		g.Fail(err)
	}
}

// askFounders asks the other founders once for an introduction. It reports whether the node is part
// of a cluster now. After an error the node will not become part of one.
func (n *Node) askFounders(ctx context.Context) (decided bool, err error) {
	founders := n.founders()
	var missing []error // why the cluster cannot begin
	isMember := func(i introduction) bool {
		return slices.ContainsFunc(i.Members, func(m Peer) bool { return m.ID == n.self.ID })
	}
	for _, a := range n.introduceUntil(ctx, founders, isMember) {
		at := slices.IndexFunc(founders, func(p Peer) bool { return p.Node == a.Node })
		switch {
		case a.err != nil:
			missing = append(missing, a.err)
		case a.Cluster != "":
			if err := namesake(a.Members, n.self); err != nil {
				return false, err
			}
			if isMember(a.introduction) {
				return true, n.adopt(a.Cluster)
			}
			missing = append(missing, fmt.Errorf("node %q is of cluster %s, which this node is not part of (AddNode)", a.Node, a.Cluster))
		case !slices.Equal(a.Founders, names(founders)):
			missing = append(missing, fmt.Errorf("node %q begins a cluster of %q, this one of %q", a.Node, a.Founders, names(founders)))
		case a.Address != founders[at].Address:
			missing = append(missing, fmt.Errorf("node %q says that its address is %s, not %s", a.Node, a.Address, founders[at].Address))
		default:
			founders[at].ID = a.ID
		}
	}
	if n.membership.ctx.Err() != nil || n.Cluster() != "" { // another node has added this one meanwhile
		return false, nil
	}
	if len(missing) == 0 && founders[0].Node != n.self.Node {
		missing = append(missing, fmt.Errorf("node %q is to begin it", founders[0].Node))
	}
	if err := errors.Join(missing...); err != nil {
		n.membership.wait("the cluster has not begun", err, n.log)
		return false, nil
	}
	return true, n.begin(founders)
}

func names(peers []Peer) (names []string) {
	for _, p := range peers {
		names = append(names, p.Node)
	}
	return names
}

// begin founds the cluster. If the node ends before begin is complete, it continues when it is
// opened again: the manifest has the founders until all groups have begun.
//
// The others learn of the cluster before they know all groups. So until a majority knows the first
// members of a group, the group depends on this node, which must not lose power and come back as
// another one: meanwhile its acknowledged entries are on its disk, at any level.
func (n *Node) begin(founders []Peer) error {
	d, all := n.c.Directory, foundersOf(founders)
	if err := n.adoptFormat(n.formatOfFounders(all)); err != nil {
		return err
	}
	if err := n.adopt(manifest.NewID(), all...); err != nil {
		return err
	}
	for _, g := range n.groups {
		err := g.raft.BootstrapCluster(configurationOf(all)).Error()
		if err != nil && !errors.Is(err, raft.ErrCantBootstrap) {
			return fmt.Errorf("codeq: found shard %d of %s: %w", g.index, d.Path, err)
		}
	}
	n.watch("first election", n.standFirst, nil) // or another node stands after HeartbeatTimeout
	n.watchBeginning()
	return nil
}

// watchBeginning records the moment when all groups have begun, if this node founds the cluster.
func (n *Node) watchBeginning() {
	if !n.founding.Load() {
		return
	}
	n.watch("beginning of a cluster", func() {
		blank := func(g *Group) bool { return g.raft.CommitIndex() == 0 }
		err := n.poll(n.membership.ctx, func() (bool, error) { return !slices.ContainsFunc(n.groups, blank), nil })
		if err == nil {
			err = n.awaitRoom(n.begun)
		}
		if err != nil && n.membership.ctx.Err() == nil {
			n.failAll(err)
		}
	}, n.failAll)
}

// goOnFounding completes a begin that a crash has interrupted, for one group. Raft does not: to
// Raft a group that has a term, and nothing else yet, exists already.
func (g *Group) goOnFounding(logs *groupLog, votes *groupVotes, c raft.Configuration) error {
	last, err := logs.LastIndex()
	if err != nil || last > 0 || g.Applied() > 0 {
		return err
	}
	if err := votes.SetUint64([]byte(keyCurrentTerm), 1); err != nil {
		return err
	}
	return logs.StoreLog(&raft.Log{Index: 1, Term: 1, Type: raft.LogConfiguration, Data: raft.EncodeConfiguration(c)})
}

// begun records that all groups have begun.
func (n *Node) begun() error {
	err := n.changeManifest(func(d *manifest.Directory) (bool, error) { d.Founders = nil; return true, nil })
	if err == nil {
		n.founding.Store(false)
	}
	return err
}

func foundersOf(peers []Peer) (founders []manifest.Founder) {
	for _, p := range peers {
		founders = append(founders, manifest.Founder{Node: p.Node, ID: p.ID, Address: p.Address})
	}
	return founders
}

// configurationOf is the first configuration of each group of a new cluster: all vote.
func configurationOf(founders []manifest.Founder) (c raft.Configuration) {
	for _, f := range founders {
		c.Servers = append(c.Servers, raft.Server{
			ID: Peer{Node: f.Node, ID: f.ID}.ServerID(), Address: raft.ServerAddress(f.Address),
		})
	}
	return c
}

// introduce asks a node, which need not be of this cluster, for an introduction.
func (n *Node) introduce(ctx context.Context, p Peer) (i introduction, err error) {
	b, err := n.peer.Introduce(ctx, peer.Target{Name: p.Node, Address: p.Address}, kindWho, nil)
	if err != nil {
		return i, fmt.Errorf("node %q at %s: %w", p.Node, p.Address, err)
	}
	if err := json.Unmarshal(b, &i); err != nil || i.Node != p.Node || i.ID == "" {
		return i, fmt.Errorf("node %q at %s: %w", p.Node, p.Address, ErrMalformedCall)
	}
	return i, nil
}

// answer is the introduction of a node, or the reason why there is none.
type answer struct {
	introduction
	address string
	err     error
}

// peer is the node that has answered.
func (a *answer) peer() Peer { return Peer{Node: a.Node, Address: a.address, ID: a.ID} }

// introduceAll asks all nodes except this one for an introduction. It returns when all have
// answered, or ctx has ended.
func (n *Node) introduceAll(ctx context.Context, peers []Peer) []answer {
	return n.introduceUntil(ctx, peers, nil)
}

// introduceUntil is introduceAll that returns earlier if an answer is enough. A node with any other
// answer is asked again each HeartbeatTimeout while others are silent, as the answer may change.
// Several goroutines call enough; nil: no answer is enough.
func (n *Node) introduceUntil(ctx context.Context, peers []Peer, enough func(introduction) bool) []answer {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	awaiting, last := context.WithCancel(ctx) // ends when no node is silent any more
	defer last()
	peers = slices.DeleteFunc(slices.Clone(peers), func(p Peer) bool { return p.Node == n.self.Node })
	answers := make([]answer, len(peers))
	var silent atomic.Int32
	silent.Store(int32(len(peers)))
	for i, err := range n.together("introduction", len(peers), func(i int) (err error) {
		heard := sync.OnceFunc(func() {
			if silent.Add(-1) == 0 {
				last()
			}
		})
		defer heard()
		a := &answers[i]
		if a.introduction, err = n.introduce(ctx, peers[i]); err != nil || enough == nil {
			return err
		}
		for heard(); !enough(a.introduction); {
			if !sleep(awaiting, n.c.HeartbeatTimeout) {
				return nil
			}
			if again, err := n.introduce(awaiting, peers[i]); err == nil {
				a.introduction = again
			}
		}
		cancel()
		return nil
	}) {
		answers[i].address, answers[i].err = peers[i].Address, err
	}
	return answers
}

// serveIntroduction answers a node that need not be of this cluster.
func (n *Node) serveIntroduction(r *peer.Request) error {
	switch r.Kind {
	case kindWho:
		r.Reply(wire.AppendJSON(nil, n.introduction()))
		return nil
	case kindAdopt:
		n.answer(r, "adoption", func() ([]byte, error) { return nil, n.adopt(string(r.Body)) })
		return nil
	case kindElders:
		return n.serveElders(r)
	}
	return ErrMalformedCall
}
