package codeq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// Claim leases the next ready task of the queues asked for, and waits for one
// if there is none. The lease is stored before Claim returns: a worker that
// dies with the task, or takes the process with it, has used up an attempt.
//
// Within a queue the order is: higher priorities first, tenants in turn, and
// for each tenant the task that has been ready for longest. With several
// shards, tenants take turns in each of them, and claims go to the shard with the
// highest priority, and for a queue with one tenant to the one with the oldest task, as the
// shards of the process have told after their last commits: of claims that are made
// at the same time some may get a task before a more urgent, or an older, one. The strict
// order of queues holds over the shards for the first 16 of them. If req has
// Weights, claims begin at any shard, and keep to the priorities only.
//
// A task whose lease runs out for the first time keeps its place, and so does one whose
// lease ends as the process restarts. The next time that its lease runs out it goes behind the
// others of its lane (a queue, tenant and priority), so that a task that hangs its workers
// holds nobody up. RedriveDead begins anew.
//
// Claim returns [ErrEmpty] if req.NoWait is set and no task is ready, the error
// of ctx if ctx ends first, and [ErrClosed] when the queue is closed. It is safe
// for concurrent use; claims that wait are served first come, first served (those that
// name more than 16 queues among themselves, in turn with the others), in a
// cluster those of the node that leads the shard before others. There, the tasks
// of a claim whose node is lost in this moment wait until the lease has expired.
//
// Errors: [ErrInvalid], [ErrEmpty], [ErrDiskFull] (with NoWait), [ErrUncertain], [ErrFailed],
// [ErrNotLeader], [ErrCorrupt], [ErrClosed], and that of ctx.
func (q *Queue) Claim(ctx context.Context, req ClaimRequest) (_ *Lease, err error) {
	defer public(&err)
	req.Max = 1
	op, err := q.claim(ctx, &req, nil)
	if err != nil {
		return nil, err
	}
	defer op.unref()
	return leaseOf(&op.grants[0])
}

// ClaimBatch is Claim for up to req.Max tasks at once. It returns as soon as
// there is one, with as many as are ready in one shard: of the first queue, then of the
// queues that follow. It returns fewer where another shard has more urgent ones, and where the
// next ones are to be read from disk first, as soon after Open or in a long backlog.
//
// Errors: those of [Queue.Claim].
func (q *Queue) ClaimBatch(ctx context.Context, req ClaimRequest) (_ []*Lease, err error) {
	defer public(&err)
	op, err := q.claim(ctx, &req, nil)
	if err != nil {
		return nil, err
	}
	defer op.unref()
	leases := make([]*Lease, len(op.grants))
	for i := range op.grants {
		if leases[i], err = leaseOf(&op.grants[i]); err != nil {
			return nil, err
		}
	}
	return leases, nil
}

// claim returns an operation with at least one grant; the caller unrefs it.
// r is for leases that end with the process.
func (q *Queue) claim(ctx context.Context, req *ClaimRequest, r *runner) (*claimOp, error) {
	if r == nil { // else Run has checked it
		if err := q.checkCall(ctx); err != nil {
			return nil, err
		}
		if err := req.check(&q.opts.Limits); err != nil {
			return nil, err
		}
	}
	if q.node != nil {
		return q.node.claims.claim(ctx, req, r)
	}
	op := q.newClaim(req, r)
	first := q.shard(q.claimShard(op))
	op.shards, op.begin = first.peers, first.index
	if err := first.inbox.push(ctx, op); err != nil {
		op.unref()
		op.unref()
		return nil, err
	}
	return op.wait(ctx)
}

// newClaim makes an operation with two references, the caller's and the inbox's.
func (q *Queue) newClaim(req *ClaimRequest, r *runner) *claimOp {
	op, ok := q.pools.claim.Get().(*claimOp)
	if !ok {
		op = &claimOp{completion: newCompletion(), pool: &q.pools.claim}
	}
	switch {
	case r != nil && r.list != nil:
		op.list = r.list
	case len(req.Queues) > shortList:
		op.list = newQueueList(slices.Clone(req.Queues), req.appendWeights(nil))
	default:
		op.queues, op.weights = append(op.queues, req.Queues...), req.appendWeights(op.weights)
	}
	op.max, op.noWait, op.holder.Local = max(req.Max, 1), req.NoWait, req.Local || r != nil
	if r != nil {
		op.holder.Runner = r.number
	}
	op.duration = millis(req.LeaseFor)
	if op.duration == 0 {
		op.duration = millis(q.opts.LeaseFor)
	}
	op.refs.Store(2)
	return op
}

// wait waits until the claim is served, and gives up the caller's reference if
// it is not.
func (op *claimOp) wait(ctx context.Context) (*claimOp, error) {
	var err error
	if cancel := ctx.Done(); cancel == nil {
		err = <-op.done
	} else {
		select {
		case err = <-op.done:
		case <-cancel:
			if op.take() { // nobody has served it, and now nobody will
				op.leave()
				op.unref()
				return nil, base.EndOf(ctx)
			}
			err = <-op.done
		}
	}
	if err != nil {
		op.unref()
		return nil, err
	}
	return op, nil
}

// maxWeight keeps the sum of the weights of any list of queues in an int.
const maxWeight = 1 << 16

func isWeight(w int) bool { return w >= 1 && w <= maxWeight }

var weightBounds = fmt.Sprint("1 to ", maxWeight)

func (r *ClaimRequest) check(l *Limits) error {
	if len(r.Queues) == 0 {
		return &InvalidError{"ClaimRequest.Queues", "none", "at least one"}
	}
	for _, name := range r.Queues {
		if name == "" {
			return &InvalidError{"ClaimRequest.Queues", `""`, "names"}
		}
		if err := checkName("ClaimRequest.Queues", name, l.Name); err != nil {
			return err
		}
	}
	if err := r.checkWeights(); err != nil {
		return err
	}
	if r.LeaseFor != 0 && (r.LeaseFor < minLease || r.LeaseFor > maxLease) {
		return &InvalidError{"ClaimRequest.LeaseFor", r.LeaseFor, fmt.Sprint(minLease, " to ", maxLease)}
	}
	if r.Max < 0 || r.Max > l.Batch {
		return &InvalidError{"ClaimRequest.Max", r.Max, atMostTasks(l.Batch)}
	}
	return nil
}

func (r *ClaimRequest) checkWeights() error {
	if len(r.Weights) == 0 {
		return nil
	}
	named := func(queue string) bool { return slices.Contains(r.Queues, queue) }
	if len(r.Queues) > shortList {
		queues := make(map[string]bool, len(r.Queues))
		for _, name := range r.Queues {
			queues[name] = true
		}
		named = func(queue string) bool { return queues[queue] }
	}
	for queue, w := range r.Weights {
		if !named(queue) {
			return &InvalidError{"ClaimRequest.Weights", strconv.Quote(queue), "one of Queues"}
		}
		if !isWeight(w) {
			return &InvalidError{"ClaimRequest.Weights of " + queue, w, weightBounds}
		}
	}
	return nil
}

// appendWeights adds a weight for each of the queues, or none if the order is strict.
func (r *ClaimRequest) appendWeights(weights []int) []int {
	if len(r.Weights) == 0 {
		return weights
	}
	for _, name := range r.Queues {
		weights = append(weights, max(1, r.Weights[name]))
	}
	return weights
}

// claimOp asks the shards in turn for tasks. A claim that waits does so in all
// of them, by tickets, and whoever takes it first serves it.
//
// Invariant: only who has taken the claim (a shard that serves or refuses it,
// or the caller that gives up) writes grants and err. It may do so without a
// reference until the claim is settled.
type claimOp struct {
	completion
	pool     *sync.Pool
	queues   []string // memory of the operation, as is that of weights
	weights  []int
	list     *queueList // in place of queues and weights, if they are many
	drawn    int        // the queue of the list that is drawn, plus 1, until a refill; 0: none is
	duration uint64     // ms
	max      int
	noWait   bool
	holder   engine.Holder // Local: of a Run, perhaps of another node; Runner: of one of this node

	// In a cluster only.
	remote     bool       // a claim of another node, or for the claims of this one: made for one call
	remoteWait remoteWait // of a claim of this node
	asked      []string   // queues that have no permit for it, as it knows

	shards  []*shard      // of this process, in which it may wait; they stay as they are
	begin   int           // the index of the one that it visits first; written by the one whose turn it is
	visited int           // shards that have seen it, in turn; as begin
	full    error         // one of them had no room to grant a lease; as visited
	sent    int           // how often to a shard with something more urgent
	to      int           // the index of that shard
	rank    uint64        // of the head of the queue that was looked at last, in the shard that looked
	state   atomic.Uint64 // odd: somebody has taken it. It grows by 2 when the operation is recycled
	refs    atomic.Int32  // the caller, and the inbox or list that holds it
	grants  []engine.Grant
}

// take makes the caller of take the one who decides the claim.
// REQUIRES: a reference.
func (op *claimOp) take() bool { return op.ticket().take() }

func (op *claimOp) isTaken() bool { return op.state.Load()&1 == 1 }

// unref gives up a reference; the last one recycles the operation. When the
// caller has given up, done was never sent to.
func (op *claimOp) unref() {
	if op.refs.Add(-1) > 0 || op.remote {
		return
	}
	clear(op.queues)
	clear(op.grants)
	op.queues, op.weights, op.grants, op.err = op.queues[:0], op.weights[:0], op.grants[:0], nil
	op.list, op.drawn = nil, 0
	op.begin, op.visited, op.full, op.sent, op.shards, op.holder, op.remoteWait, op.asked = 0, 0, nil, 0, nil, engine.Holder{}, remoteWait{}, nil
	op.state.Store((op.state.Load() | 1) + 1) // all tickets are void
	op.pool.Put(op)
}

// settle lets go of what a claim of another node was given, which is encoded by then:
// its tickets may stay for a while.
func (op *claimOp) settle(err error) {
	made := op.reply != nil // for one call; else the caller may recycle it
	op.completion.settle(err)
	if made {
		op.grants = nil
	}
}

// resolve serves the claim, or has it wait here and sends it on.
func (op *claimOp) resolve(s *shard) {
	if op.isTaken() {
		op.unref()
		return
	}
	outcome := s.tryClaim(op)
	if outcome == claimElsewhere {
		if op.sendOn() {
			return
		}
		outcome = s.tryClaim(op)
	}
	switch outcome {
	case claimServed:
		op.unref()
	case claimPending:
		s.deferred = append(s.deferred, op)
	case claimNothing:
		s.passOn(op)
	}
}

// passOn has a claim wait in this shard, unless it does not wait, and hands it
// to the next one.
func (s *shard) passOn(op *claimOp) {
	if !op.noWait {
		s.enlist(op.ticket(), op.queues, op.list, op.remote)
	}
	op.drawn = 0
	if next := op.next(); next != nil {
		if err := next.inbox.pass(op); err != nil {
			refuse(op, err)
		}
		return
	}
	if op.noWait && op.take() {
		op.err = cmp.Or(op.full, ErrEmpty)
		s.settle(op)
	} else if op.remoteWait.table != nil && !op.noWait {
		op.remoteWait.table.add(op)
		return
	}
	op.unref()
}

// next is the shard that a claim visits next; nil if it has visited the last.
func (op *claimOp) next() *shard {
	if op.visited++; op.visited >= len(op.shards) {
		return nil
	}
	return op.shards[(op.begin+op.visited)%len(op.shards)]
}

// hasVisited reports whether a claim waits in a shard since it has visited it.
func (op *claimOp) hasVisited(s *shard) bool {
	n := len(op.shards)
	at := slices.Index(op.shards, s)
	return at >= 0 && (at-op.begin+n)%n < op.visited
}

func (op *claimOp) abandon(s *shard) {
	if op.take() {
		_ = s.inbox.pass(&leaveOp{op.queues, op.list, op.remote}) // one that is closing has no tickets
	}
}

// named is the queues that the claim names, and their weights.
func (op *claimOp) named() (queues []string, weights []int) {
	if op.list != nil {
		return op.list.names, op.list.weights
	}
	return op.queues, op.weights
}

func (op *claimOp) encode(dst []byte) (callKind, []byte) {
	queues, weights := op.named()
	dst = appendNames(dst, queues)
	dst = keys.AppendIndexes(dst, weights)
	dst = wire.AppendUint(dst, op.duration)
	dst = wire.AppendUint(dst, uint64(op.max))
	return callClaim, wire.AppendBool(wire.AppendBool(dst, op.noWait), op.holder.Local)
}

func (op *claimOp) decode(r *wire.Reader) {
	op.queues, op.weights = readNames(r), keys.ReadIndexes(r)
	op.duration, op.max = r.Uint(), int(r.Uint())
	op.noWait, op.holder.Local = r.Bool(), r.Bool()
	req := ClaimRequest{Queues: op.queues, Max: op.max, LeaseFor: duration(op.duration)}
	if req.check(&Limits{Name: 1 << 20, Batch: 1 << 20}) != nil ||
		len(op.weights) != 0 && len(op.weights) != len(op.queues) ||
		slices.ContainsFunc(op.weights, func(w int) bool { return !isWeight(w) }) {
		r.Fail()
		return
	}
	if op.list = newQueueList(op.queues, op.weights); op.list != nil {
		op.queues, op.weights = nil, nil
	}
}

func (op *claimOp) encodeReply(dst []byte) []byte {
	dst = wire.AppendUint(dst, uint64(len(op.grants)))
	for i := range op.grants {
		g := &op.grants[i]
		dst = appendReceipt(dst, receiptOf(g.Receipt))
		dst = wire.AppendBytes(dst, g.Queue)
		dst = wire.AppendBytes(dst, g.Tenant)
		dst = append(dst, g.Priority)
		dst = wire.AppendUint(dst, uint64(g.Attempt))
		dst = wire.AppendUint(dst, g.Deadline)
		dst = wire.AppendBytes(dst, g.Rec)
	}
	return dst
}

// decodeReply gives grants of one lane that follow each other the same names.
func (op *claimOp) decodeReply(r *wire.Reader) {
	var last engine.LaneKey // tasks of one lane often come together
	for range r.Count(keys.IDLen + 7) {
		g := engine.Grant{Receipt: readReceipt(r).inner()}
		key := engine.LaneKey{Queue: r.String(), Tenant: r.String(), Priority: r.Byte()}
		if last != key {
			last = key
		}
		g.LaneKey, g.Attempt, g.Deadline, g.Rec = last, uint32(r.Uint()), r.Uint(), r.Bytes()
		op.grants = append(op.grants, g)
	}
}

type claimOutcome int

const (
	claimNothing   claimOutcome = iota
	claimServed                 // or taken by somebody else
	claimPending                // depends on a refill
	claimAsks                   // does not wait, and is resolved again when the permit allocator has answered
	claimElsewhere              // another shard has something more urgent
)

// tryClaim takes tasks for a claim, in the order of its queues. Queues where
// others wait already are left to them.
func (s *shard) tryClaim(op *claimOp) claimOutcome {
	if op.list != nil {
		return s.tryClaimOf(op)
	}
	for _, name := range s.claimOrder(op) {
		q := s.Queues[name]
		if s.isElsewhere(op, name, q) {
			return claimElsewhere
		}
		if q == nil || !op.noWait && s.isAwaited(s.claimsOf(q), op.remote) {
			continue
		}
		l, pending := s.next(q)
		if pending {
			return claimPending
		}
		if s.isPassedOver(op, name, q, l) {
			return claimElsewhere
		}
		if l == nil {
			if op.noWait && s.asks(s.claimsOf(q), op) {
				return claimAsks
			}
			continue
		}
		if s.takes(op.ticket()) {
			if op.visited > 0 && !op.noWait {
				s.voidElsewhere(op)
			}
			s.give(op, q, l)
		} else {
			s.leaveGate(s.claimsOf(q))
		}
		return claimServed
	}
	return claimNothing
}

// claimOrder is the order of the queues of a claim: as given, or drawn by lot
// in proportion to the weights. It is good until the next call: a claim that waits may be looked at by
// several shards at once, so that it has no memory for this.
func (s *shard) claimOrder(op *claimOp) []string {
	if len(op.weights) == 0 {
		return op.queues
	}
	s.order = append(s.order[:0], op.queues...)
	s.lots = append(s.lots[:0], op.weights...)
	for i := range s.order {
		total := 0
		for _, w := range s.lots[i:] {
			total += w
		}
		j := i
		for lot := rand.IntN(total) - s.lots[i]; lot >= 0; lot -= s.lots[j] {
			j++
		}
		s.order[i], s.order[j] = s.order[j], s.order[i]
		s.lots[i], s.lots[j] = s.lots[j], s.lots[i]
	}
	return s.order
}

// takes takes a claim that is settled with what give or giveOfSet gives it, which follows.
func (s *shard) takes(t ticket) bool {
	if !t.take() {
		return false
	}
	s.giving = t.claim
	return true
}

// give serves a claim that has been taken: with tasks of q, l's first to begin with, and if
// there is room, with those of its other queues.
func (s *shard) give(op *claimOp, q *engine.Queue, l *engine.Lane) {
	if s.giveOf(op, q, l) && len(op.queues) > 1 {
		s.fillUp(op, q)
	}
	s.settle(op)
	s.giving = nil
}

// giveOf leases tasks of a queue to a claim, as far as they are ready and other shards
// have no more urgent ones. It is true if the queue has no more, and there is room.
func (s *shard) giveOf(op *claimOp, q *engine.Queue, l *engine.Lane) bool {
	limit := uint64(0)
	if op.max > 1 {
		limit = s.highestElsewhere(q)
	}
	pending := false
	for l != nil {
		g, err := s.Grant(l, op.duration, op.holder)
		if err != nil {
			s.Broken = err
			return false
		}
		op.grants = append(op.grants, g)
		if len(op.grants) == op.max {
			return false
		}
		l, pending = s.nextOf(q, limit)
	}
	return !pending && s.Broken == nil && s.headOf(q).rank() >= limit
}

// fillLooks is at how many queues a batch looks to be filled.
const fillLooks = 64

// fillUp fills a batch that has all that q has to give. In strict order, the queues after
// q follow, until one has tasks that this shard cannot give; else all that lots draw.
func (s *shard) fillUp(op *claimOp, q *engine.Queue) {
	strict := len(op.weights) == 0
	names := op.queues
	if strict {
		if s.highestElsewhere(q) > 0 {
			return
		}
		names = names[slices.Index(names, q.Name)+1:]
	} else {
		names = s.claimOrder(op)
	}
	for _, name := range names[:min(len(names), fillLooks)] {
		q := s.Queues[name]
		if q != nil && (op.noWait || !s.isAwaited(s.claimsOf(q), op.remote)) {
			limit := s.highestElsewhere(q)
			if h := s.headOf(q); h != 0 && h.rank() >= limit {
				if l, _ := s.nextOf(q, limit); l != nil && !s.giveOf(op, q, l) {
					return
				}
			}
		}
		if strict && (q != nil && s.headOf(q) != 0 || s.board.of(name).best(s.index) >= 0) {
			return
		}
	}
}

// serve gives ready tasks to the claims that wait, first come, first served. What
// is beyond the budget is served in the next group.
// Claims for one queue and those for a list of them come first in turn.
func (s *shard) serve() {
	served := 0
	if s.setsFirst = !s.setsFirst; s.setsFirst {
		s.serveSets(&served)
	}
	serveInTurn(&s.hungry, &served, func(c *queueClaims) (all bool) {
		all = s.serveQueue(c, &served)
		c.hungry = !all
		return all
	})
	s.serveSets(&served)
}

// serveInTurn has all be served that are hungry, until the budget is spent: serve says so, and served
// counts claims. Who has had its part then comes last.
func serveInTurn[T any](hungry *[]T, served *int, serve func(T) (all bool)) {
	n := 0
	for ; n < len(*hungry); n++ {
		before := *served
		if serve((*hungry)[n]) {
			continue
		}
		if *served > before {
			*hungry = append(*hungry, (*hungry)[n])
			n++
		}
		break
	}
	*hungry = slices.Delete(*hungry, 0, n)
}

// serveQueue is serve for one queue; served counts claims. It is false if the
// budget is spent.
func (s *shard) serveQueue(c *queueClaims, served *int) bool {
	for ; c.front().len() > 0; *served++ {
		if !s.mayDecide(*served) {
			return false
		}
		if !c.front().first().good() {
			c.front().pop()
			continue
		}
		l, _ := s.next(c.queue)
		if l == nil {
			break
		}
		if t := c.front().pop(); s.takes(t) {
			s.void(t.claim, c)
			s.give(t.claim, c.queue, l)
		} else {
			s.leaveGate(c)
		}
	}
	s.unlist(c)
	return true
}

// refuse settles an operation that is not going to be resolved.
func refuse(op operation, reason error) {
	c, isClaim := op.(*claimOp)
	if !isClaim {
		op.settle(reason)
		return
	}
	if c.remoteWait.table != nil && !c.noWait && errors.Is(reason, ErrNotLeader) { // it goes on waiting, elsewhere
		c.remoteWait.table.add(c)
		return
	}
	if c.take() {
		c.settle(reason)
	}
	c.unref()
}

// leaseOf decodes what a worker gets.
func leaseOf(g *engine.Grant) (*Lease, error) {
	l := new(Lease)
	return l, decodeGrant(g, l)
}

// decodeGrant decodes into l.
func decodeGrant(g *engine.Grant, l *Lease) error {
	l.Receipt = receiptOf(g.Receipt)
	l.ID = l.Receipt.ID
	l.Attempt = int(g.Attempt)
	l.Deadline = time.UnixMilli(int64(g.Deadline))
	if payload, ok := record.Plain(g.Rec); ok {
		l.Queue, l.Tenant, l.Priority = g.Queue, g.Tenant, int(g.Priority)
		l.Payload = payload
		return nil
	}
	rec, err := record.Decode(g.Rec)
	if err != nil {
		return fmt.Errorf("%w: task %s: %w", ErrCorrupt, g.Receipt.ID, err)
	}
	l.Task, l.LastError = task(g.LaneKey, &rec), rec.Error
	return nil
}
