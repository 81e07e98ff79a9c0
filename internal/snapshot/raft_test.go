package snapshot

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
)

// member is a node of a Raft group. Entry n of the log brings the shard into state n; entries that
// are not commands leave it behind until the next command.
type member struct {
	*node
	t         *testing.T
	id        raft.ServerID
	logs      *raft.InmemStore
	transport *raft.InmemTransport
	others    *[]*member
	raft      *raft.Raft
	restored  int
}

func (m *member) Apply(l *raft.Log) any {
	m.shard.apply(m.t, l.Index) // it skips entries that it has
	return nil
}

func (m *member) Snapshot() (raft.FSMSnapshot, error) { return fsmSnapshot{m.live()}, nil }

func (m *member) Restore(r io.ReadCloser) error {
	m.restored++
	m.swap(m.t)
	return r.Close()
}

type fsmSnapshot struct{ live Live }

func (s fsmSnapshot) Persist(sink raft.SnapshotSink) error { return sink.(*Sink).Persist(s.live) }
func (s fsmSnapshot) Release()                             {}

func (m *member) start() {
	conf := raft.DefaultConfig()
	conf.LocalID = m.id
	conf.LogOutput = io.Discard
	conf.TrailingLogs = 2
	conf.NoSnapshotRestoreOnStart = true
	var err error
	m.raft, err = raft.NewRaft(conf, m, m.logs, m.logs, m.store, fileTransport{m.transport, m})
	require.NoError(m.t, err)
	// Goroutines left in the bubble would hide why a test has failed.
	m.t.Cleanup(func() {
		_ = m.raft.Shutdown().Error()
		_ = m.transport.Close()
	})
}

// fileTransport sends the files of a snapshot before Raft does.
type fileTransport struct {
	*raft.InmemTransport
	member *member
}

func (f fileTransport) InstallSnapshot(
	id raft.ServerID, to raft.ServerAddress, req *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse, _ io.Reader,
) error {
	c, err := f.member.store.Checkpoint()
	if err != nil {
		return err
	}
	defer c.Remove()
	here, there := net.Pipe()
	var ends sync.WaitGroup
	defer ends.Wait()
	defer here.Close()
	for _, m := range *f.member.others {
		if m.id == id {
			ends.Go(func() { _ = m.store.Receive(there, time.Second, openGate) }) // the sender says why not
		}
	}
	t := c.Transfer(here, time.Second)
	if err := t.Offer(req.Term); err != nil {
		return err
	}
	ends.Go(t.Listen)
	if err := t.Send(func(int64) error { return nil }); err != nil {
		return err
	}
	message := *req
	message.Size = int64(len(c.Manifest))
	return f.InmemTransport.InstallSnapshot(id, to, &message, resp, bytes.NewReader(c.Manifest))
}

// openGate admits everything.
var openGate = Gate{
	Admit: func(Offered) (bool, error) { return false, nil },
	Room:  func(int64) error { return nil },
	Next:  func(Offered, int, int64) error { return nil },
}

func TestFollowerThatWasCutOffGetsTheLeadersState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var members []*member
		var configuration raft.Configuration
		for i := range 3 {
			id := fmt.Sprint("node", i)
			_, transport := raft.NewInmemTransport(raft.ServerAddress(id))
			m := &member{t: t, others: &members, id: raft.ServerID(id), logs: raft.NewInmemStore(), transport: transport}
			m.node = openNode(t, crashfs.New())
			members = append(members, m)
			configuration.Servers = append(configuration.Servers, raft.Server{ID: m.id, Address: transport.LocalAddr()})
		}
		connect := func(m *member, connected bool) {
			for _, other := range members {
				if other == m {
					continue
				}
				if connected {
					m.transport.Connect(other.transport.LocalAddr(), other.transport)
					other.transport.Connect(m.transport.LocalAddr(), m.transport)
				} else {
					m.transport.Disconnect(other.transport.LocalAddr())
					other.transport.Disconnect(m.transport.LocalAddr())
				}
			}
		}
		for _, m := range members {
			connect(m, true)
			m.start()
		}
		require.NoError(t, members[0].raft.BootstrapCluster(configuration).Error())

		leader := func() *member {
			for range 1000 {
				for _, m := range members {
					if m.raft.VerifyLeader().Error() == nil {
						return m
					}
				}
				time.Sleep(50 * time.Millisecond)
			}
			t.Fatal("no leader")
			return nil
		}
		write := func(m *member, entries int) {
			for range entries {
				require.NoError(t, m.raft.Apply([]byte("entry"), time.Second).Error())
			}
		}
		caughtUp := func(m *member) {
			l := leader()
			write(l, 1)
			// longer than the longest pause between two attempts to replicate
			time.Sleep(10 * time.Second)
			synctest.Wait()
			require.Equal(t, l.raft.LastIndex(), m.shard.requireState(t))
		}

		first := leader()
		write(first, 20)
		var cut *member
		for _, m := range members {
			if m != first {
				caughtUp(m)
				cut = m
			}
		}
		require.NoError(t, cut.raft.Snapshot().Error())

		connect(cut, false)
		write(first, 30)
		require.NoError(t, first.raft.Snapshot().Error())
		oldest, err := first.logs.FirstIndex()
		require.NoError(t, err)
		require.Greater(t, oldest, cut.raft.LastIndex()+1, "the log must not reach back")
		taken := first.newest(t).Index
		write(first, 10) // the state is ahead of the snapshot
		connect(cut, true)
		caughtUp(cut)
		require.Equal(t, 1, cut.restored)
		require.Equal(t, taken, cut.newest(t).Index)
		require.Equal(t, []string{recordName}, cut.files(t))
		require.Equal(t, []string{recordName}, first.files(t))

		// The follower loses power. Its log, which is in memory here, is kept.
		require.NoError(t, cut.raft.Shutdown().Error())
		clone := cut.fs.(*crashfs.Disk).CrashClone(vfs.CrashCloneCfg{})
		cut.shard.close()
		write(leader(), 5)
		cut.node = openNode(t, clone)
		require.GreaterOrEqual(t, cut.shard.requireState(t), taken)
		_, cut.transport = raft.NewInmemTransport(cut.transport.LocalAddr())
		connect(cut, true)
		cut.start()
		caughtUp(cut)
		require.Equal(t, 1, cut.restored)
	})
}
