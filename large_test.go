package codeq

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/store"
)

// sizedCommitter takes a time for each large commit.
type sizedCommitter struct {
	committer
	takes time.Duration
}

func (c sizedCommitter) Commit(b *pebble.Batch) error {
	if b.Len() > engine.GroupBytes {
		time.Sleep(c.takes)
	}
	return c.committer.Commit(b)
}

// TestSmallPassLarge: a small operation waits for one large one at the most, however many there
// are, and large ones go on however many small ones come.
func TestSmallPassLarge(t *testing.T) {
	t.Parallel()
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		const commit = 10 * time.Millisecond // of a large one; the others take no time
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			s.commit = sizedCommitter{s.commit, commit}
			return nil
		}))
		produceOne := func(queue string, size int, took *time.Duration) {
			begun := time.Now()
			_, err := q.Produce(t.Context(), Task{Queue: queue, Payload: make([]byte, size)})
			if err != nil {
				t.Error(err)
			}
			*took = time.Since(begun)
		}
		const large = 20
		var took [large]time.Duration
		for i := range took {
			go produceOne("large", engine.GroupBytes, &took[i])
		}
		synctest.Wait()
		for range 3 * large { // without a pause between them
			var small time.Duration
			produceOne("small", 10, &small)
			require.LessOrEqual(t, small, commit)
		}
		synctest.Wait()
		for i := range took {
			require.NotZero(t, took[i], i)
			require.LessOrEqual(t, took[i], 2*large*commit+commit, i)
		}
	})
}

// stalledFS makes no table until a channel is closed: flushes wait.
type stalledFS struct {
	vfs.FS
	until *atomic.Pointer[chan struct{}] // nil: none does
}

func (fs stalledFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	if until := fs.until.Load(); until != nil && strings.HasSuffix(name, ".sst") {
		<-*until
	}
	return fs.FS.Create(name, category)
}

// TestLargeWaitForFlushes: large operations wait while memtables are flushed, and small ones do
// not.
func TestLargeWaitForFlushes(t *testing.T) {
	t.Parallel()
	fs := stalledFS{crashfs.New(), new(atomic.Pointer[chan struct{}])}
	bubble(t, *inspect.With(&Options{Shards: 1, MemTableBytes: 1 << 20}, inspect.Private{FS: fs}), func(t *testing.T, q *Queue) {
		flushed := make(chan struct{})
		flush := sync.OnceFunc(func() { close(flushed) })
		defer flush()
		fs.until.Store(&flushed)
		const large = 3 * store.MemTables
		done := make(chan error, large)
		for range large {
			go func() {
				_, err := q.Produce(t.Context(), Task{Queue: "large", Payload: make([]byte, 400<<10)})
				done <- err
			}()
		}
		for range 50 {
			begun := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err := q.Produce(ctx, Task{Queue: "small"})
			cancel()
			require.NoError(t, err)
			require.Zero(t, time.Since(begun))
			time.Sleep(10 * time.Millisecond)
		}
		require.Less(t, q.shard(0).Store.DB().Metrics().MemTable.Size, uint64(store.MemTables<<20))
		require.Less(t, len(done), large)
		flush()
		for range large {
			require.NoError(t, <-done)
		}
		requireSettled(t, q)
	})
}

// TestLargeAtTheEnd: large operations that wait are decided before the queue closes, or refused
// when the shard fails.
func TestLargeAtTheEnd(t *testing.T) {
	t.Parallel()
	for _, fails := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			q, err := Open("q", inspect.With(&Options{Shards: 1}, inspect.Private{FS: crashfs.New()}))
			require.NoError(t, err)
			goOn := make(chan struct{})
			go func() {
				_ = q.shard(0).probe(func(s *shard) error {
					if <-goOn; fails {
						s.Broken = errBroken
					}
					return nil
				})
			}()
			synctest.Wait()
			errs := make(chan error, 10)
			for range cap(errs) {
				go func() {
					_, err := q.Produce(t.Context(), Task{Queue: "a", Payload: make([]byte, engine.GroupBytes)})
					errs <- err
				}()
			}
			synctest.Wait()
			closed := make(chan error, 1)
			if !fails {
				go func() { closed <- q.Close() }()
				synctest.Wait()
			}
			close(goOn)
			for range cap(errs) {
				if err := <-errs; fails {
					require.ErrorIs(t, err, ErrFailed)
				} else {
					require.NoError(t, err)
				}
			}
			if fails {
				require.ErrorIs(t, q.Close(), ErrFailed)
			} else {
				require.NoError(t, <-closed)
			}
		})
	}
}

// TestLargeAmidClose: the queue closes while large operations wait for memtables.
func TestLargeAmidClose(t *testing.T) {
	t.Parallel()
	for round := range 10 {
		q, err := Open(t.TempDir(), &Options{Shards: 1, MemTableBytes: 1 << 20})
		require.NoError(t, err)
		s := q.shard(0)
		var producers sync.WaitGroup
		for range 20 {
			producers.Go(func() {
				for {
					if _, err := q.Produce(context.Background(), Task{Queue: "large", Payload: make([]byte, 400<<10)}); err != nil {
						return
					}
				}
			})
		}
		for waits := false; !waits; { // some do
			require.NoError(t, s.probe(func(s *shard) error { waits = s.undecided.large.Recheck() > 0; return nil }))
		}
		require.NoError(t, q.Close(), round)
		producers.Wait()
	}
}
