package codeq

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/inspect"
	"codeq/internal/localsocket"
	"codeq/internal/manifest"
	"codeq/internal/wire"
)

// Cluster makes a queue one of several nodes with the same tasks: each shard is a Raft group
// (Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm"). Acknowledged
// changes are in the logs of a majority; any node serves any call. The leader of a task's shard
// decides by its [Options]: give all nodes the same.
type Cluster struct {
	// Node is the name of this node and its directory, 1 to 255 bytes of UTF-8. Required. After the
	// loss of its directory a node needs a new one: [Open], or, if the others do not answer within
	// a quarter of HeartbeatTimeout, later calls and [Queue.Close] refuse an empty directory.
	Node string
	// Listen is where other nodes reach this one, such as "10.0.0.1:7400". Required, or Listener.
	Listen    string
	Listener  net.Listener // the queue, or an [Open] that fails, closes it
	Advertise string       // host:port that other nodes dial, at most 300 bytes. Default: that of Listen or Listener.
	// Peers are the first nodes of a new cluster, on all nodes the same, each with its own name and
	// address, with or without this one. The cluster begins when all are open; then it knows its
	// members, and Peers are where they may have moved ([Queue.AddNode]). Without other nodes, a
	// standalone queue or a [Queue.Checkpoint] becomes the first node, with all that it has, and
	// others join it. An only node, closed, opens without [Options.Cluster] as such a queue again.
	Peers []Peer
	// Join adds a new node to the existing cluster of Peers: [Open] asks each once, for 5 minutes
	// at most, and returns when the node votes. [ErrNotLeader]: less than half answer, and are of
	// one cluster. context.DeadlineExceeded: no progress (entries, bytes of files) for 5 minutes.
	// [Options.Shards] is the cluster's. A directory that was part of it ignores Join.
	Join bool
	// TLS protects the connections between nodes. Both sides show its certificate, with the node's
	// name as an alternative name (DNS or URI); [Open] looks at Certificates, and asks
	// GetCertificate and GetClientCertificate once. ClientAuth must be
	// tls.RequireAndVerifyClientCert, unless AllowAnonymous; RootCAs and ClientCAs are the
	// certificates' authority. Default of ServerName: the dialed host. Default: no protection:
	// anyone who reaches the address may do anything.
	TLS              *tls.Config
	AllowAnonymous   bool          // accepts nodes without a verified certificate, which TLS refuses by default
	HeartbeatTimeout time.Duration // without a word from its leader, once to twice, a node elects another. Default: 500 ms.
	ElectionTimeout  time.Duration // bounds an election; then another one begins. Default: HeartbeatTimeout.
	// CallTimeout is how long a call waits for a leader that commits; longer only while the shard,
	// or a large message, goes on. Waiting claims, [Queue.Await], [Queue.WaitIdle], [Queue.Run] and
	// changes of members wait as long as their ctx. Without a commit for this, StallAfter and twice
	// ElectionTimeout, an operation is uncertain. Default: 10 s.
	CallTimeout time.Duration
	// LeaveOnClose makes [Queue.Close] call [Queue.RemoveNode], and return its error, as for the
	// last node. By default a closed node stays a member, and is missed.
	LeaveOnClose bool

	private inspect.Private
}

// Peer is the name and the address of a node.
type Peer struct {
	Node    string
	Address string
}

func (c *Cluster) withDefaults() (*Cluster, error) {
	o := *c
	o.Peers, o.TLS = slices.Clone(o.Peers), o.TLS.Clone()
	n := o.config()
	if field, value, limit := n.SetDefaults(); limit != "" {
		return nil, &InvalidError{field, value, limit}
	}
	o.Advertise, o.HeartbeatTimeout, o.ElectionTimeout, o.CallTimeout = n.Advertise, n.HeartbeatTimeout, n.ElectionTimeout, n.CallTimeout
	return &o, nil
}

// config is the part of a node's configuration that users give.
func (c *Cluster) config() cluster.Config {
	n := cluster.Config{
		Node: c.Node, Listen: c.Listen, Listener: c.Listener, Advertise: c.Advertise, Join: c.Join, TLS: c.TLS, AllowAnonymous: c.AllowAnonymous,
		HeartbeatTimeout: c.HeartbeatTimeout, ElectionTimeout: c.ElectionTimeout, CallTimeout: c.CallTimeout, LeaveOnClose: c.LeaveOnClose,
		Newest: c.private.Newest, Dial: c.private.Dial, Votes: c.private.Votes, Log: c.private.Log,
	}
	for _, p := range c.Peers {
		n.Peers = append(n.Peers, p.inner())
	}
	return n
}

func (p Peer) inner() cluster.Peer { return cluster.Peer{Node: p.Node, Address: p.Address} }

func (q *Queue) checkAddress(address string) error {
	if limit := cluster.CheckPeerAddress(address, q.opts.Cluster.private.Dial != nil); limit != "" {
		return &InvalidError{"Peer.Address", base.Shortly(address), limit}
	}
	return nil
}

// checkOpen refuses an address in use and, without a cluster yet, one that differs from Peers.
func (c *Cluster) checkOpen(m *manifest.Manifest) error {
	for _, p := range c.Peers {
		if p.Node == c.Node && p.Address != c.Advertise && !c.Join && (m == nil || m.Cluster == "") {
			return &InvalidError{"Cluster.Peers: address of " + p.Node, strconv.Quote(p.Address), "what the node advertises: " + c.Advertise}
		}
	}
	if c.Listener == nil {
		return cluster.CheckListen(c.Listen)
	}
	return nil
}

// AddNode makes a node part of the cluster: in each shard it first follows, and votes when it has
// caught up. The node must be open, with [Cluster.Join] ([Open] then calls AddNode) or with the
// Peers of this cluster; AddNode waits for that as long as its ctx, and logs why. A member with a
// new address is added again. ErrNotMember: the cluster knows the name with another directory (see
// [Queue.ReplaceNode]), the node is of another cluster or was removed (it may return with an empty
// directory), or another node or server has the address. Ask any node, and again after an error:
// completed steps stay, and others may follow, until [Queue.RemoveNode].
//
// Errors: [ErrNotMember], [ErrShardCount], [ErrFormat], those of nodes ([Queue]), and that of ctx.
func (q *Queue) AddNode(ctx context.Context, p Peer) (err error) {
	defer public(&err)
	if done, err := q.tellCluster(ctx, localsocket.AddNode, p, p.Node); done {
		return err
	}
	if err := q.checkAddress(p.Address); err != nil {
		return err
	}
	return q.node.Add(ctx, p.inner())
}

// RemoveNode takes a node out of the cluster for good, this one or one that is gone included: the
// others refuse its directory from then on (they remember a thousand removed names and
// directories). [Open] of it does not ask them; calls of the node say that it was removed, even if
// another directory has its name by now. First the nodes that stay are asked, for every shard: if
// less than a majority answers, nothing changes ([ErrNoMajority]); then its shards are transferred.
// [ErrNotMember]: no shard has a node of this name. [ErrUncertain]: only some may have it. Ask any
// node, and again; concurrent removals follow each other.
//
// Errors: [ErrNotMember], [ErrNoMajority], those of nodes (see [Queue]), and that of ctx.
func (q *Queue) RemoveNode(ctx context.Context, node string) (err error) {
	defer public(&err)
	if done, err := q.tellCluster(ctx, localsocket.RemoveNode, node, node); done {
		return err
	}
	return q.node.Remove(ctx, node)
}

// ReplaceNode adds a node and then removes another one, such as one that has lost its disk. The new
// one has another name, is no member yet, and is open with the Peers of this cluster, without
// [Cluster.Join]. If it is a member, as after an error, call RemoveNode of the other. First the
// nodes are asked as by [Queue.RemoveNode]. Concurrent replacements follow each other, as long as
// their ctx; each waits until shard 0 has had its leader for 20 ElectionTimeouts.
//
// Errors: [ErrNoMajority], those of [Queue.AddNode] such as [ErrNotMember], and that of ctx.
func (q *Queue) ReplaceNode(ctx context.Context, old string, p Peer) (err error) {
	defer public(&err)
	if done, err := q.tellCluster(ctx, localsocket.ReplaceNode, replacement{old, p}, old, p.Node); done {
		return err
	}
	if err := q.checkAddress(p.Address); err != nil {
		return err
	}
	err = q.node.Replace(ctx, old, p.inner())
	if errors.Is(err, cluster.ErrIsMember) {
		return &InvalidError{"Peer.Node", p.Node, "a node that is no member yet; if it is one, RemoveNode removes the other"}
	}
	return err
}

// TransferLeadership makes a node the leader of a shard, and loses nothing. The shard stores the
// choice: others lead it only while this node cannot; "" undoes it. An error says why the node
// cannot lead; the shard may still move later, but not after [ErrCannotLead].
//
// Errors: [ErrNotFound] (no member), [ErrCannotLead], those of nodes ([Queue]), and that of ctx.
func (q *Queue) TransferLeadership(ctx context.Context, shard int, node string) (err error) {
	defer public(&err)
	if done, err := q.tellCluster(ctx, localsocket.Transfer, transfer{shard, node}, cmp.Or(node, "any")); done {
		return err
	}
	if shard < 0 || shard >= len(q.replicas) {
		return &InvalidError{"TransferLeadership shard", shard, fmt.Sprintf("0 to %d", len(q.replicas)-1)}
	}
	for _, how := range []cluster.Change{cluster.CheckLeader, cluster.MakeLeader} {
		if err := (*leaders)(q.node).Change(ctx, shard, how, cluster.Peer{Node: node}); err != nil {
			return err
		}
	}
	return nil
}

// Drain hands over all shards that this node leads, as before maintenance, and returns when it
// leads none. Until [Queue.Undrain], also over a restart, it leads only while no other node can; it
// votes, stores, forwards calls and runs workers as ever. If no other can lead a shard, Drain tries
// for [Cluster.CallTimeout], and tells why ([ErrCannotLead]); the drained node goes on trying.
//
// Errors: [ErrCannotLead], those of nodes (see [Queue]), and that of ctx.
func (q *Queue) Drain(ctx context.Context) (err error) {
	defer public(&err)
	if done, err := q.tellCluster(ctx, localsocket.Drain, nil); done {
		return err
	}
	return q.node.Drain(ctx)
}

// Undrain undoes [Queue.Drain]: after a while the node leads its share again.
//
// Errors: those of nodes (see [Queue]) but [ErrUncertain], and that of ctx.
func (q *Queue) Undrain(ctx context.Context) (err error) {
	defer public(&err)
	if done, err := q.tellCluster(ctx, localsocket.Undrain, nil); done {
		return err
	}
	return q.node.Undrain(ctx)
}

// tellCluster is tell for a verb about a cluster, and about these nodes of it.
func (q *Queue) tellCluster(ctx context.Context, verb byte, argument any, nodes ...string) (done bool, err error) {
	if done, err := q.tell(ctx, verb, argument, nil); done {
		return true, err
	}
	if q.node == nil {
		return true, ErrNoCluster
	}
	for _, node := range nodes {
		if limit := cluster.CheckName(node); limit != "" {
			return true, &InvalidError{"node", base.Shortly(node), limit}
		}
	}
	return false, nil
}

// memberOp changes the Raft group of a shard, on its leader; the owner only makes sure that it is.
type memberOp struct {
	completion
	call.Silent
	how    cluster.Change
	peer   cluster.Peer
	former []string // IDs that its directory had
	at     *replica
}

func (op *memberOp) resolve(s *shard) {
	op.at = s.replica
	if op.how == cluster.MakeLeader {
		s.rules.Mail.SetPlacement(op.peer.Node)
		op.at.group.Place(op.peer.Node)
	}
	s.settleAfterCommit(op)
}

func (op *memberOp) settle(err error) {
	if err != nil {
		op.completion.settle(err)
		return
	}
	op.at.group.Change(op.how, op.peer, op.former, func(err error) {
		if errors.Is(err, cluster.ErrLastNode) {
			err = &InvalidError{"node", op.peer.Node, "one that is not the last"}
		}
		op.completion.settle(err)
	})
}

func (op *memberOp) Append(dst []byte) []byte {
	return cluster.AppendChange(dst, op.how, op.peer, op.former)
}

func (op *memberOp) Read(r *wire.Reader) { op.how, op.peer, op.former = cluster.ReadChange(r) }

// RecoverCluster is the last resort (see docs/replication.md): it makes a node the only member of a
// new cluster, because a majority is lost for good, may lack acknowledged changes ([ErrPowerLost]),
// or has diverged from the node ([ErrDiverged]). The directory must be closed; opts are those of
// Open, without another node in [Cluster.Peers]. Recover the node that is furthest (by the larger
// of Applied and LastIndex, see [ClusterStatus]); others join it under new names, with empty
// directories ([Cluster.Join]). Old nodes that come back are refused; a majority of them goes on
// beside the new cluster. If it fails, or its process ends, call it again.
//
// Acknowledged changes that the node lacks are gone, and lacking completions repeated; uncommitted
// changes in its log count, but entries that do not follow the applied index are dropped. Warnings
// ([Options.Logger]) list the missing messages between shards: their follow-ups are gone.
//
// Errors: before anything is written, [ErrInvalid], [ErrNoCluster], [ErrNotQueue], [ErrNotMember]
// (it is of another node, a standalone queue, or a node of no cluster yet), [ErrShardCount] (not
// that of [Options.Shards]) and those of [Open] about the directory; [ErrFailed], [ErrCorrupt].
func RecoverCluster(dir string, opts *Options) (err error) {
	defer public(&err)
	if err := checkDir("RecoverCluster dir", dir); err != nil {
		return err
	}
	o, err := opts.withDefaults()
	if err != nil {
		return err
	}
	if o.Cluster == nil {
		return ErrNoCluster
	}
	if !o.Cluster.isAlone() {
		return &InvalidError{"Cluster.Peers", fmt.Sprintf("%+v", o.Cluster.Peers), "this node only; others join it with empty directories"}
	}
	return o.withNode(dir, (*cluster.Node).Recover)
}

// dissolve turns the only node of a cluster into a standalone queue.
func dissolve(dir string, o *Options) error {
	m, err := manifest.Read(o.private.FS, dir)
	if err != nil {
		return err
	}
	member := *o
	member.Cluster, member.logs = &Cluster{Node: m.Node}, nil // the logger is closed with the queue
	if err := member.withNode(dir, (*cluster.Node).Dissolve); err != nil {
		return fmt.Errorf("open %s without Cluster: %w", dir, err)
	}
	return nil
}

// isAlone reports whether no other node is meant to be in the cluster yet.
func (c *Cluster) isAlone() bool {
	return !c.Join && !slices.ContainsFunc(c.Peers, func(p Peer) bool { return p.Node != c.Node })
}

// withNode calls do to change the directory of a node that is not open.
func (o *Options) withNode(dir string, do func(*cluster.Node) error) error {
	d, err := manifest.Open(o.private.FS, dir, manifest.Want{Shards: o.Shards, Node: o.Cluster.Node, Exists: true})
	if err != nil {
		return err
	}
	if err := d.Take(o.AcceptCopy, o.private.Boot, o.volatile()); err != nil {
		return errors.Join(fmt.Errorf("codeq: open %s: %w", dir, err), d.Close())
	}
	o.setShards(d.Shards)
	q := newQueue(o, d)
	d.Opened(nil)
	return errors.Join(do(q.newNode().Node), q.closeFiles())
}

// ClusterStatus is a cluster as one node sees it.
type ClusterStatus struct {
	Cluster string // its ID, in hexadecimal; "": the node is of none yet
	Node    string // the node that answered
	Shards  []ShardStatus
}

// ShardStatus is the Raft group of a shard.
type ShardStatus struct {
	Shard    int
	Leader   string // the node that leads it; "": none is known
	Term     uint64 // of the leader, or the latest that any node knows
	Placed   string // the node chosen by TransferLeadership; "": any may lead it
	Format   int    // its stored format; 0: not known
	Replicas []ReplicaStatus
}

// ReplicaStatus is one node's replica of a shard.
type ReplicaStatus struct {
	Node         string
	Address      string
	ID           string // of the directory, by which the shard identifies the node: an empty one is another node
	Voter        bool   // whether the node counts in majorities; a new one does not until it has caught up
	Suspect      bool   `json:",omitempty"` // whether it may lack acknowledged changes (power loss, older copy); no vote until taken back
	LastError    string `json:",omitempty"` // why the node could not be asked; the fields below are zero then
	Drained      bool   `json:",omitempty"` // whether it leads nothing while another node can ([Queue.Drain])
	Serves       bool   // whether the shard's operations are resolved here
	NewestFormat int    // the newest it supports; shards rise to their leader's when all nodes support it
	Term         uint64
	// LastIndex is the last entry in its log, Committed the last one that it knows to be in the
	// logs of a majority, Applied the last one in its store.
	LastIndex, Committed, Applied uint64
	Lag                           uint64        // how many entries the leader has applied and this node has not
	LastContact                   time.Duration // the time since the leader's last message; 0 for the leader itself
	ClockAhead                    time.Duration // how far its wall clock is ahead of the median of all, give or take half a round trip
	Stalled                       time.Duration `json:",omitempty"` // how long its log, or store of the shard, is stalled ([Options.StallAfter])
	FreeBytes, DiskBytes          int64         `json:",omitempty"` // of the disk of its node, free and in all, as measured last; 0: not known
}

// WaitReady waits until every shard has a leader that this node can call, as after [Open]; other
// calls wait for [Cluster.CallTimeout] at most. It does not wait without a cluster, or once the
// node knows that it was removed. If ctx ends before, the error says why a shard cannot be called.
//
// Errors: [ErrInvalid], [ErrNotLeader] (a removed node), [ErrFailed], [ErrClosed], and that of ctx.
func (q *Queue) WaitReady(ctx context.Context) (err error) {
	defer public(&err)
	if done, err := q.tell(ctx, localsocket.Ready, nil, nil); done {
		return err
	}
	if q.node == nil {
		return nil
	}
	for shard := range q.replicas {
		if err := q.node.Group(shard).AwaitLeader(ctx, func() error {
			_, err := (*leaders)(q.node).Applied(ctx, shard)
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// ClusterStatus asks all nodes of the cluster how far they are. Nodes that do not answer within two
// seconds, or until ctx ends, are in the result with an error.
//
// Errors: [ErrInvalid], [ErrNoCluster], [ErrNotLeader] (the node was removed), [ErrClosed].
func (q *Queue) ClusterStatus(ctx context.Context) (_ *ClusterStatus, err error) {
	defer public(&err)
	st := new(ClusterStatus)
	if done, err := q.tell(ctx, localsocket.Status, nil, st); done {
		return orNil(st, err)
	}
	if q.node == nil {
		return nil, ErrNoCluster
	}
	shards := q.node.Status(ctx)
	if err := q.node.CheckMember(shards); err != nil {
		return nil, err
	}
	st.Cluster, st.Node = q.node.Cluster(), q.node.Self().Node
	for _, sh := range shards {
		outer := ShardStatus{Shard: sh.Shard, Leader: sh.Leader, Term: sh.Term, Format: sh.Format, Placed: sh.Placed}
		for _, r := range sh.Replicas {
			outer.Replicas = append(outer.Replicas, ReplicaStatus(r))
		}
		st.Shards = append(st.Shards, outer)
	}
	return st, nil
}
