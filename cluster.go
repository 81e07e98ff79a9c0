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

// Cluster makes a queue one of several nodes that hold the same tasks: each shard is a Raft group
// (Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm";
// github.com/hashicorp/raft). Acknowledged changes are in the logs of a majority of the nodes, and
// any node serves any call. Three nodes go on without one of them, five without two.
//
// [Options.Limits], [Options.LeaseFor], [Options.MaxAttempts], [Options.Backoff] and
// [Options.Retention] are those of the node that leads a task's shard: give all nodes the same.
type Cluster struct {
	// Node is this node's name, of 1 to 255 bytes of UTF-8, and that of its directory: a node that
	// has lost its directory comes back under another name, and [Open] refuses an empty one. If the
	// others do not answer Open within a quarter of HeartbeatTimeout, it succeeds, and calls and
	// [Queue.Close] return that error once they have answered. Required.
	Node string
	// Listen is the address on which the other nodes reach this one, such as
	// "10.0.0.1:7400". Required, unless Listener is given.
	Listen string
	// Listener is used in place of listening on Listen. The queue, or an [Open] that fails, closes
	// it.
	Listener net.Listener
	// Advertise is the address that other nodes dial: a host and a port, such as "10.0.0.1:7400",
	// of at most 300 bytes. Default: Listen, or the address of Listener.
	Advertise string
	// Peers are the first nodes of a new cluster, each with a name and an address of its own; this
	// one may be among them or not. If they name no other node, a standalone queue, or a
	// [Queue.Checkpoint], may be opened as the first node of a new cluster, with all that it has,
	// and others join it. When they have been removed, and it is closed, the only node is opened
	// without [Options.Cluster] as a standalone queue again. All nodes of a new cluster give the
	// same, and it begins when all of them have been open at the same time. Once it has begun, the
	// cluster itself knows its members, and Peers are where they may have moved ([Queue.AddNode]).
	Peers []Peer
	// Join makes a new node part of the cluster of Peers, which exists already: [Open] asks them to
	// add it, and returns when it votes. It asks each of them once, for 5 minutes at most: if less
	// than half of them answer, and are of one cluster, Open returns an error that matches
	// [ErrNotLeader]. Then Open waits as long as the node makes progress, by entries or bytes of
	// files: after 5 minutes without any it returns an error that matches context.DeadlineExceeded.
	// [Options.Shards] is that of the cluster. In a directory that was part of the cluster before,
	// Join has no meaning.
	Join bool
	// TLS protects the connections between nodes. Both sides take their certificate from it, which
	// has the node's name among its subject alternative names, as a DNS name or a URI. [Open] looks
	// at Certificates, and asks GetCertificate and GetClientCertificate once. ClientAuth must be
	// tls.RequireAndVerifyClientCert, unless AllowAnonymous is set; set RootCAs and ClientCAs to
	// the authority of the nodes' certificates. ServerName, if it is empty, is the host that is
	// dialed. Default: connections are neither encrypted nor authenticated, and anyone with access
	// to the address may do anything.
	TLS *tls.Config
	// AllowAnonymous accepts nodes that show no certificate, or one that is not verified. By
	// default TLS without mutual authentication is refused.
	AllowAnonymous bool
	// HeartbeatTimeout is how long a node waits for a word from its leader before a new one is
	// elected: between one and two times as long. Default: 500 ms.
	HeartbeatTimeout time.Duration
	// ElectionTimeout bounds an election; then another one begins. Default: HeartbeatTimeout.
	ElectionTimeout time.Duration
	// CallTimeout is how long a call waits for a shard, if its ctx does not end before: a leader is
	// missing, cannot be reached, or commits nothing. It waits longer only while the shard goes on,
	// or a large message gets further. Calls that wait on purpose (claims without NoWait,
	// [Queue.Await], [Queue.WaitIdle], [Queue.Run]) wait for leaders as long as their ctx, those
	// that change the members so long. An operation that a leader has not committed for so long,
	// and for StallAfter and twice ElectionTimeout, is uncertain. Default: 10 s.
	CallTimeout time.Duration
	// LeaveOnClose makes [Queue.Close] remove the node from the cluster, for good, as
	// [Queue.RemoveNode] does; Close returns the error if that is refused, such as for the last
	// node. Nodes that are closed at one moment leave one after the other. By default a closed node
	// stays a member, and is missed until it is back.
	LeaveOnClose bool

	private inspect.Private
}

// Peer is the name and the address of a node.
type Peer struct {
	Node    string
	Address string
}

// withDefaults returns a copy in which the zero fields have their defaults.
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

// checkOpen refuses an address at which something listens already, and for a node of no cluster yet
// another address of it in Peers than the one that it advertises.
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

// AddNode makes a node part of the cluster: in the Raft group of every shard it first follows, and
// votes when it has caught up. The node must be open, with [Cluster.Join] ([Open] then calls
// AddNode) or with the Peers of this cluster; AddNode waits for it, and until it has caught up, as
// long as ctx does not end, and logs why. A member that has another address now is added again.
// ErrNotMember says that the cluster knows the name with another directory (see
// [Queue.ReplaceNode]), that the node is of another cluster, that another node, or another server,
// has the address, or that the node was removed: it may come back with an empty directory.
//
// AddNode may be called on any node, and again if it has returned an error, such as that of ctx:
// completed steps stay, and further ones may follow later, but not after a later
// [Queue.RemoveNode].
//
// Errors: [ErrInvalid], [ErrNoCluster], [ErrNotMember], [ErrShardCount], [ErrFormat],
// [ErrNotLeader], [ErrUncertain], [ErrFailed], [ErrClosed], and that of ctx.
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

// RemoveNode takes a node out of the cluster, for good: the others refuse its directory from then
// on (the cluster remembers a thousand removed names and directories). [Open] of that directory
// does not ask them; the calls of the node say that it was removed, also when another directory has
// its name by now. Its shards are transferred to other nodes first. It may be this node, or one
// that is gone. Before anything is changed, the nodes that would be left are asked, for every
// shard: [ErrNoMajority] says that a majority of them does not answer. [ErrNotMember] says that no
// shard has a node of this name, or no longer, [ErrUncertain] that some shards may have it and
// others not. RemoveNode may be called on any node, and again; concurrent removals run one after
// the other.
//
// Errors: [ErrInvalid], [ErrNoCluster], [ErrNotMember], [ErrNoMajority], [ErrNotLeader],
// [ErrUncertain], [ErrFailed], [ErrClosed], and that of ctx.
func (q *Queue) RemoveNode(ctx context.Context, node string) (err error) {
	defer public(&err)
	if done, err := q.tellCluster(ctx, localsocket.RemoveNode, node, node); done {
		return err
	}
	return q.node.Remove(ctx, node)
}

// ReplaceNode adds a node and then removes another one, such as one that has lost its disk. The new
// one has another name, and is no member yet: it is open with the Peers of this cluster, and
// without [Cluster.Join]. If it is one, as after a ReplaceNode that has returned an error,
// RemoveNode of the other one is left. Before anything is changed, the nodes are asked as by
// [Queue.RemoveNode]. Concurrent replacements run one after the other, and wait until ctx ends;
// also, for 20 ElectionTimeouts, after a change of the leader of shard 0.
//
// Errors: [ErrInvalid], [ErrNoCluster], [ErrNoMajority], [ErrNotMember], [ErrShardCount],
// [ErrFormat], [ErrNotLeader], [ErrUncertain], [ErrFailed], [ErrClosed], and that of ctx.
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

// TransferLeadership makes a node the leader of a shard. The shard waits for a moment, and nothing
// is lost. The shard stores the choice: other nodes lead it only while this one cannot.
// TransferLeadership with "" as the node undoes it, so that the cluster spreads the leader again.
// The error says why the node cannot lead now; the shard then stays, and may move later if the
// error is not [ErrCannotLead].
//
// Errors: [ErrInvalid], [ErrNoCluster], [ErrNotFound] (no member has this name), [ErrCannotLead],
// [ErrNotLeader], [ErrUncertain], [ErrFailed], [ErrClosed], and that of ctx.
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

// Drain hands over all shards that this node leads, and returns when it leads none, as before
// maintenance. From then on it leads none while another node can, until [Queue.Undrain]: also when
// it has been closed and opened again. A drained node votes, stores, forwards calls and runs
// workers as ever. If no other node can lead a shard, Drain tries again for [Cluster.CallTimeout],
// and then tells why ([ErrCannotLead]); the node stays drained, and goes on trying.
//
// Errors: [ErrInvalid], [ErrNoCluster], [ErrCannotLead], [ErrNotLeader] (the node was removed),
// [ErrUncertain], [ErrFailed], [ErrClosed], and that of ctx.
func (q *Queue) Drain(ctx context.Context) (err error) {
	defer public(&err)
	if done, err := q.tellCluster(ctx, localsocket.Drain, nil); done {
		return err
	}
	return q.node.Drain(ctx)
}

// Undrain undoes [Queue.Drain]: after a while the node leads its share again.
//
// Errors: [ErrInvalid], [ErrNoCluster], [ErrNotLeader] (the node was removed), [ErrFailed],
// [ErrClosed], and that of ctx.
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

// RecoverCluster makes a node the only member of a new cluster, because a majority of its cluster
// is lost for good, or may lack acknowledged changes ([ErrPowerLost]), or has diverged from the
// node ([ErrDiverged]). Its directory must be closed; afterwards it is opened as ever. If several
// nodes are left, recover one, the one that is furthest (by the larger of Applied and LastIndex of
// its shards, see [ClusterStatus]), and make the others join it under new names with empty
// directories ([Cluster.Join]): [Cluster.Peers] must name no other node. Nodes of the old cluster
// that come back are refused; if they are a majority of it, they go on beside the new one,
// independently of it. It can be called again if it fails, or its process ends. opts are those of
// Open: [ErrShardCount] says that [Options.Shards] is neither 0 nor the number of the directory,
// [ErrNotQueue] that there is no queue in it, [ErrNotMember] that it is of another node, of a
// standalone queue, or of a node that was not part of a cluster yet; each before anything is
// written.
//
// It is the last resort. Acknowledged changes are in the logs of a majority; those that the node
// lacks are gone, and uncommitted changes in its log count as acknowledged from then on. The
// applied index decides: log entries that do not follow it are dropped. The records that its shards
// keep of each other's tasks are derived from the tasks. A completion that the node lacks is
// repeated. Warnings in the log ([Options.Logger]) list the messages between shards that are
// missing, by their numbers: follow-ups that they would have produced are gone.
//
// Errors: [ErrInvalid], [ErrNoCluster], [ErrNotQueue], [ErrNotMember], [ErrShardCount],
// [ErrFailed], [ErrCorrupt], and those of [Open] about the directory.
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
	Node    string
	Address string
	// ID is that of the node's directory. The shard identifies the node by it: an empty directory
	// under the same name is another node.
	ID string
	// Voter is whether the node counts in majorities; a new one does not until it has caught up.
	Voter bool
	// Suspect is whether the node may lack changes that it had acknowledged (a power loss, an older
	// copy). It does not count in majorities until it has been taken back.
	Suspect bool `json:",omitempty"`
	// LastError is why the node could not be asked; the fields below are zero then.
	LastError string `json:",omitempty"`
	// Drained is whether the node leads nothing while another one can ([Queue.Drain]).
	Drained bool `json:",omitempty"`
	// Serves is whether the shard's operations are resolved here.
	Serves bool
	// NewestFormat is the newest format that the node's version of codeq supports. A shard rises to
	// the newest format of its leader when all of its nodes support that.
	NewestFormat int
	Term         uint64
	// LastIndex is the index of the last entry in its log, Committed of the last one that it knows
	// to be in the logs of a majority, Applied of the last one in its store.
	LastIndex, Committed, Applied uint64
	// Lag is how many entries the leader has applied and this node has not.
	Lag uint64
	// LastContact is the time since the leader's last message; 0 for the leader itself.
	LastContact time.Duration
	// ClockAhead is how far its wall clock is ahead of the median of those of the nodes that have
	// answered, by half a message's round trip more or less.
	ClockAhead time.Duration
	// Stalled is for how long its log, or store of the shard, is stalled ([Options.StallAfter]).
	Stalled time.Duration `json:",omitempty"`
}

// WaitReady waits until every shard has a leader that this node can call, as after [Open] or while
// other nodes are started: other calls, but for those that wait on purpose, wait for a leader no
// longer than [Cluster.CallTimeout]. It does not wait without a cluster, nor, once the node knows
// that it was removed from its cluster. If ctx ends before, the error says why a shard cannot be
// called.
//
// Errors: [ErrInvalid], [ErrNotLeader] (the node was removed), [ErrFailed], [ErrClosed], and that
// of ctx.
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
