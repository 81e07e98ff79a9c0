package codeq

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/stretchr/testify/require"

	"codeq/internal/dispatch"
	"codeq/internal/engine"
)

// ownCluster runs a story on one node that leads two shards.
func ownCluster(t *testing.T, story func(t *testing.T, c *simCluster, q *Queue)) {
	synctest.Test(t, func(t *testing.T) {
		c := newSimCluster(t, 1, 1, Options{Shards: 2})
		defer c.close()
		c.awaitLeaders()
		story(t, c, simQueue(c.nodes[0]))
	})
}

// TestClaimOutlivesTheShardItBeginsAt: a claim that lies before a shard whose leader goes waits in
// all others that this node leads, and in those that it comes to lead.
func TestClaimOutlivesTheShardItBeginsAt(t *testing.T) {
	ownCluster(t, func(t *testing.T, c *simCluster, q *Queue) {
		const claims = 10
		s := q.shard(0)
		goOn := standStill(s)
		require.NoError(t, s.inbox.Pass(&crashOp{injected("of the test")}))
		served := make(chan error, claims)
		for range claims { // some begin there
			go func() {
				_, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"a"}})
				served <- err
			}()
		}
		synctest.Wait()
		goOn()
		for q.shard(0) == nil || q.shard(0) == s {
			time.Sleep(10 * time.Millisecond)
		}
		for range claims {
			_, err := q.node.do(t.Context(), 1, &produceOp{completion: newCompletion(callProduce), tasks: []engine.NewTask{prepare(&Task{Queue: "a"}, nil)}})
			require.NoError(t, err)
		}
		time.Sleep(time.Minute)
		require.Len(t, served, claims, "claims that wait, though there are tasks")
	})
}

// TestClaimThatIsSentOnIsGivenUp: a claim that a shard has sent on may be given up at any moment.
func TestClaimThatIsSentOnIsGivenUp(t *testing.T) {
	ownCluster(t, func(t *testing.T, c *simCluster, q *Queue) {
		other := q.shard(1)
		liar := dispatch.New(&other.State, dispatch.Config{Index: 1, Shards: 2})
		require.NoError(t, other.probe(func(*shard) error {
			liar.Join(q.heads, new(dispatch.SlowStart), time.Minute)
			return nil
		}))
		_, err := q.node.do(t.Context(), 1, &produceOp{completion: newCompletion(callProduce), tasks: []engine.NewTask{prepare(&Task{Queue: "a"}, nil)}})
		require.NoError(t, err)
		for range 20 { // some begin at the other shard
			require.NoError(t, other.probe(func(s *shard) error {
				s.setGate("a", closedGate{})
				liar.Publish(s.Queues["a"]) // what the shard does not give
				return nil
			}))
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
			require.ErrorIs(t, err, context.DeadlineExceeded)
			cancel()
		}
		synctest.Wait()
		requireNobodyWaits(t, q, 1)
	})
}

// TestLeaderLoadedInVain: nothing is left of a shard that was loaded, and then not served.
func TestLeaderLoadedInVain(t *testing.T) {
	ownCluster(t, func(t *testing.T, c *simCluster, q *Queue) {
		_, err := q.ProduceBatch(t.Context(), []Task{{Queue: "a"}, {Queue: "a"}})
		require.NoError(t, err)
		loaded := func() weak.Pointer[shard] {
			s, err := q.replicas[0].load(2)
			require.NoError(t, err)
			return weak.Make(s)
		}()
		runtime.GC()
		runtime.GC()
		require.Nil(t, loaded.Value())
	})
}
