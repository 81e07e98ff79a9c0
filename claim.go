package codeq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/owner"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// Claim leases the next ready task of the requested queues, and waits for one if there is none. The
// lease is stored before Claim returns: if the worker or the process dies, an attempt is used up.
//
// Within a queue the order is: higher priorities first, tenants in turn, and for each tenant the
// task that has been ready for longest. With several shards, a claim goes to the shard with the
// highest priority; of several, to the one with the oldest task, or, if their tasks are of several
// tenants, to one that is drawn by their shares over all shards of the process (in a cluster: that
// the node leads); see [Settings.TenantWeights]. A claim that waits gets the first task that
// becomes ready in any shard. A place that becomes free under [Settings].Concurrency or Rate goes
// to the shard that a new claim would choose.
//
// A claim knows the tasks as of each shard's last commit: of simultaneous claims some may get a
// task before a more urgent or older one. The strict order of queues holds across shards for the
// first 16 queues. With Weights, a claim draws a queue by them, among those with ready tasks in any
// shard of the process (of more than 16, in 16 draws at the most); in it only priorities count.
//
// A task keeps its place when its lease expires for the first time, or ends because the process
// restarts. At a further expiry it goes behind its lane (a queue, tenant and priority), so that one
// that hangs its workers does not delay the others. [Queue.RedriveDead] resets this.
//
// Claim is safe for concurrent use. Waiting claims are served first come, first served; those with
// the same list of more than 16 queues have a line of their own, and the lines take turns. In a
// cluster a claim waits for leaders; claims on a shard's leader come first. If a node is lost while
// its claim is answered, the claim's tasks wait until the lease has expired. ErrEmpty is
// linearizable: each shard, at a moment during the call, had no task to claim.
//
// Errors: [ErrInvalid], [ErrEmpty] (with NoWait), [ErrDiskFull] (with NoWait), [ErrUncertain],
// [ErrFailed], [ErrNotLeader] (the node was removed), [ErrCorrupt], [ErrClosed], and that of ctx.
func (q *Queue) Claim(ctx context.Context, req ClaimRequest) (_ *Lease, err error) {
	defer public(&err)
	req.Max = 1
	op, err := q.claim(ctx, &req, nil)
	if err != nil {
		return nil, err
	}
	defer op.unref()
	return leaseOf(&op.Grants[0])
}

// ClaimBatch is [Queue.Claim] for up to req.Max tasks. It returns as soon as there is one, with as
// many as are ready in one shard: of the first queue, then of those that follow. They are fewer if
// another shard has more urgent ones, if the next must be read from disk first, as soon after
// [Open] or in a long backlog, or if the next, with its headers, would exceed [Limits.BatchBytes].
//
// Errors: those of Claim, such as [ErrEmpty], and that of ctx.
func (q *Queue) ClaimBatch(ctx context.Context, req ClaimRequest) (_ []*Lease, err error) {
	defer public(&err)
	op, err := q.claim(ctx, &req, nil)
	if err != nil {
		return nil, err
	}
	defer op.unref()
	leases := make([]*Lease, len(op.Grants))
	for i := range op.Grants {
		if leases[i], err = leaseOf(&op.Grants[i]); err != nil {
			return nil, err
		}
	}
	return leases, nil
}

// claim returns an operation with a grant at least; the caller unrefs it. r: the Run that claims.
func (q *Queue) claim(ctx context.Context, req *ClaimRequest, r *runner) (*claimOp, error) {
	if r == nil { // otherwise Run has checked it
		if err := q.checkCall(ctx); err != nil {
			return nil, err
		}
		if err := q.onlyHere("Claim"); err != nil {
			return nil, err
		}
		if err := req.check("ClaimRequest", &q.opts.Limits); err != nil {
			return nil, err
		}
	}
	if q.node != nil {
		return q.node.claims.claim(ctx, req, r)
	}
	op := q.newClaim(req, r)
	first := q.shard(q.claimShard(op))
	op.shards, op.begin = first.peers, first.index
	if err := first.inbox.Push(ctx, op, nil); err != nil {
		op.unref()
		op.unref()
		return nil, err
	}
	return q.wait(ctx, op, nil)
}

// newClaim makes an operation with two references, the caller's and the inbox's.
func (q *Queue) newClaim(req *ClaimRequest, r *runner) *claimOp {
	op, ok := q.pools.claim.Get().(*claimOp)
	if !ok {
		op = &claimOp{completion: newCompletion(callClaim), pool: &q.pools.claim}
		op.Caller = op
	}
	switch {
	case r != nil && r.list != nil && len(req.Queues) > 1: // else it fills a batch
		op.List = r.list
	case len(req.Queues) > dispatch.ShortList:
		op.List = dispatch.NewList(slices.Clone(req.Queues), req.appendWeights(nil))
	default:
		op.Queues, op.Weights = append(op.Queues, req.Queues...), req.appendWeights(op.Weights)
	}
	op.Max, op.NoWait, op.Holder.Local, op.Holder.Worker = max(req.Max, 1), req.NoWait, req.Local || r != nil, req.Worker
	if r != nil {
		op.Holder.Runner, op.Holder.Handled, op.Holder.Process = r.number, true, q.slow.Process()
	}
	op.Duration = record.Millis(cmp.Or(req.LeaseFor, q.opts.LeaseFor))
	op.refs.Store(2)
	return op
}

// wait waits until the claim is served, and gives up the caller's reference if it is not.
func (q *Queue) wait(ctx context.Context, op *claimOp, limit *base.Limit) (*claimOp, error) {
	settled, err := op.completion.wait(ctx, limit)
	switch {
	case settled:
	case op.Take(): // no shard has served it, and now none will
		op.leave(op.shards...)
		op.unref()
		return nil, base.NotApplied(ctx)
	default: // one has, and commits the lease, which ends in a moment, mostly
		select {
		case err = <-op.done:
		case <-time.After(2 * time.Second):
			q.returnLate(op)
			return nil, err
		}
	}
	if err == nil {
		return op, nil
	}
	op.unref()
	return nil, err
}

// returnLate gives back the tasks of a claim that its caller has left, when the lease is committed.
func (q *Queue) returnLate(op *claimOp) {
	if q.enter() != nil {
		return
	}
	go func() {
		contain(q.opts.log, "return of a claim", func() {
			defer op.unref()
			if err := <-op.done; err != nil && !errors.Is(err, ErrUncertain) {
				return
			}
			ctx := context.Background()
			if q.node != nil { // where a shard may have no leader, and Close waits for this
				own, stop := q.untilClosing(ctx, "return of a claim")
				defer func() { _ = stop(nil) }()
				ctx = own
			}
			for i := 0; i < len(op.Grants) && ctx.Err() == nil; i++ { // the leases that are left expire
				back := call.Fail{How: engine.FailReturn, RoomWait: call.RoomWait{Gone: q.closing}}
				_ = q.failed(ctx, receiptOf(op.Grants[i].Receipt), back, nil)
			}
		}, nil)
		q.calls.Done()
	}()
}

var weightBounds = fmt.Sprint("1 to ", record.MaxWeight)

// check refuses invalid fields; of is the name of their struct, for errors.
func (r *ClaimRequest) check(of string, l *Limits) error {
	if len(r.Queues) == 0 {
		return &InvalidError{of + ".Queues", "none", "at least one"}
	}
	for _, name := range r.Queues {
		if name == "" {
			return &InvalidError{of + ".Queues", `""`, "names"}
		}
		if len(name) > l.Name {
			return checkName(of+".Queues", name, l.Name)
		}
	}
	if err := r.checkWeights(of); err != nil {
		return err
	}
	if r.LeaseFor != 0 && (r.LeaseFor < minLease || r.LeaseFor > maxLease) {
		return &InvalidError{of + ".LeaseFor", r.LeaseFor, fmt.Sprint(minLease, " to ", maxLease)}
	}
	if len(r.Worker) > record.MaxWorker || !utf8.ValidString(r.Worker) { // before of+ allocates
		return checkNewName(of+".Worker", r.Worker, record.MaxWorker)
	}
	if r.Max < 0 || r.Max > l.Batch {
		return &InvalidError{of + ".Max", r.Max, atMostTasks(l.Batch)}
	}
	return nil
}

func (r *ClaimRequest) checkWeights(of string) error {
	switch queue, named, ok := dispatch.CheckWeights(r.Queues, r.Weights); {
	case ok:
		return nil
	case !named:
		return &InvalidError{of + ".Weights", base.Shortly(queue), "one of Queues"}
	default:
		return &InvalidError{of + ".Weights of " + queue, r.Weights[queue], weightBounds}
	}
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

// claimOp asks the shards in turn for tasks. A waiting claim waits in all of them.
type claimOp struct {
	completion
	dispatch.Claim
	pool  *sync.Pool
	table *claimTable        // in a cluster, for a claim of this node: lists it for the shards of other nodes
	place dispatch.LinePlace // in table

	shards  []*shard     // of this process: the claim may wait in them; never changed in place
	begin   int          // index of the first shard to visit; written only by the shard that holds the claim
	visited int          // number of shards visited in turn; written like begin
	onward  *shard       // the next one, which the claim visits once the group has persisted; written like begin
	full    error        // a visited shard had no room to grant a lease; written like begin
	sent    int          // how often it was sent to a shard with a more urgent task
	refs    atomic.Int32 // held by the caller, and by the inbox or list that contains it
}

// unref gives up a reference; the last one recycles the operation: done is empty then.
func (op *claimOp) unref() {
	if op.refs.Add(-1) > 0 || op.Remote {
		return
	}
	op.begin, op.visited, op.full, op.sent, op.shards, op.err = 0, 0, nil, 0, nil, nil
	op.table, op.place = nil, dispatch.LinePlace{}
	op.Reset()
	op.pool.Put(op)
}

// Finish settles the claim, and drops the grants for another node, as its tickets may stay.
func (op *claimOp) Finish(err error) {
	made := op.reply != nil // for one call; otherwise the caller may recycle it
	op.completion.settle(err)
	if made {
		op.Grants = nil
	}
}

// settle settles the claim, or passes it to the next shard: this one has confirmed to have no task.
func (op *claimOp) settle(err error) {
	next := op.onward
	if next == nil {
		op.Finish(err)
		return
	}
	if op.onward = nil; err != nil {
		op.refuse(err)
		return
	}
	op.visit(next)
}

func (op *claimOp) visit(next *shard) {
	if err := next.inbox.Pass(op); err != nil {
		op.refuse(err)
	}
}

func (op *claimOp) resolve(s *shard) {
	if op.IsTaken() {
		op.unref()
		return
	}
	outcome := op.try(s)
	if outcome == dispatch.Elsewhere {
		if op.sendOn() {
			return
		}
		outcome = op.try(s)
	}
	switch outcome {
	case dispatch.Asks, dispatch.Elsewhere:
	case dispatch.Done:
		op.unref()
	case dispatch.Pending:
		s.undecided.Defer(op)
	case dispatch.Nothing:
		op.toNextShard(s)
	}
}

func (op *claimOp) try(s *shard) dispatch.Outcome {
	op.Visited = op.visited > 0
	op.Stays = op.Visited || op.Remote || op.sent == maxSends
	outcome := s.claims.Try(&op.Claim)
	s.collectServed()
	return outcome
}

// maxSends bounds how often a claim is sent to another shard: the published task may be gone.
const maxSends = 8

// sendOn passes a claim to the shard that has a more urgent task. It returns false if that shard
// accepts no more operations; then the claim is not sent again.
func (op *claimOp) sendOn() bool {
	op.sent++
	if i := slices.IndexFunc(op.shards, func(s *shard) bool { return s.index == op.To() }); i >= 0 {
		before := op.begin
		op.begin = i
		if op.shards[i].inbox.Pass(op) == nil {
			return true
		}
		op.begin = before
	}
	op.sent = maxSends
	return false
}

func (q *Queue) claimShard(op *claimOp) int {
	if i := q.heads.Begin(&op.Claim); i >= 0 {
		return i
	}
	return q.anyShard()
}

func (q *Queue) claimShardOf(op *claimOp, led []*shard) int {
	if i := q.heads.Begin(&op.Claim); i >= 0 {
		if at := slices.IndexFunc(led, func(s *shard) bool { return s.index == i }); at >= 0 {
			return at
		}
	}
	return rand.IntN(len(led))
}

// toNextShard keeps a claim waiting here, except with NoWait, and passes it to the next shard.
func (op *claimOp) toNextShard(s *shard) {
	s.claims.EndVisit(&op.Claim)
	if next := op.next(); next != nil {
		if op.NoWait && s.node != nil {
			op.onward = next
			s.settleAfterCommit(op)
		} else {
			op.visit(next)
		}
		return
	}
	if op.NoWait && op.Take() {
		op.err = cmp.Or(op.full, ErrEmpty)
		s.settleAfterCommit(op)
	} else if op.table != nil && !op.NoWait {
		op.table.add(op)
		return
	}
	op.unref()
}

func (op *claimOp) next() *shard {
	if op.visited++; op.visited >= len(op.shards) {
		return nil
	}
	return op.shards[(op.begin+op.visited)%len(op.shards)]
}

func (op *claimOp) hasVisited(s *shard) bool {
	n := len(op.shards)
	at := slices.Index(op.shards, s)
	return at >= 0 && (at-op.begin+n)%n < op.visited
}

// leave drops the tickets of a claim when its caller gives up. REQUIRES: the caller has taken it.
func (op *claimOp) leave(shards ...*shard) {
	left := op.Departure()
	do := func(s *shard) { s.claims.Leave(left) }
	for _, s := range shards {
		notify(s.inbox, &internal, do)
	}
}

func (op *claimOp) abandon(s *shard) {
	if op.Take() {
		op.leave(s)
	}
}

func (op *claimOp) Read(r *wire.Reader) {
	op.Claim.Read(r)
	req := ClaimRequest{Queues: op.Queues, Max: op.Max, LeaseFor: record.Duration(op.Duration), Worker: op.Holder.Worker}
	if r.Failed() || req.check("", &Limits{Name: 1 << 20, Batch: 1 << 20}) != nil {
		r.Fail()
		return
	}
	if op.List = dispatch.NewList(op.Queues, op.Weights); op.List != nil {
		op.Queues, op.Weights = nil, nil
	}
}

// ownerPort tells the owner of a shard about claims that wait in it.
type ownerPort struct{ inbox *owner.Inbox[operation] }

func (p ownerPort) Open(queue string) {
	notify(p.inbox, &internalParks, func(s *shard) { s.claims.OpenNamed(queue) })
}

func (p ownerPort) Sweep() { notify(p.inbox, &internal, func(s *shard) { s.claims.Sweep() }) }

func (op *claimOp) refuse(reason error) {
	if op.table != nil && !op.NoWait && errors.Is(reason, ErrNotLeader) { // it goes on waiting on another node
		op.table.add(op)
		return
	}
	if op.Take() {
		op.settle(reason)
	}
	op.unref()
}

func (op *claimOp) noRoom(s *shard) {
	if op.IsTaken() {
		op.unref()
		return
	}
	op.full = s.space.Refusal(s.index)
	op.toNextShard(s)
}

func leaseOf(g *engine.Grant) (*Lease, error) {
	l := new(Lease)
	_, err := decodeGrant(g, l)
	l.Timeout = cmp.Or(l.Timeout, record.Duration(g.Timeout))
	return l, err
}

// grantRest is what few grants have beside their lease.
type grantRest struct {
	beside bool // it may have steps or cursors
	logs   []record.LogLine
}

// decodeGrant decodes a grant into l, without the Timeout of a policy.
func decodeGrant(g *engine.Grant, l *Lease) (rest grantRest, err error) {
	l.ID, l.Receipt = g.Receipt.ID, receiptOf(g.Receipt)
	l.Attempt = int(g.Attempt)
	l.Deadline = msTime(g.Deadline)
	if payload, ok := record.Plain(g.Rec); ok {
		l.Queue, l.Tenant, l.Priority = g.Queue, g.Tenant, int(g.Priority)
		l.Payload = payload
		return rest, nil
	}
	rec, err := record.Decode(g.Rec)
	if err != nil {
		return rest, fmt.Errorf("%w: task %s: %w", ErrCorrupt, g.Receipt.ID, err)
	}
	l.Task, l.LastError = task(*g.LaneKey, &rec), rec.Error
	if rec.Notes != nil {
		l.Metadata, rest.logs = rec.Notes.Metadata, rec.Notes.Logs
	}
	rest.beside = rec.Steps > 0 || rec.Beside != 0
	return rest, nil
}
