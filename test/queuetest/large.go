package queuetest

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
)

// ReclaimTest returns options that make some MiB a large amount.
func ReclaimTest() codeq.Options {
	return *inspect.With(&codeq.Options{
		Shards: 1, MemTableBytes: 512 << 10, LeaseFor: time.Hour,
	}, inspect.Private{FS: crashfs.New(), TrimBytes: 256 << 10, TrimLane: 16 << 10, ReclaimFrom: 512 << 10})
}

const ReclaimPayload = 16 << 10

// incompressible is a payload that takes as much of a table as of memory.
func Incompressible() []byte {
	b := make([]byte, 0, ReclaimPayload)
	for len(b) < ReclaimPayload {
		b = binary.LittleEndian.AppendUint64(b, rand.Uint64())
	}
	return b
}

// produceMuch produces tasks with payloads, in batches.
func ProduceMuch(t *testing.T, q *codeq.Queue, n int, task func(i int) codeq.Task) (ids []codeq.ID) {
	const size = 16
	for i := 0; i < n; i += size {
		batch := make([]codeq.Task, min(size, n-i))
		for k := range batch {
			batch[k] = task(i + k)
			batch[k].Payload = Incompressible()
		}
		more, err := q.ProduceBatch(context.Background(), batch)
		require.NoError(t, err)
		ids = append(ids, more...)
	}
	return ids
}

// drain ends all tasks that are ready, in batches. It waits for space for claims, but not for long.
func Drain(t *testing.T, q *codeq.Queue, queue string, end func(*codeq.Lease) error) (n int) {
	patience := 20
	for {
		leases, err := q.ClaimBatch(context.Background(), codeq.ClaimRequest{Queues: []string{queue}, Max: 16, NoWait: true})
		if errors.Is(err, codeq.ErrEmpty) {
			return n
		}
		if errors.Is(err, codeq.ErrDiskFull) && patience > 0 {
			patience--
			time.Sleep(100 * time.Millisecond)
			continue
		}
		require.NoError(t, err)
		for _, l := range leases {
			require.NoError(t, end(l))
			n++
		}
	}
}

func Completing(q *codeq.Queue) func(*codeq.Lease) error {
	return func(l *codeq.Lease) error { return q.Complete(context.Background(), l.Receipt, nil) }
}

// StoresOf sums up the storage numbers of a process.
func StoresOf(t *testing.T, q *codeq.Queue) (sum codeq.ShardStorage) {
	st, err := q.StorageStats()
	require.NoError(t, err)
	for _, s := range st.Shards {
		sum.TableBytes += s.TableBytes
		sum.DeadBytes += s.DeadBytes
		sum.CompactedBytes += s.CompactedBytes
		sum.Flushes += s.Flushes
		sum.Compactions += s.Compactions
	}
	return sum
}

// cancelMost cancels all tasks but one in eight.
func CancelMost(t *testing.T, q *codeq.Queue, ids []codeq.ID) {
	for i, id := range ids {
		if i%8 > 0 {
			require.NoError(t, q.Cancel(context.Background(), id))
		}
	}
}
