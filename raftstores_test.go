package codeq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/raftlog"
)

// TestFollowerWithFullDisk: a follower whose disk is full refuses what its leader
// sends before it writes any of it; the others go on, and it catches up when there
// is room, by the log if the leader still has it.
func TestFollowerWithFullDisk(t *testing.T) {
	t.Parallel()
	for _, truncated := range []bool{false, true} {
		t.Run(fmt.Sprint("truncated ", truncated), func(t *testing.T) {
			simCase(t, Options{MinFreeBytes: diskTestFree}, func(t *testing.T, c *simCluster) {
				time.Sleep(2 * time.Minute) // the leader is at home
				leader, victim := c.lead()
				produce := func(n int) {
					for range n {
						begun := time.Now()
						_, err := simQueue(leader).Produce(t.Context(), Task{Queue: "a", Payload: make([]byte, 8<<10)})
						require.NoError(t, err)
						require.Less(t, time.Since(begun), time.Second)
					}
				}
				truncate := func() {
					c.snapshot(leader, 0, 5)
					time.Sleep(time.Second)
				}
				produce(20)
				truncate()
				behind := simQueue(victim).replicas[0]
				victim.fill(diskTestFree/4 - 1)
				time.Sleep(lookEvery * time.Millisecond)
				produce(1)
				victim.breakDisk(func(op, name string) bool { return op == "write" && strings.Contains(name, "/raft/") })
				produce(100)
				if truncated {
					truncate()
					produce(10)
				}
				var reads atomic.Int64 // of the leader's log
				leader.breakDisk(func(op, name string) bool {
					if op == "read" {
						reads.Add(1)
					}
					return false
				})
				const tries = int64(10 * time.Minute / refusedPause)
				sent := c.net.Sent(leader.name, victim.name)
				time.Sleep(10 * time.Minute)
				produce(1)
				require.Less(t, reads.Load(), tries*(maxAppend+6))
				require.Less(t, c.net.Sent(leader.name, victim.name)-sent, tries*(16<<10), "an entry at a time")
				require.NoError(t, behind.failure())
				require.Equal(t, leader.name, c.leader(0).name)
				ahead := simQueue(leader).replicas[0]
				require.Greater(t, ahead.applied.Load(), behind.applied.Load()+100)

				victim.breakDisk(func(string, string) bool { return false })
				victim.fill(simFree)
				wait := 2 * time.Second
				if truncated {
					wait = 12 * time.Second // Raft tries a snapshot again as rarely
				}
				time.Sleep(wait)
				require.Equal(t, ahead.applied.Load(), behind.applied.Load())
				received, err := behind.snapshots.List()
				require.NoError(t, err)
				require.Equal(t, truncated, len(received) > 0)
			})
		})
	}
}

// TestLeaderWithFullDisk: a node whose disk is full leads no shard for long.
func TestLeaderWithFullDisk(t *testing.T) {
	simCase(t, Options{MinFreeBytes: diskTestFree}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute) // the leader is at home
		c.rest()
		leader, victim := c.lead()
		victim.fill(diskTestFree/4 - 1)
		time.Sleep(lookEvery * time.Millisecond)
		require.NoError(t, simQueue(leader).replicas[0].raft.LeadershipTransferToServer(
			raft.ServerID(victim.name), raft.ServerAddress(victim.name)).Error())
		require.Eventually(t, func() bool { // it may win more than one election
			_, err := simQueue(victim).Produce(context.Background(), Task{Queue: "a"})
			return err == nil
		}, simPatience, 10*time.Millisecond)
		require.NotEqual(t, victim.name, c.leader(0).name)
		require.NoError(t, simQueue(victim).replicas[0].failure())
		victim.fill(simFree)
	})
}

// loneReplica is a replica whose Raft is not there.
func loneReplica(t *testing.T, disk vfs.FS) *replica {
	n := &node{log: slog.New(slog.DiscardHandler)}
	n.room = newLogRoom(&Options{fs: disk, MinFreeBytes: diskTestFree}, "dir", n.log)
	return &replica{node: n, leading: newLeaderTerm(), running: true}
}

func loneLog(t *testing.T, disk vfs.FS) *replicaLog {
	store, err := raftlog.Open("dir", raftlog.Options{FS: vfs.NewMem()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	group, err := store.Group(0)
	require.NoError(t, err)
	r := loneReplica(t, disk)
	r.node.logs = store
	return &replicaLog{groupLog: group, replica: r}
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
		disk := newSmallDisk(1 << 30)
		log := loneLog(t, disk)
		set := func(free int64) {
			disk.free(free)
			time.Sleep(lookEvery * time.Millisecond)
		}
		bounds := func() [2]uint64 {
			first, err := log.FirstIndex()
			require.NoError(t, err)
			last, err := log.LastIndex()
			require.NoError(t, err)
			return [2]uint64{first, last}
		}
		require.NoError(t, log.StoreLogs(entriesFrom(1, 10)))
		set(diskTestFree/4 - 1)
		require.ErrorIs(t, log.StoreLogs(entriesFrom(11, 1)), ErrDiskFull)
		require.ErrorIs(t, raftError(log.StoreLog(entriesFrom(11, 1)[0])), ErrNotLeader)
		require.ErrorIs(t, log.DeleteRange(9, 10), ErrDiskFull)
		require.NoError(t, log.DeleteRange(1, 2))
		require.Equal(t, [2]uint64{3, 10}, bounds())

		set(diskTestFree / 4)
		require.NoError(t, log.DeleteRange(9, 10))
		set(diskTestFree/4 - 1)
		require.NoError(t, log.StoreLogs(entriesFrom(9, 1)))
		require.Equal(t, [2]uint64{3, 9}, bounds())
		require.ErrorIs(t, log.StoreLogs(entriesFrom(10, 1)), ErrDiskFull)

		require.NoError(t, log.DeleteRange(3, 9)) // behind a snapshot
		require.NoError(t, log.StoreLogs(entriesFrom(20, 1)))
		require.ErrorIs(t, log.StoreLogs(entriesFrom(21, 1)), ErrDiskFull)
		set(diskTestFree)
		require.NoError(t, log.StoreLogs(entriesFrom(21, 1)))
	})
}

// TestLogRoomIsAskedRarely: the file system is asked once a second or 4 MiB, and
// ten times a second while there is no room.
func TestLogRoomIsAskedRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := newSmallDisk(1 << 30)
		room := loneReplica(t, disk).node.room
		asks := func(calls, bytes int) int64 {
			before := disk.asked.Load()
			for range calls {
				room.full(bytes)
				time.Sleep(10 * time.Millisecond)
			}
			return disk.asked.Load() - before
		}
		require.EqualValues(t, 10, asks(1000, 1))
		require.InDelta(t, 11, asks(11, lookBytes), 1)
		disk.free(0)
		time.Sleep(time.Second)
		require.EqualValues(t, 100, asks(1000, 1))
		require.True(t, room.full(0))
		none := newLogRoom(&Options{fs: disk, MinFreeBytes: -1}, "dir", slog.New(slog.DiscardHandler))
		require.False(t, none.full(1))
	})
}

// oldVotes are those of a disk of which a write fails, once.
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

// TestFailingVotes has each write of a term and a vote fail: Raft hears of it
// unless it would panic, nothing more is stored, and what was stored, in a file, is
// no vote that was not given.
func TestFailingVotes(t *testing.T) {
	for write := 1; write <= 3; write++ {
		path := filepath.Join(t.TempDir(), "votes")
		file, err := raftlog.OpenStable(path)
		require.NoError(t, err)
		old := &oldVotes{StableStore: file.Group(0)}
		r := loneReplica(t, vfs.NewMem())
		v := &replicaVotes{StableStore: old, replica: r}
		vote := func(term uint64, who string) error {
			require.NoError(t, v.SetUint64([]byte(keyCurrentTerm), term))
			return errors.Join(v.SetUint64([]byte(keyVoteTerm), term), v.Set([]byte(keyVote), []byte(who)))
		}
		require.NoError(t, vote(1, "a"))
		old.writes = write
		r.asking.enter() // Raft is not to be shut down: it is not there
		require.ErrorIs(t, vote(2, "b"), errBroken)
		require.ErrorIs(t, r.failure(), errBroken)
		require.ErrorIs(t, r.failure(), ErrFailed)
		left := old.writes
		require.ErrorIs(t, vote(3, "c"), errNotStored)
		require.Equal(t, left, old.writes)
		log := &replicaLog{replica: r}
		require.ErrorIs(t, log.StoreLogs(entriesFrom(1, 1)), errNotStored)
		require.ErrorIs(t, log.DeleteRange(1, 1), errNotStored)
		require.NoError(t, file.Close())

		file, err = raftlog.OpenStable(path)
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

// TestClosedStoresFailNoReplica: that they are closed is no failure.
func TestClosedStoresFailNoReplica(t *testing.T) {
	r := loneReplica(t, vfs.NewMem())
	store, err := raftlog.Open("dir", raftlog.Options{FS: vfs.NewMem(), CacheBytes: 1})
	require.NoError(t, err)
	r.node.logs = store
	group, err := store.Group(0)
	require.NoError(t, err)
	log := &replicaLog{groupLog: group, replica: r}
	require.NoError(t, log.StoreLogs(entriesFrom(1, 1)))
	require.NoError(t, store.Close())
	file, err := raftlog.OpenStable(filepath.Join(t.TempDir(), "votes"))
	require.NoError(t, err)
	require.NoError(t, file.Close())
	votes := &replicaVotes{StableStore: file.Group(0), replica: r}

	var entry raft.Log
	require.NoError(t, log.GetLog(1, &entry))
	require.Equal(t, raft.LogNoop, entry.Type)
	require.NoError(t, votes.SetUint64([]byte(keyCurrentTerm), 1))
	require.ErrorIs(t, votes.Set([]byte(keyVote), nil), raftlog.ErrClosed)
	require.NoError(t, r.failure())
}
