package codeq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/record"
)

// claimTable is the claims of this node that wait, in a cluster. A claim visits
// the shards that the node leads, and waits in them as ever. Those that find
// nothing there are listed here as well, those that want the same in one line; and
// for each line one claim at a time, for as many tasks as the line is long,
// waits with each shard that another node leads. That node serves its own claims
// first. So a task goes to another node only if nobody wants it at home, and
// claims that are served at home cost no word to anybody.
type claimTable struct {
	node *node

	mu     sync.Mutex // guards what follows
	lines  map[lineKey]*claimLine
	closed bool
}

// lineKey is what claims of one line have in common.
type lineKey struct {
	queues   string
	duration uint64
	local    bool
}

// claimLine is claims that want the same. Its fetchers, one for each shard, end
// when the table is closed, or the line is dropped.
type claimLine struct {
	table   *claimTable
	key     lineKey
	queues  []string
	weights []int
	list    *dispatch.List    // in their place, if they are many
	waiting dispatch.WaitList // guarded by the table's mu
	filled  chan struct{}     // non-nil while fetchers wait for a claim; closed by add
	ctx     context.Context
	drop    context.CancelFunc
}

// remoteWait is how a claim of this node gets to the shards of the cluster: it visits
// those that the node leads, and is then listed in the table for the others.
type remoteWait struct {
	table  *claimTable
	listed bool // guarded by the table's mu
}

func newClaimTable(n *node) *claimTable {
	return &claimTable{node: n, lines: make(map[lineKey]*claimLine)}
}

// claim is Queue.claim in a cluster.
func (t *claimTable) claim(ctx context.Context, req *ClaimRequest, r *runner) (*claimOp, error) {
	var patience cluster.Patience
	if req.NoWait {
		patience = t.node.NewPatience()
	}
	for {
		change := t.node.Changed()
		op, err := t.try(ctx, req, r)
		if err == nil || !errors.Is(err, ErrNotLeader) && !errors.Is(err, ErrUncertain) {
			return op, err
		}
		// A lease that may have been granted ends by itself.
		again := patience.Wait(ctx, change)
		if ctx.Err() != nil {
			return nil, base.EndOf(ctx)
		}
		if !again {
			return nil, err
		}
	}
}

// try asks the shards that are led here. Then the claim waits, or the others are asked.
func (t *claimTable) try(ctx context.Context, req *ClaimRequest, r *runner) (*claimOp, error) {
	q := t.node.queue
	led := q.led()
	if len(led) == 0 && req.NoWait {
		return t.askAll(ctx, req, r, led)
	}
	op := q.newClaim(req, r)
	op.remoteWait.table = t
	if len(led) == 0 {
		t.add(op)
	} else {
		op.shards, op.begin = led, q.claimShardOf(op, led)
		switch err := led[op.begin].inbox.push(ctx, op); {
		case err == nil:
		case !req.NoWait && errors.Is(err, ErrNotLeader):
			t.add(op)
		default:
			op.unref()
			op.unref()
			return nil, err
		}
	}
	op, err := op.wait(ctx)
	if err != nil && req.NoWait && errors.Is(err, ErrEmpty) {
		return t.askAll(ctx, req, r, led)
	}
	return op, err
}

// askAll asks the shards that other nodes lead, without waiting. This node has asked those that it
// led.
func (t *claimTable) askAll(ctx context.Context, req *ClaimRequest, r *runner, led []*shard) (*claimOp, error) {
	n := t.node
	var unreached error
	first := rand.IntN(len(n.queue.replicas))
	for i := range n.queue.replicas {
		shard := n.queue.replicas[(first+i)%len(n.queue.replicas)]
		if s := shard.lead.Load(); s != nil {
			if !slices.Contains(led, s) {
				unreached = fmt.Errorf("%w: shard %d has come to this node meanwhile", ErrNotLeader, s.index)
			}
			continue
		}
		op := n.queue.newClaim(req, r)
		err := n.ask(ctx, shard, op)
		op.unref() // nobody else has it
		if err == nil {
			return op, nil
		}
		op.unref()
		if !errors.Is(err, ErrEmpty) {
			unreached = err
		}
	}
	if unreached != nil {
		return nil, unreached
	}
	return nil, ErrEmpty
}

// add lists a claim that waits, unless it is listed. It takes over the caller's
// reference. The claim comes to wait in the shards that this node leads by now and that it has
// not visited: their leadership is new, or that of one before them has ended.
func (t *claimTable) add(op *claimOp) {
	defer op.unref()
	key := lineKey{queues: lineName(op), duration: op.Duration, local: op.Holder.Local}
	t.mu.Lock()
	defer t.mu.Unlock()
	if op.remoteWait.listed {
		return
	}
	op.remoteWait.listed = true
	if t.closed {
		op.Ticket().Refuse(ErrClosed)
		return
	}
	l := t.lines[key]
	if l == nil {
		l = t.open(key, op)
	}
	l.waiting.Push(op.Ticket())
	if l.filled != nil {
		close(l.filled)
		l.filled = nil
	}
	led := t.node.queue.led()
	if op.visited >= len(op.shards) && slices.Equal(led, op.shards) { // as ever
		return
	}
	for _, s := range led {
		if !op.hasVisited(s) {
			_ = s.inbox.pass(&joinOp{op.Ticket(), l.queues, l.list}) // or else it waits elsewhere
		}
	}
}

func lineName(op *claimOp) string {
	if op.List != nil {
		return string(op.List.Digest[:])
	}
	if len(op.Queues) == 1 {
		return op.Queues[0]
	}
	var b strings.Builder
	for i, name := range op.Queues {
		b.WriteString(strconv.Itoa(len(name)))
		b.WriteByte(' ')
		b.WriteString(name)
		if len(op.Weights) > 0 {
			b.WriteString(strconv.Itoa(op.Weights[i]))
		}
		b.WriteByte(' ')
	}
	return b.String()
}

// lineCap is how many lines there may be before those without a claim are dropped.
const lineCap = 64

// open makes a line and its fetchers. REQUIRES: mu is held.
func (t *claimTable) open(key lineKey, op *claimOp) *claimLine {
	if len(t.lines) >= lineCap {
		for other, l := range t.lines {
			if !l.waiting.AnyGood() {
				l.drop()
				delete(t.lines, other)
			}
		}
	}
	l := &claimLine{table: t, key: key, queues: slices.Clone(op.Queues), weights: slices.Clone(op.Weights), list: op.List}
	l.ctx, l.drop = context.WithCancel(t.node.ctx)
	t.lines[key] = l
	for _, r := range t.node.queue.replicas {
		t.node.background.Go(func() {
			contain(t.node.log, "claim line", func() { l.fetch(r) }, l.fail)
		})
	}
	return l
}

// joined lets all claims that wait do so in a shard that this node has begun to lead.
func (t *claimTable) joined(s *shard) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.lines {
		l.waiting.Sweep()
		for _, ticket := range l.waiting.All() {
			_ = s.inbox.pass(&joinOp{ticket, l.queues, l.list}) // or else it waits elsewhere
		}
	}
}

// joinOp lets a claim that waits elsewhere wait in a shard, too.
type joinOp struct {
	ticket dispatch.Ticket
	queues []string
	list   *dispatch.List
}

func (op *joinOp) resolve(s *shard) {
	if !op.ticket.Good() {
		return
	}
	if op.list != nil && !s.claims.Build(op.list) {
		s.postponeOp(op)
		return
	}
	s.claims.WaitBy(op.ticket, op.queues, op.list, false)
}

// settle is called if the operation is refused: the claim waits elsewhere.
func (op *joinOp) settle(error) {}

// close refuses the claims that wait. REQUIRES: node.ctx has ended, and no owner runs.
func (t *claimTable) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	for _, l := range t.lines {
		l.waiting.Refuse(ErrClosed)
	}
}

// fetch claims tasks of a shard for the line while another node leads it.
func (l *claimLine) fetch(r *replica) {
	n := l.table.node
	var pause cluster.Patience
	for l.ctx.Err() == nil {
		change := r.group.Changed()
		if r.lead.Load() != nil || !r.group.HasLeader() {
			select {
			case <-change:
			case <-l.ctx.Done():
			}
			continue
		}
		want, ok := l.want(change)
		if !ok {
			continue
		}
		op := &claimOp{completion: newCompletion(), Claim: dispatch.Claim{
			Queues: l.queues, Weights: l.weights, List: l.list, Duration: l.key.duration,
			Holder: engine.Holder{Local: l.key.local}, Max: want, Remote: true,
		}}
		began := time.Now()
		if err := n.ask(l.ctx, r, op); err != nil {
			pause.Wait(l.ctx, change)
			continue
		}
		pause = cluster.Patience{}
		l.deal(l.inForce(r, op.Grants, time.Since(began)))
	}
}

// renewTries bounds how often leases are renewed that are shorter than the way to their shard
// takes.
const renewTries = 3

// inForce returns those of some leases that have not expired. They may be as old as the call, whose
// answer may have been under way for long: then they are renewed first. Or else a claim that came
// later would get a task that somebody else has completed before.
func (l *claimLine) inForce(r *replica, grants []engine.Grant, age time.Duration) []engine.Grant {
	doubtful := make(map[uint64][]engine.Receipt) // by the duration of the lease, ms
	for i := range grants {
		if d := l.durationOf(&grants[i]); age >= halfOf(d) {
			doubtful[d] = append(doubtful[d], grants[i].Receipt)
		}
	}
	lost := make(map[engine.Receipt]bool)
	for d, receipts := range doubtful {
		for range renewTries {
			began := time.Now()
			b := &call.Renew{Receipts: receipts, Duration: d}
			if _, err := l.table.node.do(l.ctx, r.index, rule(callRenew, b)); err != nil { // they expire by themselves
				b.Lost = receipts
			}
			for _, receipt := range b.Lost {
				lost[receipt] = true
			}
			if len(b.Lost) == len(receipts) || time.Since(began) < halfOf(d) {
				break
			}
		}
	}
	return slices.DeleteFunc(grants, func(g engine.Grant) bool { return lost[g.Receipt] })
}

func halfOf(ms uint64) time.Duration { return time.Duration(ms) * time.Millisecond / 2 }

// durationOf is how long a lease was granted for, ms.
func (l *claimLine) durationOf(g *engine.Grant) uint64 {
	head, err := record.DecodeHead(g.Rec)
	if err == nil && head.Lease != 0 && !l.key.local {
		return head.Lease
	}
	return l.key.duration
}

// fail refuses the claims in the line, which is dropped: the next claim opens another one.
func (l *claimLine) fail(cause error) {
	t := l.table
	t.mu.Lock()
	defer t.mu.Unlock()
	l.drop()
	if t.lines[l.key] == l {
		delete(t.lines, l.key)
	}
	reason := fmt.Errorf("%w: %w", ErrFailed, cause)
	l.waiting.Refuse(reason)
}

// want waits until there is a claim in the line, and returns how many tasks its
// claims want.
func (l *claimLine) want(change <-chan struct{}) (tasks int, ok bool) {
	t := l.table
	for {
		t.mu.Lock()
		if l.waiting.AnyGood() {
			most := min(fetchCap, t.node.queue.opts.Limits.Batch)
			tasks = min(l.waiting.Wants(most), most)
		}
		if tasks > 0 {
			t.mu.Unlock()
			return tasks, true
		}
		if l.filled == nil {
			l.filled = make(chan struct{})
		}
		filled := l.filled
		t.mu.Unlock()
		select {
		case <-filled:
		case <-change:
			return 0, false
		case <-l.ctx.Done():
			return 0, false
		}
	}
}

// deal gives tasks that have been fetched to the claims in the line, and gives
// back what none of them wants any more.
func (l *claimLine) deal(grants []engine.Grant) {
	t := l.table
	for len(grants) > 0 {
		t.mu.Lock()
		var op *claimOp
		for op == nil && l.waiting.Len() > 0 {
			if ticket := l.waiting.Pop(); ticket.Take() {
				op = ticket.Claim().Caller.(*claimOp)
			}
		}
		t.mu.Unlock()
		if op == nil {
			break
		}
		n := min(op.Max, len(grants))
		op.Grants = append(op.Grants, grants[:n]...)
		grants = grants[n:]
		for _, s := range op.shards {
			s.claims.CountVoid(op.Tickets())
		}
		op.completion.settle(nil)
	}
	for _, g := range grants {
		t.node.background.Go(func() {
			contain(t.node.log, "task that comes back", func() {
				// A task that cannot be given back is, when its lease has expired.
				_ = t.node.queue.failed(t.node.ctx, receiptOf(g.Receipt), failOp{how: engine.FailReturn, roomWait: roomWait{gone: t.node.ctx.Done()}}, nil)
			}, nil)
		})
	}
}
