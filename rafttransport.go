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

// SetHeartbeatHandler is raft.Transport's. Raft calls it last before its goroutines begin.
func (t *transport) SetHeartbeatHandler(handle func(raft.RPC)) {
	t.replica.running = true
	t.NetworkTransport.SetHeartbeatHandler(handle)
}

// AppendEntriesPipeline is raft.Transport's.
func (t *transport) AppendEntriesPipeline(id raft.ServerID, target raft.ServerAddress) (raft.AppendPipeline, error) {
	p, err := t.NetworkTransport.AppendEntriesPipeline(id, target)
	if err != nil {
		return nil, err
	}
	return newPipeline(p, t.replica, t.patience, t.replica.node.queue.opts.maxAppend), nil
}

// pipeline closes itself when a request waits for too long for the one before.
type pipeline struct {
	raft.AppendPipeline
	replica  *replica
	patience time.Duration
	most     int         // entries that Raft sends at a time
	watch    *time.Timer // stopped but during AppendEntries
	sent     time.Time   // when the last request was, or else the pipeline made
}

func newPipeline(p raft.AppendPipeline, r *replica, patience time.Duration, most int) *pipeline {
	watch := time.AfterFunc(time.Hour, func() {
		contain(r.node.log, "end of a pipeline", func() { _ = p.Close() }, nil) // never fails
	})
	watch.Stop()
	return &pipeline{AppendPipeline: p, replica: r, patience: patience, most: most, watch: watch, sent: time.Now()}
}

// AppendEntries is raft.AppendPipeline's. One goroutine calls it.
func (p *pipeline) AppendEntries(
	args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) (raft.AppendFuture, error) {
	if err := p.replica.failure(); err != nil {
		return nil, err
	}
	if len(args.Entries) >= p.most {
		p.giveWay()
	}
	p.sent = time.Now()
	p.watch.Reset(p.patience)
	defer p.watch.Stop()
	return p.AppendPipeline.AppendEntries(args, resp)
}

// maxAppend is how many entries Raft sends at a time at the most. Only a node
// that is behind gets as many: a shard has one group under way.
const maxAppend = 64

// A node that catches up leaves most of the time to the calls of others: after
// so many entries it waits for giveWayFor times as long as they took. A
// shard at work commits one entry in the time in which the other node then gets
// 64/(1+giveWayFor), so that it catches up nevertheless.
const (
	giveWayFor = 7
	maxGiveWay = 50 * time.Millisecond
)

func (p *pipeline) giveWay() {
	time.Sleep(min(giveWayFor*time.Since(p.sent), maxGiveWay))
}
