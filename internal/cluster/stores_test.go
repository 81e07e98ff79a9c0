package cluster

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/crashfs"
	"codeq/internal/integrity"
	"codeq/internal/platform"
	"codeq/internal/raftlog"
	"codeq/internal/store"
	"codeq/internal/testkit"
)

func loneLog(t *testing.T, disk vfs.FS) *groupLog {
	logs, err := raftlog.Open("dir", raftlog.Options{FS: crashfs.New()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, logs.Close()) })
	group, err := logs.Group(0)
	require.NoError(t, err)
	g := loneGroup(disk, nil)
	g.node.logs = logs
	return &groupLog{LogStore: group, group: g}
}

func entriesFrom(index, n uint64) (logs []*raft.Log) {
	for i := range n {
		logs = append(logs, &raft.Log{Index: index + i, Term: index, Data: []byte("data")})
	}
	return logs
}

// TestFullDiskLeavesLogWhole: on a full disk the end of a log is replaced, or stays,
// and the oldest entries can be deleted.
func TestFullDiskLeavesLogWhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := newSizedDisk(1 << 30)
		log := loneLog(t, disk)
		set := func(free int64) {
			disk.free(free)
			time.Sleep(store.LookEvery * time.Millisecond)
		}
		bounds := func() [2]uint64 {
			first, err := log.FirstIndex()
			require.NoError(t, err)
			last, err := log.LastIndex()
			require.NoError(t, err)
			return [2]uint64{first, last}
		}
		require.NoError(t, log.StoreLogs(entriesFrom(1, 10)))
		set(testMinFree/4 - 1)
		require.ErrorIs(t, log.StoreLogs(entriesFrom(11, 1)), base.ErrDiskFull)
		require.ErrorIs(t, raftError(log.StoreLog(entriesFrom(11, 1)[0])), base.ErrNotLeader)
		require.ErrorIs(t, log.DeleteRange(9, 10), base.ErrDiskFull)
		require.NoError(t, log.DeleteRange(1, 2))
		require.Equal(t, [2]uint64{3, 10}, bounds())

		set(testMinFree / 4)
		require.NoError(t, log.DeleteRange(9, 10))
		set(testMinFree/4 - 1)
		require.NoError(t, log.StoreLogs(entriesFrom(9, 1)))
		require.Equal(t, [2]uint64{3, 9}, bounds())
		require.ErrorIs(t, log.StoreLogs(entriesFrom(10, 1)), base.ErrDiskFull)

		require.NoError(t, log.DeleteRange(3, 9)) // behind a snapshot
		require.NoError(t, log.StoreLogs(entriesFrom(20, 1)))
		require.ErrorIs(t, log.StoreLogs(entriesFrom(21, 1)), base.ErrDiskFull)
		set(testMinFree)
		require.NoError(t, log.StoreLogs(entriesFrom(21, 1)))
	})
}

// TestLogRoomIsAskedRarely: the file system is asked once a second or 4 MiB, and
// ten times a second while there is no room.
func TestLogRoomIsAskedRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := newSizedDisk(1 << 30)
		room := loneGroup(disk, nil).node.room
		asks := func(calls, bytes int) int64 {
			before := disk.asked.Load()
			for range calls {
				room.full(bytes)
				time.Sleep(10 * time.Millisecond)
			}
			return disk.asked.Load() - before
		}
		require.EqualValues(t, 10, asks(1000, 1))
		require.InDelta(t, 11, asks(11, store.LookBytes), 1)
		disk.free(0)
		time.Sleep(time.Second)
		require.EqualValues(t, 100, asks(1000, 1))
		require.True(t, room.full(0))
		require.EqualValues(t, 1, room.reclaim(), "as little as can be said")
		disk.free(testMinFree + testMinFree/2 - 1)
		time.Sleep(time.Second)
		require.False(t, room.full(0))
		require.EqualValues(t, testMinFree+testMinFree/2-1, room.reclaim())
		disk.free(testMinFree + testMinFree/2)
		time.Sleep(time.Second)
		require.False(t, room.full(0))
		require.Zero(t, room.reclaim())
		none := newLogRoom(disk, "dir", -1, slog.New(slog.DiscardHandler))
		require.False(t, none.full(1))
	})
}

// TestRoomOfHungDisk: a disk that hangs is asked once for its room, however often others are told.
func TestRoomOfHungDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := newSizedDisk(1 << 30)
		disk.hangs = make(chan struct{})
		n := loneGroup(disk, nil).node
		logs, err := raftlog.Open("dir", raftlog.Options{FS: crashfs.New()})
		require.NoError(t, err)
		defer logs.Close()
		n.logs = logs
		tell := func() {
			for range 100 {
				n.diskRoom()
				require.False(t, n.room.full(store.LookBytes))
				time.Sleep(100 * time.Millisecond)
			}
		}
		tell()
		require.EqualValues(t, 1, disk.asked.Load())
		close(disk.hangs)
		n.background.Wait()
		require.EqualValues(t, 1<<30, n.diskRoom().free)
		tell()
		require.Greater(t, disk.asked.Load(), int64(9))
		n.background.Wait()
	})
}

// TestOldAnswersExpire: what nodes have said of their disks counts for a while only.
func TestOldAnswersExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var rs rooms
		var health peerHealth
		rs.note("a", diskRoom{shortage: 4})
		health.noteRefusal("a", true)
		time.Sleep(answerAge - 1)
		require.Equal(t, 4, rs.get("a").shortage)
		require.True(t, health.refuses("a"))
		time.Sleep(time.Nanosecond)
		require.Zero(t, rs.get("a"))
		require.False(t, health.refuses("a"))
		rs.note("b", diskRoom{})
		health.noteRefusal("b", false)
		require.Zero(t, rs.short.Load())
		require.False(t, health.anyRefuses())
	})
}

// oldVotes are votes on a disk that fails one write.
type oldVotes struct {
	raft.StableStore
	writes int // until then
}

func (v *oldVotes) Set(key, value []byte) error {
	if v.writes--; v.writes == 0 {
		return errBroken
	}
	return v.StableStore.Set(key, value)
}

func (v *oldVotes) SetUint64(key []byte, value uint64) error {
	if v.writes--; v.writes == 0 {
		return errBroken
	}
	return v.StableStore.SetUint64(key, value)
}

// TestFailingVotes fails each write of a term and a vote: Raft gets the error unless it would
// panic, nothing more is stored, and the file has only votes that were given.
func TestFailingVotes(t *testing.T) {
	for write := 1; write <= 3; write++ {
		path := filepath.Join(t.TempDir(), "votes")
		file, err := raftlog.OpenStable(platform.FS, path)
		require.NoError(t, err)
		old := &oldVotes{StableStore: file.Group(0)}
		g := loneGroup(crashfs.New(), nil)
		v := newVotes(old, g)
		vote := func(term uint64, who string) error {
			require.NoError(t, v.SetUint64([]byte(keyCurrentTerm), term))
			return errors.Join(v.SetUint64([]byte(keyVoteTerm), term), v.Set([]byte(keyVote), []byte(who)))
		}
		require.NoError(t, vote(1, "a"))
		old.writes = write
		g.pendingProposals.enter() // Raft is not to be shut down: it is not there
		require.ErrorIs(t, vote(2, "b"), errBroken)
		require.ErrorIs(t, g.Failure(), errBroken)
		require.ErrorIs(t, g.Failure(), base.ErrFailed)
		left := old.writes
		require.ErrorIs(t, vote(3, "c"), errNotStored)
		require.Equal(t, left, old.writes)
		log := &groupLog{group: g}
		require.ErrorIs(t, log.StoreLogs(entriesFrom(1, 1)), errNotStored)
		require.ErrorIs(t, log.DeleteRange(1, 1), errNotStored)
		require.NoError(t, file.Close())

		file, err = raftlog.OpenStable(platform.FS, path)
		require.NoError(t, err)
		term, err := file.Group(0).GetUint64([]byte(keyVoteTerm))
		require.NoError(t, err)
		require.EqualValues(t, 1, term)
		who, err := file.Group(0).Get([]byte(keyVote))
		require.NoError(t, err)
		require.Equal(t, write == 3, string(who) == "b", "not a in term 2")
		require.NoError(t, file.Close())
	}
}

// TestVotesDoNotGoBack: when Raft has gone back to an earlier term, the stored term stays, and
// there is no second vote in a term, nor one in a term before the latest.
func TestVotesDoNotGoBack(t *testing.T) {
	file, err := raftlog.OpenStable(platform.FS, filepath.Join(t.TempDir(), "votes"))
	require.NoError(t, err)
	defer func() { require.NoError(t, file.Close()) }()
	g := loneGroup(crashfs.New(), nil)
	v := newVotes(file.Group(0), g)
	vote := func(term uint64, who string) error {
		require.NoError(t, v.SetUint64([]byte(keyCurrentTerm), term))
		require.NoError(t, v.SetUint64([]byte(keyVoteTerm), term))
		return v.Set([]byte(keyVote), []byte(who))
	}
	require.NoError(t, vote(8, "a"))
	require.NoError(t, vote(10, "b"))
	require.NoError(t, v.SetUint64([]byte(keyCurrentTerm), 8)) // a heartbeat
	require.ErrorIs(t, vote(9, "c"), errNotStored)
	require.ErrorIs(t, vote(10, "c"), errNotStored)
	for key, want := range map[string]uint64{keyCurrentTerm: 10, keyVoteTerm: 10} {
		got, err := v.GetUint64([]byte(key))
		require.NoError(t, err)
		require.Equal(t, want, got, key)
	}
	who, err := v.Get([]byte(keyVote))
	require.NoError(t, err)
	require.Equal(t, "b", string(who))
	require.NoError(t, vote(10, "b"))
	require.NoError(t, vote(11, "c"))
	require.NoError(t, g.Failure())
}

// damagedLog cannot store, as its store reads a damaged block.
type damagedLog struct{ LogStore }

func (damagedLog) StoreLogs([]*raft.Log) error {
	return fmt.Errorf("%w: %w", raftlog.ErrFailed, raftlog.ErrCorrupt)
}

// TestDamagedLog: the damage of a log is the error of the entries that it has not stored.
func TestDamagedLog(t *testing.T) {
	log := loneLog(t, crashfs.New())
	log.group.pendingProposals.enter() // Raft is not to be shut down: it is not there
	log.LogStore = damagedLog{}
	err := raftError(log.StoreLogs(entriesFrom(1, 1)))
	require.ErrorIs(t, err, base.ErrCorrupt)
	require.ErrorIs(t, err, raftlog.ErrFailed)
	require.NotErrorIs(t, err, base.ErrNotLeader)
	require.ErrorIs(t, log.group.Failure(), base.ErrCorrupt)
}

// TestDamageIsToldAtClose: damage in a table of the log that any read finds while the node is open
// is the error of Close.
func TestDamageIsToldAtClose(t *testing.T) {
	disk := crashfs.New()
	open := func() *raftlog.Store {
		logs, err := raftlog.Open("dir", raftlog.Options{FS: disk, CacheBytes: 1})
		require.NoError(t, err)
		return logs
	}
	logs := open()
	group, err := logs.Group(0)
	require.NoError(t, err)
	entries := entriesFrom(1, 400)
	for _, e := range entries {
		e.Data = make([]byte, 1000)
	}
	require.NoError(t, errors.Join(group.StoreLogs(entries), logs.Close()))
	require.NoError(t, open().Close()) // which makes a table of what lies in the log of the store
	tables := 0
	image := testkit.ImageOf(t, disk, "dir")
	for _, name := range image.Files {
		if integrity.IsTable(name) {
			tables++
			disk = image.Flip(t, name, 4*len(image.Content[name])) // in the middle
		}
	}
	require.Equal(t, 1, tables)

	logs = open()
	group, err = logs.Group(0)
	require.NoError(t, err)
	err = nil
	for i := uint64(1); i <= 400 && err == nil; i++ {
		err = group.GetLog(i, new(raft.Log))
	}
	require.ErrorIs(t, err, raftlog.ErrCorrupt)
	n := &Node{logs: logs}
	err = n.closeLogs()
	require.ErrorIs(t, err, base.ErrFailed)
	require.ErrorIs(t, err, base.ErrCorrupt)
}

// TestClosedStoresFailNoReplica: that they are closed is no failure.
func TestClosedStoresFailNoReplica(t *testing.T) {
	g := loneGroup(crashfs.New(), nil)
	logs, err := raftlog.Open("dir", raftlog.Options{FS: crashfs.New(), CacheBytes: 1})
	require.NoError(t, err)
	g.node.logs = logs
	group, err := logs.Group(0)
	require.NoError(t, err)
	log := &groupLog{LogStore: group, group: g}
	require.NoError(t, log.StoreLogs(entriesFrom(1, 1)))
	require.NoError(t, logs.Close())
	file, err := raftlog.OpenStable(platform.FS, filepath.Join(t.TempDir(), "votes"))
	require.NoError(t, err)
	require.NoError(t, file.Close())
	votes := newVotes(file.Group(0), g)

	var entry raft.Log
	require.NoError(t, log.GetLog(1, &entry))
	require.Equal(t, raft.LogNoop, entry.Type)
	require.NoError(t, votes.SetUint64([]byte(keyCurrentTerm), 1))
	require.NoError(t, votes.SetUint64([]byte(keyVoteTerm), 1))
	require.ErrorIs(t, votes.Set([]byte(keyVote), nil), raftlog.ErrClosed)
	require.NoError(t, g.Failure())
}

// TestFoundersOnFullDisk: while there is no room to make the founders durable, the log waits for
// it, and goes on behind them; or the node is closed.
func TestFoundersOnFullDisk(t *testing.T) {
	for _, closed := range []bool{false, true} {
		t.Run(fmt.Sprint("closed ", closed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				disk := testkit.NewSmallDisk(1 << 30)
				logs, err := raftlog.Open("dir", raftlog.Options{FS: disk})
				require.NoError(t, err)
				group, err := logs.Group(0)
				require.NoError(t, err)
				g := loneGroup(crashfs.New(), nil)
				g.node.logs, g.node.quit = logs, make(chan struct{})
				log := &groupLog{LogStore: group, group: g}
				require.True(t, logs.HasSpace())
				synctest.Wait() // until Pebble has removed the files that it opened
				disk.FillNodes()
				stored := make(chan error, 1)
				go func() { stored <- log.StoreLogs(entriesFrom(1, 1)) }()
				time.Sleep(time.Minute)
				require.Empty(t, stored)
				if closed {
					logs.Hurry()
					close(g.node.quit)
					require.ErrorIs(t, <-stored, raftlog.ErrClosed)
					disk.Nodes.Store(1 << 30)
				} else {
					disk.Nodes.Store(1 << 30)
					require.NoError(t, <-stored)
					require.NoError(t, log.StoreLogs(entriesFrom(2, 1)))
				}
				require.NoError(t, g.Failure())
				require.NoError(t, logs.Close())
			})
		})
	}
}
