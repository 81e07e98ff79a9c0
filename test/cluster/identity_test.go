package cluster_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/simtest"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// count returns the number of ready tasks in the queue "a", as the node sees it.
func (n *simNode) count(t *testing.T) int {
	t.Helper()
	return int(queuetest.CountsOf(t, simQueue(n), "a").Ready)
}

func (n *simNode) produce(t *testing.T, tasks int) {
	t.Helper()
	queuetest.Produce(t, simQueue(n), slices.Repeat([]codeq.Task{{Queue: "a"}}, tasks)...)
}

// TestAnotherCluster: a node of a new cluster has the address of a node of another cluster. That
// node is down or up. Neither cluster takes over anything from the other, or loses anything to it.
func TestAnotherCluster(t *testing.T) {
	for _, up := range []bool{false, true} {
		simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
			leader, node := c.lead()
			leader.produce(t, 50)
			other := &simCluster{t: t, net: c.net, rng: c.rng, opts: c.opts}
			for _, name := range []string{"m0", node.name, "m1"} {
				other.peers = append(other.peers, codeq.Peer{Node: name, Address: name})
				if !up || name != node.name {
					other.nodes = append(other.nodes, newSimNode(other, name, false))
				}
			}
			if !up {
				node.crash(100)
			}
			each(other.nodes, (*simNode).start)
			if up { // the cluster does not begin: a founder is part of another one
				time.Sleep(time.Minute)
				for _, n := range other.nodes {
					require.ErrorIs(t, <-queuetest.Producing(simQueue(n), codeq.Task{Queue: "a"}), codeq.ErrNotLeader)
				}
			} else {
				other.awaitLeaders()
				other.nodes[1].produce(t, 10)
				require.Equal(t, 10, other.nodes[0].count(t))
				other.rest()
				require.NoError(t, other.check())
			}
			c.awaitLeaders()
			leader.produce(t, 50)
			require.Equal(t, 100, leader.count(t))
			other.close()
		})
	}
}

// TestWipedDisk: a node with a new disk does not come back under its old name, as a founder or by a
// join, whichever node adds it. It would vote for a leader that lacks its own acknowledgements.
func TestWipedDisk(t *testing.T) {
	for _, join := range []bool{false, true} {
		t.Run(fmt.Sprint("join ", join), func(t *testing.T) {
			simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
				leader, wiped := c.lead()
				leader.produce(t, 50)
				wiped.crash(100)
				wiped.machine.Wipe()
				wiped.join = join
				err := c.open(wiped)
				require.ErrorIs(t, err, codeq.ErrNotMember)
				require.ErrorContains(t, err, "ReplaceNode")

				// If the node cannot ask the others at first, it waits.
				for _, n := range c.members() {
					c.net.Pause(n.name, true)
				}
				wiped.join = false
				wiped.machine.Wipe()
				c.net.Pause(wiped.name, false)
				wiped.start()
				_, err = simQueue(wiped).Produce(context.Background(), codeq.Task{Queue: "a"})
				require.ErrorIs(t, err, codeq.ErrNotLeader)
				for _, n := range c.members() {
					c.net.Pause(n.name, false)
				}
				c.newLeader(wiped)
				time.Sleep(time.Minute)
				_, err = simQueue(wiped).Produce(context.Background(), codeq.Task{Queue: "a"})
				require.ErrorContains(t, err, "ReplaceNode")
				require.ErrorContains(t, wiped.close(), "ReplaceNode")

				c.replace(wiped, func(string, ...any) {}, nil)
				require.Equal(t, 50, leader.count(t))
			})
		})
	}
}

// TestWipedMajority: two nodes with new disks do not found a cluster while the third node cannot be
// reached. The third node has all tasks.
func TestWipedMajority(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		left := c.members()[2]
		left.produce(t, 50)
		c.rest() // the third node has all tasks
		each(c.members(), func(n *simNode) { n.crash(100) })
		for _, n := range c.members()[:2] {
			n.machine.Wipe()
			n.start()
		}
		time.Sleep(time.Minute)
		for _, n := range c.members()[:2] {
			_, err := simQueue(n).Produce(context.Background(), codeq.Task{Queue: "a"})
			require.ErrorIs(t, err, codeq.ErrNotLeader)
		}
		left.start()
		time.Sleep(time.Minute)
		for _, n := range c.members()[:2] {
			_, err := simQueue(n).Produce(context.Background(), codeq.Task{Queue: "a"})
			require.ErrorContains(t, err, "ReplaceNode")
			require.ErrorContains(t, n.close(), "ReplaceNode")
		}

		left.stop()
		c.goOn(t, left, 50)
	})
}

// TestNoLeaderSaysWhichCertificate: a node does not trust the certificates of the others, or sees
// them as expired. Its calls say so.
func TestNoLeaderSaysWhichCertificate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca, other := testbase.NewAuthority(t), testbase.NewAuthority(t)
		c := newSimCluster(t, 1, 0, codeq.Options{Shards: 1})
		open := func(n *simNode, conf *tls.Config) {
			require.NoError(t, c.openWith(n, func(o *codeq.Options) {
				dial := inspect.Options(o.Cluster).Dial
				o.Cluster.TLS = conf
				inspect.Options(o.Cluster).Dial = func(ctx context.Context, address string) (net.Conn, error) {
					raw, err := dial(ctx, address)
					if err != nil {
						return nil, err
					}
					to := conf.Clone()
					to.ServerName = address
					conn := tls.Client(raw, to)
					if err := conn.HandshakeContext(ctx); err != nil {
						return nil, errors.Join(err, raw.Close())
					}
					return conn, nil
				}
			}))
		}
		c.found(3)
		for _, n := range c.nodes {
			open(n, ca.Config(t, ca, n.name))
		}
		leader, left := c.lead()
		left.stop()
		open(left, other.Config(t, other, left.name))
		time.Sleep(time.Second)
		_, err := simQueue(left).Produce(context.Background(), codeq.Task{Queue: "a"})
		require.ErrorIs(t, err, codeq.ErrNotLeader)
		for _, n := range c.members() {
			if n != left {
				require.ErrorContains(t, err, "node "+n.name+": peer: dial "+n.name+": tls: failed to verify certificate: x509: certificate signed by unknown authority")
			}
		}
		leader.produce(t, 1)
		left.stop()
		late := ca.Config(t, ca, left.name)
		late.Time = func() time.Time { return time.Now().Add(2 * time.Hour) }
		open(left, late)
		time.Sleep(time.Second)
		_, err = simQueue(left).Produce(context.Background(), codeq.Task{Queue: "a"})
		require.ErrorIs(t, err, codeq.ErrNotLeader)
		require.ErrorContains(t, err, "x509: certificate has expired")
		c.close()
	})
}

// TestKnownNameElsewhere: AddNode refuses a node that has the name of another node.
func TestKnownNameElsewhere(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, other := c.lead()
		blank := c.openAs(simtest.NewMachine(), other.name, "blank", func(o *codeq.Cluster) {
			o.Peers = []codeq.Peer{{Node: leader.name, Address: leader.name}}
			inspect.Options(o).Dial = func(context.Context, string) (net.Conn, error) { return nil, context.Canceled }
		})
		defer blank.stop()
		err := simQueue(leader).AddNode(context.Background(), codeq.Peer{Node: other.name, Address: "blank"})
		require.ErrorIs(t, err, codeq.ErrNotMember)
		require.ErrorContains(t, err, "ReplaceNode")
		err = simQueue(leader).AddNode(context.Background(), codeq.Peer{Node: "n9", Address: "blank"})
		require.ErrorIs(t, err, codeq.ErrNotMember, "another node is there")
		require.Equal(t, "", inspect.Of(simQueue(blank)).Node().Cluster())
	})
}

// TestNodesMove: nodes that are opened at other addresses find each other, whether one has moved or
// all have. AddNode then tells the new addresses to the shards. A node that the others cannot find
// says why.
func TestNodesMove(t *testing.T) {
	testbase.SkipUnderRace(t) // Raft reads the address of a member that changes without its lock
	t.Parallel()
	for moved := 1; moved <= 3; moved++ {
		simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
			nodes, at := c.members(), func(i int) string { return fmt.Sprint("new", i) }
			nodes[2].produce(t, 10)
			var peers []codeq.Peer
			for i, n := range nodes {
				peers = append(peers, codeq.Peer{Node: n.name, Address: n.name})
				if i < moved {
					peers[i].Address = at(i)
					n.stop()
				}
			}
			qs := make([]*codeq.Queue, moved)
			for i, n := range nodes[:moved] {
				qs[i] = simQueue(c.openAs(n.machine, n.name, at(i), func(o *codeq.Cluster) { o.Peers = peers }))
				if i == 0 && moved == 3 {
					early, cancel := context.WithTimeout(t.Context(), 5*time.Second)
					err := qs[i].WaitReady(early)
					cancel()
					require.ErrorIs(t, err, context.DeadlineExceeded)
					require.ErrorContains(t, err, "the cluster knows this node at n0, and it is at new0: AddNode")
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			for _, q := range qs {
				require.NoError(t, q.WaitReady(ctx))
				queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			}
			for i, n := range nodes[:moved] {
				require.NoError(t, qs[(i+1)%moved].AddNode(ctx, codeq.Peer{Node: n.name, Address: at(i)}))
			}
			st, err := qs[0].ClusterStatus(ctx)
			require.NoError(t, err)
			for _, r := range st.Shards[0].Replicas {
				require.True(t, r.Voter)
				require.Empty(t, r.LastError)
				require.Contains(t, peers, codeq.Peer{Node: r.Node, Address: r.Address})
			}
			require.EqualValues(t, 10+moved, queuetest.CountsOf(t, qs[0], "a").Ready)
			for i, n := range nodes[:moved] { // and back
				require.NoError(t, qs[i].Close())
				n.start()
			}
			for _, n := range nodes[:moved] {
				require.NoError(t, simQueue(n).WaitReady(ctx))
			}
			for _, n := range nodes[:moved] {
				require.NoError(t, simQueue(n).AddNode(ctx, codeq.Peer{Node: n.name, Address: n.name}))
			}
		})
	}
}

// TestRemovedNodeIsLeftAlone: the other nodes do not dial a node that was removed, whether it was
// up or down at that time.
func TestRemovedNodeIsLeftAlone(t *testing.T) {
	for _, there := range []bool{true, false} {
		t.Run(fmt.Sprint("there ", there), func(t *testing.T) {
			simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
				leader, removed := c.lead()
				var w codeq.Mux
				codeq.Handle(&w, "b", func(context.Context, *codeq.Job[int]) error { return nil })
				stop := queuetest.Run(simQueue(leader), &w, codeq.RunOptions{})
				if !there {
					removed.crash(100)
					time.Sleep(10 * time.Second)
				}
				require.NoError(t, simQueue(leader).RemoveNode(t.Context(), removed.name))
				time.Sleep(30 * time.Second)
				before := c.net.Dials(removed.name)
				c.drop(removed)
				for range 60 {
					time.Sleep(time.Second)
					leader.count(t)
				}
				require.Equal(t, before, c.net.Dials(removed.name))
				require.NoError(t, stop())
			})
		})
	}
}

// TestCertificateNames: with TLS a node must show a certificate for its name. Open refuses a
// configuration that admits nodes without a certificate, unless AllowAnonymous is set.
func TestCertificateNames(t *testing.T) {
	t.Parallel()
	ca := testbase.NewAuthority(t)
	qs := threeNodes(t, codeq.Options{}, func(node string) *tls.Config { return ca.Config(t, ca, node) })
	queuetest.Produce(t, qs[0], codeq.Task{Queue: "a"})
	open := func(c codeq.Cluster) error {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer l.Close()
		c.Listener, c.Peers, c.Join = l, peersOf(qs), true
		q, err := codeq.Open(filepath.Join(t.TempDir(), "q"), &codeq.Options{Cluster: &c})
		if err == nil {
			err = q.Close()
		}
		return err
	}
	for _, names := range [][]string{{"n1"}, {}} {
		of := ca.Config(t, ca, names...)
		unseen := of.Clone()
		unseen.Certificates, unseen.GetConfigForClient = nil, func(*tls.ClientHelloInfo) (*tls.Config, error) { return of, nil }
		asked := false
		unseen.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			if asked {
				return &of.Certificates[0], nil
			}
			asked = true
			return nil, errors.New("later")
		}
		require.ErrorContains(t, open(codeq.Cluster{Node: "n3", TLS: unseen}), fmt.Sprintf(`certificate of node "n3": it is for %q`, names))
	}

	anonymous := ca.Config(t, ca, "n3")
	anonymous.ClientAuth = tls.NoClientCert
	var invalid *codeq.InvalidError
	require.ErrorAs(t, open(codeq.Cluster{Node: "n3", TLS: anonymous}), &invalid)
	require.Equal(t, "Cluster.TLS.ClientAuth", invalid.Field)
	require.NoError(t, open(codeq.Cluster{Node: "n3", TLS: anonymous, AllowAnonymous: true}))
}

// TestOwnCertificate: Open refuses a node if its certificate is for another name, as far as Open
// can see it, and writes nothing before.
func TestOwnCertificate(t *testing.T) {
	ca := testbase.NewAuthority(t)
	good, bad := ca.Config(t, ca, "other", "n0"), ca.Config(t, ca, "n1")
	with := func(certs *tls.Config, change func(*tls.Config)) *tls.Config {
		c := certs.Clone()
		change(c)
		return c
	}
	server := func(of *tls.Config) func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		return func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &of.Certificates[0], nil }
	}
	client := func(of *tls.Config) func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &of.Certificates[0], nil }
	}
	for name, c := range map[string]struct {
		refused, anonymous bool
		config             *tls.Config
	}{
		"good": {config: good},
		"bad":  {config: bad, refused: true},
		"none": {config: with(good, func(c *tls.Config) { c.Certificates = nil }), refused: true},
		"two":  {config: with(bad, func(c *tls.Config) { c.Certificates = append(c.Certificates, good.Certificates...) })},
		"no certificate": {config: with(good, func(c *tls.Config) {
			c.Certificates = []tls.Certificate{{Certificate: [][]byte{[]byte("none")}}}
		}), refused: true},
		"functions": {config: with(good, func(c *tls.Config) {
			c.Certificates, c.GetCertificate, c.GetClientCertificate = nil, server(good), client(good)
		})},
		"bad function of the server": {config: with(good, func(c *tls.Config) {
			c.Certificates, c.GetCertificate, c.GetClientCertificate = nil, server(bad), client(good)
		}), refused: true},
		"bad function of the client": {config: with(good, func(c *tls.Config) { c.GetClientCertificate = client(bad) }), refused: true},
		"bad function of an anonymous client": {config: with(good, func(c *tls.Config) {
			c.GetClientCertificate = client(bad)
		}), anonymous: true},
		"functions that need a connection": {config: with(good, func(c *tls.Config) {
			c.Certificates = nil
			c.GetCertificate = func(h *tls.ClientHelloInfo) (*tls.Certificate, error) { panic(h.Conn.LocalAddr()) }
			c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return nil, errors.New("not yet") }
		})},
	} {
		fs := crashfs.New()
		err := codeq.RecoverCluster("q", inspect.With(&codeq.Options{
			Cluster: &codeq.Cluster{Node: "n0", Listen: "127.0.0.1:1", TLS: c.config, AllowAnonymous: c.anonymous},
		}, inspect.Private{FS: fs}))
		if !c.refused {
			require.ErrorIs(t, err, codeq.ErrNotQueue, name) // the options are good
			continue
		}
		_, err = codeq.Open("q", inspect.With(&codeq.Options{Cluster: &codeq.Cluster{Node: "n0", Listen: "127.0.0.1:1", TLS: c.config}}, inspect.Private{FS: fs}))
		var invalid *codeq.InvalidError
		require.ErrorAs(t, err, &invalid, name)
		require.Equal(t, "Cluster.TLS", invalid.Field, name)
		require.ErrorContains(t, err, `"n0"`, name)
		names, err := fs.List("")
		require.NoError(t, err)
		require.Empty(t, names, name)
	}
}

// TestFoundingIsInterrupted: the founders of a cluster crash at any moment, and found one cluster.
func TestFoundingIsInterrupted(t *testing.T) {
	for seed := range uint64(testkit.Sized(10, 200)) {
		simCaseOf(t, seed, 0, codeq.Options{Shards: 2}, 0, func(t *testing.T, c *simCluster) {
			c.found(3)
			for _, n := range c.nodes {
				n.start()
				n.crashAfter(1+c.rng.Int64N(60), []int{0, 50, 100}[c.rng.IntN(3)])
			}
			for range 5 {
				time.Sleep(time.Duration(c.rng.Int64N(int64(time.Second))))
				n := c.nodes[c.rng.IntN(3)]
				n.crash([]int{0, 50, 100}[c.rng.IntN(3)])
				time.Sleep(time.Duration(c.rng.Int64N(int64(time.Second))))
				n.raise()
			}
			c.mend(true)
			c.awaitLeaders()
			for _, n := range c.nodes {
				n.produce(t, 1)
				require.Equal(t, inspect.Of(simQueue(c.nodes[0])).Node().Cluster(), inspect.Of(simQueue(n)).Node().Cluster(), "seed %d", seed)
			}
			require.Equal(t, 3, c.nodes[0].count(t), "seed %d", seed)
		})
	}
}

// TestJoinByWhoReachesTheNode: a node that some peers cannot reach joins by another peer. If no
// peer can reach it, Open says why, and changes nothing.
func TestJoinByWhoReachesTheNode(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		by, joins := c.members()[2], c.node(true)
		require.NoError(t, simQueue(by).TransferLeadership(t.Context(), 0, by.name))
		for _, n := range c.members()[:2] {
			n.stop()
			require.NoError(t, c.openWith(n, func(o *codeq.Options) {
				dial := inspect.Options(o.Cluster).Dial
				inspect.Options(o.Cluster).Dial = func(ctx context.Context, addr string) (net.Conn, error) {
					if addr == joins.name {
						return nil, errors.New("no route")
					}
					return dial(ctx, addr)
				}
			}))
		}
		begun := time.Now()
		err := c.openWith(joins, func(o *codeq.Options) { o.Cluster.Advertise = "elsewhere:1" })
		require.ErrorIs(t, err, codeq.ErrNotLeader)
		require.ErrorContains(t, err, "dial sim: elsewhere:1")
		require.Len(t, membersOf(by, 0), 3)

		joins.start()
		c.nodes = append(c.nodes, joins)
		require.Less(t, time.Since(begun), time.Minute)
	})
}

// TestCloneIsToldWhere: a process opens a copy of the directory of an open node. The error tells it
// the address at which that node listens, and not only the port of its connection.
func TestCloneIsToldWhere(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	qs := threeNodes(t, codeq.Options{Shards: 1}, nil)
	for _, q := range qs {
		require.NoError(t, q.WaitReady(ctx))
	}
	copied := filepath.Join(t.TempDir(), "copied")
	testkit.CopyDirectory(t, inspect.Of(qs[0]).Directory().Path, copied)
	peers := optionsOf(qs[0]).Cluster.Peers
	for range 3 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		q, err := codeq.Open(copied, &codeq.Options{AcceptCopy: true, Cluster: &codeq.Cluster{Node: "n0", Listener: l, Peers: peers}})
		require.NoError(t, err)
		_, err = q.Produce(ctx, codeq.Task{Queue: "a"})
		require.ErrorIs(t, err, codeq.ErrOldCopy)
		require.ErrorContains(t, err, "at "+peers[0].Address)
		require.ErrorIs(t, q.Close(), codeq.ErrOldCopy)
	}
	queuetest.Produce(t, qs[0], codeq.Task{Queue: "a"})
}
