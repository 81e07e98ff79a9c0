package cluster_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"codeq"
	"codeq/internal/manifest"
	"codeq/internal/simtest"
)

// Power fails on all nodes below DurabilityDisk, under load. The nodes then acknowledge nothing
// until one of them goes on alone with its own state, and others join it.

// simLoad holds the clients of a cluster.
type simLoad struct {
	watch   *leaseWatch
	watched func()           // ends watch
	wait    func()           // waits for the clients of features
	stop    func(empty bool) // ends the workers; if empty, once their queue is empty
}

// simBlackout is drawn in schedules in which a power loss costs a node acknowledged changes.
var simBlackout = simFault{"power of all", 3, func(s *schedule) bool {
	const most = 2 // a recovery may follow each
	if s.blackouts == most || !s.moving.CompareAndSwap(false, true) {
		return false
	}
	moved := func() { s.moving.Store(false) }
	defer func() { moved() }()
	s.blackouts++
	s.note("power of all fails")
	for _, n := range s.members() {
		n.losePower(50 * s.rng.IntN(2))
	}
	begin, from := time.Now(), s.h.Now()
	time.Sleep(s.upTo(2 * time.Second))
	s.raise()
	if s.hasMajority() {
		s.note("a majority had been down before")
		moved = func() {} // no moves until all are back: one more loss would prevent that
		s.dark = nil
		s.done.Go(func() {
			defer s.moving.Store(false)
			for _, n := range s.members() {
				s.awaitReturn(n)
			}
		})
		return true
	}
	time.Sleep(5*time.Second + s.upTo(10*time.Second))
	s.lost.Store(true)
	s.clients.Wait()
	s.done.Wait()
	s.load.wait()
	s.load.stop(false)
	s.load.watched()
	s.mend(true)
	time.Sleep(5 * time.Second)
	s.requireSilence(from)
	nodes := s.members()
	n := s.furthest(nodes...)
	each(nodes, (*simNode).stop)
	if !s.goOn(n, len(nodes)-1) {
		s.lost.Store(false)
		return true
	}
	s.beginAnew()
	for range len(nodes) - 1 {
		s.grow(s.note)
	}
	s.dark = nil
	s.lost.Store(false)
	s.begin()
	s.note("the load goes on")
	s.until = s.until.Add(time.Since(begin))
	return true
}}

// losePower crashes the node. If its process is already down, its machine loses power.
func (n *simNode) losePower(percent int) {
	if !n.crash(percent) {
		n.machine.Reboot()
	}
}

// hasMajority reports whether a majority of the nodes still has all that it acknowledged. REQUIRES:
// all were started after their power loss, and no leader readmits a node.
func (s *schedule) hasMajority() bool {
	nodes, sound := s.members(), 0
	for _, n := range nodes {
		if m, err := manifest.Read(n.machine.Disk(), "queue"); err == nil && len(m.Former) == 0 {
			sound++
		}
	}
	return sound > len(nodes)/2
}

// requireSilence checks that no shard has answered a call that began after some moment of the
// history, and that no shard answers a new one.
func (s *schedule) requireSilence(from int64) {
	for _, n := range s.members() {
		if _, err := simQueue(n).Produce(context.Background(), codeq.Task{Queue: "a"}); !errors.Is(err, codeq.ErrNotLeader) {
			s.t.Errorf("produce on %s after all have lost power: %v", n.name, err)
		}
	}
	s.h.RequireSilence(from)
}

// goOn makes a node go on alone, and starts that many of the other, lost nodes at the same time.
// REQUIRES: all are down; the lost nodes that start have no majority of votes.
func (s *schedule) goOn(n *simNode, beside int) bool {
	s.note("%s goes on alone", n.name)
	lost := slices.DeleteFunc(s.members(), func(o *simNode) bool { return o == n })
	s.rng.Shuffle(len(lost), func(i, j int) { lost[i], lost[j] = lost[j], lost[i] })
	if err := s.recover(n); err != nil {
		s.t.Errorf("RecoverCluster: %v", err)
		return false
	}
	s.happened("recover")
	n.mu.Lock()
	n.join = false
	n.mu.Unlock()
	n.start()
	s.awaitLeaders()
	for _, o := range lost[:beside] {
		o.mu.Lock()
		o.join = false
		o.mu.Unlock()
		o.start()
		s.note("%s, which is lost, is started beside it", o.name)
	}
	before, err := s.tasks()
	if err != nil {
		s.t.Error(err)
	}
	time.Sleep(5 * time.Second)
	for _, o := range lost[:beside] {
		s.requireRefused(o)
	}
	for _, o := range lost {
		o.stop()
		o.mu.Lock()
		o.removed = true
		o.mu.Unlock()
	}
	after, err := s.tasks()
	if err != nil {
		s.t.Error(err)
	}
	for id, t := range after {
		death, died := codeq.DeathOf(t.Headers)
		if before[id] == nil && (!died || before[death.ID] == nil) {
			s.t.Errorf("task %s has come from a node that is lost", id)
		}
	}
	return true
}

// requireRefused checks that a lost node serves no call, and reports the reason.
func (s *schedule) requireRefused(lost *simNode) {
	q := simQueue(lost)
	if _, err := q.Produce(context.Background(), codeq.Task{Queue: "lost"}); !errors.Is(err, codeq.ErrNotLeader) {
		s.t.Errorf("produce on %s, which is lost: %v", lost.name, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := q.WaitReady(ctx)
	if errors.Is(err, codeq.ErrPowerLost) {
		return
	}
	why := func(text string) bool { return err != nil && strings.Contains(err.Error(), text) }
	m, found := manifest.Read(lost.machine.Disk(), "queue")
	if found == nil && m.Cluster == "" && errors.Is(err, codeq.ErrNotLeader) {
		return // its power failed before it was a member: it waits for the other founders
	}
	if !why("of cluster ") && !why("nobody has taken this node back") { // it may know no node that is up
		s.t.Errorf("WaitReady of %s, which is lost: %v", lost.name, err)
	}
}

// beginAnew begins a new history with the tasks of a node that goes on alone; the clients saw each
// of these states stored at some moment. REQUIRES: no client calls.
func (s *schedule) beginAnew() {
	tasks, err := s.tasks()
	if err != nil {
		s.t.Error(err)
	}
	kept := s.h.Begin(simtest.Read, 0, "recovered")
	kept.Whenever() // any state stored at any moment is allowed
	s.h.Finish(kept, nil, true)
	s.h.Stored(kept, s.h.Decided(shownOf(tasks)))
	s.past, s.h = append(s.past, s.h), s.h.Next(shownOf(tasks))
	s.features.forget()
	s.copying.Lock()
	defer s.copying.Unlock()
	for id := range s.backlogs {
		if tasks[id] == nil {
			delete(s.backlogs, id)
		}
	}
}

// forget checks the clients' knowledge of tasks, some of them perhaps lost, and drops it.
func (f *simFeatures) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.checkOrder()
	for _, t := range f.tasks {
		t.acked, t.leases = false, nil
	}
}
