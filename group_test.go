package codeq

import (
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// requireNoGroups makes sure that nothing is left of any group.
func requireNoGroups(t *testing.T, q *Queue) {
	t.Helper()
	for _, s := range q.led() {
		require.NoError(t, s.probe(func(s *shard) error {
			if u := s.Probe().Usage().Groups; u.Whole && u.Held > 0 {
				return fmt.Errorf("%d groups in memory", u.Held)
			}
			return store.Scan(s.Store.DB(), keys.Group, func(key, value []byte) error {
				return fmt.Errorf("group %x is %x", key, value)
			})
		}))
	}
}

// TestGroupsBeyondMemory: with more groups than memory holds, whose turn it is
// is read from disk.
func TestGroupsBeyondMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		opts := *inspect.With(&Options{WindowTasks: 1 << 17}, inspect.Private{FS: crashfs.New()})
		q := openForRun(t, opts)
		const followed, batch = 50, 5000
		most := engine.MostTurns()
		groups := most + 500
		produceAll := func(n int, payload string) {
			for from := 0; from < n; from += batch {
				var tasks []Task
				for i := from; i < min(from+batch, n); i++ {
					tasks = append(tasks, Task{Queue: "a", Group: fmt.Sprint(i * 997 % groups), Payload: []byte(payload)})
				}
				_, err := q.ProduceBatch(t.Context(), tasks)
				require.NoError(t, err)
			}
		}
		held := func() (n int, whole bool) {
			require.NoError(t, q.shard(0).probe(func(s *shard) error {
				u := s.Probe().Usage().Groups
				n, whole = u.Held, u.Whole
				return nil
			}))
			return n, whole
		}
		produceAll(groups, "first")
		n, whole := held()
		require.False(t, whole)
		require.LessOrEqual(t, n, most)
		produceAll(followed, "second")
		requireSettled(t, q)

		for range 2 {
			counts, err := q.Stats(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, followed, counts["a"].Blocked)
			require.NoError(t, q.Close())
			q = openForRun(t, opts)
			requireSettled(t, q)
			_, whole = held()
			require.False(t, whole)
		}
		for i := range followed {
			l := claimNow(t, q, "a")
			require.Equal(t, fmt.Sprint(i*997%groups), l.Group)
			require.Equal(t, "first", string(l.Payload))
			complete(t, q, l)
		}
		for i := range followed { // in their places, which come after the first ones of all other groups
			l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			if i == 0 {
				require.Equal(t, "first", string(l.Payload))
			}
		}
		counts, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.Zero(t, counts["a"].Blocked)
		require.EqualValues(t, groups-followed, counts["a"].Ready)
		n, _ = held()
		require.LessOrEqual(t, n, most)
		requireSettled(t, q)
	})
}

// TestTurnPassesInOneCommit: the next of a group is ready in the commit that ends the task before
// it, without a read; of those that wait and are not in memory several are read at a time.
func TestTurnPassesInOneCommit(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		const waiting = 10 * engine.WaitersAhead
		for range waiting + 1 {
			produce(t, q, Task{Queue: "a", Group: "g"})
		}
		step := func() (reads int, commits uint64) {
			l := claimNow(t, q, "a")
			s := q.shard(0)
			reads, commits = q.readsOf(t), s.commits.Load()
			complete(t, q, l)
			synctest.Wait()
			return q.readsOf(t) - reads, s.commits.Load() - commits
		}
		for i := range engine.WaitersAhead {
			reads, commits := step()
			require.Zero(t, reads, i)
			require.EqualValues(t, 1, commits, i)
		}
		all := 0
		for range waiting - engine.WaitersAhead {
			reads, _ := step()
			all += reads
		}
		require.Less(t, all, 2*waiting)
		require.NoError(t, q.checkMemory())
		step()
		requireSettled(t, q)
		requireNoGroups(t, q)
	})
}
