package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/dispatch"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// limitedCluster is a cluster with three shards, each led by another node, with a queue "a" that
// has limits over all shards. Workers work on the queue, while a probe counts its leases all the
// time.
type limitedCluster struct {
	*simCluster
	t       *testing.T
	ctx     context.Context
	stop    context.CancelFunc
	limit   atomic.Int32 // there must not be more leases; 0: none
	most    atomic.Int32 // leases that the probe has seen
	all     sync.WaitGroup
	workers sync.WaitGroup

	mu        sync.Mutex // guards the fields below
	claims    []time.Time
	completed map[string]int // by payload
}

func limitedNodes(t *testing.T, nodes int, test func(t *testing.T, c *limitedCluster)) {
	synctest.Test(t, func(t *testing.T) {
		c := &limitedCluster{
			t: t, simCluster: newSimCluster(t, 1, nodes, codeq.Options{Shards: 3, Durability: codeq.DurabilityDisk, MaxAttempts: 1000}),
			completed: make(map[string]int),
		}
		c.ctx, c.stop = context.WithCancel(t.Context())
		defer func() { // also for a failed test
			c.stop()
			c.all.Wait()
			c.workers.Wait()
			c.close()
		}()
		c.spread()
		c.all.Go(c.probe)
		test(t, c)
	})
}

// leases counts the leases by shard, in shards with a leader. REQUIRES: synctest.Wait has just
// returned.
func (c *limitedCluster) leases() (leases [3]int) {
	for shard := range leases {
		if n := c.leader(shard); n != nil {
			if q, _ := n.queue(); q != nil && inspect.Of(q).Leads(shard) {
				inspect.Of(q).Asleep(shard, func(o *inspect.Owner) { leases[shard] = int(o.Rules.Names.QueueNamed("a").Counts.Leased) })
			}
		}
	}
	return leases
}

func (c *limitedCluster) probe() {
	for c.ctx.Err() == nil {
		time.Sleep(time.Millisecond)
		synctest.Wait()
		leases := c.leases()
		sum := leases[0] + leases[1] + leases[2]
		c.most.Store(max(c.most.Load(), int32(sum)))
		if limit := int(c.limit.Load()); limit > 0 && sum > limit {
			c.t.Errorf("leases %v, the limit is %d", leases, limit)
			return
		}
	}
}

func (c *limitedCluster) queue(node int) *codeq.Queue {
	q, _ := c.nodes[node].queue()
	return q
}

func (c *limitedCluster) configure(change func(*codeq.Settings)) {
	c.t.Helper()
	queuetest.Configure(c.t, c.queue(0), "a", change)
}

// produce stores tasks in the shard of a leader.
func (c *limitedCluster) produce(node, tasks int) {
	c.t.Helper()
	batch := make([]codeq.Task, tasks)
	for i := range batch {
		batch[i] = codeq.Task{Queue: "a", Payload: fmt.Append(nil, node, " ", i)}
	}
	ids, err := c.queue(node).ProduceBatch(c.t.Context(), batch)
	require.NoError(c.t, err)
	for _, id := range ids {
		require.Equal(c.t, node, keys.ShardOf(keys.ID(id), 3))
	}
}

// produceToAll stores tasks in each shard.
func (c *limitedCluster) produceToAll(tasks int) {
	c.t.Helper()
	for node := range 3 {
		c.produce(node, tasks)
	}
}

const permitLease = 5 * time.Second

// work starts a worker of a node that completes tasks, each within the given time. One lease of so
// many expires, or its task is released.
func (c *limitedCluster) work(node int, most time.Duration, spoil int) {
	seed := rand.Uint64()
	c.workers.Go(func() {
		rng := rand.New(rand.NewPCG(seed, 0))
		for c.ctx.Err() == nil {
			q := c.queue(node)
			if q == nil {
				time.Sleep(100 * time.Millisecond)
				continue
			}
			l, err := q.Claim(c.ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: permitLease})
			if err != nil {
				time.Sleep(10 * time.Millisecond)
				continue
			}
			c.mu.Lock()
			c.claims = append(c.claims, l.Deadline.Add(-permitLease))
			c.mu.Unlock()
			time.Sleep(time.Duration(rng.Int64N(int64(most) + 1)))
			if spoil > 0 && rng.IntN(spoil) == 0 {
				if rng.IntN(2) == 0 {
					_ = q.Release(c.ctx, l.Receipt, 0)
				}
				continue
			}
			for !c.completed1(q, l) && c.ctx.Err() == nil {
				time.Sleep(10 * time.Millisecond)
				if q = c.queue(node); q == nil {
					break
				}
			}
		}
	})
}

// workOnAll starts workers on each node.
func (c *limitedCluster) workOnAll(perNode int, most time.Duration, spoil int) {
	for node := range 3 {
		for range perNode {
			c.work(node, most, spoil)
		}
	}
}

// completed1 completes a task; it returns false if the caller must try again.
func (c *limitedCluster) completed1(q *codeq.Queue, l *codeq.Lease) bool {
	err := q.Complete(c.ctx, l.Receipt, nil)
	if errors.Is(err, codeq.ErrNotLeader) || errors.Is(err, codeq.ErrUncertain) || errors.Is(err, codeq.ErrClosed) {
		return false
	}
	if err == nil {
		c.mu.Lock()
		c.completed[string(l.Payload)]++
		c.mu.Unlock()
	}
	return true
}

func (c *limitedCluster) done() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.completed)
}

// drain waits until no task is left.
func (c *limitedCluster) drain() {
	c.t.Helper()
	c.until("the end of all tasks", func() bool {
		ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Second)
		defer cancel()
		stats, err := c.queue(0).Stats(ctx)
		return err == nil && stats["a"] == (codeq.Counts{})
	})
}

// requireReturned checks that, at rest, no shard has a permit, and that the reports of the shards
// have stopped: one shard can then get all permits.
func (c *limitedCluster) requireReturned() {
	c.t.Helper()
	c.stop()
	c.all.Wait() // the probe must not wait too
	c.workers.Wait()
	c.spread() // a new leader starts its reports again
	time.Sleep(10 * time.Second)
	synctest.Wait()
	told := c.told()
	time.Sleep(time.Minute)
	synctest.Wait()
	require.Equal(c.t, told, c.told(), "shards go on telling, or are led anew")
	for shard := range 3 {
		q, _ := c.leader(shard).queue()
		inspect.Of(q).Asleep(shard, func(o *inspect.Owner) {
			p := permitsIn(o, "a")
			require.Zero(c.t, p.Unused())
			require.False(c.t, p.IsBusy())
		})
	}
	set, err := c.queue(0).Settings("a")
	require.NoError(c.t, err)
	c.produce(1, set.Concurrency+set.Burst)
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	defer cancel()
	claim := func() *codeq.Lease { // it waits: old claims may still get a task and release it
		l, err := c.queue(1).Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Hour})
		require.NoError(c.t, err, "a permit has not come back")
		return l
	}
	for range set.Burst {
		queuetest.Complete(c.t, c.queue(1), claim())
	}
	for range set.Concurrency {
		claim()
	}
}

// told returns the numbers of reports of the shards, and their leaders. REQUIRES: synctest.Wait has
// just returned.
func (c *limitedCluster) told() (told [3]string) {
	for shard := range told {
		n := c.leader(shard)
		q, _ := n.queue()
		term := inspect.Of(q).Group(shard).Raft().CurrentTerm()
		inspect.Of(q).Asleep(shard, func(o *inspect.Owner) {
			told[shard] = fmt.Sprintf("%s in term %d: %d reports", n.name, term, o.Permits.Reports())
		})
	}
	return told
}

// requireRate checks that no window of time has more claims than the bucket allows. The time of a
// claim is the time of its decision, in whole ms.
func (c *limitedCluster) requireRate(rate float64, burst int) {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	slices.SortFunc(c.claims, time.Time.Compare)
	for i, from := range c.claims {
		for j, to := range c.claims[i:] {
			allowed := float64(burst) + rate*(to.Sub(from)+time.Millisecond).Seconds()
			if float64(j+1) > allowed+1e-6 {
				c.t.Errorf("%d claims in %v, %v were allowed", j+1, to.Sub(from), allowed)
				return
			}
		}
	}
}

// TestPermitsOneShard: one shard gets the whole limit while the others have no tasks, and then
// another shard gets it.
func TestPermitsOneShard(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for shard, limit := range map[int]int{0: 1, 2: 5} {
		t.Run(fmt.Sprint("limit ", limit, " shard ", shard), func(t *testing.T) {
			limitedNodes(t, 3, func(t *testing.T, c *limitedCluster) {
				c.configure(func(s *codeq.Settings) { s.Concurrency = limit })
				c.limit.Store(int32(limit))
				c.workOnAll(4, 40*time.Millisecond, 0)
				for _, at := range []int{shard, (shard + 1) % 3} {
					begin := time.Now()
					c.most.Store(0)
					c.produce(at, 60)
					c.drain()
					require.EqualValues(t, limit, c.most.Load())
					// A task takes 20 ms of work, and messages of at most 5 ms before and after
					// it. Its own share would give a shard only a third of the limit.
					require.Less(t, time.Since(begin), 60/time.Duration(limit)*50*time.Millisecond, "the room is not used")
				}
				c.requireReturned()
			})
		})
	}
}

// TestPermitsTurns: a shard with tasks all the time does not block the others.
func TestPermitsTurns(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, most := range []time.Duration{2 * time.Millisecond, 400 * time.Millisecond} {
		t.Run(most.String(), func(t *testing.T) {
			limitedNodes(t, 3, func(t *testing.T, c *limitedCluster) {
				c.configure(func(s *codeq.Settings) { s.Concurrency = 2 })
				c.limit.Store(2)
				c.produceToAll(2000)
				c.workOnAll(3, most, 0)
				time.Sleep(max(100*most, 5*time.Second))
				c.stop()
				c.workers.Wait()
				by := make(map[byte]int)
				for payload := range c.completed {
					by[payload[0]]++
				}
				for node := range 3 {
					require.Greater(t, by['0'+byte(node)], c.done()/6, "%v", by)
				}
			})
		})
	}
}

// TestPermitsOfTenants: shards share a limit in proportion to their tenants with tasks.
func TestPermitsOfTenants(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	limitedNodes(t, 3, func(t *testing.T, c *limitedCluster) {
		c.configure(func(s *codeq.Settings) { s.Concurrency = 4 })
		c.limit.Store(4)
		for node, tenants := range []string{"ABCD", "X", "ABCD"} {
			var batch []codeq.Task
			for i := range 8000 {
				tenant := tenants[i%len(tenants) : i%len(tenants)+1]
				batch = append(batch, codeq.Task{Queue: "a", Tenant: tenant, Payload: fmt.Append(nil, tenant, node, " ", i)})
			}
			_, err := c.queue(node).ProduceBatch(t.Context(), batch)
			require.NoError(t, err)
		}
		c.workOnAll(4, 4*time.Millisecond, 0)
		time.Sleep(15 * time.Second)
		c.stop()
		c.workers.Wait()
		by := make(map[string]float64)
		for payload := range c.completed {
			by[payload[:1]] += 1 / float64(c.done())
		}
		require.InDelta(t, 1./9, by["X"], 0.05, "%v", by)
		for _, tenant := range []string{"A", "B", "C", "D"} {
			require.InDelta(t, 2./9, by[tenant], 0.03, "%v", by)
		}
	})
}

// TestPermitsFaults: during random crashes, partitions and changes of leaders, also of the permit
// allocator, the queue never exceeds its limit of leases and its rate, and no part of the limit is
// lost for ever.
func TestPermitsFaults(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for range testkit.Sized(2, 4) {
		seed := testkit.Seed()
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			limitedNodes(t, 3, func(t *testing.T, c *limitedCluster) {
				const limit, rate, burst = 3, 60, 10
				rng := rand.New(rand.NewPCG(seed, 0))
				c.configure(func(s *codeq.Settings) { s.Concurrency, s.Rate, s.Burst = limit, rate, burst })
				c.limit.Store(limit)
				c.produceToAll(300)
				c.workOnAll(3, 30*time.Millisecond, 40)
				for range 12 {
					n := c.nodes[rng.IntN(3)]
					switch rng.IntN(6) {
					case 0:
						n.crash([]int{0, 50, 100}[rng.IntN(3)])
					case 1:
						c.net.Isolate(n.name, c.names())
					case 2:
						c.net.SetCut(n.name, c.nodes[rng.IntN(3)].name, true)
					case 3:
						c.transfer(n, rng.IntN(3), n)
					case 4:
						c.net.Pause(n.name, true)
					case 5:
						n.stop()
					}
					time.Sleep(time.Duration(rng.Int64N(int64(3 * time.Second))))
					if rng.IntN(2) == 0 {
						c.mend(true)
					}
				}
				c.mend(true)
				c.awaitLeaders()
				c.drain()
				require.EqualValues(t, limit, c.most.Load())
				c.requireRate(rate, burst)
				c.requireReturned()
			})
		})
	}
}

// TestPermitsRate: the claims of all shards together stay within the rate, and use all of it.
func TestPermitsRate(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, c := range []struct {
		rate  float64
		burst int
		least float64 // claims a second
	}{
		{50, 0, 49},
		{50, 5, 49},
		{10, 1, 8}, // the bucket has no room for a token on its way
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			limitedNodes(t, 3, func(t *testing.T, cl *limitedCluster) {
				cl.configure(func(s *codeq.Settings) { s.Rate, s.Burst = c.rate, c.burst })
				set := record.Settings{Rate: c.rate, Burst: c.burst}
				cl.produceToAll(500)
				cl.workOnAll(3, time.Millisecond, 0)
				begin := time.Now()
				time.Sleep(20 * time.Second)
				cl.stop()
				cl.workers.Wait()
				require.GreaterOrEqual(t, float64(len(cl.claims)), c.least*time.Since(begin).Seconds())
				cl.requireRate(c.rate, set.BurstSize())
			})
		})
	}
}

// TestPermitsRateReturned: another shard can use the unused tokens of a shard.
func TestPermitsRateReturned(t *testing.T) {
	limitedNodes(t, 3, func(t *testing.T, c *limitedCluster) {
		c.configure(func(s *codeq.Settings) { s.Rate, s.Burst = 0.001, 9 })
		c.produce(1, 30)
		got := 0
		for range 50 { // most are canceled while the token is on its way
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			if _, err := c.queue(1).Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}}); err == nil {
				got++
			}
			cancel()
			time.Sleep(20 * time.Millisecond)
		}
		require.Less(t, got, 9)
		for ; got < 9; got++ {
			require.NotNil(t, c.claimAt(1))
		}
		require.Nil(t, c.claimAt(1))
	})
}

// TestPermitsRateFailover: a new permit allocator does not allow another burst.
func TestPermitsRateFailover(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	limitedNodes(t, 3, func(t *testing.T, c *limitedCluster) {
		c.configure(func(s *codeq.Settings) { s.Rate, s.Burst = 20, 40 })
		c.produceToAll(500)
		c.workOnAll(3, time.Millisecond, 0)
		for _, shard := range []int{0, 1, 0} {
			time.Sleep(3 * time.Second)
			c.leader(shard).crash(0)
			time.Sleep(3 * time.Second)
			c.mend(true)
			c.awaitLeaders()
		}
		time.Sleep(3 * time.Second)
		c.requireRate(20, 40)
		claims := func() int {
			c.mu.Lock()
			defer c.mu.Unlock()
			return len(c.claims)
		}
		before := claims()
		time.Sleep(5 * time.Second)
		require.GreaterOrEqual(t, claims()-before, 95)
	})
}

// claimAt claims on a node without waiting; nil: no task.
func (c *limitedCluster) claimAt(node int) *codeq.Lease {
	c.t.Helper()
	l, err := c.queue(node).Claim(c.t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true, LeaseFor: time.Hour})
	if errors.Is(err, codeq.ErrEmpty) {
		return nil
	}
	require.NoError(c.t, err)
	return l
}

// TestPermitsNoWait: a claim that does not wait gets a task if any shard has room in the limit, and
// otherwise none.
func TestPermitsNoWait(t *testing.T) {
	t.Parallel()
	limitedNodes(t, 3, func(t *testing.T, c *limitedCluster) {
		c.configure(func(s *codeq.Settings) { s.Concurrency = 3 })
		c.limit.Store(3)
		c.produceToAll(10)
		for range 5 {
			held := []*codeq.Lease{c.claimAt(0), c.claimAt(0), c.claimAt(1)}
			require.Nil(t, c.claimAt(0))
			require.Nil(t, c.claimAt(2))
			for i, l := range held {
				queuetest.Complete(t, c.queue(i), l)
			}
		}
		c.requireReturned()
	})
}

// longList returns some queues and others, too many for a short list.
func longList(queues ...string) []string {
	for i := range dispatch.ShortList {
		queues = append(queues, fmt.Sprint("other ", i))
	}
	return queues
}

// TestPermitsOfLists: claims of a long list of queues also get a task only if any shard has room in
// the limit, whether they wait or not.
func TestPermitsOfLists(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, noWait := range []bool{true, false} {
		t.Run(fmt.Sprint("noWait=", noWait), func(t *testing.T) {
			limitedNodes(t, 3, func(t *testing.T, c *limitedCluster) {
				queues := longList("a")
				c.configure(func(s *codeq.Settings) { s.Concurrency = 3 })
				c.limit.Store(3)
				c.produce(1, 10)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				for i := range 8 {
					l, err := c.queue(1+i%2).Claim(ctx, codeq.ClaimRequest{Queues: queues, NoWait: noWait, LeaseFor: time.Hour})
					require.NoError(t, err)
					queuetest.Complete(t, c.queue(1), l)
					time.Sleep(time.Second) // unused permits go back
				}
				c.requireReturned()
			})
		})
	}
}

// TestPermitsLeftByLists: a claim of a list waits for permits. Two other claims of the same list
// asked for them before, got none, and have ended: one does not wait, and one got a task of another
// queue.
func TestPermitsLeftByLists(t *testing.T) {
	t.Parallel()
	limitedNodes(t, 3, func(t *testing.T, c *limitedCluster) {
		queues := longList("a", "b")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		q := c.queue(1)
		claim := func(noWait bool) (*codeq.Lease, error) {
			return q.Claim(ctx, codeq.ClaimRequest{Queues: queues, NoWait: noWait, LeaseFor: time.Hour})
		}
		c.configure(func(s *codeq.Settings) { s.Concurrency = 1 })
		c.limit.Store(1)
		c.produce(2, 1)
		for range 3 {
			held := c.claimAt(2)
			require.NotNil(t, held)
			c.produce(1, 2)
			_, err := claim(true)
			require.ErrorIs(t, err, codeq.ErrEmpty)
			queuetest.Produce(t, q, codeq.Task{Queue: "b"})
			l, err := claim(false)
			require.NoError(t, err)
			require.Equal(t, "b", l.Queue)
			queuetest.Complete(t, q, l)
			time.Sleep(time.Second) // an unused permit goes back
			served := make(chan error)
			go func() {
				l, err := claim(false)
				if err == nil {
					err = q.Complete(t.Context(), l.Receipt, nil)
				}
				served <- err
			}()
			time.Sleep(time.Second)
			require.Empty(t, served)
			queuetest.Complete(t, c.queue(2), held)
			require.NoError(t, <-served)
		}
	})
}

// TestPermitsSettings: a change of the settings has the same effect as without a cluster.
func TestPermitsSettings(t *testing.T) {
	t.Parallel()
	limitedNodes(t, 3, func(t *testing.T, c *limitedCluster) {
		c.produceToAll(20)
		var held []*codeq.Lease
		for i := range 4 { // before the first limit
			held = append(held, c.claimAt(i%3))
		}
		for at := range 3 {
			free := false
			require.NoError(t, inspect.Of(c.queue(at)).Owner(at, func(o *inspect.Owner) error {
				free = o.Claims.Of(o.Rules.Names.QueueNamed("a")).Gateway() == nil
				return nil
			}))
			require.True(t, free, "without a limit nothing is needed")
		}
		c.configure(func(s *codeq.Settings) { s.Concurrency = 5 })
		held = append(held, c.claimAt(0))
		require.Nil(t, c.claimAt(1), "leases that are older than the limit count")

		waiting := make(chan *codeq.Lease, 3)
		for i := range 3 {
			c.workers.Go(func() {
				l, err := c.queue(i).Claim(c.ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Hour})
				if err == nil {
					waiting <- l
				}
			})
		}
		time.Sleep(time.Second)
		c.configure(func(s *codeq.Settings) { s.Concurrency = 2 })
		for i := range 3 {
			require.Nil(t, c.claimAt(i), "%d leases", 5-i)
			require.NoError(t, c.queue(i).Extend(t.Context(), held[i].Receipt, time.Hour), "a lease was taken away")
			queuetest.Complete(t, c.queue(i), held[i])
		}
		require.Nil(t, c.claimAt(0))

		require.Empty(t, waiting)
		queuetest.Complete(t, c.queue(0), held[3])
		time.Sleep(time.Second)
		require.Len(t, waiting, 1, "room wakes who waits")
		c.configure(func(s *codeq.Settings) { s.Concurrency = 3 })
		time.Sleep(time.Second)
		require.Len(t, waiting, 2, "so does a higher limit")

		c.configure(func(s *codeq.Settings) { s.Paused = true })
		queuetest.Complete(t, c.queue(1), <-waiting)
		time.Sleep(time.Second)
		require.Len(t, waiting, 1, "nothing passes while the queue is paused")
		c.configure(func(s *codeq.Settings) { s.Concurrency = 0 })
		c.configure(func(s *codeq.Settings) { s.Paused = false })
		time.Sleep(time.Second)
		require.Len(t, waiting, 2)
		held = append(held, <-waiting, <-waiting)
		for range 10 {
			held = append(held, c.claimAt(2))
			require.NotNil(t, held[len(held)-1], "there is no limit any more")
		}
		c.configure(func(s *codeq.Settings) { s.Rate, s.Burst = 1, 2 })
		for range 2 {
			held = append(held, c.claimAt(1))
			require.NotNil(t, held[len(held)-1])
		}
		require.Nil(t, c.claimAt(0))
		c.configure(func(s *codeq.Settings) { s.Rate, s.Concurrency = 0, 100 })
		require.NotNil(t, c.claimAt(0))
	})
}

// takeOnlyPermit limits the queue to one lease, and produces a task in the second and the third
// shard. The leader of the second shard leases its task.
func (c *limitedCluster) takeOnlyPermit() *codeq.Lease {
	c.t.Helper()
	c.configure(func(s *codeq.Settings) { s.Concurrency = 1 })
	c.limit.Store(1)
	c.produce(1, 1)
	c.produce(2, 1)
	l := c.claimAt(1)
	require.Equal(c.t, 1, keys.ShardOf(keys.ID(l.ID), 3))
	return l
}

// TestPermitsUntoldEnd: a leader ends before it returns a permit; the next leader returns it.
func TestPermitsUntoldEnd(t *testing.T) {
	t.Parallel()
	limitedNodes(t, 3, func(t *testing.T, c *limitedCluster) {
		l := c.takeOnlyPermit()
		c.net.SetCut("n1", "n0", true)
		queuetest.Complete(t, c.queue(1), l)
		term := termOf(c.nodes[0], 0)
		c.nodes[1].crash(0)
		time.Sleep(10 * time.Second)
		require.Equal(t, term, termOf(c.nodes[0], 0), "another allocator would ask")
		require.NotNil(t, c.claimAt(2))
	})
}

// TestPermitsEndThatIsNotStored: no shard gets the permit of a lease before the end of the lease is
// stored, since the next leader may find the lease in force.
func TestPermitsEndThatIsNotStored(t *testing.T) {
	t.Parallel()
	limitedNodes(t, 5, func(t *testing.T, c *limitedCluster) {
		l := c.takeOnlyPermit()
		c.workers.Go(func() { // waits for a permit
			_, _ = c.queue(2).Claim(c.ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Hour})
		})
		time.Sleep(time.Second)
		for _, other := range []string{"n2", "n3", "n4"} { // the permit allocator is within reach, a majority is not
			c.net.SetCut("n1", other, true)
			c.net.SetCut(other, "n1", true)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		require.Error(t, c.queue(1).Complete(ctx, l.Receipt, nil))
		time.Sleep(5 * time.Second)
		require.NotEqual(t, nameOf(c.nodes[1]), nameOf(c.leader(1)))
	})
}

// permitsIn returns the permits of a queue in a shard.
func permitsIn(o *inspect.Owner, queue string) *dispatch.PermitGate {
	return o.Claims.Of(o.Rules.Names.Queues[queue]).Gateway().(*dispatch.PermitGate)
}
