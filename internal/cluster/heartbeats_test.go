package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/manifest"
	"codeq/internal/raftlog"
	"codeq/internal/simtest"
)

// votesInMemory are the terms and votes of a node.
type votesInMemory map[uint32]*raft.InmemStore

func (v votesInMemory) Group(n uint32) raft.StableStore {
	if v[n] == nil {
		v[n] = raft.NewInmemStore()
	}
	return v[n]
}
func (votesInMemory) Close() error { return nil }

// lead is a state machine that leads, and decides nothing.
type lead struct{ notes }

func (*lead) Lead(uint64) (Leader, error) { return &leads{make(chan struct{})}, nil }

type leads struct{ done chan struct{} }

func (*leads) Serve()                  {}
func (l *leads) StepDown(error)        { close(l.done) }
func (l *leads) Done() <-chan struct{} { return l.done }
func (*leads) Crashed() bool           { return false }

var trioNames = []string{"a", "b", "c"}

// openTrio opens three nodes on a network in memory, and waits until each leads its share of the
// shards. If it is given any, the wall clocks are ahead by so many nanoseconds.
func openTrio(t *testing.T, shards int, ahead ...*atomic.Int64) ([]*Node, *simtest.Net) {
	return openTrioWith(t, shards, func(i int, c *Config) {
		if len(ahead) > 0 {
			c.Wall = func() time.Time { return time.Now().Add(time.Duration(ahead[i].Load())) }
		}
	})
}

// openTrioWith is openTrio of nodes that adapt has adapted.
func openTrioWith(t *testing.T, shards int, adapt func(i int, c *Config)) ([]*Node, *simtest.Net) {
	network, cluster := simtest.NewNet(1, time.Millisecond), manifest.NewID()
	var nodes []*Node
	var members []Peer
	for i, name := range trioNames {
		disk := crashfs.New()
		require.NoError(t, disk.MkdirAll("dir", 0o700))
		host := network.Listen(name)
		c := Config{
			Node: name, Listener: host, MaxAppend: MaxAppend, SnapshotBytes: SnapshotBytes, Logger: slog.New(slog.DiscardHandler),
			HeartbeatTimeout: 500 * time.Millisecond, ElectionTimeout: 500 * time.Millisecond, CallTimeout: time.Second,
			Directory:   manifest.New(disk, "dir", manifest.Manifest{Format: manifest.Format, Shards: shards, ID: manifest.NewID(), Cluster: cluster}),
			Machines:    machines(shards),
			Reconcile:   func(bool) error { return nil },
			PanicError:  func(what string, value any, _ []byte) error { return fmt.Errorf("panic in %s: %v", what, value) },
			Votes:       func(string) (raftlog.Stables, error) { return make(votesInMemory), nil },
			EncodeError: func(err error) (byte, string) { return 0, err.Error() },
			DecodeError: func(_ byte, text string) error { return errors.New(text) },
			Dial:        func(ctx context.Context, to string) (net.Conn, error) { return network.Dial(ctx, host, to) },
		}
		c.Directory.BeginIncarnation()
		adapt(i, &c)
		n := New(c)
		for _, g := range n.groups {
			g.format.Store(manifest.Format) // they do not rise
		}
		nodes, members = append(nodes, n), append(members, n.self)
	}
	for _, n := range nodes {
		n.c.Directory.Founders = foundersOf(members)
		require.NoError(t, n.Open())
	}
	for i := range shards {
		for !nodes[i%3].Group(i).leads() {
			time.Sleep(time.Second)
		}
	}
	return nodes, network
}

func machines(shards int) (all []StateMachine) {
	for range shards {
		all = append(all, new(lead))
	}
	return all
}

func closeAll(t *testing.T, nodes []*Node) {
	for _, n := range nodes {
		require.NoError(t, n.Close())
	}
}

// TestIdleMessages: how many messages idle nodes send each other does not depend on how many groups
// they have.
func TestIdleMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, network := openTrio(t, 24) // each node leads 8
		time.Sleep(10 * time.Second)
		before := network.Messages("a", "b")
		const seconds = 20
		time.Sleep(seconds * time.Second)
		// Six or seven times a second heartbeats leave, and their answers, in a write or a few.
		require.Less(t, network.Messages("a", "b")-before, 60*seconds)
		closeAll(t, nodes)
	})
}

// TestGroupsAnswerForThemselves: a replica that does not answer heartbeats delays no other, and its
// leader is not taken for one.
func TestGroupsAnswerForThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, network := openTrio(t, 6)
		a, goOn := nodes[0], make(chan struct{})
		require.True(t, a.Group(3).leads())
		network.Isolate("a", trioNames) // no heartbeat arrives for a moment
		time.Sleep(20 * time.Millisecond)
		for _, n := range nodes[1:] {
			n.Group(0).transport.handle = func(raft.RPC) { <-goOn }
		}
		network.Heal(false)
		begun := time.Now()
		for a.Group(0).raft.State() == raft.Leader {
			require.Less(t, time.Since(begun), 2*time.Second)
			time.Sleep(10 * time.Millisecond)
		}
		for range 100 {
			time.Sleep(50 * time.Millisecond)
			require.True(t, a.Group(3).leads())
			for _, n := range nodes[1:] {
				require.LessOrEqual(t, time.Since(n.Group(3).raft.LastContact()), 2*a.c.HeartbeatTimeout/5+5*time.Millisecond)
			}
		}
		close(goOn)
		closeAll(t, nodes)
	})
}

// TestSilentNode: a node that accepts all messages, and answers none, delays neither the heartbeats
// to others nor their elections.
func TestSilentNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, network := openTrio(t, 6)
		time.Sleep(time.Minute)
		silent := time.Now()
		for _, other := range trioNames[:2] {
			network.SetCut("c", other, true)
		}
		for range 400 {
			time.Sleep(50 * time.Millisecond)
			for _, shard := range []int{0, 3} {
				require.True(t, nodes[0].Group(shard).leads())
				require.LessOrEqual(t, time.Since(nodes[1].Group(shard).raft.LastContact()), 2*nodes[0].c.HeartbeatTimeout/5+5*time.Millisecond)
			}
			if time.Since(silent) > 3*time.Second {
				require.True(t, nodes[0].Group(2).leads() || nodes[1].Group(2).leads())
			}
		}
		network.Heal(true)
		closeAll(t, nodes)
	})
}

// quietConn is a connection of calls that brings nothing while it is quiet.
type quietConn struct {
	net.Conn
	calls bool // its header says so
	quiet *atomic.Bool
}

func (c *quietConn) Write(b []byte) (int, error) {
	const incarnations, calls = 12, 1 // in the header
	if bytes.HasPrefix(b, []byte("codeq")) {
		use := incarnations + 1 + 8*int(b[incarnations])
		c.calls = b[use] == calls
	}
	return c.Conn.Write(b)
}

func (c *quietConn) Read(b []byte) (n int, err error) {
	for {
		if n, err = c.Conn.Read(b); err != nil || !c.calls || !c.quiet.Load() {
			return n, err
		}
	}
}

// TestSilentConnection: a node hears from its leaders although the connection of heartbeats is
// silent, and they are not taken for cut off, whether the third node is there or not.
func TestSilentConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var quiet atomic.Bool
		nodes, network := openTrioWith(t, 6, func(_ int, c *Config) {
			dial := c.Dial
			c.Dial = func(ctx context.Context, to string) (net.Conn, error) {
				conn, err := dial(ctx, to)
				return &quietConn{Conn: conn, quiet: &quiet}, err
			}
		})
		time.Sleep(time.Minute)
		a, b := nodes[0], nodes[1]
		quiet.Store(true)
		for i := range 1000 {
			if i == 500 {
				network.Isolate("c", trioNames)
			}
			time.Sleep(50 * time.Millisecond)
			for _, shard := range []int{0, 3} {
				require.True(t, a.Group(shard).leads())
				require.LessOrEqual(t, time.Since(b.Group(shard).raft.LastContact()), 4*a.c.HeartbeatTimeout/5+5*time.Millisecond)
			}
		}
		quiet.Store(false)
		network.Heal(true)
		closeAll(t, nodes)
	})
}

// TestIdleLeaderThatIsCutOff: it steps down, and the others elect another one, as soon as if it had
// entries to send.
func TestIdleLeaderThatIsCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, network := openTrio(t, 1)
		time.Sleep(time.Minute)
		cut := time.Now()
		network.Isolate("a", trioNames)
		for nodes[0].Group(0).raft.State() == raft.Leader {
			require.Less(t, time.Since(cut), time.Second)
			time.Sleep(10 * time.Millisecond)
		}
		for !nodes[1].Group(0).leads() && !nodes[2].Group(0).leads() {
			require.Less(t, time.Since(cut), 3*time.Second)
			time.Sleep(10 * time.Millisecond)
		}
		network.Heal(true)
		closeAll(t, nodes)
	})
}

// TestIdleLeaderWhoseFollowersHaveAnother: a leader with nothing to send steps down when a node
// that answers it has elected another one, which cannot reach it.
func TestIdleLeaderWhoseFollowersHaveAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, network := openTrio(t, 1)
		time.Sleep(time.Minute + longRest/2)
		network.SetCut("a", "b", true)
		network.SetCut("b", "a", true)
		answer := make(chan raft.RPCResponse, 1)
		b := nodes[1].Group(0)
		b.Receive(raft.RPC{Command: &raft.TimeoutNowRequest{RPCHeader: b.transport.header()}, RespChan: answer})
		require.NoError(t, (<-answer).Error)
		for b.raft.State() != raft.Leader {
			time.Sleep(time.Millisecond)
		}
		elected := time.Now()
		for nodes[0].Group(0).raft.State() == raft.Leader {
			time.Sleep(time.Millisecond)
		}
		took := time.Since(elected)
		network.Heal(true)
		closeAll(t, nodes)
		require.Less(t, took, time.Second)
	})
}

// TestCandidateForgetsItsLeader: a node that stands for election is asked to take over, and then
// gets a heartbeat of the leader, which the others lose. It lacks an entry, so it cannot lead; it
// votes for the one that can.
func TestCandidateForgetsItsLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, network := openTrio(t, 1)
		a, b, c := nodes[0].Group(0), nodes[1].Group(0), nodes[2].Group(0)
		term := a.raft.CurrentTerm()
		network.Isolate("c", trioNames)
		require.NoError(t, a.Propose(term, make([]byte, EntryHeader)))
		for c.raft.State() != raft.Candidate {
			time.Sleep(time.Millisecond)
		}
		tell := func(receive func(raft.RPC), message any) {
			answer := make(chan raft.RPCResponse, 1)
			receive(raft.RPC{Command: message, RespChan: answer})
			require.NoError(t, (<-answer).Error)
		}
		tell(c.Receive, &raft.TimeoutNowRequest{RPCHeader: a.transport.header()})
		tell(c.transport.heartbeat, &raft.AppendEntriesRequest{RPCHeader: a.transport.header(), Term: term})
		require.Equal(t, term, c.raft.CurrentTerm())
		network.Isolate("a", trioNames)
		network.SetCut("b", "c", false)
		network.SetCut("c", "b", false)
		for lost := time.Now(); !b.leads(); time.Sleep(10 * time.Millisecond) {
			require.Less(t, time.Since(lost), time.Minute)
		}
		network.Heal(true)
		closeAll(t, nodes)
	})
}
