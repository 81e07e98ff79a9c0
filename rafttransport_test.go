package codeq

import (
	"testing"
	"testing/synctest"
	"time"

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
		_, err := newPipeline(stuckPipeline{make(chan struct{})}, time.Second).AppendEntries(nil, nil)
		require.ErrorIs(t, err, raft.ErrPipelineShutdown)
		require.Equal(t, time.Second, time.Since(begin))
	})
}
