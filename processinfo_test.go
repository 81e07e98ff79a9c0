package codeq

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestClusterProcessInfo: each shard is counted by the node that leads it, and by no other, also
// when the leader has changed.
func TestClusterProcessInfo(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	qs := threeNodes(t, Options{Shards: 3}, nil)
	for _, q := range qs {
		require.NoError(t, q.WaitReady(ctx))
	}
	for range 10 {
		produce(t, qs[0], Task{Queue: "a"})
	}
	require.Eventually(t, func() bool { return qs[1].TransferLeadership(ctx, 0, "n2") == nil }, 20*time.Second, time.Millisecond)
	for _, q := range qs {
		require.NoError(t, q.WaitReady(ctx))
	}
	require.Eventually(t, func() bool {
		ready, leaders := uint64(0), make([]int, 3)
		for i, q := range qs {
			p, err := q.ProcessInfo(ctx)
			require.NoError(t, err)
			require.Equal(t, qs[i].node.Self().Node, p.Node)
			for shard, s := range p.Shards {
				if !s.Leads {
					require.Empty(t, s.Queues)
					continue
				}
				leaders[shard]++
				for _, of := range s.Queues {
					ready += of.Counts.Ready
				}
			}
		}
		return ready == 10 && leaders[0] == 1 && leaders[1] == 1 && leaders[2] == 1 && qs[2].replicas[0].lead.Load() != nil
	}, 20*time.Second, time.Millisecond)
}

// TestProcessInfoOfFailedShard: a shard that has failed, or does not answer in time, has an error,
// and the others have their numbers.
func TestProcessInfoOfFailedShard(t *testing.T) {
	t.Parallel()
	q, err := Open(t.TempDir(), &Options{Shards: 2})
	require.NoError(t, err)
	defer func() { require.ErrorIs(t, q.Close(), ErrFailed) }()
	for i := range 2 {
		_, err := q.startingAt(i).ProduceBatch(t.Context(), []Task{{Queue: "a"}})
		require.NoError(t, err)
	}
	info := func(ctx context.Context) []ShardInfo {
		p, err := q.ProcessInfo(ctx)
		require.NoError(t, err)
		return p.Shards
	}
	require.NotEmpty(t, info(t.Context())[0].Queues)

	ctx, cancel := context.WithCancel(t.Context())
	held, release, stuck := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		stuck <- q.shard(0).probe(func(*shard) error {
			close(held)
			<-release
			return nil
		})
	}()
	<-held
	shards := make(chan []ShardInfo)
	go func() {
		p, err := q.ProcessInfo(ctx)
		if err != nil {
			t.Error(err)
			p = &ProcessInfo{Shards: make([]ShardInfo, 2)}
		}
		shards <- p.Shards
	}()
	for q.shard(0).inbox.Len() == 0 {
		runtime.Gosched()
	}
	cancel()
	require.Equal(t, ShardInfo{LastError: "codeq: context canceled"}, (<-shards)[0])
	go func() {
		p, err := q.ProcessInfo(t.Context())
		if err != nil {
			t.Error(err)
			p = &ProcessInfo{Shards: make([]ShardInfo, 2)}
		}
		shards <- p.Shards
	}()
	for q.shard(0).inbox.Len() < 2 {
		runtime.Gosched()
	}
	close(release)
	require.Equal(t, 1, (<-shards)[0].Inbox, "the call that was given up")
	require.NoError(t, <-stuck)

	require.ErrorIs(t, q.shard(0).probe(func(s *shard) error {
		s.Broken = errors.New("a broken disk")
		return nil
	}), ErrUncertain)
	got := info(t.Context())
	require.False(t, got[0].Leads)
	require.Contains(t, got[0].LastError, "a broken disk")
	require.Empty(t, got[0].Queues)
	require.True(t, got[1].Leads)
	require.NotEmpty(t, got[1].Queues)
}
