package bench

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2"
)

// BenchmarkRawPebble is the limit that the engine works under: Pebble with
// codeq's settings does the four key writes of a cycle and nothing else, 64
// cycles a batch, without a sync. The keys of a kind stand together in the
// batch and come in order, which is what suits the memtable best.
func BenchmarkRawPebble(b *testing.B) {
	for _, dbs := range []int{1, 2} {
		b.Run(fmt.Sprintf("dbs=%d", dbs), func(b *testing.B) {
			var l load
			var stop atomic.Bool
			var wg sync.WaitGroup
			dir := b.TempDir()
			for i := range dbs {
				wg.Go(func() {
					if err := rawCycles(filepath.Join(dir, fmt.Sprint(i)), &l, &stop); err != nil {
						b.Error(err)
					}
				})
			}
			l.measure(b, nil)
			stop.Store(true)
			wg.Wait()
		})
	}
}

func rawCycles(dir string, l *load, stop *atomic.Bool) error {
	db, err := pebble.Open(dir, &pebble.Options{
		FormatMajorVersion:          pebble.FormatColumnarBlocks,
		MemTableSize:                16 << 20,
		MemTableStopWritesThreshold: 4,
		L0StopWritesThreshold:       24,
		Cache:                       pebble.NewCache(16 << 20),
		Logger:                      silence{},
	})
	if err != nil {
		return err
	}
	const bodyLen, leaseLen = 1 + 4 + 16, 1 + 16
	key := make([]byte, bodyLen)
	value := append([]byte{0}, payload...)
	lease := make([]byte, 18)
	body := func(n uint64) []byte { return rawKey(key[:bodyLen], 0x10, 5, n) }
	held := func(n uint64) []byte { return rawKey(key[:leaseLen], 0x11, 1, n) }
	b := db.NewBatch()
	// A task is completed as many cycles after it was produced as there are workers.
	for n := uint64(workers); !stop.Load(); n += batch {
		for i := n; i < n+batch; i++ {
			_ = b.Set(body(i), value, nil)
		}
		for i := n; i < n+batch; i++ {
			_ = b.Set(held(i), lease, nil)
		}
		for i := n - workers; i < n-workers+batch && n >= 2*workers; i++ {
			_ = b.SingleDelete(body(i), nil)
		}
		for i := n - workers; i < n-workers+batch && n >= 2*workers; i++ {
			_ = b.SingleDelete(held(i), nil)
		}
		if err := db.Apply(b, pebble.NoSync); err != nil {
			return err
		}
		b.Reset()
		l.created.Add(batch)
		l.completed.Add(batch)
	}
	return db.Close()
}

// rawKey is a prefix, and at offset at an ID that ascends with n.
func rawKey(key []byte, prefix byte, at int, n uint64) []byte {
	key[0] = prefix
	binary.BigEndian.PutUint64(key[at:], n)
	binary.BigEndian.PutUint64(key[at+8:], n*0x9e3779b97f4a7c15)
	return key
}

type silence struct{}

func (silence) Infof(string, ...any)  {}
func (silence) Errorf(string, ...any) {}
func (silence) Fatalf(format string, args ...any) {
	panic(fmt.Sprintf(format, args...))
}
