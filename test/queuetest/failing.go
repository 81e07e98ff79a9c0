package queuetest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
)

const waitingClaims = 3

// FailingQueue is a queue of two shards. The store of shard 0 is about to fail.
type FailingQueue struct {
	*codeq.Queue
	T       *testing.T
	Opts    codeq.Options
	Acked   []string     // payloads of the tasks stored in shard 0, in order
	Lease   *codeq.Lease // of one of them
	Waiting chan error
}

func NewFailingQueue(t *testing.T, level codeq.Durability, fs vfs.FS) *FailingQueue {
	f := &FailingQueue{T: t, Waiting: make(chan error, waitingClaims)}
	f.Opts = *inspect.With(&codeq.Options{Shards: 2, Durability: level, LeaseFor: time.Hour, MemTableBytes: 256 << 10}, inspect.Private{FS: fs})
	var err error
	f.Queue, err = codeq.Open("queue", &f.Opts)
	require.NoError(t, err)
	for range 10 {
		require.NoError(t, f.Store(10))
	}
	f.Lease, err = StartingAt(f.Queue, 0).Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"a"}})
	require.NoError(t, err)
	for i := range waitingClaims {
		go func() {
			_, err := StartingAt(f.Queue, i%2).Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"empty"}})
			f.Waiting <- err
		}()
	}
	waits := func(shard int) (n int) {
		require.NoError(t, inspect.Of(f.Queue).Owner(shard, func(o *inspect.Owner) error {
			n = o.Claims.Usage().Tickets
			return nil
		}))
		return n
	}
	require.Eventually(t, func() bool {
		return waits(0) == waitingClaims && waits(1) == waitingClaims
	}, 20*time.Second, time.Millisecond)
	return f
}

// produce stores a task in shard 0.
func (f *FailingQueue) Store(bytes int) error {
	payload := fmt.Sprint(len(f.Acked), " ", strings.Repeat("x", bytes))
	_, err := StartingAt(f.Queue, 0).Produce(context.Background(), codeq.Task{Queue: "a", Payload: []byte(payload)})
	if err == nil {
		f.Acked = append(f.Acked, payload)
	}
	return err
}

// RequireFailed makes sure that shard 0 refuses work, and that shard 1 does not.
func (f *FailingQueue) RequireFailed() {
	t, ctx := f.T, context.Background()
	for range waitingClaims {
		err := testkit.InTime(t, "waiting claim", func() error { return <-f.Waiting })
		require.ErrorIs(t, err, codeq.ErrFailed)
		require.ErrorContains(t, err, ErrBroken.Error())
	}
	_, err := StartingAt(f.Queue, 0).Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
	require.ErrorIs(t, err, codeq.ErrFailed)
	require.ErrorIs(t, f.Store(10), codeq.ErrFailed)
	require.ErrorIs(t, f.Complete(ctx, f.Lease.Receipt, nil), codeq.ErrFailed)
	require.ErrorIs(t, f.Extend(ctx, f.Lease.Receipt, time.Minute), codeq.ErrFailed)
	_, err = f.Stats(ctx)
	require.ErrorIs(t, err, codeq.ErrFailed)
	_, err = f.Get(ctx, f.Lease.ID)
	require.ErrorIs(t, err, codeq.ErrFailed)

	healthy := StartingAt(f.Queue, 1)
	id, err := healthy.Produce(ctx, codeq.Task{Queue: "b"})
	require.NoError(t, err)
	l, err := healthy.Claim(ctx, codeq.ClaimRequest{Queues: []string{"b"}})
	require.NoError(t, err)
	require.Equal(t, id, l.ID)
	require.NoError(t, f.Complete(ctx, l.Receipt, nil))
	_, err = healthy.Claim(ctx, codeq.ClaimRequest{Queues: []string{"b"}, NoWait: true})
	require.ErrorIs(t, err, codeq.ErrFailed, "the other shard cannot say that it is empty")
}

// RequireStored makes sure that a queue opened again has the tasks that were
// acknowledged, all of them or the first ones, perhaps one more, and works.
func (f *FailingQueue) RequireStored(fs vfs.FS, all bool) {
	t, ctx := f.T, context.Background()
	inspect.Options(&f.Opts).FS = fs
	q, err := codeq.Open("queue", &f.Opts)
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	require.NoError(t, CheckAll(q))
	require.NoError(t, CheckMemory(q))
	stored := make(map[string]bool)
	for info, err := range q.List(ctx, codeq.ListOptions{State: codeq.Ready}) {
		require.NoError(t, err)
		stored[string(info.Payload)] = true
	}
	info, err := q.Get(ctx, f.Lease.ID)
	if all || err == nil {
		require.NoError(t, err)
		require.Equal(t, codeq.Leased, info.State)
		stored[string(info.Payload)] = true
	}
	missing := 0
	for _, payload := range f.Acked {
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
		require.NoError(t, q.Complete(ctx, f.Lease.Receipt, nil))
	}
	_, err = StartingAt(q, 0).Produce(ctx, codeq.Task{Queue: "a"})
	require.NoError(t, err)
}
