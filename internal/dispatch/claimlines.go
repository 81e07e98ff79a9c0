package dispatch

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/guard"
	"codeq/internal/record"
)

// ClaimLines holds the claims of a node that wait at other nodes of its cluster.
//
// A claim visits the shards that the node leads, and waits in them as ever. Claims that find no
// task there are listed here as well, claims for the same tasks in one line; and for each line one
// claim at a time, for as many tasks as the line is long, waits with each shard that another node
// leads. That node serves its own claims first. So a task goes to another node only if no claim of
// its own node wants it, and claims that are served by their own node cost no message.
//
// In contrast to a Dispatcher, it is safe for concurrent use, and has goroutines.
type ClaimLines struct {
	config LinesConfig
	host   LinesHost

	mu     sync.Mutex // guards the fields below
	lines  map[lineKey]*line
	closed error // reason why the table accepts no claims any more; nil: it does
}

// LinesConfig is the configuration of ClaimLines.
type LinesConfig struct {
	Shards     int
	Batch      int             // largest number of tasks of a claim
	Context    context.Context // ends when the node leads no shard any more
	Background *sync.WaitGroup // of the table's goroutines
	Log        *slog.Logger
	PanicError func(what string, value any, stack []byte) error
	Now        func() time.Time // by which the age of leases is measured
}

// LinesHost asks other nodes for tasks.
type LinesHost interface {
	// Watch reports whether another node leads a shard. change is closed when this may have
	// changed.
	Watch(shard int) (elsewhere bool, change <-chan struct{})
	// Claim waits for tasks of a shard.
	Claim(ctx context.Context, shard int, r LineRequest) ([]engine.Grant, error)
	// Renew renews leases for a duration in ms, and returns those that are lost.
	Renew(
		ctx context.Context, shard int, leases []engine.Receipt, duration uint64,
	) (lost []engine.Receipt, err error)
	// GiveBack gives back a task as if it had not been claimed.
	GiveBack(ctx context.Context, lease engine.Receipt)
	// Served tells the caller of a claim that it has its Grants.
	Served(c *Claim)
}

// LineRequest is the claim of a line at a shard.
type LineRequest struct {
	Queues   []string
	Weights  []int
	List     *List  // in their place, if they are many
	Duration uint64 // of the leases, ms
	Local    bool
	Handled  bool   // by Run
	Worker   string // see lineKey
	Max      int    // tasks
}

// LinePlace is the place of a claim in ClaimLines. The zero LinePlace is none.
type LinePlace struct {
	listed bool // guarded by the table's mu
}

// lineKey is the common part of the claims of one line.
type lineKey struct {
	queues   string
	duration uint64
	local    bool
	handled  bool
	worker   string // of the claims; "" also for claims that came when there were lineCap lines
}

// line is claims for the same tasks. Its fetchers, one for each shard, end when the table is
// closed, or the line is dropped.
type line struct {
	table   *ClaimLines
	key     lineKey
	wants   LineRequest   // without Max
	waiting waitList      // guarded by the table's mu
	filled  chan struct{} // non-nil while fetchers wait for a claim; closed by Add
	ctx     context.Context
	drop    context.CancelFunc

	// Guarded by the table's mu.
	calls    context.Context // of the fetchers' claims; nil: there are none
	endCalls context.CancelFunc
	watch    *time.Timer // calls look; nil: no fetcher has claimed yet
	watched  bool        // look will be called
}

// idleFor is the earliest time after which the fetchers of a line without a claim stop waiting with
// the shards, which could not tell that their tasks are not wanted; the latest is twice as long.
const idleFor = 10 * time.Second

// beginCall returns the context of a fetcher's claim. REQUIRES: mu is held.
func (l *line) beginCall() context.Context {
	if l.calls == nil {
		l.calls, l.endCalls = context.WithCancel(l.ctx)
	}
	switch {
	case l.watched:
	case l.watch == nil:
		l.watch = time.AfterFunc(idleFor, func() { l.table.contain("look at a claim line", l.look, nil) })
	default:
		l.watch.Reset(idleFor)
	}
	l.watched = true
	return l.calls
}

// look ends the claims of the fetchers if no claim is in the line, and looks again later if one is.
func (l *line) look() {
	l.table.mu.Lock()
	defer l.table.mu.Unlock()
	if l.watched = l.ctx.Err() == nil && l.waiting.AnyGood(); l.watched {
		l.watch.Reset(idleFor)
		return
	}
	l.endCalls()
	l.calls = nil
}

// NewClaimLines returns a table without lines.
func NewClaimLines(c LinesConfig, host LinesHost) *ClaimLines {
	return &ClaimLines{config: c, host: host, lines: make(map[lineKey]*line)}
}

// contain calls f on one of the table's goroutines. caught is nil if nothing depends on f.
func (t *ClaimLines) contain(what string, f func(), caught func(error)) {
	guard.Contain(t.config.Log, what, f, func(value any, stack []byte) {
		if caught != nil {
			caught(t.config.PanicError(what, value, stack))
		}
	})
}

// Add lists a claim that waits. It returns false if the claim is listed already, or refused since
// the table takes none any more. REQUIRES: a reference to the claim. queues and list are those of
// the claim, in memory of the table.
func (t *ClaimLines) Add(c *Claim, p *LinePlace) (queues []string, list *List, added bool) {
	k := lineKey{queues: nameOf(c), duration: c.Duration, local: c.Holder.Local, handled: c.Holder.Handled}
	t.mu.Lock()
	defer t.mu.Unlock()
	if p.listed {
		return nil, nil, false
	}
	p.listed = true
	if t.closed != nil {
		c.Ticket().Refuse(t.closed)
		return nil, nil, false
	}
	k.worker = c.Holder.Worker
	l := t.lines[k]
	if l == nil && len(t.lines) >= lineCap {
		if t.dropIdle(); len(t.lines) >= lineCap {
			k.worker = ""
			l = t.lines[k]
		}
	}
	if l == nil {
		l = t.open(k, c)
	}
	l.waiting.Push(c.Ticket())
	if l.filled != nil {
		close(l.filled)
		l.filled = nil
	}
	return l.wants.Queues, l.wants.List, true
}

// nameOf returns a text that only claims of the same queues and weights have.
func nameOf(c *Claim) string {
	if c.List != nil {
		return string(c.List.Digest[:])
	}
	if len(c.Queues) == 1 {
		return c.Queues[0]
	}
	var b strings.Builder
	for i, name := range c.Queues {
		b.WriteString(strconv.Itoa(len(name)))
		b.WriteByte(' ')
		b.WriteString(name)
		if len(c.Weights) > 0 {
			b.WriteString(strconv.Itoa(c.Weights[i]))
		}
		b.WriteByte(' ')
	}
	return b.String()
}

// lineCap is how many lines there may be before those without a claim are dropped.
const lineCap = 64

// dropIdle drops the lines without a claim. REQUIRES: mu is held.
func (t *ClaimLines) dropIdle() {
	for k, l := range t.lines {
		if !l.waiting.AnyGood() {
			l.drop()
			delete(t.lines, k)
		}
	}
}

// open makes a line and its fetchers. REQUIRES: mu is held.
func (t *ClaimLines) open(k lineKey, c *Claim) *line {
	l := &line{table: t, key: k, wants: LineRequest{
		Queues: slices.Clone(c.Queues), Weights: slices.Clone(c.Weights), List: c.List,
		Duration: k.duration, Local: k.local, Handled: k.handled, Worker: k.worker,
	}}
	l.ctx, l.drop = context.WithCancel(t.config.Context)
	t.lines[k] = l
	for shard := range t.config.Shards {
		t.config.Background.Go(func() {
			t.contain("claim line", func() { l.fetch(shard) }, l.fail)
		})
	}
	return l
}

// Each calls f, which must not wait, for all claims that wait, with their queues as by Add.
func (t *ClaimLines) Each(f func(ticket Ticket, queues []string, list *List)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.lines {
		l.waiting.Sweep()
		for _, ticket := range l.waiting.All() {
			f(ticket, l.wants.Queues, l.wants.List)
		}
	}
}

// End refuses the claims that wait, and all that come, with an error.
func (t *ClaimLines) End(cause error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = cause
	for _, l := range t.lines {
		l.waiting.Refuse(cause)
	}
}

// fetch claims tasks of a shard for the line while another node leads it.
func (l *line) fetch(shard int) {
	host := l.table.host
	var pause base.Patience
	for l.ctx.Err() == nil {
		elsewhere, change := host.Watch(shard)
		if !elsewhere {
			select {
			case <-change:
			case <-l.ctx.Done():
			}
			continue
		}
		r, ctx := l.request(change)
		if ctx == nil {
			continue
		}
		began := l.table.config.Now()
		grants, err := host.Claim(ctx, shard, r)
		switch {
		case err == nil:
		case ctx.Err() != nil:
			continue
		default:
			pause.Wait(l.ctx, change)
			continue
		}
		pause = base.Patience{}
		l.deal(l.inForce(shard, grants, l.table.config.Now().Sub(began)))
	}
}

// renewTries bounds how often leases are renewed that are shorter than the way to their shard
// takes.
const renewTries = 3

// inForce returns those of some leases that have not expired. They may be as old as the call, and
// its answer may have been under way for long: then they are renewed first. Otherwise a later claim
// could get a task that another worker has completed before.
func (l *line) inForce(shard int, grants []engine.Grant, age time.Duration) []engine.Grant {
	doubtful := make(map[uint64][]engine.Receipt) // by the duration of the lease, ms
	for i := range grants {
		if d := l.durationOf(&grants[i]); age >= halfOf(d) {
			doubtful[d] = append(doubtful[d], grants[i].Receipt)
		}
	}
	isLost := make(map[engine.Receipt]bool)
	for d, leases := range doubtful {
		for range renewTries {
			began := l.table.config.Now()
			lost, err := l.table.host.Renew(l.ctx, shard, leases, d)
			if err != nil { // they will expire
				lost = leases
			}
			for _, lease := range lost {
				isLost[lease] = true
			}
			if len(lost) == len(leases) || l.table.config.Now().Sub(began) < halfOf(d) {
				break
			}
		}
	}
	return slices.DeleteFunc(grants, func(g engine.Grant) bool { return isLost[g.Receipt] })
}

func halfOf(ms uint64) time.Duration { return time.Duration(ms) * time.Millisecond / 2 }

// durationOf is how long a lease was granted for, ms.
func (l *line) durationOf(g *engine.Grant) uint64 {
	head, err := record.DecodeHead(g.Rec)
	if err == nil && head.Lease != 0 && !l.key.local {
		return head.Lease
	}
	return l.key.duration
}

// fail refuses the claims in the line, which is dropped: the next claim opens another one.
func (l *line) fail(cause error) {
	t := l.table
	t.mu.Lock()
	defer t.mu.Unlock()
	l.drop()
	if t.lines[l.key] == l {
		delete(t.lines, l.key)
	}
	l.waiting.Refuse(fmt.Errorf("%w: %w", base.ErrFailed, cause))
}

// request waits until there is a claim in the line, and returns the request of its claims, and a
// context that lasts as long as they do; a nil ctx: no request.
func (l *line) request(change <-chan struct{}) (r LineRequest, ctx context.Context) {
	t := l.table
	r = l.wants
	for {
		t.mu.Lock()
		if l.waiting.AnyGood() {
			r.Max = min(l.waiting.Wants(t.config.Batch), t.config.Batch)
		}
		if r.Max > 0 {
			defer t.mu.Unlock()
			return r, l.beginCall()
		}
		if l.filled == nil {
			l.filled = make(chan struct{})
		}
		filled := l.filled
		t.mu.Unlock()
		select {
		case <-filled:
		case <-change:
			return r, nil
		case <-l.ctx.Done():
			return r, nil
		}
	}
}

// deal gives fetched tasks to the claims in the line, and gives back the tasks that none of them
// wants any more.
func (l *line) deal(grants []engine.Grant) {
	t := l.table
	for len(grants) > 0 {
		t.mu.Lock()
		var c *Claim
		for c == nil && l.waiting.Len() > 0 {
			if ticket := l.waiting.Pop(); ticket.Take() {
				c = ticket.Claim()
			}
		}
		t.mu.Unlock()
		if c == nil {
			break
		}
		n := min(c.Max, len(grants))
		c.Grants = append(c.Grants, grants[:n]...)
		grants = grants[n:]
		t.host.Served(c)
	}
	for _, g := range grants {
		t.config.Background.Go(func() {
			t.contain("task that comes back", func() { t.host.GiveBack(t.config.Context, g.Receipt) }, nil)
		})
	}
}
