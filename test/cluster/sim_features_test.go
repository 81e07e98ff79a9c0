package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"codeq"
	"codeq/internal/simtest"
)

// simFeatures are clients that use the features unused by the others, each in its own queues.
type simFeatures struct {
	*schedule
	mu      sync.Mutex // guards the fields below
	serials int
	tasks   map[string]*simFeatureTask // by payload
	uses    int

	runs     bool // workers run
	policies bool // the queue of deaths has them
}

// simFeatureTask is the clients' knowledge of a task.
type simFeatureTask struct {
	payload, queue string
	group, key     string
	produce        span // time of the call
	acked          bool // it was certainly stored
	leases         []simLease
	ends           []*span // calls that have ended it, or perhaps have
	runs           int     // of a handler
}

// span is the time of a call.
type span struct{ begin, end time.Time }

// simLease is a lease, from the moment when its holder gets it until its earliest end.
type simLease struct {
	span
	token uint64
}

const (
	simGroups     = "groups"    // tasks in groups, in a queue with a limit
	simKeys       = "keys"      // tasks with idempotency keys
	simFlows      = "flows"     // tasks that are completed with a follow-up
	simFollowUps  = "follow-up" // which nobody claims
	simRuns       = "run"       // tasks for Run
	simDeaths     = "deaths"    // tasks of a queue with a policy and a dead-letter queue
	simDead       = "dead"      // which nobody claims
	simLimit      = 2
	simAttempts   = 3
	simGroupLease = 4 * time.Second
)

func newSimFeatures(s *schedule) *simFeatures {
	return &simFeatures{schedule: s, tasks: make(map[string]*simFeatureTask)}
}

// begin starts the clients of some features, with numbers from first on. wait waits for the clients
// to end. stop then stops the workers; with empty, it first waits until their queue is empty.
func (f *simFeatures) begin(first int) (wait func(), stop func(empty bool)) {
	var clients, workers sync.WaitGroup
	number := 3000 + first
	client := func(work func(c *simClient)) {
		c := &simClient{schedule: f.schedule, number: number, home: number, rng: rand.New(rand.NewPCG(f.seed, uint64(number)))}
		number++
		clients.Go(func() {
			for !f.ending() {
				time.Sleep(c.upTo(2 * time.Second))
				work(c)
			}
		})
	}
	f.configure()
	for _, use := range []func(c *simClient){f.useGroups, f.useKeys, f.useFlows, f.useDeaths} {
		if f.rng.IntN(3) == 0 {
			for range 3 {
				client(use)
			}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	if f.runs = f.rng.IntN(3) == 0 || f.runs; f.runs { // again after a loss: tasks may remain
		client(func(c *simClient) { f.produce(c, &simFeatureTask{queue: simRuns}) })
		for i := range f.members() {
			rng := rand.New(rand.NewPCG(f.seed, uint64(4000+first+i)))
			workers.Go(func() { f.work(ctx, i, rng) })
		}
	}
	return clients.Wait, func(empty bool) {
		if empty {
			f.await(simRuns)
		}
		cancel()
		workers.Wait()
	}
}

// configure sets the limit of the queue of groups, and the policy of that of deaths, which older
// formats do not have. They have no tasks yet.
func (f *simFeatures) configure() {
	f.awaitLeaders()
	_ = f.set(simGroups, func(s *codeq.Settings) { s.Concurrency = simLimit })
	f.policies = f.set(simDeaths, func(s *codeq.Settings) {
		s.MaxAttempts, s.Backoff, s.RetryFirst = simAttempts, codeq.Backoff{Base: time.Second, Step: time.Second}, true
		s.DeadLetterQueue = simDead
	})
}

// set changes the settings of a queue. It returns false if the format of the cluster has none.
func (f *simFeatures) set(queue string, change func(*codeq.Settings)) bool {
	ctx, cancel := context.WithTimeout(context.Background(), simPatience)
	defer cancel()
	q, _ := f.members()[0].queue()
	for {
		err := q.Configure(ctx, queue, change)
		switch {
		case err == nil:
			return true
		case errors.Is(err, codeq.ErrFormat):
			return false
		case !errors.Is(err, codeq.ErrNotLeader) && !errors.Is(err, codeq.ErrUncertain):
			f.hangs(fmt.Sprintf("Configure (%v)", err))
		}
	}
}

// await returns when a queue is empty. A clock far ahead may have scheduled its tasks, so await
// sets all clocks ahead. REQUIRES: all nodes are up and connected.
func (f *simFeatures) await(queue string) {
	for _, n := range f.members() {
		n.machine.Wall.Set(24 * time.Hour)
	}
	f.simCluster.until("the end of queue "+queue, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		stats, err := simQueue(f.members()[0]).Stats(ctx)
		return err == nil && stats[queue] == (codeq.Counts{})
	})
}

// new records a task before its produce.
func (f *simFeatures) new(t *simFeatureTask) codeq.Task {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.serials++
	t.payload = fmt.Sprint(t.queue, " ", f.serials)
	t.produce.begin = time.Now()
	f.tasks[t.payload] = t
	task := codeq.Task{Queue: t.queue, Group: t.group, Unique: codeq.Unique{Key: t.key}, MaxAttempts: 1000, Payload: []byte(t.payload)}
	if t.queue == simDeaths {
		task.MaxAttempts = 0
	}
	return task
}

func (f *simFeatures) produce(c *simClient, t *simFeatureTask) {
	task := f.new(t)
	duplicate := false
	call, ok := c.call(simtest.Produce, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error {
		_, err := q.Produce(ctx, task)
		if duplicate = errors.Is(err, codeq.ErrDuplicate); duplicate {
			return nil
		}
		return err
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	t.produce.end = time.Now()
	t.acked = ok && call.Outcome == simtest.Done && !duplicate
	f.uses++
}

// claim returns a lease of a queue, and its task.
func (f *simFeatures) claim(c *simClient, queue string) (*codeq.Lease, *simFeatureTask) {
	var l *codeq.Lease
	begin := time.Now()
	call, ok := c.call(simtest.Claim, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) (err error) {
		l, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}, LeaseFor: simGroupLease, NoWait: c.rng.IntN(2) == 0})
		return err
	})
	if !ok || call.Outcome != simtest.Done {
		return nil, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.tasks[string(l.Payload)]
	if t == nil {
		f.t.Errorf("a task of queue %s that nobody has produced: %q", queue, l.Payload)
		return nil, nil
	}
	now := time.Now()
	granted, _ := f.h.Granted(begin, now, l.Deadline, simGroupLease)
	t.leases = append(t.leases, simLease{span{now, granted.Add(f.h.Shortest(simGroupLease) - simtest.Slack)}, l.Receipt.Token})
	f.uses++
	return l, t
}

// complete completes a task, and records its end by the answer. next, if it is not nil, is its
// follow-up.
func (f *simFeatures) complete(c *simClient, l *codeq.Lease, t *simFeatureTask, next ...codeq.Task) {
	begin := time.Now()
	f.mu.Lock()
	for i := range t.leases {
		if held := &t.leases[i]; held.token == l.Receipt.Token && begin.Before(held.end) {
			held.end = begin
		}
	}
	end := &span{begin: begin}
	t.ends = append(t.ends, end)
	f.mu.Unlock()
	call, ok := c.call(simtest.Complete, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error {
		return q.Complete(ctx, l.Receipt, nil, next...)
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	end.end = time.Now()
	if !ok || call.Outcome == simtest.Never {
		t.ends = slices.DeleteFunc(t.ends, func(e *span) bool { return e == end })
	}
	f.uses++
}

// useGroups produces tasks of groups and works on them; the queue has a limit.
func (f *simFeatures) useGroups(c *simClient) {
	if c.rng.IntN(2) == 0 {
		f.produce(c, &simFeatureTask{queue: simGroups, group: fmt.Sprint(c.rng.IntN(4))})
		return
	}
	f.pass(c, simGroups)
}

// useKeys produces tasks with few keys and works on them.
func (f *simFeatures) useKeys(c *simClient) {
	if c.rng.IntN(2) == 0 {
		f.produce(c, &simFeatureTask{queue: simKeys, key: fmt.Sprint(c.rng.IntN(3))})
		return
	}
	f.pass(c, simKeys)
}

// pass claims a task and mostly completes it.
func (f *simFeatures) pass(c *simClient, queue string) {
	if l, t := f.claim(c, queue); l != nil && c.rng.IntN(5) > 0 {
		time.Sleep(c.upTo(2 * time.Second))
		f.complete(c, l, t)
	}
}

// useFlows produces tasks and completes them with a follow-up.
func (f *simFeatures) useFlows(c *simClient) {
	if c.rng.IntN(2) == 0 {
		f.produce(c, &simFeatureTask{queue: simFlows})
		return
	}
	if l, t := f.claim(c, simFlows); l != nil {
		time.Sleep(c.upTo(2 * time.Second))
		f.complete(c, l, t, codeq.Task{Queue: simFollowUps, Payload: l.Payload})
	}
}

// useDeaths produces tasks, and fails at them until they die.
func (f *simFeatures) useDeaths(c *simClient) {
	if c.rng.IntN(3) == 0 {
		f.produce(c, &simFeatureTask{queue: simDeaths})
		return
	}
	if l, _ := f.claim(c, simDeaths); l != nil && c.rng.IntN(5) > 0 {
		time.Sleep(c.upTo(2 * time.Second))
		_, _ = c.call(simtest.Retry, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error {
			return q.Retry(ctx, l.Receipt, codeq.RetryOptions{})
		})
	}
}

// work runs handlers on a node until ctx ends, in each of its lives.
func (f *simFeatures) work(ctx context.Context, node int, rng *rand.Rand) {
	var mu sync.Mutex // guards rng
	var m codeq.Mux
	codeq.Handle(&m, simRuns, func(_ context.Context, j *codeq.Job[[]byte]) error {
		mu.Lock()
		length := time.Duration(rng.Int64N(int64(time.Second)))
		fails := rng.IntN(10) == 0
		mu.Unlock()
		time.Sleep(length)
		f.mu.Lock()
		defer f.mu.Unlock()
		f.uses++
		t := f.tasks[string(j.Args)]
		if t == nil {
			f.t.Errorf("Run has a task that nobody has produced: %q", j.Args)
			return nil
		}
		if fails {
			return errors.New("fails")
		}
		t.runs++
		return nil
	}, codeq.Policy{Backoff: codeq.Backoff{Base: time.Second, Factor: 1}, RetryFirst: true})
	for ctx.Err() == nil {
		nodes := f.members()
		if q, _ := nodes[node%len(nodes)].queue(); q != nil {
			_ = q.Run(ctx, &m, &codeq.RunOptions{Concurrency: 2, LeaseFor: simGroupLease}) // until the node ends
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// check compares the clients' knowledge with the stored tasks.
func (f *simFeatures) check(stored map[codeq.ID]*codeq.TaskInfo) {
	f.mu.Lock()
	defer f.mu.Unlock()
	there := make(map[string]map[string]int) // the count of each payload in each queue
	for _, info := range stored {
		if there[info.Queue] == nil {
			there[info.Queue] = make(map[string]int)
		}
		there[info.Queue][string(info.Payload)]++
	}
	for _, t := range f.tasks {
		f.checkStored(t, there[t.queue][t.payload], there[simFollowUps][t.payload])
	}
	f.checkOrder()
	if f.policies && len(f.past) == 0 { // a loss may take settings away
		f.checkDeaths(stored)
	}
}

// checkDeaths checks that each dead task has one in the dead-letter queue, and no other has, and
// that none was tried more often than its queue says.
func (f *simFeatures) checkDeaths(stored map[codeq.ID]*codeq.TaskInfo) {
	told := make(map[codeq.ID]int)
	for _, info := range stored {
		if d, ok := codeq.DeathOf(info.Headers); ok {
			told[d.ID]++
		}
	}
	for id, info := range stored {
		deaths := 0
		if info.State == codeq.Dead && info.Queue == simDeaths {
			deaths = 1
		}
		if told[id] != deaths {
			f.t.Errorf("task %s is %v, and %d tasks tell of its death", info.Payload, info.State, told[id])
		}
		if info.Queue == simDeaths && (info.Attempts > simAttempts || info.Attempts == simAttempts && deaths == 0 && info.State != codeq.Leased) {
			f.t.Errorf("task %s has %d attempts, and is %v", info.Payload, info.Attempts, info.State)
		}
		delete(told, id)
	}
	for id := range told {
		f.t.Errorf("the death of %s is told, and it is not stored", id)
	}
}

// checkOrder compares the clients' knowledge of different tasks. REQUIRES: mu is held.
func (f *simFeatures) checkOrder() {
	tasks := slices.Collect(maps.Values(f.tasks))
	slices.SortFunc(tasks, func(a, b *simFeatureTask) int { return a.produce.begin.Compare(b.produce.begin) })
	f.checkGroups(tasks)
	f.checkKeys(tasks)
}

// checkStored checks that a task is there once until it has ended, and its follow-up after that.
func (f *simFeatures) checkStored(t *simFeatureTask, here, followUps int) {
	switch {
	case here > 1 || followUps > 1 || here+followUps > 1:
		f.t.Errorf("task %s is stored %d times, and its follow-up %d times", t.payload, here, followUps)
	case t.queue == simFlows && t.acked && here+followUps == 0:
		f.t.Errorf("task %s is stored no more, and has no follow-up", t.payload)
	case t.queue == simRuns && t.acked && here == 0 && t.runs == 0:
		f.t.Errorf("task %s is stored no more, and no handler has run", t.payload)
	case t.queue != simRuns && t.acked && here == 0 && len(t.ends) == 0:
		f.t.Errorf("task %s is stored no more, and nobody has ended it", t.payload)
	}
}

// checkGroups checks that no two tasks of a group were leased at the same time, that tasks were
// claimed in the order of their produces, and that the limit of the queue held.
func (f *simFeatures) checkGroups(tasks []*simFeatureTask) {
	type held struct {
		simLease
		t *simFeatureTask
	}
	var leases []held
	for _, t := range tasks {
		if t.queue == simGroups {
			for _, l := range t.leases {
				leases = append(leases, held{l, t})
			}
		}
	}
	for i, a := range leases {
		for _, b := range leases[i+1:] {
			if a.t != b.t && a.t.group == b.t.group && a.begin.Before(b.end) && b.begin.Before(a.end) {
				f.t.Errorf("two tasks of group %s are leased: %s %v, %s %v", a.t.group, a.t.payload, a.span, b.t.payload, b.span)
			}
		}
		for _, first := range tasks {
			before := first.queue == simGroups && first.group == a.t.group && first.acked && first.produce.end.Before(a.t.produce.begin)
			if before && !slices.ContainsFunc(first.ends, func(end *span) bool { return end.begin.Before(a.begin) }) {
				f.t.Errorf("%s of group %s is claimed at %v, before the end of %s", a.t.payload, a.t.group, a.begin, first.payload)
			}
		}
	}
	for _, a := range leases {
		var at []string
		for _, b := range leases {
			if !b.begin.After(a.begin) && a.begin.Before(b.end) {
				at = append(at, fmt.Sprintf("%s of group %s, token %x, %v", b.t.payload, b.t.group, b.token, b.span))
			}
		}
		if len(at) > simLimit {
			f.t.Errorf("%d tasks are leased at %v, at most %d may be: %s", len(at), a.begin, simLimit, strings.Join(at, "; "))
		}
	}
}

// checkKeys checks that a task got a key only after the previous task with that key had ended.
func (f *simFeatures) checkKeys(tasks []*simFeatureTask) {
	for i, a := range tasks {
		for _, b := range tasks[i+1:] {
			if a.key == "" || a.key != b.key || !a.acked || !b.acked || !a.produce.end.Before(b.produce.begin) {
				continue
			}
			if !slices.ContainsFunc(a.ends, func(end *span) bool { return end.begin.Before(b.produce.end) }) {
				f.t.Errorf("%s and %s have key %s at the same time", a.payload, b.payload, a.key)
			}
		}
	}
}
