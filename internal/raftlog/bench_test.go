package raftlog

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	"github.com/stretchr/testify/require"
	"go.etcd.io/bbolt"
)

// BenchmarkStoreLogs: each group stores entry after entry of 16 KiB, and truncates its log now and
// then, like snapshots. Pebble uses one store, bbolt a file for each group. Without a sync, bbolt
// has only one level: it writes pages with write(2).
func BenchmarkStoreLogs(b *testing.B) {
	const (
		entryBytes = 16 << 10
		keep       = 2048 // entries
	)
	levels := []struct {
		name string
		sync Sync
	}{{"none", SyncNone}, {"process", SyncProcess}, {"disk", SyncDisk}}
	data := make([]byte, entryBytes)
	for i := range data { // compressible by half, as tasks are
		data[i] = byte(rand.Uint32()) & 0x0f
	}
	for _, kind := range []string{"pebble", "boltdb"} {
		for _, level := range levels {
			for _, groups := range []int{1, 3} {
				b.Run(fmt.Sprintf("store=%s/sync=%s/groups=%d", kind, level.name, groups), func(b *testing.B) {
					dir := b.TempDir()
					logs := make([]raft.LogStore, groups)
					if kind == "pebble" {
						s, err := Open(dir, Options{FS: vfs.Default, Sync: level.sync})
						require.NoError(b, err)
						defer func() { require.NoError(b, s.Close()) }()
						for n := range logs {
							logs[n], err = s.Group(uint32(n))
							require.NoError(b, err)
						}
					} else {
						for n := range logs {
							s, err := raftboltdb.New(raftboltdb.Options{
								Path:        filepath.Join(dir, fmt.Sprint(n)),
								NoSync:      level.sync != SyncDisk,
								BoltOptions: &bbolt.Options{NoFreelistSync: true, FreelistType: bbolt.FreelistMapType},
							})
							require.NoError(b, err)
							defer func() { require.NoError(b, s.Close()) }()
							logs[n] = s
						}
					}
					b.ResetTimer()
					var wg sync.WaitGroup
					for n, log := range logs {
						count := uint64(b.N / groups)
						if n < b.N%groups {
							count++
						}
						wg.Go(func() {
							for i := uint64(1); i <= count; i++ {
								if err := log.StoreLog(&raft.Log{Index: i, Term: 1, Data: data}); err != nil {
									b.Error(err)
									return
								}
								if i%keep == 0 && i > keep {
									if err := log.DeleteRange(i-2*keep+1, i-keep); err != nil {
										b.Error(err)
										return
									}
								}
							}
						})
					}
					wg.Wait()
					b.StopTimer()
					perSecond := float64(b.N) / b.Elapsed().Seconds()
					b.ReportMetric(perSecond, "entries/s")
					b.ReportMetric(perSecond*entryBytes/1e6, "MB/s")
				})
			}
		}
	}
}

// BenchmarkTruncation: groups append in turn, and keep a tail of their logs. It reports the largest
// size of the directory relative to the kept entries, and the bytes written to tables relative to
// the appended ones.
func BenchmarkTruncation(b *testing.B) {
	const (
		entryBytes = 16 << 10
		groups     = 3
		every      = 1024
	)
	for _, keep := range []int{1024, 6144} {
		b.Run(fmt.Sprintf("keep=%d", keep), func(b *testing.B) {
			dir := b.TempDir()
			s, err := Open(dir, Options{FS: vfs.Default, Sync: SyncNone})
			require.NoError(b, err)
			var logs [groups]*Group
			for n := range logs {
				logs[n], err = s.Group(uint32(n))
				require.NoError(b, err)
			}
			data := make([]byte, entryBytes)
			for i := range data {
				data[i] = byte(rand.Uint32())
			}
			var largest int64
			for i := 1; i <= b.N/groups; i++ {
				for _, g := range logs {
					require.NoError(b, g.StoreLog(&raft.Log{Index: uint64(i), Data: data}))
				}
				if i%every == 0 {
					for _, g := range logs {
						require.NoError(b, g.DeleteRange(1, uint64(max(i-keep, 0))))
					}
					largest = max(largest, directoryBytes(b, dir))
				}
			}
			m := s.db.Metrics()
			appended := float64(b.N) * entryBytes
			tables := m.Total().TableBytesFlushed + m.Total().TableBytesCompacted
			b.ReportMetric(float64(largest)/1e6, "MB-largest")
			b.ReportMetric(float64(groups*(keep+every)*entryBytes)/1e6, "MB-kept")
			b.ReportMetric(float64(directoryBytes(b, dir))/1e6, "MB-end")
			b.ReportMetric((float64(tables)-float64(m.WAL.BytesWritten))/appended, "tables/appended")
			require.NoError(b, s.Close())
		})
	}
}

func directoryBytes(tb testing.TB, dir string) (n int64) {
	require.NoError(tb, filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil // deleted meanwhile
		}
		if info, err := e.Info(); err == nil && !e.IsDir() {
			n += info.Size()
		}
		return nil
	}))
	return n
}
