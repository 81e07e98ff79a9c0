package cluster_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"path"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/cluster"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/simtest"
	"codeq/internal/store"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// A node lacks more entries than the log holds. While it receives the files of the store, producers
// add more than the log holds when no files are sent.
const (
	snapshotLink  = 128 << 10 // bytes per second
	snapshotState = 4 << 20
	snapshotEvery = 256 << 10 // bytes of log
	snapshotTask  = 1 << 10
	snapshotPause = 40 * time.Millisecond // between two tasks
	snapshotTime  = snapshotState / snapshotLink * time.Second
)

// slowSnapshot is a cluster with a victim: this node lacks more than the log holds, and has a slow
// link.
type slowSnapshot struct {
	*simCluster
	leader, victim *simNode
	lacks          int64        // bytes
	sent           int64        // by the leader to the victim, before the test began
	last           *store.Store // of the victim
	installs       int          // how often last was replaced
	begun          time.Time
}

func slowSnapshotCase(t *testing.T, state int64, story func(t *testing.T, s *slowSnapshot)) {
	simCase(t, *inspect.With(&codeq.Options{}, inspect.Private{SnapshotBytes: snapshotEvery}), func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute) // until the leader is the home node
		s := &slowSnapshot{simCluster: c}
		s.leader, s.victim = c.lead()
		s.last = queuetest.StoreOf(simQueue(s.victim), 0)
		c.net.Isolate(s.victim.name, c.names())
		for s.lacks < state {
			s.produce(16, 16<<10)
		}
		for range 600 { // snapshots leave 256 entries of any size
			s.produce(1, snapshotTask)
		}
		c.net.Heal(true)
		s.limit(snapshotLink)
		s.sent, s.begun = c.net.Sent(s.leader.name, s.victim.name), time.Now()
		story(t, s)
		s.limit(0)
	})
}

// limit limits the links to the victim.
func (s *slowSnapshot) limit(rate int64) {
	for _, n := range s.members() {
		s.net.SetBandwidth(n.name, s.victim.name, rate)
	}
}

// produce produces tasks that cannot be compressed.
func (s *slowSnapshot) produce(tasks, bytes int) {
	chance := rand.NewChaCha8([32]byte{byte(s.rng.Uint32())})
	batch := make([]codeq.Task, tasks)
	for i := range batch {
		batch[i] = codeq.Task{Queue: "a", Payload: make([]byte, bytes)}
		_, _ = chance.Read(batch[i].Payload) // never fails
	}
	_, err := simQueue(s.leader).ProduceBatch(context.Background(), batch)
	require.NoError(s.t, err)
	s.lacks += int64(tasks * bytes)
}

// work produces for some time, or until the condition holds.
func (s *slowSnapshot) work(d time.Duration, until func() bool) {
	for end := time.Now().Add(d); time.Now().Before(end) && !until(); time.Sleep(snapshotPause) {
		s.produce(1, snapshotTask)
		s.look()
	}
}

// bytes returns how many bytes the leader has sent.
func (s *slowSnapshot) bytes() int64 { return s.net.Sent(s.leader.name, s.victim.name) - s.sent }

// hasGot returns a condition: the leader has sent that many more bytes.
func (s *slowSnapshot) hasGot(bytes int64) func() bool {
	at := s.bytes()
	return func() bool { return s.bytes() >= at+bytes }
}

// firstIndex returns the first index of the leader's log.
func (s *slowSnapshot) firstIndex() uint64 {
	first, err := inspect.Of(simQueue(s.leader)).Group(0).FirstIndex()
	require.NoError(s.t, err)
	return first
}

// caughtUp reports whether the victim is as far as a node that follows the log.
func (s *slowSnapshot) caughtUp() bool {
	return inspect.Of(simQueue(s.victim)).Group(0).Applied()+8 >= inspect.Of(simQueue(s.leader)).Group(0).Applied()
}

// look counts how often the victim's store has been replaced.
func (s *slowSnapshot) look() {
	if st := queuetest.StoreOf(simQueue(s.victim), 0); st != nil && st != s.last {
		s.last = st
		s.installs++
	}
}

// remains returns the files of unfinished snapshots on a node.
func (s *slowSnapshot) remains(n *simNode) []string {
	dir := manifest.MetaDir(n.machine.Disk(), "queue", 0)
	names, err := n.machine.Disk().List(dir)
	require.NoError(s.t, err)
	return slices.DeleteFunc(names, func(name string) bool { return !strings.Contains(path.Base(name), "ing-") })
}

// TestSnapshotOverSlowLink: a node receives the files of the store once, over a slow link: the
// transfer takes longer than an unheld log would last. Then the node goes on with the log. During
// the transfer it has contact with its leader, and a Run on it keeps its lease.
func TestSnapshotOverSlowLink(t *testing.T) {
	slowSnapshotCase(t, snapshotState, func(t *testing.T, s *slowSnapshot) {
		begun := s.lacks
		release := s.victim.holdLease(t)
		s.work(2*snapshotTime, func() bool { s.victim.requireContact(t, 2); return s.caughtUp() })
		require.True(t, s.caughtUp())
		require.Greater(t, time.Since(s.begun), 4*heldFor)
		release()
		require.Equal(t, 1, s.installs)
		require.Less(t, s.bytes(), begun*27/20)
		require.Empty(t, s.remains(s.leader))
		require.Empty(t, s.remains(s.victim))
	})
}

// newestOf returns the newest snapshot of a node.
func (s *slowSnapshot) newestOf(n *simNode) *raft.SnapshotMeta {
	list, err := inspect.Of(simQueue(n)).Group(0).Snapshots()
	require.NoError(s.t, err)
	require.NotEmpty(s.t, list)
	return list[0]
}

// TestSnapshotOfEarlierMembers: a node receives the files of a snapshot, and first has the members
// at the index of the snapshot. It learns the later members from the log.
func TestSnapshotOfEarlierMembers(t *testing.T) {
	t.Parallel()
	slowSnapshotCase(t, snapshotState/4, func(t *testing.T, s *slowSnapshot) {
		s.net.Isolate(s.victim.name, s.names())
		taken := s.newestOf(s.leader)
		for taken.Index == s.newestOf(s.leader).Index { // else it begins with a newer one
			s.produce(1, snapshotTask)
			time.Sleep(snapshotPause)
		}
		taken = s.newestOf(s.leader)
		r := inspect.Of(simQueue(s.leader)).Group(0).Raft()
		x := cluster.Peer{Node: "x", Address: "x", ID: manifest.NewID()}
		require.NoError(t, r.AddNonvoter(x.ServerID(), raft.ServerAddress(x.Address), 0, 0).Error())
		s.net.Heal(true)
		s.work(snapshotTime, func() bool { return s.installs > 0 })
		got := s.newestOf(s.victim)
		require.Equal(t, taken.Index, got.Index)
		require.Equal(t, taken.Configuration, got.Configuration)
		require.Equal(t, taken.ConfigurationIndex, got.ConfigurationIndex)
		require.Len(t, got.Configuration.Servers, 3)
		s.work(snapshotTime, s.caughtUp)
		require.True(t, s.caughtUp())
		require.Equal(t, 1, s.installs)
		require.Equal(t, membersOf(s.leader, 0), membersOf(s.victim, 0))
		require.Len(t, membersOf(s.victim, 0), 4)
		require.NoError(t, r.RemoveServer(x.ServerID(), 0, 0).Error())
	})
}

// TestSnapshotGoesOn: after its connection breaks, a transfer goes on at the same place.
func TestSnapshotGoesOn(t *testing.T) {
	slowSnapshotCase(t, snapshotState/2, func(t *testing.T, s *slowSnapshot) {
		for range 2 {
			s.work(snapshotTime, s.hasGot(snapshotState/8))
			s.net.Isolate(s.victim.name, s.names())
			time.Sleep(10 * time.Second)
			s.net.Heal(true)
		}
		s.work(2*snapshotTime, s.caughtUp)
		require.True(t, s.caughtUp())
		require.Equal(t, 1, s.installs)
		require.Less(t, s.bytes(), s.lacks*5/4)
	})
}

// TestVoteBesideSnapshot: a node votes while it receives files.
func TestVoteBesideSnapshot(t *testing.T) {
	slowSnapshotCase(t, snapshotState/4, func(t *testing.T, s *slowSnapshot) {
		s.work(snapshotTime, s.hasGot(snapshotState/16))
		require.Len(t, s.remains(s.victim), 1)
		s.net.Isolate(s.leader.name, s.names())
		s.requireElection(t, s.leader)
	})
}

// TestSnapshotGivenUp: a node ends during a transfer. Some time later, both sides remove the files,
// and the log does not wait for the node.
func TestSnapshotGivenUp(t *testing.T) {
	slowSnapshotCase(t, snapshotState/4, func(t *testing.T, s *slowSnapshot) {
		s.work(snapshotTime, s.hasGot(snapshotState/16))
		require.Len(t, s.remains(s.leader), 1)
		require.Len(t, s.remains(s.victim), 1)
		s.net.Isolate(s.victim.name, s.names())
		time.Sleep(6 * time.Minute)
		require.Empty(t, s.remains(s.leader))
		require.Empty(t, s.remains(s.victim))
		before := s.firstIndex()
		s.work(20*time.Second, func() bool { return false })
		require.Greater(t, s.firstIndex(), before)
	})
}

// TestFullDiskRefusesSnapshot: a node without room for the files refuses them before they come, and
// the log does not wait for the node.
func TestFullDiskRefusesSnapshot(t *testing.T) {
	slowSnapshotCase(t, snapshotState/4, func(t *testing.T, s *slowSnapshot) {
		s.victim.fill(optionsOf(simQueue(s.victim)).MinFreeBytes/4 + snapshotState/16)
		time.Sleep(time.Minute)
		require.Empty(t, s.remains(s.victim))
		require.Less(t, s.bytes(), int64(snapshotState/8))
		before := s.firstIndex()
		s.produce(40, 8<<10) // half of the log's limit besides the files
		for range 40 {
			s.produce(1, 1)
		}
		time.Sleep(6 * time.Minute)
		require.Greater(t, s.firstIndex(), before)
		s.victim.fill(simtest.DiskSize)
		s.work(3*snapshotTime, s.caughtUp)
		require.True(t, s.caughtUp())
	})
}

// breaking is a listener. Its connections for files break when the sender has sent the first piece,
// and most of it has come.
type breaking struct {
	net.Listener
	files atomic.Int64 // connections
}

type breakingConn struct {
	net.Conn
	of   *breaking
	head []byte // the first bytes: the header
	got  int
	sent bool // files
}

func (b *breaking) Accept() (net.Conn, error) {
	conn, err := b.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &breakingConn{Conn: conn, of: b}, nil
}

func (c *breakingConn) Read(b []byte) (int, error) {
	const lives, files, some = 12, 4, 240 << 10 // the offsets of the number of lives and of a use
	n, err := c.Conn.Read(b)
	if len(c.head) < 1<<10 {
		c.head = append(c.head, b[:n]...)
	}
	if !c.sent && len(c.head) > lives {
		use := lives + 1 + 8*int(c.head[lives]) // behind them
		if c.sent = use < len(c.head) && c.head[use] == files; c.sent {
			c.of.files.Add(1)
		}
	}
	if c.got += n; c.sent && c.got > some {
		time.Sleep(20 * time.Millisecond) // until the sender has sent the rest
		_ = c.Conn.Close()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

// TestSnapshotThatGetsNowhere: a transfer that makes no progress is tried more and more rarely.
func TestSnapshotThatGetsNowhere(t *testing.T) {
	slowSnapshotCase(t, snapshotState/4, func(t *testing.T, s *slowSnapshot) {
		s.limit(0)
		v, l := s.victim, new(breaking)
		v.stop()
		require.NoError(t, s.openWith(v, func(o *codeq.Options) {
			l.Listener = o.Cluster.Listener
			o.Cluster.Listener, o.Cluster.Advertise = l, v.name
		}))
		time.Sleep(time.Minute)
		require.Positive(t, l.files.Load())
		require.Less(t, l.files.Load(), int64(40))
		v.stop()
		v.start()
		s.work(2*snapshotTime, s.caughtUp)
		require.True(t, s.caughtUp())
	})
}

// TestLogHeldIsBounded: if a link is slower than the growth of the log, the log does not grow
// beyond the size of the files.
func TestLogHeldIsBounded(t *testing.T) {
	slowSnapshotCase(t, snapshotState/4, func(t *testing.T, s *slowSnapshot) {
		const large = 4 << 10
		s.limit(large)
		for range 4 * s.lacks / large {
			s.produce(1, large)
			last := inspect.Of(simQueue(s.leader)).Group(0).Raft().LastIndex()
			require.Less(t, int64(last-s.firstIndex())*large, int64(6<<20)) // of 7 MiB
		}
	})
}

// TestFullDiskEndsSnapshot: a transfer ends when there is no more room for its remaining files,
// even if some files are complete. It succeeds when there is room.
func TestFullDiskEndsSnapshot(t *testing.T) {
	t.Parallel()
	for _, broken := range []bool{false, true} {
		t.Run(fmt.Sprint("connection broken ", broken), func(t *testing.T) {
			slowSnapshotCase(t, snapshotState/4, func(t *testing.T, s *slowSnapshot) {
				s.work(snapshotTime, s.hasGot(snapshotState/16))
				require.Len(t, s.remains(s.victim), 1)
				if broken {
					s.net.Isolate(s.victim.name, s.names())
					time.Sleep(20 * time.Second) // longer than the time limit of a piece
					require.Len(t, s.remains(s.victim), 1)
				}
				s.victim.fill(optionsOf(simQueue(s.victim)).MinFreeBytes/4 + snapshotState/8)
				time.Sleep(10 * time.Second)
				require.Empty(t, s.remains(s.victim))
				require.Zero(t, s.installs)
				s.net.Heal(true)
				s.limit(snapshotLink)
				s.victim.fill(simtest.DiskSize)
				s.work(3*snapshotTime, s.caughtUp)
				require.True(t, s.caughtUp())
				require.Equal(t, 1, s.installs)
			})
		})
	}
}

// TestCloseDuringSnapshot: the sender and the receiver can be closed during a transfer.
func TestCloseDuringSnapshot(t *testing.T) {
	slowSnapshotCase(t, snapshotState/4, func(t *testing.T, s *slowSnapshot) {
		for _, n := range []*simNode{s.victim, s.leader} {
			s.leader, _ = s.lead()
			s.sent = s.net.Sent(s.leader.name, s.victim.name)
			s.work(snapshotTime, s.hasGot(snapshotState/16))
			begun := time.Now()
			n.stop()
			require.Less(t, time.Since(begun), 30*time.Second)
			require.Empty(t, s.remains(n))
			n.start()
			s.awaitLeaders()
		}
	})
}

// TestPanicsOfATransfer: a transfer goes on after each of its goroutines has panicked.
func TestPanicsOfATransfer(t *testing.T) {
	p := &testkit.PanicIn{Names: []string{"watch of a transfer", "answer of a receiver", "end of a transfer"}}
	p.Begin(t)
	slowSnapshotCase(t, snapshotState/4, func(t *testing.T, s *slowSnapshot) {
		p.Armed.Store(true)
		s.work(2*snapshotTime, s.caughtUp)
		require.True(t, s.caughtUp())
		time.Sleep(6 * time.Minute)
		require.Empty(t, p.Left())
	})
}
