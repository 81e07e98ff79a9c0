package cluster

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"
)

// stuckPipeline is one to whose answers nobody listens.
type stuckPipeline struct{ closed chan struct{} }

func (p stuckPipeline) AppendEntries(*raft.AppendEntriesRequest, *raft.AppendEntriesResponse) (raft.AppendFuture, error) {
	<-p.closed
	return nil, raft.ErrPipelineShutdown
}

func (p stuckPipeline) Consumer() <-chan raft.AppendFuture { return nil }

func (p stuckPipeline) Close() error {
	close(p.closed)
	return nil
}

func TestStuckPipelineEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		_, err := newPipeline(stuckPipeline{make(chan struct{})}, loneGroup(vfs.NewMem(), nil), time.Second, MaxAppend).AppendEntries(new(raft.AppendEntriesRequest), nil)
		require.ErrorIs(t, err, raft.ErrPipelineShutdown)
		require.Equal(t, time.Second, time.Since(begin))
	})
}

// slowPipeline takes some time for each request.
type slowPipeline struct {
	raft.AppendPipeline
	takes time.Duration
}

func (p slowPipeline) AppendEntries(*raft.AppendEntriesRequest, *raft.AppendEntriesResponse) (raft.AppendFuture, error) {
	time.Sleep(p.takes)
	return nil, nil
}

// TestCatchUpGivesWay: of what a node gets that is behind the pace is an eighth,
// and a node that is not does not wait.
func TestCatchUpGivesWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipeline(slowPipeline{takes: time.Millisecond}, loneGroup(vfs.NewMem(), nil), time.Second, MaxAppend)
		send := func(entries int) {
			_, err := p.AppendEntries(&raft.AppendEntriesRequest{Entries: make([]*raft.Log, entries)}, nil)
			require.NoError(t, err)
		}
		begun := time.Now()
		for range 100 {
			send(MaxAppend - 1)
		}
		require.Equal(t, 100*time.Millisecond, time.Since(begun))
		begun = time.Now()
		for range 100 {
			send(MaxAppend)
		}
		require.Equal(t, 800*time.Millisecond, time.Since(begun))
	})
}

// TestFailedReplicaSendsNothing: what it has read of its log may not be what is there.
func TestFailedReplicaSendsNothing(t *testing.T) {
	g := loneGroup(vfs.NewMem(), nil)
	g.broken.Store(&errBroken)
	tr := &transport{group: g}
	require.ErrorIs(t, tr.AppendEntries("a", "a", new(raft.AppendEntriesRequest), nil), errBroken)
	p := newPipeline(slowPipeline{}, g, time.Second, MaxAppend)
	_, err := p.AppendEntries(new(raft.AppendEntriesRequest), nil)
	require.ErrorIs(t, err, errBroken)
}
