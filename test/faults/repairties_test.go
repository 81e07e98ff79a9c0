package faults_test

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/keys"
	"codeq/internal/simtest"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestRepairOfTies flips a bit in each table of a queue with ties of all kinds. After a repair the
// shards agree, also when messages were exchanged. When all tasks have ended, no task stays longer
// than its retention.
func TestRepairOfTies(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for name, c := range map[string]struct {
		shards int
		quiet  bool // nothing is under way between the shards
	}{"one shard": {1, false}, "at work": {2, false}, "quiet": {2, true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				damaged := repairTables(t, tiedQueue(t, c.shards, c.quiet), c.shards)
				for _, prefix := range []byte{
					keys.Inbound, keys.Sent, keys.Blocked, keys.Done, keys.Unique, keys.Group, keys.Pending, keys.Dependent,
					keys.Pin, keys.Pinned,
				} {
					require.Contains(t, damaged, prefix)
				}
			})
		})
	}
}

func tiedOptions(disk *crashfs.Disk, shards int) *codeq.Options {
	return queuetest.OnDisk(disk, &codeq.Options{Shards: shards, Retention: 2 * time.Second})
}

// tiedQueue returns the disk of a closed queue with all entries in tables.
func tiedQueue(t *testing.T, shards int, quiet bool) *crashfs.Disk {
	disk := crashfs.New()
	q, err := codeq.Open("queue", tiedOptions(disk, shards))
	require.NoError(t, err)
	for i := range 12 {
		parent := codeq.Task{Queue: "parents", Retention: time.Duration(i%2) * 3 * time.Second}
		other := codeq.Task{Queue: "others", Retention: 3 * time.Second, Group: fmt.Sprint("group", i%3), Unique: codeq.Unique{Key: fmt.Sprint(i)}}
		ids := queuetest.Produce(t, q, parent, other)
		children := queuetest.Produce(t, q,
			codeq.Task{Queue: "children", After: ids[:1]},
			codeq.Task{Queue: "children", After: ids[:1], Group: "children"},
			codeq.Task{Queue: "children", After: ids, Unique: codeq.Unique{Key: fmt.Sprint(i), For: time.Hour}},
		)
		queuetest.Produce(t, q, codeq.Task{Queue: "children", After: children})
	}
	complete := func(queue string, n int) {
		leases, err := q.ClaimBatch(context.Background(), codeq.ClaimRequest{Queues: []string{queue}, Max: n, NoWait: true})
		require.NoError(t, err)
		for _, l := range leases {
			require.NoError(t, q.Complete(context.Background(), l.Receipt, []byte("result")))
		}
	}
	complete("parents", 8)
	synctest.Wait()
	complete("children", 5)
	complete("others", 2)
	complete("parents", 2)
	if quiet {
		queuetest.Quiesce(t, q)
	}
	require.NoError(t, q.Close())
	q, err = codeq.Open("queue", tiedOptions(disk, shards))
	require.NoError(t, errors.Join(err, q.Close()))
	return disk
}

// repairTables damages each table of a queue, and repairs it. It returns the ranges that the tables
// begin with.
func repairTables(t *testing.T, disk *crashfs.Disk, shards int) (damaged map[byte]bool) {
	damaged = make(map[byte]bool)
	image := testkit.ImageOf(t, disk, "queue")
	for name := range image.Content {
		if path.Ext(name) != ".sst" {
			continue
		}
		disk := image.Flip(t, name, 8*20)
		var prefix byte
		r := queuetest.VerifyImage(t, disk, false)
		if r.OK() { // the table is outside of the store
			continue
		}
		_, err := fmt.Sscanf(r.Problems[0].Text, "keys between %2x", &prefix)
		require.NoError(t, err)
		damaged[prefix] = true
		what := fmt.Sprintf("%s: %v", name, r.Problems[0])
		r = queuetest.VerifyImage(t, disk, true)
		what += fmt.Sprint(r.Problems)
		if !r.OK() { // see TestRepairOfFiles
			require.Contains(t, fmt.Sprint(r.Problems), "has scope", what)
			continue
		}
		sound := func() {
			t.Helper()
			r := queuetest.VerifyImage(t, disk, false)
			require.True(t, r.OK(), "%v after %s", r.Problems, what)
		}
		sound()
		q, err := codeq.Open("queue", tiedOptions(disk, shards))
		require.NoError(t, err)
		synctest.Wait()
		require.NoError(t, q.Close(), what)
		sound()
		endAll(t, disk, shards, what)
		sound()
	}
	return damaged
}

// endAll completes all tasks of a queue, and waits until their retentions have passed.
func endAll(t *testing.T, disk *crashfs.Disk, shards int, what string) {
	t.Helper()
	ctx := context.Background()
	q, err := codeq.Open("queue", tiedOptions(disk, shards))
	require.NoError(t, err)
	var queues []string
	for queue := range queuetest.MustStats(t, q) {
		queues = append(queues, queue)
	}
	for {
		synctest.Wait()
		leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: queues, Max: 100, NoWait: true})
		if errors.Is(err, codeq.ErrEmpty) {
			break
		}
		require.NoError(t, err)
		for _, l := range leases {
			require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		}
	}
	require.NoError(t, queuetest.CheckAll(q), what)
	time.Sleep(time.Minute)
	left, err := queuetest.List(q)
	require.NoError(t, err)
	var text strings.Builder
	for _, info := range left {
		fmt.Fprintf(&text, "%+v\n", info)
	}
	require.Empty(t, text.String(), what)
	require.NoError(t, errors.Join(queuetest.CheckAll(q), q.Close()), what)
}

// TestRepairOfLostPins: the shard of two completed parents has lost how many tasks need them. After
// a repair the parents are kept until their child has ended and their own retentions have passed.
func TestRepairOfLostPins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		open := func() *codeq.Queue {
			q, err := codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{Shards: 1, Retention: time.Hour}))
			require.NoError(t, err)
			return q
		}
		q := open()
		parents := queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a", Retention: 2 * time.Hour})
		queuetest.Produce(t, q, codeq.Task{Queue: "b", After: parents, Retention: time.Second})
		for range parents {
			queuetest.Complete(t, q, queuetest.ClaimNow(t, q, "a"))
		}
		require.NoError(t, q.Close())
		simtest.AlterStore(t, disk, func(db *pebble.DB) {
			require.NoError(t, db.DeleteRange([]byte{keys.Pinned}, []byte{keys.Pinned + 1}, nil))
		})
		r := queuetest.VerifyImage(t, disk, true)
		require.True(t, r.OK(), "%v", r.Problems)
		require.NotEmpty(t, r.Problems)

		q = open()
		isKept := func(parent codeq.ID) bool {
			_, err := q.Get(t.Context(), parent)
			if err != nil {
				require.ErrorIs(t, err, codeq.ErrNotFound)
			}
			return err == nil
		}
		queuetest.Complete(t, q, queuetest.ClaimNow(t, q, "b"))
		time.Sleep(50 * time.Minute)
		require.True(t, isKept(parents[0]))
		time.Sleep(time.Hour)
		require.False(t, isKept(parents[0]))
		require.True(t, isKept(parents[1]))
		time.Sleep(time.Hour)
		require.False(t, isKept(parents[1]))
		require.NoError(t, errors.Join(queuetest.CheckAll(q), q.Close()))
	})
}
