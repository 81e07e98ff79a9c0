package dispatch

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/record"
)

// Gates holds the gates of the queues that have ever needed one, for a process that has all shards.
// It is safe for concurrent use.
type Gates struct {
	mu      sync.Mutex // guards byQueue; locked before that of a gate
	byQueue map[string]*gate
}

// NewGates returns an empty table.
func NewGates() *Gates { return &Gates{byQueue: make(map[string]*gate)} }

// set applies settings to the gate of a queue, and returns it; nil if there is none. joins: the
// shard does not have it yet.
func (t *Gates) set(queue string, c engine.Configured, known bool, ago time.Duration, d *Dispatcher, joins bool) *gate {
	t.mu.Lock()
	defer t.mu.Unlock()
	g := t.byQueue[queue]
	if g == nil && (c.Settings.Concurrency > 0 || c.Settings.Rate > 0) {
		g = &gate{clock: d.now}
		t.byQueue[queue] = g
	}
	if g != nil {
		if g.set(c, known, ago, d.now()); joins {
			g.shards++
		}
	}
	return g
}

// leave gives a shard's places in a gate back. A version of the settings has removed them. leave
// returns the Dispatchers that wait for places.
func (t *Gates) leave(queue string, d *Dispatcher, g *gate, version uint64, leased int) []*Dispatcher {
	t.mu.Lock()
	defer t.mu.Unlock()
	g.set(engine.Configured{Version: version, Settings: new(record.Settings)}, true, 0, d.now())
	if g.shards--; g.shards == 0 {
		delete(t.byQueue, queue)
	}
	return g.quit(d, leased)
}

// gate limits the claims of a queue in all shards of a process, by concurrency and by rate. Each
// shard enters its leases when it first applies settings that need the gate, or later ones.
//
// Claims that wait have tickets in all shards. A place that becomes free is kept for the shard that
// a new claim would choose. If that shard does not use it, it is kept for another one. A new claim
// takes any free place, since it has chosen its shard by the same rule.
//
// Invariant: while a place is free and kept for no shard, each line that waits is of a shard that
// looks again: it has been woken, or its time of the next token comes.
type gate struct {
	shards int              // that have it; guarded by Gates.mu
	clock  func() time.Time // monotonic

	// closed is until when there is no place, ns of the clock; 0: there is one; forever: until a
	// lease ends. It is written under mu.
	closed atomic.Int64

	mu      sync.Mutex // guards the fields below
	version uint64     // of the settings that it applies
	limit   int        // 0: none
	leased  int
	rate    *rate.Limiter
	drained time.Time // when the rate had no token, as shards have found when they were loaded
	lines   []*gateLine
	kept    int // sum of the kept of lines; at most as many as places are free
}

// gateLine is the claims of a shard that wait for a place.
type gateLine struct {
	claims *Dispatcher
	heads  *queueHeads // nil: the shard has published none
	waits  bool        // claims that wait have found no place, and the shard has declined none since
	isShut bool        // sets have shut the queue until there is a place
	kept   int         // places kept for the shard
}

// forever is later than all times.
const forever = math.MaxInt64

// Enter takes a place. When there is none, wait is how long until the rate has one, or 0 if a lease
// has to end first.
func (g *gate) Enter(d *Dispatcher, now time.Time) (ok bool, wait time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if ok, wait = g.room(now); !ok {
		return false, wait
	}
	g.leased++
	if g.rate != nil {
		g.rate.AllowN(now, 1)
	}
	if l := g.lineOf(d); l != nil && l.kept > 0 {
		l.kept--
		g.kept--
	}
	g.update(now)
	return true, 0
}

// Look is Enter without taking the place.
func (g *gate) Look(_ *Dispatcher, now time.Time) (ok bool, wait time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.room(now)
}

// room returns the result of Enter. REQUIRES: mu is held.
func (g *gate) room(now time.Time) (ok bool, wait time.Duration) {
	if base.Invariants {
		base.AssertHeld(&g.mu, "the lock of a gate")
	}
	if g.limit > 0 && g.leased >= g.limit {
		return false, 0
	}
	wait = g.nextToken(0, now)
	return wait == 0, wait
}

// nextToken returns how long until the rate has one token more than so many. REQUIRES: mu is held.
func (g *gate) nextToken(tokens int, now time.Time) time.Duration {
	if g.rate == nil {
		return 0
	}
	missing := max(0, float64(tokens+1)-g.rate.TokensAt(now))
	return time.Duration(min(missing/float64(g.rate.Limit())*float64(time.Second), float64(longAgo)))
}

// free returns how many places there are that are kept for no shard. REQUIRES: mu is held.
func (g *gate) free(now time.Time) int {
	n := math.MaxInt
	if g.limit > 0 {
		n = g.limit - g.leased
	}
	if g.rate != nil {
		tokens := int(g.rate.TokensAt(now))
		if g.nextToken(tokens, now) == 0 { // all but a rounding error
			tokens++
		}
		n = min(n, tokens)
	}
	return n - g.kept
}

// update follows a change of the leases or the limits. REQUIRES: mu is held.
func (g *gate) update(now time.Time) {
	closed := int64(0)
	if ok, wait := g.room(now); !ok && wait == 0 {
		closed = forever
	} else if !ok {
		closed = now.Add(wait).UnixNano()
	}
	if g.closed.Load() != closed {
		g.closed.Store(closed)
	}
	if g.kept == 0 {
		return
	}
	over := min(g.kept, -g.free(now)) // new claims have taken places that were kept
	for i := 0; over > 0; i++ {
		l := g.lines[i]
		n := min(over, l.kept)
		l.kept -= n
		g.kept -= n
		over -= n
	}
	if base.Invariants {
		g.assertKept(now)
	}
}

// assertKept: a gate keeps at most as many places as are free, and each for a line.
func (g *gate) assertKept(now time.Time) {
	kept := 0
	for _, l := range g.lines {
		if l.kept < 0 {
			base.Violated("a line keeps %d places", l.kept)
		}
		kept += l.kept
	}
	if kept != g.kept {
		base.Violated("a gate keeps %d places, its lines %d", g.kept, kept)
	}
	if kept != 0 && g.free(now) < 0 {
		base.Violated("a gate keeps %d places, %d more than are free", kept, -g.free(now))
	}
}

// isClosed reports whether there is no place. It is safe for concurrent use.
func (g *gate) isClosed() bool {
	closed := g.closed.Load()
	return closed != 0 && (closed == forever || closed > g.clock().UnixNano())
}

// now is the time, if it matters.
func (g *gate) now() (t time.Time) {
	if g.rate != nil {
		t = g.clock()
	}
	return t
}

// lineOf returns the line of a shard; nil: it has none. REQUIRES: mu is held.
func (g *gate) lineOf(d *Dispatcher) *gateLine {
	for _, l := range g.lines {
		if l.claims == d {
			return l
		}
	}
	return nil
}

// lineFor is lineOf, and makes the line. REQUIRES: mu is held.
func (g *gate) lineFor(d *Dispatcher) *gateLine {
	l := g.lineOf(d)
	if l == nil {
		l = &gateLine{claims: d}
		g.lines = append(g.lines, l)
	}
	return l
}

// turn is Look for claims that wait. own and share are the shard's head now. wake are other shards:
// places are kept for them instead.
func (g *gate) turn(d *Dispatcher, heads *queueHeads, own head, share uint64, now time.Time) (ok bool, wait time.Duration, wake []*Dispatcher) {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.lineFor(d)
	l.heads, l.waits = heads, true
	if ok, wait = g.room(now); !ok || l.kept > 0 || g.limit == 0 && g.rate == nil {
		return ok, wait, nil
	}
	for range drawsAtOnce {
		if g.free(now) <= 0 {
			return false, g.nextToken(g.kept, now), wake
		}
		drawn := g.draw(l, own, share)
		if wake = g.keepFor(drawn, wake); drawn == l {
			return true, 0, wake[:len(wake)-1]
		}
	}
	return true, 0, wake
}

// drawsAtOnce is how many places go to other shards before a claim gets one of many that are free,
// at most.
const drawsAtOnce = 64

// keepFor keeps a place for a shard, and adds the shard to wake unless it looks again already.
// REQUIRES: mu is held.
func (g *gate) keepFor(l *gateLine, wake []*Dispatcher) []*Dispatcher {
	g.kept++
	if l.kept++; l.kept > 1 {
		return wake
	}
	return append(wake, l.claims)
}

// draw returns the line of the shard that a new claim would choose: the one with the highest
// priority and, among several, with the oldest task or, if their tasks are of several tenants,
// drawn by shares. nil: none waits. l has the head own; the others, or all if l is nil, have
// published theirs. REQUIRES: mu is held.
func (g *gate) draw(l *gateLine, own head, share uint64) (drawn *gateLine) {
	headOf := func(of *gateLine) (head, uint64) {
		if of == l {
			return own, share
		}
		return of.head()
	}
	top, total, many := head(0), uint64(0), false
	for _, of := range g.lines {
		if !of.waits {
			continue
		}
		h, share := headOf(of)
		switch {
		case drawn == nil, h.rank() > top.rank():
			drawn, top, total, many = of, h, share, h.tenant() == manyTenants
		case h.rank() == top.rank():
			many = many || h.tenant() != top.tenant()
			total += share
			if h > top {
				drawn, top = of, h
			}
		}
	}
	if !many || total == 0 {
		return drawn
	}
	lot := rand.Uint64N(total)
	for _, of := range g.lines {
		if h, share := headOf(of); of.waits && h.rank() == top.rank() {
			if drawn = of; lot < share {
				break // or, if they have less than a moment ago, the last one is drawn
			}
			lot -= share
		}
	}
	return drawn
}

// head returns the published head of the shard, and its share.
func (l *gateLine) head() (h head, share uint64) {
	if l.heads == nil {
		return 0, 0
	}
	s := &l.heads.shards[l.claims.index]
	return head(s.word.Load()), s.share.Load()
}

// pass keeps free places for shards where claims wait, at most so many, and returns all shards that
// have to look again. REQUIRES: mu is held.
func (g *gate) pass(places int) (wake []*Dispatcher) {
	now := g.now()
	if ok, wait := g.room(now); !ok && wait == 0 {
		return nil
	}
	keeps := g.free(now) > 0 && (g.limit > 0 || g.rate != nil)
	for _, l := range g.lines {
		if l.isShut || l.waits && !keeps { // to see when there will be a token
			l.isShut = false
			wake = append(wake, l.claims)
		}
	}
	for ; keeps && places > 0 && g.free(now) > 0; places-- {
		l := g.draw(nil, 0, 0)
		if l == nil {
			break
		}
		wake = g.keepFor(l, wake)
	}
	return wake
}

// decline passes on the places that are kept for a shard: no claims wait there, or nothing is ready
// for them.
func (g *gate) decline(d *Dispatcher) (wake []*Dispatcher) {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.lineOf(d)
	if l == nil || l.kept == 0 {
		return nil
	}
	places := l.kept
	g.kept -= places
	l.kept, l.waits = 0, false
	return g.pass(places)
}

// waitShut reports whether the queue will be opened in a shard when there is a place; false: there
// is one.
func (g *gate) waitShut(d *Dispatcher) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	ok, wait := g.room(g.now())
	if !ok && wait == 0 {
		g.lineFor(d).isShut = true
	}
	return !ok
}

// quit removes the line of a shard, gives the places of its leases back, and returns the shards
// that have to look again.
func (g *gate) quit(d *Dispatcher, leased int) (wake []*Dispatcher) {
	g.mu.Lock()
	defer g.mu.Unlock()
	places := leased
	if i := slices.IndexFunc(g.lines, func(l *gateLine) bool { return l.claims == d }); i >= 0 {
		places += g.lines[i].kept
		g.kept -= g.lines[i].kept
		g.lines = slices.Delete(g.lines, i, i+1)
	}
	g.leased -= leased
	g.update(g.now())
	return g.pass(places)
}

// join enters the leases that a shard has granted before it had the gate.
func (g *gate) join(leased int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.leased += leased
	g.update(g.now())
}

// Leave gives n places back, and returns the shards that have to look again.
func (g *gate) Leave(n int) (wake []*Dispatcher) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.leased -= n
	if base.Invariants && g.leased < 0 {
		base.Violated("a gate counts %d leases", g.leased)
	}
	if g.limit == 0 && g.rate != nil {
		return nil // only time brings tokens
	}
	g.update(g.now())
	return g.pass(n)
}

func (g *gate) MayAsk() bool    { return false }
func (g *gate) Ask(*Claim) bool { return false }

// set changes the limits; the first shard that applies a version does so for all.
func (g *gate) set(c engine.Configured, known bool, ago time.Duration, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.Version <= g.version {
		if !known && g.rate != nil { // another shard may have used the last token
			g.drain(now.Add(-ago))
			g.update(now)
		}
		return
	}
	defer g.update(now)
	set := c.Settings
	g.version, g.limit = c.Version, set.Concurrency
	limit := rate.Limit(set.Rate)
	switch {
	case set.Rate == 0:
		g.rate = nil
	case g.rate == nil:
		g.rate = rate.NewLimiter(limit, set.BurstSize())
		if g.drained = (time.Time{}); !known { // tokens have been used before a restart
			g.drain(now.Add(-ago))
		}
	default:
		g.rate.SetLimitAt(now, limit)
		g.rate.SetBurstAt(now, set.BurstSize())
	}
}

// drain notes that the rate had no token at a time, unless it had none later. REQUIRES: no token
// has been used since the rate was set.
func (g *gate) drain(at time.Time) {
	if at.After(g.drained) {
		g.drained, g.rate = at, rate.NewLimiter(g.rate.Limit(), g.rate.Burst())
		g.rate.AllowN(at, g.rate.Burst())
	}
}
