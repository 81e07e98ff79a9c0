package faults_test

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/simtest"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// readNode returns a node's view of its tasks, and the first error.
func readNode(q *codeq.Queue) (seen []string, err error) {
	ctx := context.Background()
	for state := codeq.Ready; state <= codeq.Canceled; state++ {
		for t, err := range q.List(ctx, codeq.ListOptions{State: state}) {
			if err != nil {
				return nil, err
			}
			seen = append(seen, fmt.Sprintf("%s %s %s", t.ID, t.State, t.Payload))
		}
	}
	_, err = q.Produce(ctx, codeq.Task{Queue: "later"})
	return seen, err
}

// TestCorruptionOfANode flips single bits in the files of a cluster node. The node refuses to open
// and returns the reason, or it has all its tasks.
func TestCorruptionOfANode(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	disk, votes := crashfs.New(), simtest.NewVotes()
	q, err := queuetest.OneNode(disk, votes)
	require.NoError(t, err)
	require.Eventually(t, func() bool { // earlier writes of a founder make many small files
		m, err := manifest.Read(disk, "queue")
		return err == nil && len(m.Founders) == 0 && inspect.Of(q).Leads(0) && inspect.Of(q).Leads(1)
	}, 20*time.Second, time.Millisecond)
	for i := range 60 {
		queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: fmt.Append(nil, i, strings.Repeat("x", 100))})
		if i == 30 {
			for shard := range inspect.Of(q).Shards() {
				require.NoError(t, inspect.Of(q).Group(shard).Raft().Snapshot().Error())
			}
		}
	}
	for range 10 {
		queuetest.Complete(t, q, queuetest.Claim(t, q, "a"))
	}
	killed := disk.Clone()
	require.NoError(t, q.Close())
	q, err = queuetest.OneNode(disk.Clone(), votes)
	require.NoError(t, err)
	want, err := readNode(q)
	require.NoError(t, errors.Join(err, q.Close()))
	require.Len(t, want, 50)
	r := queuetest.VerifyImage(t, disk, false)
	require.True(t, r.OK(), "%v", r.Problems)
	require.Equal(t, "a", r.Node)
	require.True(t, queuetest.VerifyImage(t, killed, false).OK())

	rng := testkit.Seeded(t)
	for _, image := range []*crashfs.Disk{disk, killed} {
		c := testkit.ImageOf(t, image, "queue")
		c.Files = slices.DeleteFunc(c.Files, func(name string) bool {
			return strings.Contains(name, "OPTIONS-") || path.Base(name) == manifest.Name || image == killed && path.Ext(name) == ".log" // a power loss, too, leaves logs with parts that cannot be read
		})
		noticed := make(map[string]int)
		for begun, n := time.Now(), 0; n < 2*len(c.Files) || time.Since(begun) < *corruptFor; n++ {
			name := c.Files[n%len(c.Files)]
			bit := rng.IntN(8 * len(c.Content[name]))
			what := fmt.Sprintf("%s, bit %d of %d", name, bit, 8*len(c.Content[name]))
			disk := c.Flip(t, name, bit)
			report := queuetest.VerifyImage(t, disk.Clone(), true)
			var seen []string
			err := testkit.InTime(t, what, func() error {
				q, err := queuetest.OneNode(disk, votes)
				if err != nil {
					return err
				}
				seen, err = readNode(q)
				return errors.Join(err, ignoreFailed(q.Close(), err))
			})
			if err == nil {
				require.Equal(t, want, seen, what)
				continue
			}
			require.ErrorIs(t, err, codeq.ErrCorrupt, what)
			require.ErrorContains(t, err, path.Base(path.Dir(name)), what)
			noticed[strings.NewReplacer("000", "", "001", "").Replace(path.Base(path.Dir(name)))+"/"+kindOf(name)]++
			require.False(t, report.OK(), "%s: %v", what, err)
			require.Contains(t, fmt.Sprint(report.Problems), path.Base(name), what)
		}
		t.Logf("noticed: %v", noticed)
		require.NotZero(t, noticed["shard-.raft/snapshot"])
		require.NotZero(t, noticed["raft/.log"]+noticed["raft/MANIFEST-"])
		require.NotZero(t, noticed["shard-/MANIFEST-"])
		require.NotZero(t, noticed["shard-/.sst"])
	}
}
