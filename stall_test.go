package codeq

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"
)

// slowCommitter takes a time for each commit. In a bubble, where nothing else takes time, a
// caller knows by the clock how many groups it has waited for.
type slowCommitter struct {
	committer
	takes   time.Duration
	Commits atomic.Int64
}

func (c *slowCommitter) Commit(b *pebble.Batch) error {
	c.Commits.Add(1)
	time.Sleep(c.takes)
	return c.committer.Commit(b)
}

// slowDown makes each commit of a shard take a time from now on.
func slowDown(t *testing.T, q *Queue, index int, takes time.Duration) *slowCommitter {
	t.Helper()
	c := &slowCommitter{takes: takes}
	require.NoError(t, q.shard(index).probe(func(s *shard) error {
		c.committer, s.commit = s.commit, c
		return nil
	}))
	return c
}
