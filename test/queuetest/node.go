package queuetest

import (
	"net"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/raftlog"
)

// oneNode opens a cluster that is one node. Its votes are in memory.
func OneNode(disk vfs.FS, votes raftlog.Stables) (*codeq.Queue, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	opts := VariedOptions(disk)
	opts.Cluster = inspect.With(&codeq.Cluster{
		Node: "a", Listener: l, Advertise: "a:1", HeartbeatTimeout: 50 * time.Millisecond, CallTimeout: 10 * time.Second,
	}, inspect.Private{Votes: func(string) (raftlog.Stables, error) { return votes, nil }})
	q, err := codeq.Open("queue", opts)
	if err != nil {
		_ = l.Close()
	}
	return q, err
}
