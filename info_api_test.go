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
)

// infoIn is what Info says of one queue; zero if it does not name it.
func infoIn(t *testing.T, q interface {
	Info(context.Context) ([]codeq.QueueInfo, error)
}, queue string) (info codeq.QueueInfo) {
	t.Helper()
	all, err := q.Info(t.Context())
	require.NoError(t, err)
	for i := range all {
		if i > 0 {
			require.Less(t, all[i-1].Queue, all[i].Queue)
		}
		if all[i].Queue == queue {
			info = all[i]
		}
	}
	return info
}

// TestInfo: what has happened to the tasks of a queue is counted once, by day as well, and stays
// when the queue is closed, or killed, and when all of its tasks have ended.
func TestInfo(t *testing.T) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				disk := crashfs.New()
				open := func() *codeq.Queue {
					q, err := codeq.Open("queue", onDisk(disk, &codeq.Options{Shards: shards, MaxAttempts: 2, LeaseFor: time.Minute}))
					require.NoError(t, err)
					return q
				}
				q := open()
				defer func() { _ = q.Close() }()
				claim := func() codeq.Receipt {
					l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
					require.NoError(t, err)
					return l.Receipt
				}
				day := time.Now().UTC().Truncate(24 * time.Hour)
				began := time.Now()
				produce(t, q, codeq.Task{Queue: "a"})
				time.Sleep(time.Second)
				produce(t, q, named(codeq.Task{Queue: "a"}, "1", "2", "3")...)
				produce(t, q, codeq.Task{Queue: "a", RunAt: time.Now().Add(24 * time.Hour)})
				require.NoError(t, q.Configure(ctx, "b", func(s *codeq.Settings) { s.Rate = 7 }))
				require.WithinDuration(t, began, infoIn(t, q, "a").OldestReady, 0)
				require.Equal(t, codeq.QueueInfo{Queue: "b", Settings: codeq.Settings{Rate: 7}}, infoIn(t, q, "b"))

				require.NoError(t, q.Complete(ctx, claim(), nil))
				require.NoError(t, q.Retry(ctx, claim(), codeq.RetryOptions{Err: errors.New("again")}))
				require.NoError(t, q.Release(ctx, claim(), 0))
				require.NoError(t, q.DeadLetter(ctx, claim(), errors.New("given up")))
				first := codeq.Totals{Produced: 5, Claimed: 4, Completed: 1, Retried: 1, Released: 1, Dead: 1}
				info := infoIn(t, q, "a")
				require.Equal(t, codeq.Counts{Ready: 1, Scheduled: 2, Dead: 1}, info.Counts)
				require.Equal(t, first, info.Totals)

				requireDays := func(want ...codeq.DayTotals) {
					t.Helper()
					got, err := q.TotalsByDay(ctx, "a")
					require.NoError(t, err)
					require.Equal(t, want, got)
				}
				killed := disk.Clone()
				require.NoError(t, q.Close())
				for _, disk = range []*crashfs.Disk{disk, killed} {
					r, err := codeq.OpenReadOnly("queue", onDisk(disk, new(codeq.ReaderOptions)))
					require.NoError(t, err)
					require.Equal(t, info, infoIn(t, r, "a"))
					got, err := r.TotalsByDay(ctx, "a")
					require.NoError(t, err)
					require.Equal(t, []codeq.DayTotals{{Day: day, Totals: first}}, got)
					require.NoError(t, r.Close())
					q = open()
					require.Equal(t, info, infoIn(t, q, "a"), "all that waits is found on disk")
					requireDays(codeq.DayTotals{Day: day, Totals: first})
					if disk != killed {
						require.NoError(t, q.Close())
					}
				}

				time.Sleep(25 * time.Hour)
				claim()
				time.Sleep(2 * time.Minute) // its lease expires
				for range 3 {
					require.NoError(t, q.Cancel(ctx, claim().ID))
				}
				second := codeq.Totals{Claimed: 4, Canceled: 3, Expired: 1}
				requireDays(codeq.DayTotals{Day: day, Totals: first}, codeq.DayTotals{Day: day.Add(24 * time.Hour), Totals: second})
				_, err := q.PurgeDead(ctx, codeq.DeadFilter{Queue: "a"})
				require.NoError(t, err)
				all := codeq.Totals{Produced: 5, Claimed: 8, Completed: 1, Retried: 1, Released: 1, Dead: 1, Canceled: 3, Expired: 1}
				require.Equal(t, codeq.QueueInfo{Queue: "a", Totals: all}, infoIn(t, q, "a"), "it has just become empty")
				time.Sleep(time.Hour)
				require.Empty(t, infoIn(t, q, "a").Queue)
				require.NoError(t, q.Close())

				q = open()
				require.Empty(t, infoIn(t, q, "a").Queue)
				requireDays(codeq.DayTotals{Day: day, Totals: first}, codeq.DayTotals{Day: day.Add(24 * time.Hour), Totals: second})
				all.Produced++
				produce(t, startingAt(q, 0), codeq.Task{Queue: "a"})
				require.Equal(t, all, infoIn(t, q, "a").Totals)
				quiesce(q, t)
				require.NoError(t, errors.Join(checkAll(q), q.Close()))
				require.True(t, verifyImage(t, disk, false).OK())
			})
		})
	}
}

// TestTotalsOfGoneQueues: of queues that come and go, which memory and counters do not keep, the
// totals go on when they come back, and are forgotten after 90 days.
func TestTotalsOfGoneQueues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk := crashfs.New()
		opts := onDisk(disk, &codeq.Options{Shards: 1})
		q, err := codeq.Open("queue", opts)
		require.NoError(t, err)
		defer func() { _ = q.Close() }()
		work := func(queue string) {
			produce(t, q, codeq.Task{Queue: queue})
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}})
			require.NoError(t, err)
			require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		}
		reopen := func() {
			require.NoError(t, q.Close())
			q, err = codeq.Open("queue", opts)
			require.NoError(t, err)
			quiesce(q, t)
		}
		const days = 100
		for range days {
			work("a")
			work("b")
			reopen() // only its tasks keep a queue in memory
			time.Sleep(24 * time.Hour)
		}
		require.Equal(t, 2*codeq.TotalsDays+1, stored(t, q, 0x0e), "the rows of each day, and when they were swept")
		got, err := q.TotalsByDay(ctx, "a")
		require.NoError(t, err)
		require.Len(t, got, codeq.TotalsDays-1, "and nothing today")
		work("a")
		require.EqualValues(t, days+1, infoIn(t, q, "a").Totals.Completed)
		require.Zero(t, infoIn(t, q, "b"))
		reopen()

		time.Sleep((codeq.TotalsDays - 1) * 24 * time.Hour)
		work("a")
		work("b")
		require.EqualValues(t, days+2, infoIn(t, q, "a").Totals.Completed)
		require.EqualValues(t, 1, infoIn(t, q, "b").Totals.Completed, "it was gone for too long")
		reopen()
		require.NoError(t, errors.Join(checkAll(q), checkMemory(q), q.Close()))
	})
}
