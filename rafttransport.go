package codeq

import (
	"time"

	"github.com/hashicorp/raft"
)

// transport is Raft's, whose pipelines do not get stuck. Raft stops to listen to
// the answers of a pipeline when it gets one that ends it, such as that of a
// follower that knows a later term. If another answer comes then, and another
// request is sent, the goroutine that sends waits for ever, and with it the
// replication to that follower, and Shutdown.
type transport struct {
	*raft.NetworkTransport
	replica  *replica
	patience time.Duration // for an answer, before the pipeline ends and Raft goes on without
}

// AppendEntriesPipeline is raft.Transport's.
func (t *transport) AppendEntriesPipeline(id raft.ServerID, target raft.ServerAddress) (raft.AppendPipeline, error) {
	p, err := t.NetworkTransport.AppendEntriesPipeline(id, target)
	if err != nil {
		return nil, err
	}
	return newPipeline(p, t.patience), nil
}

// pipeline closes itself when a request waits for too long for the one before.
type pipeline struct {
	raft.AppendPipeline
	patience time.Duration
	watch    *time.Timer // stopped but during AppendEntries
}

func newPipeline(p raft.AppendPipeline, patience time.Duration) *pipeline {
	watch := time.AfterFunc(time.Hour, func() { _ = p.Close() }) // never fails
	watch.Stop()
	return &pipeline{p, patience, watch}
}

// AppendEntries is raft.AppendPipeline's. One goroutine calls it.
func (p *pipeline) AppendEntries(
	args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) (raft.AppendFuture, error) {
	p.watch.Reset(p.patience)
	defer p.watch.Stop()
	return p.AppendPipeline.AppendEntries(args, resp)
}
