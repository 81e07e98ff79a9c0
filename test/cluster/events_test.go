package cluster_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/test/queuetest"
)

// TestInterestsEnd: the last subscription of a cluster ends, by its Close or with its node. Some
// seconds later no entry carries events any more. A subscription that begins meanwhile misses
// nothing.
func TestInterestsEnd(t *testing.T) {
	simCase(t, codeq.Options{Shards: 2}, func(t *testing.T, c *simCluster) {
		wanted := func() (all engine.KindSet) {
			for _, n := range c.members() {
				q := simQueue(n)
				if q == nil {
					continue // it is down
				}
				for shard := range inspect.Of(q).Shards() {
					if inspect.Of(q).Leads(shard) {
						require.NoError(t, inspect.Of(q).Owner(shard, func(o *inspect.Owner) error { all |= o.Rules.Mail.Interested; return nil }))
					}
				}
			}
			return all
		}
		subscribe := func(n int) *codeq.Subscription {
			sub, err := simQueue(c.members()[n]).Subscribe(codeq.SubscribeOptions{Kinds: []codeq.EventKind{codeq.EventProduced}})
			require.NoError(t, err)
			return sub
		}
		require.Zero(t, wanted())
		first, second := subscribe(0), subscribe(1)
		require.Equal(t, engine.KindSet(1<<codeq.EventProduced), wanted())
		first.Close()
		time.Sleep(time.Minute)
		require.NotZero(t, wanted(), "another node has one")
		second.Close()
		for range 30 {
			time.Sleep(time.Second)
			sub := subscribe(2)
			queuetest.Produce(t, simQueue(c.members()[0]), codeq.Task{Queue: "a"})
			time.Sleep(time.Second)
			require.Len(t, queuetest.Buffered(sub), 1)
			sub.Close()
		}
		time.Sleep(time.Minute)
		require.Zero(t, wanted())

		subscribe(2)
		require.NotZero(t, wanted())
		require.NoError(t, c.members()[2].close())
		c.members()[2].start()
		c.awaitLeaders()
		require.NotZero(t, wanted())
		time.Sleep(time.Minute)
		require.Zero(t, wanted(), "an earlier life wanted them")

		// The process is killed, and the leaders change.
		for _, n := range c.members() {
			go subscribe(slices.Index(c.members(), n)).Next(t.Context())
			n.crash(100)
			c.awaitLeaders()
			require.NotZero(t, wanted())
			n.start()
			c.awaitLeaders()
		}
		for i := range 20 { // at about the time when the interests end
			time.Sleep(500 * time.Millisecond)
			sub := subscribe(i % 3)
			if i%5 == 0 {
				_ = simQueue(c.members()[1]).TransferLeadership(t.Context(), i%2, "")
				c.awaitLeaders()
			}
			queuetest.Produce(t, simQueue(c.members()[0]), codeq.Task{Queue: "a"})
			time.Sleep(time.Second)
			require.Len(t, queuetest.Buffered(sub), 1)
			sub.Close()
		}
		time.Sleep(time.Minute)
		require.Zero(t, wanted(), "killed processes wanted them")
	})
}
