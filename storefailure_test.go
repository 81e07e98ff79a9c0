package codeq

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
)

var errBroken = testkit.ErrBroken

// failingQueue is a queue of two shards. The store of shard 0 is about to fail.
type failingQueue struct {
	*Queue
	t       *testing.T
	Opts    Options
	acked   []string // payloads of the tasks stored in shard 0, in order
	lease   *Lease   // of one of them
	waiting chan error
}

const waitingClaims = 3

func newFailingQueue(t *testing.T, level Durability, fs vfs.FS) *failingQueue {
	f := &failingQueue{t: t, waiting: make(chan error, waitingClaims)}
	f.Opts = *inspect.With(&Options{Shards: 2, Durability: level, LeaseFor: time.Hour}, inspect.Private{FS: fs})
	var err error
	f.Queue, err = Open("queue", &f.Opts)
	require.NoError(t, err)
	for range 10 {
		require.NoError(t, f.Store(10))
	}
	f.lease, err = f.startingAt(0).Claim(context.Background(), ClaimRequest{Queues: []string{"a"}})
	require.NoError(t, err)
	for i := range waitingClaims {
		go func() {
			_, err := f.startingAt(i%2).Claim(context.Background(), ClaimRequest{Queues: []string{"empty"}})
			f.waiting <- err
		}()
	}
	waits := func(s *shard) (n int) {
		require.NoError(t, s.probe(func(s *shard) error {
			n = s.claims.Usage().Tickets
			return nil
		}))
		return n
	}
	require.Eventually(t, func() bool {
		return waits(f.shard(0)) == waitingClaims && waits(f.shard(1)) == waitingClaims
	}, 20*time.Second, time.Millisecond)
	return f
}

// produce stores a task in shard 0.
func (f *failingQueue) Store(bytes int) error {
	payload := fmt.Sprint(len(f.acked), " ", strings.Repeat("x", bytes))
	_, err := f.startingAt(0).Produce(context.Background(), Task{Queue: "a", Payload: []byte(payload)})
	if err == nil {
		f.acked = append(f.acked, payload)
	}
	return err
}

// requireFailed makes sure that shard 0 refuses work, and that shard 1 does not.
func (f *failingQueue) RequireFailed() {
	t, ctx := f.t, context.Background()
	for range waitingClaims {
		err := testkit.InTime(t, "waiting claim", func() error { return <-f.waiting })
		require.ErrorIs(t, err, ErrFailed)
		require.ErrorContains(t, err, errBroken.Error())
	}
	_, err := f.startingAt(0).Claim(ctx, ClaimRequest{Queues: []string{"a"}, NoWait: true})
	require.ErrorIs(t, err, ErrFailed)
	require.ErrorIs(t, f.Store(10), ErrFailed)
	require.ErrorIs(t, f.Complete(ctx, f.lease.Receipt, nil), ErrFailed)
	require.ErrorIs(t, f.Extend(ctx, f.lease.Receipt, time.Minute), ErrFailed)
	_, err = f.Stats(ctx)
	require.ErrorIs(t, err, ErrFailed)
	_, err = f.Get(ctx, f.lease.ID)
	require.ErrorIs(t, err, ErrFailed)

	healthy := f.startingAt(1)
	id, err := healthy.Produce(ctx, Task{Queue: "b"})
	require.NoError(t, err)
	l, err := healthy.Claim(ctx, ClaimRequest{Queues: []string{"b"}})
	require.NoError(t, err)
	require.Equal(t, id, l.ID)
	require.NoError(t, f.Complete(ctx, l.Receipt, nil))
	_, err = healthy.Claim(ctx, ClaimRequest{Queues: []string{"b"}, NoWait: true})
	require.ErrorIs(t, err, ErrFailed, "the other shard cannot say that it is empty")
}

// requireStored makes sure that a queue opened again has the tasks that were
// acknowledged, all of them or the first ones, perhaps one more, and works.
func (f *failingQueue) RequireStored(fs vfs.FS, all bool) {
	t, ctx := f.t, context.Background()
	inspect.Options(&f.Opts).FS = fs
	q, err := Open("queue", &f.Opts)
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	require.NoError(t, q.checkAll())
	require.NoError(t, q.checkMemory())
	stored := make(map[string]bool)
	for info, err := range q.List(ctx, ListOptions{State: Ready}) {
		require.NoError(t, err)
		stored[string(info.Payload)] = true
	}
	info, err := q.Get(ctx, f.lease.ID)
	if all || err == nil {
		require.NoError(t, err)
		require.Equal(t, Leased, info.State)
		stored[string(info.Payload)] = true
	}
	missing := 0
	for _, payload := range f.acked {
		if !stored[payload] {
			missing++
			continue
		}
		require.Zero(t, missing, "a gap")
		delete(stored, payload)
	}
	if all {
		require.Zero(t, missing)
	}
	require.LessOrEqual(t, len(stored), 1, "tasks of which the outcome was unknown")
	if info != nil {
		require.NoError(t, q.Complete(ctx, f.lease.Receipt, nil))
	}
	_, err = q.startingAt(0).Produce(ctx, Task{Queue: "a"})
	require.NoError(t, err)
}

// TestStoreFailureInBackground: while no table can be written, logs keep what
// is acknowledged.
func TestStoreFailureInBackground(t *testing.T) {
	t.Parallel()
	for _, level := range []Durability{DurabilityProcess, DurabilityDisk, DurabilityNone} {
		t.Run(level.String(), func(t *testing.T) {
			disk := crashfs.New()
			fs, broken := testkit.Breakable(disk, "begin", ".sst", errBroken)
			f := newFailingQueue(t, level, fs)
			broken.Store(true)
			flushed, err := f.shard(0).Store.DB().AsyncFlush()
			require.NoError(t, err)
			for range 10 {
				require.NoError(t, f.Store(10))
			}
			select {
			case <-flushed:
				require.Fail(t, "the flush has succeeded")
			default:
			}
			broken.Store(false)
			require.NoError(t, testkit.InTime(t, "flush", func() error { <-flushed; return nil }))
			require.NoError(t, testkit.InTime(t, "Close", f.Close))
			f.RequireStored(disk, true)
		})
	}
}
