package store

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/crashfs"
	"codeq/internal/keys"
	"codeq/internal/testkit"
)

// openTest creates a store; the caller closes it.
func openTest(t *testing.T, c Config) *Store {
	st, shared, err := tryOpen(c)
	t.Cleanup(shared.Close)
	require.NoError(t, err)
	return st
}

// tryOpen opens a store. The caller closes the caches, even after an error.
func tryOpen(c Config) (*Store, *Caches, error) {
	c.Log = slog.New(slog.DiscardHandler)
	shared := NewCaches(16<<20, c.MemTableBytes, 1)
	st, err := Open("store", c, shared, true)
	return st, shared, err
}

// TestMisuse: a SINGLEDEL of a task without its key follows from range deletions. Any other
// SINGLEDEL without a key shows damage.
func TestMisuse(t *testing.T) {
	task := keys.AppendTask(nil, 7, 0x7000, keys.ID{})
	lease := binary.BigEndian.AppendUint64([]byte{keys.Lease}, 7)
	require.True(t, mayBeTrimmed(pebble.PossibleAPIMisuseInfo{Kind: pebble.IneffectualSingleDelete, UserKey: task}))
	require.False(t, mayBeTrimmed(pebble.PossibleAPIMisuseInfo{Kind: pebble.NondeterministicSingleDelete, UserKey: task}))
	require.False(t, mayBeTrimmed(pebble.PossibleAPIMisuseInfo{Kind: pebble.IneffectualSingleDelete, UserKey: lease}))
}

// TestCorruptionInCompaction: a compaction that resolves SINGLEDELs finds a damaged block. The
// store fails, and the process does not end.
func TestCorruptionInCompaction(t *testing.T) {
	disk := crashfs.New()
	st := openTest(t, Config{FS: disk, MemTableBytes: 256 << 10})
	const n = 2000
	key := func(i int) []byte { return fmt.Appendf(nil, "%06d", i) }
	rng := rand.New(rand.NewPCG(9, 9))
	for i := range n {
		value := make([]byte, 100)
		for j := range value {
			value[j] = byte(rng.Uint32())
		}
		require.NoError(t, st.DB().Set(key(i), value, nil))
	}
	require.NoError(t, st.Flush(context.Background()))
	require.NoError(t, st.DB().Compact(context.Background(), key(0), key(n), false))
	names, err := disk.List("store")
	require.NoError(t, err)
	for _, name := range names {
		if path.Ext(name) == ".sst" {
			f, err := disk.OpenReadWrite("store/"+name, vfs.WriteCategoryUnspecified)
			require.NoError(t, err)
			_, err = f.WriteAt([]byte("damage"), 50_000)
			require.NoError(t, errors.Join(err, f.Close()))
		}
	}
	for i := range n {
		require.NoError(t, st.DB().SingleDelete(key(i), nil))
	}
	require.NoError(t, st.Flush(context.Background()))
	go func() { _ = st.DB().Compact(context.Background(), key(0), key(n), false) }()
	require.Eventually(t, func() bool { return st.Failure() != nil }, 20*time.Second, time.Millisecond)
	require.ErrorIs(t, st.Failure(), base.ErrCorrupt)
	b := st.DB().NewBatch()
	require.NoError(t, b.Set([]byte("x"), nil, nil))
	require.ErrorIs(t, st.Commit(b), base.ErrCorrupt)
	require.ErrorIs(t, st.Close(), base.ErrCorrupt)
}

// imagingFS takes an image of the disk after a power failure, before each removal of a marker.
type imagingFS struct {
	*crashfs.Disk
	take func() *crashfs.Disk
	all  []*crashfs.Disk
}

func (fs *imagingFS) Remove(name string) error {
	if strings.HasPrefix(path.Base(name), markerPrefix) {
		for range 20 {
			fs.all = append(fs.all, fs.take())
		}
	}
	return fs.Disk.Remove(name)
}

// TestMarkersNameWhatExists: after a power failure, the file that a marker names exists, no matter
// which part of the unsynced data survives.
func TestMarkersNameWhatExists(t *testing.T) {
	rng := testkit.Seeded(t)
	mem := crashfs.New()
	disk := &imagingFS{Disk: mem, take: func() *crashfs.Disk {
		return mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 1 + rng.IntN(99), RNG: rng})
	}}
	for i := range 3 {
		shared := NewCaches(16<<20, 256<<10, 1)
		st, err := Open("store", Config{FS: disk, Log: slog.New(slog.DiscardHandler), MemTableBytes: 256 << 10}, shared, i == 0)
		require.NoError(t, err)
		require.NoError(t, st.Close())
		shared.Close()
	}
	require.NotEmpty(t, disk.all)
	for _, image := range disk.all {
		names, err := image.List("store")
		require.NoError(t, err)
		for _, name := range names {
			if i := strings.Index(name, "MANIFEST"); i > 0 && strings.HasPrefix(name, markerPrefix) {
				require.Contains(t, names, name[i:])
			}
		}
	}
}

// TestStoresShareMemory: the memory that waits for flushes has one bound for all stores together. A
// store waits only for its own flush, even if the others hold much memory. It leaves its part of
// the memory to them after the write of this part, or after its close.
func TestStoresShareMemory(t *testing.T) {
	for _, durability := range []Durability{Process, Replicated} {
		synctest.Test(t, func(t *testing.T) { sharedMemory(t, durability) })
	}
}

func sharedMemory(t *testing.T, durability Durability) {
	const stores, memTable, commit = 3, 256 << 10, 16 << 10
	shared := NewCaches(1<<20, memTable, stores)
	defer shared.Close()
	var all [stores]*Store
	var flushes [stores]chan struct{} // with an element: no flush goes on
	var full atomic.Bool
	stop, goOn := func(store int) { flushes[store] <- struct{}{} }, func(store int) { <-flushes[store] }
	for i := range all {
		flushes[i] = make(chan struct{}, 1)
		fs := &testkit.HookFS{FS: crashfs.New(), Before: func(op, name string) error {
			if op == "create" && path.Ext(name) == ".sst" {
				stop(i)
				goOn(i)
				if full.Load() {
					return syscall.ENOSPC
				}
			}
			return nil
		}}
		c := Config{FS: fs, Log: slog.New(slog.DiscardHandler), MemTableBytes: memTable, Durability: durability}
		st, err := Open("store", c, shared, true)
		require.NoError(t, err)
		all[i] = st
	}
	memory := func(store int) int { return int(all[store].DB().Metrics().MemTable.Size) }
	const some, much = 31, 300 // commits: three memtables, and many
	fill := func(store, commits int) (end <-chan error) {
		ended := make(chan error, 1)
		go func() {
			var err error
			for ; commits > 0 && all[store].HasSpace() && err == nil; commits-- {
				b := all[store].DB().NewBatch()
				require.NoError(t, b.Set([]byte("k"), make([]byte, commit), nil))
				err = errors.Join(all[store].Commit(b), b.Close())
			}
			ended <- err
		}()
		synctest.Wait()
		return ended
	}

	alone := func(store int) { // the other stores wait for nothing, or for little
		stop(store)
		end := fill(store, much)
		require.Equal(t, MemTables*memTable, memory(store))
		goOn(store)
		require.NoError(t, <-end)
		synctest.Wait()
	}

	alone(0)
	var ends [stores]<-chan error
	total := 0
	for i := range all {
		stop(i)
		ends[i] = fill(i, much)
		require.Empty(t, ends[i])
		require.GreaterOrEqual(t, memory(i), 3*memTable)
		total += memory(i)
	}
	require.Equal(t, (3*stores+1)*memTable, total)
	goOn(1)
	require.NoError(t, <-ends[1])
	require.NoError(t, <-fill(1, much), "the others still wait")
	for _, i := range []int{0, 2} {
		goOn(i)
		require.NoError(t, <-ends[i])
	}

	for _, i := range []int{0, 2} {
		stop(i)
		require.NoError(t, <-fill(i, some))
		goOn(i)
	}
	synctest.Wait()
	alone(1)

	stop(2)
	require.NoError(t, <-fill(2, some))
	stop(0)
	ends[0] = fill(0, much)
	full.Store(true)
	goOn(0)
	synctest.Wait()
	var slot Slot
	slot.Hurry()
	slot.Set(all[0])
	<-ends[0]          // it may have failed, or not begun
	_ = all[0].Close() // the disk is full
	full.Store(false)
	alone(1)
	goOn(2)
	require.NoError(t, errors.Join(all[1].Close(), all[2].Close()))
}
