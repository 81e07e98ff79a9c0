package codeq_test

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/heldkeys"
	"codeq/internal/keys"
	"codeq/internal/private"
)

// TestHeldKeys: keys that outlive their tasks are taken in another directory as well, whichever
// shard they belong to; those that a task has there stay with it.
func TestHeldKeys(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	from, to := filepath.Join(t.TempDir(), "from"), filepath.Join(t.TempDir(), "to")
	keyed := func(key, group string, d time.Duration) codeq.Task {
		return codeq.Task{Queue: "a", Group: group, Unique: codeq.Unique{Key: key, For: d}}
	}
	end := func(q *codeq.Queue, task codeq.Task) {
		id, err := q.Produce(ctx, task)
		require.NoError(t, err)
		require.NoError(t, q.Cancel(ctx, id))
	}
	held := make(map[[keys.UniqueLen]byte]bool)
	use := func(dir string, shards int, f func(*codeq.Queue)) {
		q, err := codeq.Open(dir, &codeq.Options{Shards: shards})
		require.NoError(t, err)
		f(q)
		require.NoError(t, q.Close())
	}
	use(from, 3, func(q *codeq.Queue) {
		for _, key := range []string{"1", "2", "3", "4", "5", "taken"} {
			end(q, keyed(key, "", time.Hour))
			held[keys.UniqueHash("a", "", "", "", key)] = true
		}
		end(q, keyed("in a group", "g", time.Hour))
		held[keys.UniqueHash("a", "", "", "g", "in a group")] = true
		kept := keyed("of a kept task", "", time.Hour)
		kept.Retention = codeq.Forever
		end(q, kept)
		end(q, keyed("of no time", "", 0))
		_, err := q.Produce(ctx, keyed("of a ready task", "", time.Hour))
		require.NoError(t, err)
		_, err = heldkeys.Read(ctx, private.FS, from)
		require.ErrorIs(t, err, codeq.ErrLocked)
		require.ErrorIs(t, heldkeys.Write(ctx, private.FS, from, make([]heldkeys.Key, 1)), codeq.ErrLocked)
	})
	read, err := heldkeys.Read(ctx, private.FS, from)
	require.NoError(t, err)
	got := make(map[[keys.UniqueLen]byte]bool)
	for _, k := range read {
		got[k.Hash] = true
		require.WithinDuration(t, time.Now().Add(time.Hour), time.UnixMilli(int64(k.Until)), time.Minute)
	}
	require.Equal(t, held, got)
	require.Len(t, read, len(held))

	var holder, dead codeq.ID
	use(to, 2, func(q *codeq.Queue) {
		holder, err = q.Produce(ctx, keyed("taken", "", 0))
		require.NoError(t, err)
		dead, err = q.Produce(ctx, keyed("4", "", 0))
		require.NoError(t, err)
		for range 2 {
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			if l.ID == dead {
				require.NoError(t, q.DeadLetter(ctx, l.Receipt, nil))
			}
		}
	})
	canceled, stop := context.WithCancel(ctx)
	stop()
	require.ErrorIs(t, heldkeys.Write(canceled, private.FS, to, read), context.Canceled)
	earlier := read[0]
	earlier.Until -= 1000
	for range 2 { // what is there stays as it is
		require.NoError(t, heldkeys.Write(ctx, private.FS, to, append([]heldkeys.Key{earlier}, read...)))
	}
	report, err := codeq.Verify(to, nil)
	require.NoError(t, err)
	require.True(t, report.OK(), "%v", report.Problems)
	carried, err := heldkeys.Read(ctx, private.FS, to)
	require.NoError(t, err)
	require.Len(t, carried, len(held)-1)
	require.Subset(t, read, carried, "as they were")
	_, err = heldkeys.Read(canceled, private.FS, to)
	require.NoError(t, err, "it is looked at seldom")
	use(to, 2, func(q *codeq.Queue) {
		claimed := func(id codeq.ID) *codeq.Lease {
			info, err := q.Get(ctx, id)
			require.NoError(t, err)
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{info.Queue}})
			require.NoError(t, err)
			require.Equal(t, id, l.ID)
			return l
		}
		for _, key := range []string{"1", "2", "3", "4", "5", "taken"} {
			var taken *codeq.DuplicateError
			_, err := q.Produce(ctx, keyed(key, "", 0))
			require.ErrorAs(t, err, &taken, key)
			require.Equal(t, key == "taken", taken.ID == holder)
			require.Equal(t, key == "taken", taken.ID.Time().Year() > 1970)
			child, err := q.Produce(ctx, codeq.Task{Queue: "children of " + key, After: []codeq.ID{taken.ID}})
			require.NoError(t, err)
			if key != "taken" { // its parent counts as completed
				claimed(child)
			}
		}
		_, err := q.FindByKey(ctx, codeq.UniqueKey{Queue: "a", Key: "1"})
		require.ErrorIs(t, err, codeq.ErrNotFound)
		require.ErrorIs(t, q.RedriveDead(ctx, dead), codeq.ErrDuplicate)
		ids, err := q.ProduceBatch(ctx, []codeq.Task{keyed("1", "", 0), {Queue: "children", After: []codeq.ID{codeq.Nth(0)}}})
		require.ErrorIs(t, err, codeq.ErrDuplicate)
		_, err = q.Produce(ctx, claimed(ids[1]).Task)
		require.NoError(t, err, "as it is stored")
		_, err = q.Produce(ctx, keyed("in a group", "g", 0))
		require.ErrorIs(t, err, codeq.ErrDuplicate)
		_, err = q.Produce(ctx, keyed("in a group", "", 0))
		require.NoError(t, err)
		require.NoError(t, q.ReleaseKey(ctx, codeq.UniqueKey{Queue: "a", Key: "5"}))
	})
	carried, err = heldkeys.Read(ctx, private.FS, to)
	require.NoError(t, err)
	require.Len(t, carried, len(held)-2, "the other shard still has the key that was released")
}
