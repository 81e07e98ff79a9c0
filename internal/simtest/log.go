package simtest

import (
	"sync/atomic"

	"github.com/hashicorp/raft"

	"codeq/internal/raftlog"
)

// Log is a log of Raft. Life.Fail may make its reads fail.
type Log struct {
	*raftlog.Group
	life *Life
}

func (l *Log) GetLog(index uint64, log *raft.Log) error {
	if err := l.life.failure("read", "log"); err != nil {
		return err
	}
	err := l.Group.GetLog(index, log)
	if err == nil {
		l.life.machine.reads.tell(len(log.Data))
	}
	return err
}

func (l *Log) StoreLogs(logs []*raft.Log) error {
	bytes := 0
	for _, log := range logs {
		bytes += len(log.Data)
	}
	l.life.machine.stores.tell(bytes)
	return l.Group.StoreLogs(logs)
}

func (l *Log) GetHead(index uint64, log *raft.Log) (int, error) {
	if err := l.life.failure("read", "log"); err != nil {
		return 0, err
	}
	return l.Group.GetHead(index, log)
}

// watcher calls a function with the number of bytes read or stored, if one is set.
type watcher struct {
	seen atomic.Pointer[func(bytes int)]
}

func (w *watcher) set(seen func(bytes int)) {
	if seen == nil {
		w.seen.Store(nil)
		return
	}
	w.seen.Store(&seen)
}

func (w *watcher) tell(bytes int) {
	if seen := w.seen.Load(); seen != nil {
		(*seen)(bytes)
	}
}
