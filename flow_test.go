package codeq

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
)

// TestChildrenGoOnInOneCommit: the end of a task lets the first of those go on that wait for nobody
// else, in its own commit, and looks up nothing but their records; one that waits for another
// parent too goes on with the last of them.
func TestChildrenGoOnInOneCommit(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		family := []Task{{Queue: "parent"}, {Queue: "parent"}, {Queue: "both", After: []ID{Nth(0), Nth(1)}}}
		for range engine.TellAtOnce / 2 {
			family = append(family, Task{Queue: "child", After: []ID{Nth(0), Nth(0)}})
		}
		_, err := q.ProduceBatch(t.Context(), family)
		require.NoError(t, err)
		requireSettled(t, q)
		end := func() (reads int, commits uint64) {
			l := claimNow(t, q, "parent")
			s := q.shard(0)
			reads, commits = q.readsOf(t), s.commits.Load()
			complete(t, q, l)
			synctest.Wait()
			return q.readsOf(t) - reads, s.commits.Load() - commits
		}
		reads, commits := end()
		require.EqualValues(t, 1, commits)
		require.LessOrEqual(t, reads, 2*(engine.TellAtOnce/2+1), "a dependent and a record each")
		require.EqualValues(t, engine.TellAtOnce/2, countsOf(t, q, "child").Ready)
		require.Equal(t, Counts{Blocked: 1}, countsOf(t, q, "both"))
		_, commits = end()
		require.EqualValues(t, 1, commits)
		require.Equal(t, Counts{Ready: 1}, countsOf(t, q, "both"))
	})
}
