package workload

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2"
)

// RawPebble is not a queue, but the upper bound of the engine: Pebble with codeq's settings does
// only the four key writes of a cycle, a batch of cycles a commit, without a sync. The keys of a
// kind are adjacent in the batch and in order, which is best for the memtable.
type RawPebble struct {
	workers uint64
	stores  []*rawStore
	done    chan func(payload []byte) // capacity 1: sent by Work; Produce returns it after use
}

// rawStore belongs to one producer.
type rawStore struct {
	db    *pebble.DB
	batch *pebble.Batch
	key   []byte
	value []byte
	next  uint64
}

// OpenRawPebble opens stores below dir, one for each producer of the load. A task is completed
// workers cycles after its production.
func OpenRawPebble(dir string, stores, workers int) (*RawPebble, error) {
	r := &RawPebble{workers: uint64(workers), done: make(chan func([]byte), 1)}
	for i := range stores {
		db, err := pebble.Open(filepath.Join(dir, fmt.Sprint(i)), &pebble.Options{
			FormatMajorVersion:          pebble.FormatColumnarBlocks,
			MemTableSize:                16 << 20,
			MemTableStopWritesThreshold: 4,
			L0StopWritesThreshold:       24,
			Logger:                      silence{},
		})
		if err != nil {
			return nil, errors.Join(err, r.Close())
		}
		r.stores = append(r.stores, &rawStore{db: db, batch: db.NewBatch(), key: make([]byte, 1+4+16), next: r.workers})
	}
	return r, nil
}

// Close closes the stores, after the load.
func (r *RawPebble) Close() error {
	var errs []error
	for _, s := range r.stores {
		errs = append(errs, s.db.Close())
	}
	return errors.Join(errs...)
}

func (r *RawPebble) Produce(ctx context.Context, producer, _ int, payloads [][]byte) error {
	if err := r.stores[producer].cycles(payloads[0], uint64(len(payloads)), r.workers); err != nil {
		return err
	}
	select {
	case done := <-r.done:
		r.done <- done
		for _, p := range payloads {
			done(p)
		}
	case <-ctx.Done():
	}
	return nil
}

func (r *RawPebble) Work(ctx context.Context, _ int, done func(payload []byte)) error {
	r.done <- done
	<-ctx.Done()
	return nil
}

// cycles makes the writes of n cycles.
func (s *rawStore) cycles(payload []byte, n, workers uint64) error {
	s.value = append(append(s.value[:0], 0), payload...)
	var lease [18]byte
	body := func(i uint64) []byte { return rawKey(s.key, 0x10, 5, i) }
	held := func(i uint64) []byte { return rawKey(s.key[:1+16], 0x11, 1, i) }
	first := s.next
	s.next += n
	for i := first; i < s.next; i++ {
		_ = s.batch.Set(body(i), s.value, nil)
	}
	for i := first; i < s.next; i++ {
		_ = s.batch.Set(held(i), lease[:], nil)
	}
	if first >= 2*workers {
		for i := first - workers; i < s.next-workers; i++ {
			_ = s.batch.SingleDelete(body(i), nil)
		}
		for i := first - workers; i < s.next-workers; i++ {
			_ = s.batch.SingleDelete(held(i), nil)
		}
	}
	if err := s.db.Apply(s.batch, pebble.NoSync); err != nil {
		return err
	}
	s.batch.Reset()
	return nil
}

// rawKey writes a prefix and, at offset at, an ID that ascends with n.
func rawKey(key []byte, prefix byte, at int, n uint64) []byte {
	key[0] = prefix
	binary.BigEndian.PutUint64(key[at:], n)
	binary.BigEndian.PutUint64(key[at+8:], n*0x9e3779b97f4a7c15)
	return key
}

// silence is the logger of a temporary store.
type silence struct{}

func (silence) Infof(string, ...any)  {}
func (silence) Errorf(string, ...any) {}
func (silence) Fatalf(format string, args ...any) {
	panic(fmt.Sprintf(format, args...))
}
