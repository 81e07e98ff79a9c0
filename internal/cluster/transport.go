package cluster

import (
	"context"
	"log/slog"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// transport is Raft's, but its messages are of a bounded size, or have one entry.
type transport struct {
	*raft.NetworkTransport
	group *Group
}

// SetHeartbeatHandler is raft.Transport's. Raft calls it last before its goroutines begin.
func (t *transport) SetHeartbeatHandler(handle func(raft.RPC)) {
	t.group.running = true
	t.NetworkTransport.SetHeartbeatHandler(handle)
}

// AppendEntriesPipeline is raft.Transport's.
func (t *transport) AppendEntriesPipeline(id raft.ServerID, target raft.ServerAddress) (raft.AppendPipeline, error) {
	p, err := t.NetworkTransport.AppendEntriesPipeline(id, target)
	if err != nil {
		return nil, err
	}
	return newPipeline(p, t.group), nil
}

// AppendEntries is raft.Transport's.
func (t *transport) AppendEntries(
	id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	if err := t.group.Failure(); err != nil {
		return err
	}
	if isHeartbeat(req) {
		err := t.NetworkTransport.AppendEntries(id, target, req, resp)
		t.group.health.note(id, req.Term, err == nil)
		return err
	}
	t.group.awaitContact(id, req.Term)
	return t.replicate(id, target, req, resp)
}

// replicate sends entries. A node that has them follow what it has, but cannot store them, as its
// disk is full, is asked again every refusedPause, with one entry only. Raft would do so ever more
// rarely, as with one that cannot be reached, and each time go back by an entry, until it came to a
// snapshot at last. So it learns what is true as well: without the entries the node would have
// agreed.
func (t *transport) replicate(
	id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	c := &t.group.health
	n := fitting(req.Entries)
	if n > 1 && c.refuses(id) {
		n = 1
	}
	message, err := t.group.message(req, n)
	if err != nil {
		return err
	}
	req.Entries = req.Entries[:n] // Raft takes them for sent
	err = t.NetworkTransport.AppendEntries(id, target, message, resp)
	if err != nil || n == 0 {
		return err
	}
	refused := !resp.Success && !resp.NoRetryBackoff && resp.Term == req.Term
	c.noteRefusal(id, refused)
	if refused {
		select {
		case <-time.After(refusedPause):
		case <-t.group.node.ctx.Done():
		}
		req.Entries, resp.Success = nil, true
	}
	return nil
}

const refusedPause = 250 * time.Millisecond

func isHeartbeat(req *raft.AppendEntriesRequest) bool {
	return req.PrevLogEntry == 0 && req.PrevLogTerm == 0 && len(req.Entries) == 0 && req.LeaderCommitIndex == 0
}

// raftLogger passes what Raft warns of to a logger.
func raftLogger(log *slog.Logger) hclog.Logger {
	if !log.Enabled(context.Background(), slog.LevelWarn) {
		return hclog.NewNullLogger()
	}
	std := slog.NewLogLogger(log.Handler(), slog.LevelWarn)
	return hclog.FromStandardLogger(std, &hclog.LoggerOptions{Name: "raft", Level: hclog.Warn, DisableTime: true})
}
