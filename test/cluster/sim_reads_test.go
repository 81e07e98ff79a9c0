package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/simtest"
	"codeq/test/queuetest"
)

// stand makes a node start an election at once, although the others have a leader. A leader that
// transfers its leadership asks for this by a message, and the message may be late.
func (n *simNode) stand(shard int) {
	if q, _ := n.queue(); q != nil && inspect.Of(q).Node().Cluster() != "" {
		inspect.Of(q).Group(shard).Receive(raft.RPC{
			Command:  &raft.TimeoutNowRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}},
			RespChan: make(chan raft.RPCResponse, 1),
		})
	}
}

// TestDeposedLeaderAnswersNoReads: an answer to a heartbeat reaches a leader late: its sender has
// elected another leader, which has completed a task and stored others. The answer does not confirm
// later reads.
func TestDeposedLeaderAnswersNoReads(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute) // until the leader is the home node
		c.rest()
		old, _ := c.lead()
		var others []*simNode
		for _, n := range c.members() {
			if n != old {
				others = append(others, n)
			}
		}
		voter, heir := others[0], others[1]
		done := queuetest.Produce(t, simQueue(heir), codeq.Task{Queue: "a", Payload: []byte("done")})[0]
		lease := queuetest.ClaimNow(t, simQueue(heir), "a")
		queuetest.CountsOf(t, simQueue(voter), "a") // there is a connection
		c.net.SetCut(voter.name, old.name, true)
		time.Sleep(100 * time.Millisecond) // until the voter has answered a heartbeat
		c.net.SetCut(old.name, voter.name, true)
		c.net.SetCut(heir.name, old.name, true)
		heir.stand(0)
		requireNode(t, heir, c.newLeader(old))
		require.NoError(t, simQueue(heir).Complete(t.Context(), lease.Receipt, nil))
		queuetest.Produce(t, simQueue(heir), codeq.Task{Queue: "a", Payload: []byte("new")}, codeq.Task{Queue: "b"})
		q := simQueue(old)
		require.True(t, inspect.Of(q).Leads(0), "it knows of no other leader")

		var reads sync.WaitGroup
		reads.Go(func() {
			if counts := queuetest.CountsOf(t, q, "a"); counts != (codeq.Counts{Ready: 1}) {
				t.Errorf("Stats of queue a: %+v", counts)
			}
		})
		reads.Go(func() {
			if info, err := q.Get(t.Context(), done); err == nil {
				t.Errorf("Get of a completed task: %v", info.State)
			}
		})
		reads.Go(func() {
			if listed := queuetest.Collect(t, q.List(t.Context(), codeq.ListOptions{State: codeq.Ready, Queue: "a"})); len(listed) != 1 || listed[0] != "new" {
				t.Errorf("List of queue a: %q", listed)
			}
		})
		reads.Go(func() {
			if queuetest.ClaimNow(t, q, "b") == nil {
				t.Error("Claim has found nothing in queue b")
			}
		})
		synctest.Wait()
		c.net.SetCut(voter.name, old.name, false)
		time.Sleep(20 * time.Millisecond)
		c.net.Heal(false)
		reads.Wait()
	})
}

// confirming counts the confirmations of leadership that an owner got.
type confirming struct {
	inspect.Committer
	count *atomic.Int32
}

func (c confirming) Confirm() error {
	c.count.Add(1)
	return c.Committer.Confirm()
}

// TestEmptyIsConfirmed: a claim returns no task only after every shard has confirmed that.
func TestEmptyIsConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const shards = 3
		c := newSimCluster(t, 1, 1, codeq.Options{Shards: shards})
		c.awaitLeaders()
		q := simQueue(c.members()[0])
		var confirmed [shards]atomic.Int32
		for i := range shards {
			queuetest.WrapCommits(t, q, i, func(next inspect.Committer) inspect.Committer {
				return confirming{next, &confirmed[i]}
			})
			synctest.Wait()
			confirmed[i].Store(0)
		}
		require.Nil(t, queuetest.ClaimNow(t, q, "a"))
		for i := range shards {
			require.EqualValues(t, 1, confirmed[i].Load(), "shard %d", i)
		}
		c.close()
	})
}

// read reads tasks of the queue that all clients share.
func (c *simClient) read() {
	switch c.rng.IntN(3) {
	case 0:
		serial, id := c.h.AnyTask(c.rng)
		var info *codeq.TaskInfo
		call, ok := c.call(simtest.Read, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) (err error) {
			if info, err = q.Get(ctx, id); errors.Is(err, codeq.ErrNotFound) {
				return nil
			}
			return err
		})
		switch {
		case !ok || call.Outcome != simtest.Done:
		case id != codeq.ID{}:
			c.h.Saw(call, serial, shownAs(info))
		case info != nil: // without info, the payload may be stored or not
			c.h.Fail("Get of the zero ID: %+v", info)
		}
	case 1:
		var listed []*codeq.TaskInfo
		state := []codeq.State{codeq.Ready, codeq.Leased}[c.rng.IntN(2)]
		call, ok := c.call(simtest.Read, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) (err error) {
			listed, err = collectAll(q.List(ctx, codeq.ListOptions{State: state, Queue: "a"}))
			return err
		})
		if ok && call.Outcome == simtest.Done {
			for _, info := range listed {
				c.h.Saw(call, queuetest.SerialOf(info.Payload), shownAs(info))
			}
		}
	case 2:
		var stats map[string]codeq.Counts
		call, ok := c.call(simtest.Read, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) (err error) {
			stats, err = q.Stats(ctx)
			return err
		})
		if ok && call.Outcome == simtest.Done {
			c.h.Counted(call, stats["a"].Total())
		}
	}
}

// shownAs returns the fields of a read task that a history needs; nil without a task.
func shownAs(info *codeq.TaskInfo) *simtest.Task[codeq.ID] {
	if info == nil {
		return nil
	}
	return &simtest.Task[codeq.ID]{ID: info.ID, Serial: queuetest.SerialOf(info.Payload), State: info.State, Attempts: info.Attempts}
}

// shownOf is shownAs for the tasks of the queue that all clients share.
func shownOf(tasks map[codeq.ID]*codeq.TaskInfo) (shown []simtest.Task[codeq.ID]) {
	for _, info := range tasks {
		if info.Queue == "a" {
			shown = append(shown, *shownAs(info))
		}
	}
	return shown
}

// shownLease returns the fields of a lease that a history needs.
func shownLease(l *codeq.Lease) simtest.Lease[codeq.ID] {
	return simtest.Lease[codeq.ID]{ID: l.ID, Serial: queuetest.SerialOf(l.Payload), Token: l.Receipt.Token, Attempt: l.Attempt, Deadline: l.Deadline}
}

func collectAll(list iter.Seq2[*codeq.TaskInfo, error]) (tasks []*codeq.TaskInfo, err error) {
	for info, err := range list {
		if err != nil {
			return nil, err
		}
		tasks = append(tasks, info)
	}
	return tasks, nil
}

// simProbe has its own queue with at most one task: it knows the right answer of every read on any
// node.
type simProbe struct {
	*simClient
	queue    string
	id       codeq.ID
	state    codeq.State // 0: no task
	attempts int
	receipt  codeq.Receipt
}

// probeLease is a bit longer than a schedule: a shard with leases is never at rest.
const probeLease = 90 * time.Second

// probe works and reads in one queue after the other, until the schedule is over.
func (c *simClient) probe() {
	for n := 0; !c.ending(); n++ {
		p := &simProbe{simClient: c, queue: fmt.Sprintf("probe %d-%d", c.number, n)}
		for known := true; known && !c.ending(); {
			time.Sleep(c.upTo(200 * time.Millisecond))
			if c.rng.IntN(3) == 0 {
				known = p.step()
			} else {
				known = p.read()
			}
		}
	}
}

// do calls any node. ok is false if the call had no effect, or if its outcome is unknown; never
// means no effect.
func (p *simProbe) do(verb simtest.Verb, f func(ctx context.Context, q *codeq.Queue) error) (ok, never bool) {
	call, called := p.call(verb, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error { return f(ctx, q) })
	return called && call.Outcome == simtest.Done, !called || call.Outcome == simtest.Never
}

// promptly is shorter than the interval between two tries of a claim. If a claim took longer, its
// first try may still arrive late; so may a try of a canceled claim.
const promptly = 50 * time.Millisecond

// step changes the task. It returns false if the outcome is unknown.
func (p *simProbe) step() (known bool) {
	switch p.state {
	case 0:
		ok, never := p.do(simtest.Produce, func(ctx context.Context, q *codeq.Queue) (err error) {
			p.id, err = q.Produce(ctx, codeq.Task{Queue: p.queue, MaxAttempts: 1000, Payload: []byte("0 ")})
			return err
		})
		if ok {
			p.state, p.attempts = codeq.Ready, 0
		}
		return ok || never
	case codeq.Ready:
		var l *codeq.Lease
		empty, begun := false, time.Now()
		ok, _ := p.do(simtest.Claim, func(ctx context.Context, q *codeq.Queue) (err error) {
			l, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{p.queue}, NoWait: true, LeaseFor: probeLease})
			empty = errors.Is(err, codeq.ErrEmpty)
			return err
		})
		if ok {
			p.state, p.attempts, p.receipt = codeq.Leased, p.attempts+1, l.Receipt
			return time.Since(begun) < promptly
		}
		if empty { // or an earlier try leased it, and its answer was lost
			p.get(func(info *codeq.TaskInfo) bool { return info != nil && info.State == codeq.Leased }, "after ErrEmpty")
		}
		return false
	default:
		verb := []simtest.Verb{simtest.Complete, simtest.Retry, simtest.Release}[p.rng.IntN(3)]
		ok, _ := p.do(verb, func(ctx context.Context, q *codeq.Queue) error {
			switch verb {
			case simtest.Retry:
				return q.Retry(ctx, p.receipt, codeq.RetryOptions{After: -1})
			case simtest.Release:
				return q.Release(ctx, p.receipt, 0)
			}
			return q.Complete(ctx, p.receipt, nil)
		})
		switch verb {
		case simtest.Retry:
			p.state = codeq.Ready
		case simtest.Release:
			p.state, p.attempts = codeq.Ready, p.attempts-1
		case simtest.Complete:
			p.state = 0
		}
		return ok
	}
}

// compare starts clients that work on one node and read on another, until end is called.
func (s *schedule) compare(works, reads *simNode) (end func()) {
	const clients = 4
	var over atomic.Bool
	var ended sync.WaitGroup
	for range clients {
		i := s.rushed.Add(1)
		c := &simClient{schedule: s, number: 2000 + int(i), rng: rand.New(rand.NewPCG(s.seed, 2000+uint64(i)))}
		p := &simProbe{simClient: c, queue: fmt.Sprint("compared ", i)}
		ended.Go(func() {
			for known := true; known && !over.Load(); {
				c.only = works
				if known = p.step(); known {
					c.only = reads
					known = p.read()
				}
				time.Sleep(c.upTo(20 * time.Millisecond))
			}
		})
	}
	return func() {
		over.Store(true)
		ended.Wait()
	}
}

func (p *simProbe) fails(format string, args ...any) {
	p.h.Fail("%s: %s, attempts %d: %s", p.queue, p.state, p.attempts, fmt.Sprintf(format, args...))
}

// read checks that a read shows the task. It returns false if it may have changed the task.
func (p *simProbe) read() (known bool) {
	switch p.rng.IntN(5) {
	case 0:
		p.get(func(info *codeq.TaskInfo) bool {
			return info == nil && p.state == 0 || info != nil && info.State == p.state && info.Attempts == p.attempts
		}, "Get")
	case 1:
		state := []codeq.State{codeq.Ready, codeq.Leased}[p.rng.IntN(2)]
		var listed []*codeq.TaskInfo
		if ok, _ := p.do(simtest.Read, func(ctx context.Context, q *codeq.Queue) (err error) {
			listed, err = collectAll(q.List(ctx, codeq.ListOptions{State: state, Queue: p.queue}))
			return err
		}); ok && (len(listed) > 0) != (state == p.state) {
			p.fails("List of %v: %v", state, listed)
		}
	case 2:
		var counts, want codeq.Counts
		switch p.state {
		case codeq.Ready:
			want.Ready = 1
		case codeq.Leased:
			want.Leased = 1
		}
		if ok, _ := p.do(simtest.Read, func(ctx context.Context, q *codeq.Queue) error {
			stats, err := q.Stats(ctx)
			counts = stats[p.queue]
			return err
		}); ok && counts != want {
			p.fails("Stats: %+v", counts)
		}
	case 3:
		p.idle()
	case 4:
		if p.state == codeq.Ready {
			break
		}
		empty, begun := false, time.Now()
		ok, _ := p.do(simtest.Claim, func(ctx context.Context, q *codeq.Queue) error {
			_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{p.queue}, NoWait: true, LeaseFor: probeLease})
			empty = errors.Is(err, codeq.ErrEmpty)
			return err
		})
		if ok {
			p.fails("Claim has found a task")
		}
		return empty && time.Since(begun) < promptly
	}
	return true
}

func (p *simProbe) get(is func(*codeq.TaskInfo) bool, when string) {
	if p.id == (codeq.ID{}) {
		return
	}
	var info *codeq.TaskInfo
	if ok, _ := p.do(simtest.Read, func(ctx context.Context, q *codeq.Queue) (err error) {
		if info, err = q.Get(ctx, p.id); errors.Is(err, codeq.ErrNotFound) {
			return nil
		}
		return err
	}); ok && !is(info) {
		p.fails("%s: %+v", when, info)
	}
}

// WaitIdle returns only if its queues were idle at some moment of the call.

// idle checks that a queue with a task is not idle.
func (p *simProbe) idle() {
	patience := p.upTo(time.Second)
	if ok, _ := p.do(simtest.Read, func(ctx context.Context, q *codeq.Queue) error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		return q.WaitIdle(ctx, p.queue)
	}); ok && p.state != 0 {
		p.fails("WaitIdle has returned")
	}
}

// chains runs chains of follow-ups from shard to shard, each in its own queue. The queue is not
// idle before the last task is completed. Other clients wait for that.
func (c *simClient) chains() {
	for n := 0; !c.ending(); n++ {
		time.Sleep(c.upTo(3 * time.Second))
		c.chain(fmt.Sprintf("chain %d-%d", c.number, n), 1+c.rng.IntN(10))
	}
}

func (c *simClient) chain(queue string, length int) {
	task := func() codeq.Task {
		return codeq.Task{Queue: queue, Group: fmt.Sprint(c.rng.IntN(8)), MaxAttempts: 1000}
	}
	call, ok := c.call(simtest.Produce, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error {
		_, err := q.Produce(ctx, task())
		return err
	})
	if !ok || call.Outcome != simtest.Done {
		return
	}
	var over atomic.Bool
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer over.Store(true)
	for range 2 {
		w := &simClient{schedule: c.schedule, number: c.number, home: c.rng.IntN(100), rng: rand.New(rand.NewPCG(c.rng.Uint64(), 0))}
		waiting.Go(func() { w.awaitEnd(queue, &over) })
	}
	for ; length > 0 && !c.ending(); length-- {
		var l *codeq.Lease
		call, ok := c.call(simtest.Claim, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) (err error) {
			l, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}, LeaseFor: simGroupLease})
			return err
		})
		if !ok || call.Outcome != simtest.Done {
			time.Sleep(100 * time.Millisecond)
			continue
		}
		next := []codeq.Task{task()}
		if length == 1 {
			next = nil
			over.Store(true)
		}
		c.call(simtest.Complete, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error {
			return q.Complete(ctx, l.Receipt, nil, next...)
		})
	}
}

// awaitEnd calls WaitIdle again and again, and checks that the queue is not idle before over.
func (c *simClient) awaitEnd(queue string, over *atomic.Bool) {
	for !over.Load() {
		call, ok := c.call(simtest.Read, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error { return q.WaitIdle(ctx, queue) })
		if ok && call.Outcome == simtest.Done && !over.Load() {
			c.h.Fail("WaitIdle of %s has returned amid the chain: %v", queue, call)
			return
		}
		time.Sleep(c.upTo(200 * time.Millisecond))
	}
}
