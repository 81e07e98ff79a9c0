package cluster_test

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/call"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/test/queuetest"
)

// settingsOf returns the stored settings of a queue.
func (c *simCluster) settingsOf(queue string) (value []byte) {
	require.NoError(c.t, inspect.Of(simQueue(c.leader(0))).Owner(0, func(o *inspect.Owner) error {
		value = bytes.Clone(o.Rules.Names.QueueNamed(queue).Value)
		return nil
	}))
	return value
}

// configureLate applies late settings of a queue in all shards.
func (c *simCluster) configureLate(queue string, value []byte) {
	c.awaitLeaders()
	first := &call.Configure{Queue: queue, Value: value}
	for shard := range c.opts.Shards {
		require.NoError(c.t, inspect.Of(simQueue(c.leader(shard))).Owner(shard, func(o *inspect.Owner) (err error) {
			if shard == 0 {
				_, err = first.Decide(o.Rules)
			} else {
				_, err = (&call.Adopt{Queue: queue, Value: value}).Decide(o.Rules)
			}
			return err
		}))
	}
	require.True(c.t, first.Late)
	time.Sleep(time.Second) // until the shards have forgotten the queue again
}

// TestDeleteQueueInCluster: a queue in use on any node is not deleted, and the error returns its
// use. If it is deleted while a node is down, neither that node, with its older store, nor a late
// caller brings its settings back. It can be used again at once.
func TestDeleteQueueInCluster(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{Shards: 2}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		leader, other := c.lead()
		down := c.third(leader, other)
		set := codeq.Settings{Concurrency: 2, Rate: 100, DeadRetention: time.Hour}
		queuetest.Configure(t, simQueue(down), "a", func(s *codeq.Settings) { *s = set })
		refused := func(want codeq.NotEmptyError) {
			t.Helper()
			want.Queue = "a"
			for _, n := range c.members() {
				var got *codeq.NotEmptyError
				require.ErrorAs(t, simQueue(n).DeleteQueue(ctx, "a"), &got)
				if got.Claims = min(got.Claims, 1); want.Counts.Total() > 0 { // other nodes have the claimed tasks
					got.Claims = 0
				}
				require.Equal(t, want, *got)
			}
		}
		deletes := func(by *simNode) {
			t.Helper()
			for began := time.Now(); ; time.Sleep(time.Second) {
				err := simQueue(by).DeleteQueue(ctx, "a")
				if err == nil {
					return
				}
				require.ErrorIs(t, err, codeq.ErrNotEmpty)
				require.Less(t, time.Since(began), 21*time.Second)
			}
		}

		id := queuetest.Produce(t, simQueue(down), codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k", For: time.Hour}})[0]
		require.NoError(t, simQueue(other).SetSchedule(ctx, codeq.Schedule{Name: "s", Cron: "@yearly", Task: codeq.Task{Queue: "a"}}))
		refused(codeq.NotEmptyError{Counts: codeq.Counts{Ready: 1}, Keys: 1, Schedules: 1})
		require.NoError(t, simQueue(leader).Cancel(ctx, id))
		refused(codeq.NotEmptyError{Keys: 1, Schedules: 1})
		require.NoError(t, simQueue(down).ReleaseKey(ctx, codeq.UniqueKey{Queue: "a", Key: "k"}))
		require.NoError(t, simQueue(down).DeleteSchedule(ctx, "s"))
		for _, n := range c.members() {
			claiming, stop := context.WithCancel(ctx)
			ended := make(chan error, 1)
			go func() {
				_, err := simQueue(n).Claim(claiming, codeq.ClaimRequest{Queues: []string{"a"}})
				ended <- err
			}()
			time.Sleep(time.Second)
			refused(codeq.NotEmptyError{Claims: 1})
			stop()
			require.ErrorIs(t, <-ended, context.Canceled)
			time.Sleep(time.Second)
		}
		deletes(other)
		queuetest.Configure(t, simQueue(down), "a", func(s *codeq.Settings) { *s = set })

		old := c.settingsOf("a")
		down.crash(0)
		c.awaitLeaders()
		require.NoError(t, simQueue(other).DeleteQueue(ctx, "a"))
		for i := range 2 {
			c.snapshot(c.leader(i), i, 1)
		}
		late := func(by *simNode) {
			t.Helper()
			c.configureLate("a", old)
			set, err := simQueue(by).Settings("a")
			require.NoError(t, err)
			require.Zero(t, set)
			infos, err := simQueue(by).Info(ctx)
			require.NoError(t, err)
			require.Empty(t, infos)
		}
		late(other)
		down.start()
		c.awaitReady()
		for i := range 2 {
			if c.awaitLeaders(); c.leader(i) != down {
				c.transfer(c.leader(i), i, down)
			}
		}
		c.awaitLeaders()
		late(down)
		late(other)

		for range 3 {
			queuetest.Configure(t, simQueue(other), "a", func(s *codeq.Settings) { *s = set })
			id := queuetest.Produce(t, simQueue(down), codeq.Task{Queue: "a"})[0]
			refused(codeq.NotEmptyError{Counts: codeq.Counts{Ready: 1}})
			l := queuetest.Claim(t, simQueue(other), "a")
			require.Equal(t, id, l.ID)
			refused(codeq.NotEmptyError{Counts: codeq.Counts{Leased: 1}})
			queuetest.Complete(t, simQueue(down), l)
			deletes(other)
			infos, err := simQueue(down).Info(ctx)
			require.NoError(t, err)
			require.Empty(t, infos)
		}
	})
}

// TestDeletedQueueAfterRecovery: neither RecoverCluster nor a late call brings back the settings of
// a deleted queue. The next settings are newer.
func TestDeletedQueueAfterRecovery(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{Shards: 2}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		n := c.members()[2]
		queuetest.Configure(t, simQueue(n), "a", func(s *codeq.Settings) { s.Paused = true })
		old := c.settingsOf("a")
		require.NoError(t, simQueue(n).DeleteQueue(ctx, "a"))
		c.rest()
		each(c.members(), func(n *simNode) { n.crash(100) })
		c.nodes = []*simNode{n}
		require.NoError(t, c.recover(n))
		n.start()
		c.awaitLeaders()
		q := simQueue(n)
		for range 2 {
			queuetest.RequireInShards(t, q, "a", 0, codeq.Settings{})
			c.configureLate("a", old)
		}
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Burst = 1 })
		queuetest.RequireInShards(t, q, "a", 3, codeq.Settings{Burst: 1})
	})
}

// TestPoliciesInUpgrade: while a cluster has an older format, any node refuses policies, which a
// leader of an older build would drop, but takes other settings.
func TestPoliciesInUpgrade(t *testing.T) {
	t.Parallel()
	simCaseOf(t, 1, 3, codeq.Options{}, manifest.OldestOfNodes, func(t *testing.T, c *simCluster) {
		for _, n := range c.members() {
			require.ErrorIs(t, simQueue(n).Configure(t.Context(), "a", func(s *codeq.Settings) { s.MaxAttempts = 1 }), codeq.ErrFormat)
			changes, err := simQueue(n).Apply(t.Context(), map[string]codeq.Settings{"a": {DeadLetterQueue: "dead"}})
			require.ErrorIs(t, err, codeq.ErrFormat)
			require.Empty(t, changes)
			queuetest.Configure(t, simQueue(n), "a", func(s *codeq.Settings) { s.Retention += time.Hour })
		}
		set, err := simQueue(c.leader(0)).Settings("a")
		require.NoError(t, err)
		require.Equal(t, codeq.Settings{Policy: codeq.Policy{Retention: 3 * time.Hour}}, set)
	})
}
