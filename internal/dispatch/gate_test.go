package dispatch

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
	"codeq/internal/record"
	"codeq/internal/testkit"
)

// gated are shards with claims that wait for the places of a queue. A woken owner looks at the
// queue.
type gated struct {
	*testing.T
	rng    *rand.Rand
	gate   *gate
	heads  *queueHeads
	now    time.Time
	claims int // waiting in all shards
	shards []*gatedShard
	leases []int // by shard
	limits record.Settings
	got    []int
}

type gatedShard struct {
	claims  *Dispatcher
	tasks   int
	looks   bool // its owner has been woken
	reads   bool // the tasks are not in memory for now
	at      time.Time
	gone    bool
	share   uint64
	head    head
	waiting bool // until the time at
}

func newGated(t *testing.T, seed uint64, shards int) *gated {
	g := &gated{T: t, rng: rand.New(rand.NewPCG(seed, 0)), now: time.Unix(1000, 0), got: make([]int, shards)}
	g.heads = &queueHeads{shards: make([]shardHead, shards)}
	g.gate = &gate{clock: func() time.Time { return g.now }}
	g.heads.gate.Store(g.gate)
	for i := range shards {
		g.shards = append(g.shards, &gatedShard{claims: &Dispatcher{index: i}, share: 1, head: makeHead(engine.FirstTask{})})
		g.publish(i)
	}
	return g
}

func (g *gated) publish(shard int) {
	s, at := g.shards[shard], &g.heads.shards[shard]
	at.share.Store(s.share)
	if at.word.Store(0); s.tasks > 0 {
		at.word.Store(uint64(s.head))
	}
}

func (g *gated) set(s record.Settings) {
	version := g.gate.version + 1
	g.limits = s
	g.gate.set(engine.Configured{Version: version, Settings: &s}, true, 0, g.now)
	for _, s := range g.shards {
		s.looks = true
	}
}

func (g *gated) wake(shards []*Dispatcher) {
	for _, d := range shards {
		require.False(g, g.shards[d.index].gone)
		g.shards[d.index].looks = true
	}
}

// serve is a group of a shard.
func (g *gated) serve(shard int) {
	s := g.shards[shard]
	s.looks = false
	for g.claims > 0 && s.tasks > 0 && !s.reads {
		ok, wait, wake := g.gate.turn(s.claims, g.heads, s.head, s.share, g.now)
		if g.wake(wake); !ok {
			if wait > 0 {
				s.at, s.waiting = g.now.Add(wait+time.Millisecond-1).Truncate(time.Millisecond), true
			}
			break
		}
		g.lease(shard)
		g.claims--
	}
	g.wake(g.gate.decline(s.claims))
	g.publish(shard)
}

func (g *gated) lease(shard int) {
	s := g.shards[shard]
	ok, _ := g.gate.Enter(s.claims, g.now)
	require.True(g, ok)
	s.tasks--
	g.got[shard]++
	g.leases = append(g.leases, shard)
	if limit := g.limits.Concurrency; limit > 0 {
		require.LessOrEqual(g, len(g.leases), limit)
	}
}

// end ends a lease.
func (g *gated) end() {
	if len(g.leases) == 0 {
		return
	}
	i := g.rng.IntN(len(g.leases))
	g.leases = slices.Delete(g.leases, i, i+1)
	g.wake(g.gate.Leave(1))
}

// settle makes all woken owners serve.
func (g *gated) settle() {
	for range 1000 * len(g.shards) {
		var woken []int
		for i, s := range g.shards {
			if s.looks && !s.gone {
				woken = append(woken, i)
			}
		}
		if len(woken) == 0 {
			return
		}
		g.serve(woken[g.rng.IntN(len(woken))])
	}
	require.Fail(g, "owners wake each other for ever")
}

// pass moves the time to the earliest time that a shard waits for; false: no shard waits.
func (g *gated) pass() bool {
	next := -1
	for i, s := range g.shards {
		if s.waiting && !s.gone && (next < 0 || s.at.Before(g.shards[next].at)) {
			next = i
		}
	}
	if next < 0 {
		return false
	}
	if s := g.shards[next]; s.at.After(g.now) {
		g.now = s.at
	}
	for _, s := range g.shards {
		if s.waiting && !s.at.After(g.now) {
			s.waiting, s.looks = false, true
		}
	}
	return true
}

// check: no claim waits for a task that it may get.
func (g *gated) check() {
	kept := 0
	for _, l := range g.gate.lines {
		kept += l.kept
	}
	require.Equal(g, kept, g.gate.kept)
	require.Zero(g, kept, "for shards that look no more")
	ready, timed := false, false
	for _, s := range g.shards {
		ready = ready || s.tasks > 0 && !s.gone && !s.reads
		timed = timed || s.waiting && !s.gone && s.tasks > 0
	}
	if g.claims == 0 || !ready {
		return
	}
	ok, wait := g.gate.Look(nil, g.now)
	require.False(g, ok, "there is a place")
	require.True(g, g.gate.isClosed())
	if wait > 0 {
		require.True(g, timed, "nobody looks when there is a token")
	}
}

// TestPlacesOverShards: for all sequences of events, waiting claims get the places that become
// free, and no more than the limits allow.
func TestPlacesOverShards(t *testing.T) {
	t.Parallel()
	for seed := range uint64(testkit.Sized(100, 3000)) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			g := newGated(t, seed, 1+int(seed%5))
			limits := func() record.Settings {
				var s record.Settings
				if g.rng.IntN(3) > 0 {
					s.Concurrency = max(1+g.rng.IntN(5), len(g.leases))
				}
				if g.rng.IntN(3) == 0 {
					s.Rate, s.Burst = 1+g.rng.Float64()*100, 1+g.rng.IntN(5)
				}
				return s
			}
			g.set(limits())
			for range 400 {
				i := g.rng.IntN(len(g.shards))
				s := g.shards[i]
				switch g.rng.IntN(12) {
				case 0, 1, 2:
					s.tasks += g.rng.IntN(4)
					s.looks = true
				case 3, 4:
					g.claims += g.rng.IntN(4)
					for _, s := range g.shards {
						s.looks = true
					}
				case 5, 6, 7:
					g.end()
				case 8: // a claim that does not wait
					if ok, _ := g.gate.Look(s.claims, g.now); ok && s.tasks > 0 && !s.gone {
						g.lease(i)
						g.publish(i)
					}
				case 9:
					g.claims = g.rng.IntN(g.claims + 1) // others give up
					s.tasks = g.rng.IntN(s.tasks + 1)   // callers cancel some
				case 10:
					if s.reads = !s.reads; !s.reads {
						s.looks = true
					}
				case 11:
					switch g.rng.IntN(8) {
					case 0:
						g.set(limits())
					case 1:
						if !s.gone && i > 0 {
							s.gone = true
							g.wake(g.gate.quit(s.claims, 0))
						}
					default:
						g.pass()
					}
				}
				if g.rng.IntN(3) == 0 {
					g.settle()
					g.check()
				}
			}
			// In the end, all claims get tasks.
			for _, s := range g.shards {
				s.reads, s.looks = false, true
			}
			for range 10_000 {
				g.settle()
				g.check()
				if len(g.leases) > 0 {
					g.end()
				} else if !g.pass() {
					break
				}
			}
			for i, s := range g.shards {
				require.True(t, g.claims == 0 || s.tasks == 0 || s.gone, "%d claims, %d tasks in shard %d", g.claims, s.tasks, i)
			}
		})
	}
}

// TestPlacesByShares: shards get the places that become free in proportion to the shares of their
// tenants, if these tenants have tasks of the highest priority.
func TestPlacesByShares(t *testing.T) {
	for name, settings := range map[string]record.Settings{
		"concurrency": {Concurrency: 3}, "rate": {Rate: 100, Burst: 1}, "both": {Concurrency: 3, Rate: 100, Burst: 10},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGated(t, 1, 4)
			g.set(settings)
			const tasks, claims = 10_000, 5000
			for i, s := range g.shards {
				s.tasks, s.share = tasks, []uint64{720720, 3 * 720720, 2 * 720720, 9 * 720720}[i]
				if i == 3 {
					s.head = makeHead(engine.FirstTask{Priority: 1})
				}
				g.publish(i)
			}
			g.claims = tasks
			g.shards[3].tasks = 100
			for g.claims > tasks-100 {
				if g.settle(); len(g.leases) == 0 || !g.pass() {
					g.end()
				}
			}
			require.Equal(t, []int{0, 0, 0, 100}, g.got, "the highest priority first")
			for g.claims > tasks-100-claims {
				if g.settle(); len(g.leases) == 0 || !g.pass() {
					g.end()
				}
			}
			for i, want := range []int{claims / 6, claims / 2, claims / 3} {
				require.InDelta(t, want, g.got[i], 200, "%v", g.got)
			}
		})
	}
}
