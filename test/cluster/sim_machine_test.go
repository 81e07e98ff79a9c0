package cluster_test

import (
	"errors"
	"io"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/raftlog"
	"codeq/internal/simtest"
	"codeq/internal/testkit"
)

// write writes a file, and with sync syncs it and its directory.
func write(fs vfs.FS, name, content string, sync bool) error {
	f, err := fs.Create(name, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	if _, err = f.Write([]byte(content)); err == nil && sync {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil || !sync {
		return err
	}
	dir, err := fs.OpenDir("/")
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// read returns the content of a file; "": no file.
func read(t *testing.T, fs vfs.FS, name string) string {
	f, err := fs.Open(name)
	if errors.Is(err, os.ErrNotExist) {
		return ""
	}
	require.NoError(t, err)
	content, err := io.ReadAll(f)
	require.NoError(t, errors.Join(err, f.Close()))
	return string(content)
}

// vote returns the stored vote of a group.
func vote(t *testing.T, s raftlog.Stables, group uint32) string {
	v, err := s.Group(group).Get([]byte("vote"))
	require.NoError(t, err)
	return string(v)
}

// TestCrash: a power loss removes unsynced data, and a kill -9 nothing; votes stay. The next
// process does not find later changes by the old process.
func TestCrash(t *testing.T) {
	t.Parallel()
	for _, percent := range []int{0, 50, 100} {
		for seed := range uint64(10) {
			m := simtest.NewMachine()
			first := m.Start()
			require.NoError(t, write(first.FS(), "synced", "a", true))
			require.NoError(t, write(first.FS(), "written", "b", false))
			require.NoError(t, first.Stables().Group(1).Set([]byte("vote"), []byte("n1")))
			m.Crash(percent, seed)
			require.NoError(t, write(first.FS(), "late", "c", true))
			require.NoError(t, first.Stables().Group(1).Set([]byte("vote"), []byte("n2")))

			next := m.Start()
			require.Equal(t, "a", read(t, next.FS(), "synced"))
			require.Empty(t, read(t, next.FS(), "late"))
			require.Equal(t, "n1", vote(t, next.Stables(), 1))
			require.Equal(t, "n2", vote(t, first.Stables(), 1), "the process goes on with its own")
			require.Equal(t, percent == 100, first.Boot() == next.Boot())
			switch percent {
			case 0:
				require.Empty(t, read(t, next.FS(), "written"))
			case 100:
				require.Equal(t, "b", read(t, next.FS(), "written"))
			}
		}
	}
}

// TestCrashAfter: a crash comes once, before the last of a number of disk operations. A vote counts
// as one.
func TestCrashAfter(t *testing.T) {
	t.Parallel()
	// The third operation syncs the file, and the sixth its name.
	for operations, want := range map[int64]string{1: "", 3: "", 6: "", 7: "a"} {
		m := simtest.NewMachine()
		life, crashes := m.Start(), 0
		crash := func() { crashes++; m.Crash(0, 1) }
		require.True(t, life.CrashAfter(operations, crash))
		require.False(t, life.CrashAfter(1, crash), "one is to come")
		require.NoError(t, write(life.FS(), "file", "a", true))
		for range 10 {
			require.NoError(t, life.Stables().Group(1).Set([]byte("vote"), []byte("n1")))
		}
		require.Equal(t, 1, crashes)
		require.Equal(t, want, read(t, m.Start().FS(), "file"), "%d operations", operations)
		require.True(t, life.CrashAfter(1, crash))
	}

	m := simtest.NewMachine()
	life := m.Start()
	life.CrashAfter(2, func() { m.Crash(0, 1) })
	for _, v := range []string{"n1", "n2", "n3"} {
		require.NoError(t, life.Stables().Group(1).Set([]byte("vote"), []byte(v)))
	}
	require.Equal(t, "n1", vote(t, m.Start().Stables(), 1))
	require.Equal(t, "n3", vote(t, life.Stables(), 1))
}

// TestFail: the chosen operations of a life fail, including those on votes and reads of the log. No
// operation of the next life fails.
func TestFail(t *testing.T) {
	t.Parallel()
	m := simtest.NewMachine()
	life := m.Start()
	store, err := raftlog.Open("log", raftlog.Options{FS: life.FS()})
	require.NoError(t, err)
	defer func() { require.NoError(t, store.Close()) }()
	group, err := store.Group(0)
	require.NoError(t, err)
	log := life.Log(group)
	require.NoError(t, log.StoreLogs([]*raft.Log{{Index: 1, Data: []byte("entry")}}))
	operations := map[string]func() error{
		"create": func() error { return write(life.FS(), "file", "a", false) },
		"votes":  func() error { return life.Stables().Group(1).Set([]byte("vote"), []byte("n1")) },
		"log": func() error {
			_, err := log.GetHead(1, new(raft.Log))
			require.Equal(t, err, log.GetLog(1, new(raft.Log)))
			return err
		},
	}
	for broken := range operations {
		life.Fail(func(op, name string) bool { return op == broken || name == broken })
		for name, do := range operations {
			if err := do(); name == broken {
				require.ErrorIs(t, err, testkit.ErrBroken, name)
			} else {
				require.NoError(t, err, name)
			}
		}
	}
	life.Fail(func(string, string) bool { return true })
	require.NoError(t, write(m.Start().FS(), "file", "b", true))
	life.Fail(func(string, string) bool { return false })
}

// TestRoom: a small disk reports its free space, or hides it; a disk with room may report none.
func TestRoom(t *testing.T) {
	t.Parallel()
	life := simtest.NewMachine().Start()
	free := func() int64 {
		usage, err := life.FS().GetDiskUsage("/")
		require.NoError(t, err)
		require.EqualValues(t, simtest.DiskSize, usage.TotalBytes)
		require.Equal(t, usage.TotalBytes, usage.AvailBytes+usage.UsedBytes)
		return int64(usage.AvailBytes)
	}
	require.Equal(t, simtest.DiskSize, free())
	life.SetFree(0)
	require.Zero(t, free())
	require.NoError(t, write(life.FS(), "a", "0123456789", true))
	life.MakeRoom()
	for _, said := range []bool{true, false} {
		life.Limit(9, said)
		require.Equal(t, said, free() == 9)
		require.ErrorIs(t, write(life.FS(), "b", "0123456789", true), syscall.ENOSPC)
		life.MakeRoom()
		require.Equal(t, simtest.DiskSize, free())
		require.NoError(t, write(life.FS(), "b", "0123456789", true))
	}
	require.True(t, life.Fill())
	require.True(t, life.IsFull())
	require.False(t, life.Fill(), "it is already")
	life.MakeRoom()
	require.False(t, life.IsFull())
	require.True(t, life.Fill())
}

// TestClocks: a wall clock can be set, and drifts from the start of its machine; a monotonic clock
// changes its rate, and never jumps.
func TestClocks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := simtest.NewMachine()
		begin := time.Now()
		require.Equal(t, begin, m.Wall.Now())
		require.True(t, m.Wall.Set(time.Hour))
		require.False(t, m.Wall.Set(time.Hour), "it is already")
		m.Wall.Drift(-500_000)
		time.Sleep(time.Minute)
		require.Equal(t, begin.Add(time.Hour+30*time.Second), m.Wall.Now())
		require.Equal(t, begin.Add(time.Minute), m.Mono.Now())

		at := m.Mono.Now()
		m.Mono.Run(simtest.MaxRate)
		require.Equal(t, at, m.Mono.Now())
		time.Sleep(time.Second)
		require.Equal(t, at.Add(1050*time.Millisecond), m.Mono.Now())
		m.Mono.Run(-simtest.MaxRate)
		time.Sleep(time.Second)
		require.Equal(t, at.Add(2*time.Second), m.Mono.Now())
	})
}
