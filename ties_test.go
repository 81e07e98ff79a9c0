package codeq

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

func setTo(t *testing.T, q *Queue, queue string, set Settings) {
	t.Helper()
	require.NoError(t, q.Configure(context.Background(), queue, func(s *Settings) { *s = set }))
}

func requireSound(t *testing.T, q *Queue) {
	t.Helper()
	synctest.Wait()
	require.NoError(t, q.checkAll())
	require.NoError(t, q.checkMemory())
}

// parkedBehind produces n tasks of one key, of which it leases the first; the
// others wait for room.
func parkedBehind(t *testing.T, q *Queue, n int) (*Lease, []ID) {
	t.Helper()
	setTo(t, q, "a", Settings{ConcurrencyPerKey: 1})
	ids := produce(t, q, slices.Repeat([]Task{{Queue: "a", LimitKey: "k"}}, n)...)
	l := claimNow(t, q, "a")
	require.NotNil(t, l)
	require.Nil(t, claimNow(t, q, "a"))
	requireSound(t, q)
	require.EqualValues(t, n-1, countsOf(t, q, "a").Blocked)
	return l, ids
}

// TestRoomPassesOn: a task that was let go on because its limit had room, and
// then leaves without a lease, leaves the room to the next.
func TestRoomPassesOn(t *testing.T) {
	for name, leave := range map[string]func(*Queue, ID) error{
		"cancel": func(q *Queue, id ID) error { return q.Cancel(context.Background(), id) },
		"put off": func(q *Queue, id ID) error {
			return q.SetRunAt(context.Background(), id, time.Now().Add(time.Hour))
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
				l, ids := parkedBehind(t, q, 3)
				require.NoError(t, q.Complete(context.Background(), l.Receipt, nil))
				synctest.Wait()
				require.Equal(t, Ready, infoOf(t, q, ids[1]).State)
				require.NoError(t, leave(q, ids[1]))
				requireSound(t, q)
				next := claimNow(t, q, "a")
				require.NotNil(t, next)
				require.Equal(t, ids[2], next.ID)
			})
		})
	}
}

// TestRoomIsFoundAfterOpen: tasks that wait for room when the queue is opened,
// while no task of their key is leased, go on one after the other.
func TestRoomIsFoundAfterOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := Options{Shards: 1, fs: vfs.NewMem()}
		q, err := Open("q", &opts)
		require.NoError(t, err)
		l, ids := parkedBehind(t, q, 5)
		require.NoError(t, q.Complete(context.Background(), l.Receipt, nil))
		require.NoError(t, q.Close())
		q, err = Open("q", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		for i := range ids[1:] {
			requireSound(t, q)
			l := claimNow(t, q, "a")
			require.NotNil(t, l, "task %d", i)
			require.NoError(t, q.Complete(context.Background(), l.Receipt, nil))
		}
		requireSound(t, q)
	})
}

// TestClosedGateRefillsNothing: claims that wait at a limit of concurrency leave
// the shard asleep, also when the windows of the lanes evict each other.
func TestClosedGateRefillsNothing(t *testing.T) {
	bubble(t, Options{Shards: 1, WindowTasks: 2, WindowBytes: 1}, func(t *testing.T, q *Queue) {
		for _, tenant := range []string{"x", "y"} {
			for range 6 {
				produce(t, q, Task{Queue: "a", Tenant: tenant})
			}
		}
		setTo(t, q, "a", Settings{Concurrency: 2})
		claimNow(t, q, "a")
		l := claimNow(t, q, "a")
		got := make(chan *Lease, 1)
		go func() {
			l, err := q.Claim(context.Background(), ClaimRequest{Queues: []string{"a"}})
			if err == nil {
				got <- l
			}
		}()
		require.True(t, fallsAsleep(q.shards[0]), "the shard never sleeps")
		require.NoError(t, q.Complete(context.Background(), l.Receipt, nil))
		next := <-got
		require.True(t, fallsAsleep(q.shards[0]))
		require.NoError(t, q.Complete(context.Background(), next.Receipt, nil))
		requireSound(t, q)
	})
}

// fallsAsleep reports whether a shard comes to rest: synctest.Wait would not
// return if it did not.
func fallsAsleep(s *shard) bool {
	for range 200_000 {
		runtime.Gosched()
		s.inbox.mu.Lock()
		asleep := s.inbox.sleeping && len(s.inbox.ops) == 0
		s.inbox.mu.Unlock()
		if asleep && fallsAsleepSettled(s) {
			return true
		}
	}
	return false
}

// fallsAsleepSettled looks again after others have had their turn.
func fallsAsleepSettled(s *shard) bool {
	for range 100 {
		runtime.Gosched()
	}
	s.inbox.mu.Lock()
	defer s.inbox.mu.Unlock()
	return s.inbox.sleeping && len(s.inbox.ops) == 0
}

// TestChildOfATwin: a task may wait for one of its batch that was not stored,
// as an earlier one has its key: it waits for that one.
func TestChildOfATwin(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		key := Unique{Key: "u"}
		ids, err := q.ProduceBatch(context.Background(), []Task{
			{Queue: "a", Unique: key}, {Queue: "a", Unique: key}, {Queue: "b", After: []ID{Nth(1)}},
		})
		require.ErrorIs(t, err, ErrDuplicate)
		require.Equal(t, ids[0], ids[1])
		requireSound(t, q)
		require.NoError(t, q.Complete(context.Background(), claimNow(t, q, "a").Receipt, nil))
		requireSound(t, q)
		require.Equal(t, Ready, infoOf(t, q, ids[2]).State)
	})
}

// TestFollowUpWithTheKeyOfItsTask: a follow-up cannot replace the task that is
// being completed with it. Its key is free, or taken by a task that has ended.
func TestFollowUpWithTheKeyOfItsTask(t *testing.T) {
	for name, test := range map[string]struct {
		key      Unique
		produced bool
	}{
		"until the end":      {Unique{Key: "u", Replace: true}, true},
		"for an hour":        {Unique{Key: "u", Replace: true, For: time.Hour}, false},
		"until it completes": {Unique{Key: "u", Replace: true, For: time.Hour, ReleaseOnComplete: true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
				task := Task{Queue: "a", Unique: test.key}
				id := produce(t, q, task)[0]
				l := claimNow(t, q, "a")
				require.NoError(t, q.Complete(context.Background(), l.Receipt, nil, task))
				requireSound(t, q)
				_, err := q.Get(context.Background(), id)
				require.ErrorIs(t, err, ErrNotFound)
				require.Equal(t, test.produced, countsOf(t, q, "a").Ready == 1)
				require.Equal(t, test.produced, claimNow(t, q, "a") != nil)
			})
		})
	}
}

// TestNewParentsStayWithinMemory: a task that becomes a parent takes more room
// in its window.
func TestNewParentsStayWithinMemory(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		ids := produce(t, q, Task{Queue: "a"}, Task{Queue: "a", Tenant: "x"})
		s := q.shards[0]
		require.NoError(t, s.probe(func(s *shard) error { s.windowLimit = s.windowBytes; return nil }))
		produce(t, q, Task{Queue: "b", After: ids[:1], RunAt: time.Now().Add(time.Hour)})
		requireSound(t, q)
	})
}

// TestAwaitTellsTheSame: whoever asks before or after the end of a task gets the
// same outcome.
func TestAwaitTellsTheSame(t *testing.T) {
	ctx := context.Background()
	for name, end := range map[string]func(*Queue, Receipt) error{
		"done":     func(q *Queue, r Receipt) error { return q.Complete(ctx, r, []byte("result")) },
		"dead":     func(q *Queue, r Receipt) error { return q.DeadLetter(ctx, r, nil) },
		"canceled": func(q *Queue, r Receipt) error { return q.Cancel(ctx, r.ID) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{Shards: 1, Retention: time.Hour}, func(t *testing.T, q *Queue) {
				id := produce(t, q, Task{Queue: "a"})[0]
				early := make(chan *Outcome, 1)
				go func() {
					o, err := q.Await(ctx, id)
					if err == nil {
						early <- o
					}
				}()
				l := claimNow(t, q, "a")
				require.NoError(t, q.Retry(ctx, l.Receipt, RetryOptions{Err: errors.New("first"), After: -1}))
				require.NoError(t, end(q, claimNow(t, q, "a").Receipt))
				late, err := q.Await(ctx, id)
				require.NoError(t, err)
				first := <-early
				require.Equal(t, string(first.Result), string(late.Result))
				first.Result, late.Result = nil, nil
				require.Equal(t, first, late)
				require.Equal(t, name, late.State.String())
				require.Equal(t, 2, late.Attempts)
			})
		})
	}
}
