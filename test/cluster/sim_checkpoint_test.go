package cluster_test

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/simtest"
	"codeq/test/queuetest"
)

// barrierLimit is the longest time that an owner stands still after the node that stopped it is
// gone.
const barrierLimit = 5 * time.Second

// simCopy is a copy made by a node: it has the stored tasks of some moment during a call.
type simCopy struct {
	node *simNode
	lost *crashfs.Disk // the disk of the copy, if the node has lost that disk since then
	dir  string
	h    *simtest.History[codeq.ID]
	call *simtest.Call
}

// checkpoint makes a node copy the queue, without a time limit. It returns false if the node is
// down.
func (s *schedule) checkpoint(n *simNode) bool {
	q, life := n.queue()
	if q == nil {
		return false
	}
	s.copied++
	dir := fmt.Sprint("copies/", s.copied)
	s.done.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		h := s.h
		call := h.Begin(simtest.Read, 0, n.name)
		s.cutting.Add(1)
		err := q.Checkpoint(ctx, dir)
		if err == nil {
			s.cutting.Add(-1)
		} else { // shards that got no message stand still
			time.AfterFunc(barrierLimit, func() { s.cutting.Add(-1) })
		}
		if err != nil || !n.alive(life) { // the copy may be complete even if its node died
			s.note("no copy on %s: %v", n.name, err)
			return
		}
		h.Finish(call, nil, true)
		s.note("copied on %s to %s", n.name, dir)
		s.copying.Lock()
		defer s.copying.Unlock()
		s.copies = append(s.copies, simCopy{node: n, dir: dir, h: h, call: call})
	})
	return true
}

// readCopies opens the copies on the disks of their nodes, and adds their tasks to the history. The
// nodes may have crashed since the copy, and leases in a copy may have expired.
func (s *schedule) readCopies() {
	for _, c := range s.copies {
		q, err := codeq.Open(c.dir, inspect.With(&codeq.Options{}, inspect.Private{FS: cmp.Or(c.lost, c.node.machine.Disk())}))
		if err != nil {
			s.t.Errorf("copy on %s: %v", c.node.name, err)
			continue
		}
		list, err := queuetest.List(q)
		if err == nil {
			err = queuetest.CheckAll(q)
		}
		if err != nil {
			s.t.Errorf("copy on %s: %v", c.node.name, err)
		}
		tasks := make(map[codeq.ID]*codeq.TaskInfo)
		for _, info := range list {
			tasks[info.ID] = info
		}
		c.h.Stored(c.call, shownOf(tasks))
		if err := q.Close(); err != nil {
			s.t.Errorf("copy on %s: %v", c.node.name, err)
		}
	}
}
