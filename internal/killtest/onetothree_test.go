package killtest

import (
	"encoding/binary"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
)

// TestOneToThree: a queue without a cluster becomes the first node of a cluster, and two processes
// join it. The test kills one that joins, and then the first one, under load. When all tasks are
// done, the two leave, and the first one is a queue without a cluster again. No acknowledged task
// is lost, and no task runs again after its acknowledged end.
func TestOneToThree(t *testing.T) {
	testkit.OnlyLong(t, "takes 20 s")
	t.Parallel()
	random := testkit.Seeded(t)
	c := newNodes(t, random, codeq.DurabilityProcess, thisBuild(t))
	dir, alone := filepath.Join(c.dir, c.peers[0].Node), &codeq.Options{Shards: clusterShardsN, MaxAttempts: 1 << 20}
	q, err := codeq.Open(dir, alone)
	require.NoError(t, err)
	for number := range uint64(500) {
		id, err := q.Produce(t.Context(), codeq.Task{Queue: clusterQueue, Payload: binary.BigEndian.AppendUint64(nil, number)})
		require.NoError(t, err)
		c.add(0, nodeEvent{kind: nodeProduced, id: id, number: number})
	}
	require.NoError(t, q.Close())

	pause := func() { time.Sleep(time.Second + time.Duration(random.IntN(500))*time.Millisecond) }
	c.startAfter(0)
	c.waitForLeaders()
	pause()
	c.startAfter(1)
	time.Sleep(time.Duration(random.IntN(300)) * time.Millisecond) // somewhere on its way into the cluster
	c.processes[1].kill()
	c.startAfter(1)
	c.startAfter(2)
	for _, node := range []int{1, 2} {
		c.wait("the node has joined", 30*time.Second, func() bool { return c.caughtUp[node] > 0 })
	}
	pause()
	for _, victim := range []int{0, 1} {
		c.waitForLeaders()
		c.miss(victim, c.kill)
		c.startAfter(victim)
		pause()
	}

	c.drain()
	for _, node := range []int{2, 1, 0} {
		require.NoError(t, c.processes[node].stdin.Close())
		require.NoError(t, c.processes[node].wait(), "node %d", node)
	}
	c.verify()
	q, err = codeq.Open(dir, alone)
	require.NoError(t, err)
	stats, err := q.Stats(t.Context())
	require.NoError(t, err)
	require.Zero(t, stats[clusterQueue].Total())
	require.NoError(t, q.Close())
	report, err := codeq.Verify(dir, nil)
	require.NoError(t, err)
	require.Empty(t, report.Problems)
	t.Logf("%d tasks acknowledged, %d completed", len(c.produced), len(c.completed))
}
