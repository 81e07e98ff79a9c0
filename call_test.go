package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/test/queuetest"
)

// called is the result of a Call.
type called struct {
	result int
	err    error
}

// calling begins a Call, and returns when it waits or has returned.
func calling(ctx context.Context, q *codeq.Queue, task codeq.Task) chan called {
	c := make(chan called, 1)
	go func() {
		n, err := codeq.Call[int](ctx, q, task)
		c <- called{n, err}
	}()
	synctest.Wait()
	return c
}

// TestCall: a call returns the result of its task, which is not kept, or says how it has ended.
func TestCall(t *testing.T) {
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		queuetest.Bubble(t, codeq.Options{Shards: shards}, func(t *testing.T, q *codeq.Queue) {
			for name, end := range map[string]func(codeq.Receipt) error{
				"done":      func(r codeq.Receipt) error { return q.Complete(ctx, r, []byte("42")) },
				"no result": func(r codeq.Receipt) error { return q.Complete(ctx, r, nil) },
				"no number": func(r codeq.Receipt) error { return q.Complete(ctx, r, []byte("x")) },
				"dead":      func(r codeq.Receipt) error { return q.DeadLetter(ctx, r, errors.New("broken")) },
				"canceled":  func(r codeq.Receipt) error { return q.Cancel(ctx, r.ID) },
			} {
				parent := queuetest.Produce(t, q, codeq.Task{Queue: "parent"})[0]
				c := calling(ctx, q, codeq.Task{Queue: name, LimitKey: "k", After: []codeq.ID{parent}})
				require.Empty(t, c)
				require.NoError(t, q.Complete(ctx, queuetest.ClaimNow(t, q, "parent").Receipt, nil))
				synctest.Wait()
				l := queuetest.ClaimNow(t, q, name)
				require.Empty(t, c)
				require.NoError(t, end(l.Receipt))
				got := <-c
				var failed *codeq.CallError
				if errors.As(got.err, &failed) {
					require.Equal(t, l.ID, failed.ID)
				}
				switch name {
				case "done":
					require.Equal(t, called{42, nil}, got)
				case "no result":
					require.Equal(t, called{}, got)
				case "no number":
					require.Equal(t, codeq.Outcome{State: codeq.Done, Result: []byte("x"), Attempts: 1}, failed.Outcome)
					require.EqualError(t, got.err, "codeq: call of task "+l.ID.String()+
						": result of queue no number into int: invalid character 'x' looking for beginning of value")
				case "dead":
					require.Equal(t, codeq.Outcome{State: codeq.Dead, LastError: "broken", Attempts: 1}, failed.Outcome)
					require.EqualError(t, got.err, "codeq: call of task "+l.ID.String()+": a dead letter after 1 attempts: broken")
				case "canceled":
					require.ErrorIs(t, got.err, codeq.ErrCanceled)
				}
			}
		})
	}
}

// TestCallEnds: the end of ctx ends the call and not its task, and no wait stays behind. A task
// that is not stored has no CallError.
func TestCallEnds(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		short, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := codeq.Call[int](short, q, codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k"}})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, codeq.ErrUncertain)
		var left *codeq.CallError
		require.ErrorAs(t, err, &left)
		require.Zero(t, left.Outcome)
		require.Equal(t, codeq.Ready, queuetest.InfoOf(t, q, left.ID).State)

		var taken *codeq.DuplicateError
		_, err = codeq.Call[int](t.Context(), q, codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k"}})
		require.ErrorAs(t, err, &taken)
		require.Equal(t, left.ID, taken.ID)
		for _, opts := range [][]codeq.PayloadOption{{nil}, {}} {
			_, err = codeq.Call[int](t.Context(), q, codeq.Task{}, opts...)
			require.ErrorIs(t, err, codeq.ErrInvalid)
			require.False(t, errors.As(err, &left))
		}
		_, err = codeq.Call[int](t.Context(), nil, codeq.Task{Queue: "a"})
		require.ErrorIs(t, err, codeq.ErrClosed)
	})
}

// TestCallOverClose: the queue is closed while a call waits, or its shard fails: the call says that
// its task is stored.
func TestCallOverClose(t *testing.T) {
	for _, fails := range []bool{false, true} {
		t.Run(fmt.Sprint("fails ", fails), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q, err := codeq.Open("queue", queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 1}))
				require.NoError(t, err)
				c := calling(t.Context(), q, codeq.Task{Queue: "a"})
				want := codeq.ErrClosed
				if fails {
					want = codeq.ErrFailed
					queuetest.FailShard(t, q, 0)
					_, err := q.Produce(t.Context(), codeq.Task{Queue: "a"})
					require.ErrorIs(t, err, codeq.ErrUncertain)
					_, err = codeq.Call[int](t.Context(), q, codeq.Task{Queue: "a"})
					require.ErrorIs(t, err, codeq.ErrFailed)
					require.False(t, errors.As(err, new(*codeq.CallError)))
				} else {
					require.NoError(t, q.Close())
				}
				got := <-c
				require.ErrorIs(t, got.err, want)
				require.ErrorAs(t, got.err, new(*codeq.CallError))
				_ = q.Close() // the storage of a failed shard cannot be closed
			})
		})
	}
}

// TestLocalCall: a program beside the process calls a task.
func TestLocalCall(t *testing.T) {
	t.Parallel()
	s := openServed(t, t.TempDir(), codeq.Options{Shards: 2})
	s.serve(t)
	c := s.client(t)
	calls := make(chan called)
	begin := func(ctx context.Context) {
		n, err := codeq.Call[int](ctx, c, codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k"}})
		calls <- called{n, err}
	}
	claim := func() codeq.Receipt {
		l, err := s.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		return l.Receipt
	}
	go begin(t.Context())
	require.NoError(t, s.Complete(t.Context(), claim(), []byte("42")))
	require.Equal(t, called{42, nil}, <-calls)

	go begin(t.Context())
	r := claim()
	_, err := codeq.Call[int](t.Context(), c, codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k"}})
	require.ErrorIs(t, err, codeq.ErrDuplicate)
	require.NoError(t, s.DeadLetter(t.Context(), r, errors.New("broken")))
	var failed *codeq.CallError
	require.ErrorAs(t, (<-calls).err, &failed)
	require.Equal(t, &codeq.CallError{ID: r.ID, Outcome: codeq.Outcome{State: codeq.Dead, LastError: "broken", Attempts: 1}}, failed)

	short, cancel := context.WithCancel(t.Context())
	go begin(short)
	r = claim()
	cancel()
	require.ErrorIs(t, (<-calls).err, codeq.ErrUncertain)
	require.NoError(t, s.Complete(t.Context(), r, nil))

	go begin(t.Context())
	r = claim()
	require.NoError(t, s.Queue.Close())
	got := <-calls
	if !errors.As(got.err, &failed) { // the process has closed its socket before it answered
		require.ErrorIs(t, got.err, codeq.ErrUncertain)
	}
}
