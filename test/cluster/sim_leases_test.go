package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/simtest"
)

// Leases end: when a worker is gone, its task can be claimed again after the end of the lease,
// under any leader.

const (
	// simGrace is the shortest time that a lease lasts after a change of the leader.
	simGrace = time.Second
	// simPulse is the longest time between two commits of a shard that does not count as a pause.
	simPulse = 200 * time.Millisecond
	// simClaimTime is the longest time until a claim gets a task while all nodes are up.
	simClaimTime = 5 * time.Second
)

// leaseWatch measures the extra time that leases may last. It adds the times when their shard had
// no leader, when the leader committed nothing or had no room to end a lease, and when a checkpoint
// may have stopped the shard. It also adds the part of the lease clock that each new leader did not
// know.
type leaseWatch struct {
	*schedule
	mu     sync.Mutex // guards the fields below
	shards []watchedShard
	leases []simHeld
}

type watchedShard struct {
	term  uint64    // of the shard's leader
	index uint64    // the last one of its log
	at    time.Time // then
	full  time.Time // the last time without room
	extra time.Duration
}

// simHeld is a lease without its holder.
type simHeld struct {
	queue    string
	shard    int
	attempt  int
	duration time.Duration
	granted  time.Time     // at the latest
	extra    time.Duration // the shard's extra before the lease
}

// watchLeases looks at the leaders until stop is called.
func (s *schedule) watchLeases() (w *leaseWatch, stop func()) {
	const every = 100 * time.Millisecond
	w = &leaseWatch{schedule: s, shards: make([]watchedShard, s.opts.Shards)}
	for i := range w.shards {
		w.shards[i].at = time.Now()
	}
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			w.look(every)
			select {
			case <-over:
				return
			case <-time.After(every):
			}
		}
	}()
	return w, func() { close(over); <-ended }
}

// look takes one sample; every is the interval of samples.
func (w *leaseWatch) look(every time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	for i := range w.shards {
		sh := &w.shards[i]
		n := w.leader(i)
		if n == nil {
			continue
		}
		q := simQueue(n)
		if q == nil || !inspect.Of(q).Leads(i) {
			continue
		}
		group := inspect.Of(q).Group(i).Raft()
		term := group.CurrentTerm()
		if n.isFull() {
			sh.full = now
		}
		if now.Sub(sh.full) < 2*simGrace || w.cutting.Load() > 0 { // the leader checks at intervals
			sh.extra += every
		}
		switch {
		case term != sh.term:
			known := min(inspect.Of(q).ClockAge(i), simtest.ClockEvery)
			unknown := w.h.Longest(known) - known // beyond the time on its clock
			sh.extra += now.Sub(sh.at) + simtest.ClockEvery - known + unknown + simGrace
		case group.CommitIndex() < sh.index:
			continue
		case now.Sub(sh.at) > simPulse:
			sh.extra += now.Sub(sh.at)
		}
		sh.term, sh.at, sh.index = term, now, group.LastIndex()
	}
}

// extra returns the total extra time that leases of a shard may have lasted.
func (w *leaseWatch) extra(shard int) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	sh := &w.shards[shard]
	if pause := time.Since(sh.at); pause > simPulse {
		return sh.extra + pause
	}
	return sh.extra
}

// isFull reports whether the disk of the node is full.
func (n *simNode) isFull() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.life != nil && n.life.IsFull()
}

// abandon claims tasks, each in its own queue, and never ends their leases.
func (w *leaseWatch) abandon(c *simClient) {
	for n := 0; !c.ending(); n++ {
		time.Sleep(c.upTo(3 * time.Second))
		held := simHeld{
			queue:    fmt.Sprintf("lease %d-%d", c.number, n),
			duration: 5*time.Second + time.Duration(c.rng.Int64N(int64(20*time.Second))).Round(time.Millisecond),
		}
		call, ok := c.call(simtest.Produce, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error {
			id, err := q.Produce(ctx, codeq.Task{Queue: held.queue, MaxAttempts: 1000})
			held.shard = shardOf(q, id)
			return err
		})
		if !ok || call.Outcome != simtest.Done {
			continue
		}
		held.extra = w.extra(held.shard)
		call, ok = c.call(simtest.Claim, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error {
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{held.queue}, LeaseFor: held.duration, NoWait: true})
			if err == nil {
				held.attempt = l.Attempt
			}
			return err
		})
		if !ok || call.Outcome != simtest.Done {
			continue
		}
		held.granted = time.Now()
		w.mu.Lock()
		w.leases = append(w.leases, held)
		w.mu.Unlock()
	}
}

// reclaim claims the tasks of all abandoned leases; wait waits for these claims. REQUIRES: all
// nodes are up and connected.
func (w *leaseWatch) reclaim() (wait func()) {
	w.awaitLeaders()
	var claims sync.WaitGroup
	from, nodes := time.Now(), w.members()
	for i, held := range w.leases {
		claims.Go(func() { w.claimAgain(held, nodes[i%len(nodes)], from) })
	}
	return claims.Wait
}

func (w *leaseWatch) claimAgain(held simHeld, n *simNode, from time.Time) {
	ctx, cancel := context.WithTimeout(context.Background(), simPatience)
	defer cancel()
	q := simQueue(n)
	for {
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{held.queue}, LeaseFor: simPatience})
		if errors.Is(err, codeq.ErrNotLeader) || errors.Is(err, codeq.ErrUncertain) {
			continue
		}
		if err != nil {
			w.t.Errorf("claim of %s, leased at %v for %v: %v", held.queue, held.granted, held.duration, err)
			return
		}
		ends := held.granted.Add(w.h.Longest(held.duration) + w.extra(held.shard) - held.extra)
		if ends.Before(from) {
			ends = from
		}
		if late := time.Since(ends); late > simClaimTime && l.Attempt == held.attempt+1 {
			w.t.Errorf("%s was leased at %s for %v, and can be claimed %v too late", held.queue, held.granted.Format("04:05.000"), held.duration, late)
		}
		_ = q.Complete(ctx, l.Receipt, nil) // else its lease is still there at the end
		return
	}
}
