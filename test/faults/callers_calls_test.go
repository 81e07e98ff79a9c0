package faults_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq"
	"codeq/internal/dispatch"
	"codeq/internal/record"
	"codeq/test/queuetest"
)

// claimCall is Claim or ClaimBatch, or the claim of a Run.
type claimCall struct {
	shard  int // the first that it asks
	req    codeq.ClaimRequest
	local  bool
	cancel context.CancelFunc

	arrival int // grows; equal for claims made at the same time
	ctx     context.Context
	done    chan struct{} // closed when the call has returned
	leases  []*codeq.Lease
	err     error
}

func (m *crowd) drawClaim(most int, noWait bool) *claimCall {
	c := &claimCall{shard: m.drawShard(), done: make(chan struct{})}
	c.ctx, c.cancel = context.WithCancel(m.ctx)
	c.req = codeq.ClaimRequest{
		Queues: oneOf(m, "Queues", []string{"a"}, []string{"b"}, []string{"a", "b"}, []string{"b", "a"}, []string{"c", "d", "e"}, []string{"e", "a"}),
		Max:    rapid.IntRange(min(most-1, 1), most).Draw(m.t, "Max"), NoWait: noWait,
		LeaseFor: oneOf(m, "LeaseFor", 0, time.Second, 10*time.Second),
	}
	return c
}

// drawClaimOfMany draws a claim of many queues; no other call names most of them.
func (m *crowd) drawClaimOfMany() crowdCall {
	c := m.drawClaim(3, oneOf(m, "NoWait", true, false))
	c.req.Queues = slices.Clone(c.req.Queues)
	for i := range dispatch.ShortList {
		c.req.Queues = append(c.req.Queues, fmt.Sprint("nobody's ", i))
	}
	return c
}

func (m *crowd) claimLocal(*rapid.T) {
	c := m.drawClaim(5, true)
	c.local = true
	m.run(c)
}

// line identifies the claim's line of waiting claims: "" for all claims of few queues, else the
// list. Within a line, claims are served first come, first served; lines take turns.
func (c *claimCall) line() string {
	if len(c.req.Queues) <= dispatch.ShortList {
		return ""
	}
	return fmt.Sprint(c.req.Queues)
}

func (c *claimCall) finished() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

func (c *claimCall) do(q *codeq.Queue) {
	defer close(c.done)
	q = queuetest.StartingAt(q, c.shard)
	switch {
	case c.local:
		req := c.req
		req.Local, req.Max = true, max(req.Max, 1)
		c.leases, c.err = q.ClaimBatch(c.ctx, req)
	case c.req.Max == 0:
		var l *codeq.Lease
		if l, c.err = q.Claim(c.ctx, c.req); c.err == nil {
			c.leases = []*codeq.Lease{l}
		}
	default:
		c.leases, c.err = q.ClaimBatch(c.ctx, c.req)
	}
}

func (c *claimCall) judge(m *crowd, before map[codeq.ID]*codeq.TaskInfo, alone bool) {
	ready := m.claimable(before, c.req.Queues...)
	switch {
	case errors.Is(c.err, codeq.ErrEmpty) && c.req.NoWait:
		if alone && ready > 0 {
			m.t.Fatalf("claim of %v is told that it is empty, with %d ready tasks", c.req.Queues, ready)
		}
		return
	case c.err != nil || len(c.leases) == 0 || len(c.leases) > max(c.req.Max, 1):
		m.t.Fatalf("claim of at most %d got %d leases: %v", c.req.Max, len(c.leases), c.err)
	}
	first := c.leases[0]
	for _, name := range c.req.Queues {
		if m.isLimited(name) || !alone || mayStart(before[first.ID]) { // it may have to wait
			break
		}
		if m.claimable(before, name) > 0 {
			require.Equal(m.t, name, first.Queue, "the first of %v that has tasks", c.req.Queues)
			break
		}
	}
	for _, l := range c.leases {
		if queuetest.ShardOf(l.ID, m.opts.Shards) != queuetest.ShardOf(first.ID, m.opts.Shards) || !slices.Contains(c.req.Queues, l.Queue) {
			m.t.Fatalf("claim of %v got tasks of %s, and of two shards", c.req.Queues, l.Queue)
		}
		m.receipts = append(m.receipts, l.Receipt)
		switch now := m.seen[l.ID]; {
		case now == nil || now.State != codeq.Leased:
			if alone {
				m.t.Fatalf("claim got %s, which is %+v", l.ID, now)
			}
		case now.Attempts == l.Attempt && (!reflect.DeepEqual(now.Task, l.Task) || alone && !now.At.Equal(l.Deadline) || now.LastError != l.LastError):
			m.t.Fatalf("claim got\n%+v, the disk has\n%+v", l, now)
		}
		if alone {
			m.judgeOrder(l, before)
		}
		if was := before[l.ID]; was != nil {
			was.State = codeq.Leased // for the next of a batch
		}
	}
	for name, set := range m.settings {
		if n := leased(m.seen, name, ""); alone && set.Concurrency > 0 && n > max(set.Concurrency, leased(before, name, "")) {
			m.t.Fatalf("%d tasks of queue %s are leased, at most %d allowed", n, name, set.Concurrency)
		}
	}
}

// judgeOrder checks that a claim got the first task: it has the highest priority in all shards, and
// is ready for the longest time in its lane.
func (m *crowd) judgeOrder(l *codeq.Lease, before map[codeq.ID]*codeq.TaskInfo) {
	was := before[l.ID]
	if mayStart(was) { // a suspect has its own order
		ready := *was
		ready.State = codeq.Ready
		if !m.mayBeClaimed(before, &ready) || l.Attempt != was.Attempts+1 {
			m.t.Fatalf("claim started attempt %d of %s, which was %+v", l.Attempt, l.ID, was)
		}
		return
	}
	if was == nil || !m.mayBeClaimed(before, was) || l.Attempt != was.Attempts+1 {
		m.t.Fatalf("claim got attempt %d of %s, which was %+v", l.Attempt, l.ID, was)
	}
	for id, o := range before {
		if o.Queue != was.Queue || !m.mayBeClaimed(before, o) || o.LimitKey != "" && m.settings[o.Queue].ConcurrencyPerKey > 0 {
			continue
		}
		if o.Priority > was.Priority {
			m.t.Fatalf("claim got %s of priority %d before %s of priority %d", l.ID, was.Priority, id, o.Priority)
		}
		if o.Priority == was.Priority && o.Tenant == was.Tenant && o.At.Before(was.At) && queuetest.ShardOf(id, m.opts.Shards) == queuetest.ShardOf(l.ID, m.opts.Shards) {
			m.t.Fatalf("claim got %s, ready since %v, before %s of the same lane, ready since %v", l.ID, was.At, id, o.At)
		}
	}
}

// cancelClaim is the action that cancels a claim.
func (m *crowd) cancelClaim(t *rapid.T) {
	if len(m.waiters) == 0 {
		t.Skip()
	}
	i := rapid.IntRange(0, len(m.waiters)-1).Draw(t, "waiter")
	w := m.waiters[i]
	m.waiters = slices.Delete(m.waiters, i, i+1)
	w.cancel()
	synctest.Wait()
	if !w.finished() || !errors.Is(w.err, context.Canceled) {
		t.Fatalf("canceled claim: finished %t, %v", w.finished(), w.err)
	}
}

// produceCall is Produce or ProduceBatch.
type produceCall struct {
	shard int
	tasks []codeq.Task
	ids   []codeq.ID
	err   error
}

func (m *crowd) drawProduce() crowdCall {
	c := &produceCall{shard: m.drawShard(), tasks: make([]codeq.Task, rapid.IntRange(1, 5).Draw(m.t, "tasks"))}
	for i := range c.tasks {
		c.tasks[i] = m.drawTask(i)
	}
	return c
}

// drawTask draws the i-th task of a batch.
func (m *crowd) drawTask(i int) codeq.Task {
	m.serial++
	t := codeq.Task{
		Queue: oneOf(m, "Queue", "a", "a", "b", "b", "c", "d", "e"), Tenant: oneOf(m, "Tenant", "", "x", "y"),
		Priority: oneOf(m, "Priority", 0, 0, 5), Retention: oneOf(m, "Retention", 0, 0, 3*time.Second),
		Group: oneOf(m, "Group", "", "", "", "g"), LimitKey: oneOf(m, "LimitKey", "", "", "", "k"),
		Payload: fmt.Appendf(nil, "%d%*s", m.serial, oneOf(m, "more bytes", 0, 10, 300, 300, 8000), ""),
	}
	if wait := oneOf(m, "RunAt", 0, 0, 0, time.Millisecond, 8*time.Second); wait != 0 {
		t.RunAt = m.wall().Add(wait)
	}
	if key := oneOf(m, "Unique.Key", "", "", "", "u", "v"); key != "" {
		t.Unique = codeq.Unique{Key: key, Replace: rapid.Bool().Draw(m.t, "Replace"), For: oneOf(m, "For", 0, 3*time.Second)}
	}
	for range oneOf(m, "After", 0, 0, 0, 1, 2, fewParents) {
		if i > 0 && rapid.Bool().Draw(m.t, "Nth") {
			t.After = append(t.After, codeq.Nth(rapid.IntRange(0, i-1).Draw(m.t, "sibling")))
		} else if len(m.order) > 0 {
			t.After = append(t.After, rapid.SampledFrom(m.order).Draw(m.t, "parent"))
		}
	}
	return t
}

func (c *produceCall) do(q *codeq.Queue) {
	if !slices.ContainsFunc(c.tasks, func(t codeq.Task) bool { return t.LimitKey+t.Group+t.Unique.Key != "" }) {
		q = queuetest.StartingAt(q, c.shard) // else these tasks decide
	}
	if len(c.tasks) > 1 {
		c.ids, c.err = q.ProduceBatch(context.Background(), c.tasks)
		return
	}
	id, err := q.Produce(context.Background(), c.tasks[0])
	c.ids, c.err = []codeq.ID{id}, err
}

func (c *produceCall) judge(m *crowd, before map[codeq.ID]*codeq.TaskInfo, alone bool) {
	if refused := m.refuses(c.tasks); refused != errors.Is(c.err, codeq.ErrInvalid) {
		m.t.Fatalf("produce of %+v: %v, expected to be refused: %t", c.tasks, c.err, refused)
	} else if refused {
		m.unchanged(before, alone)
		return
	}
	duplicates := make(map[int]codeq.ID)
	for _, d := range duplicatesOf(c.err) {
		duplicates[d.Index] = d.ID
	}
	if c.err != nil && len(duplicates) == 0 {
		m.t.Fatalf("produce of %+v: %v", c.tasks, c.err)
	}
	for i, id := range c.ids {
		task, now := c.tasks[i], m.seen[id]
		home, bound := m.home(&task)
		switch holder, duplicate := duplicates[i]; {
		case bound && queuetest.ShardOf(id, m.opts.Shards) != home:
			m.t.Fatalf("task %+v is in the shard of %s, expected %d", task, id, home)
		case duplicate && (holder != id || task.Unique.Key == ""):
			m.t.Fatalf("task %+v is a duplicate of %s, by its error of %s", task, id, holder)
		case duplicate, task.Unique.Replace, isReplaced(c.tasks, i), !alone:
		case now == nil && len(task.After) > 0: // perhaps canceled at once
		case now == nil || !bytes.Equal(now.Payload, task.Payload) || before[id] != nil:
			m.t.Fatalf("produce of %+v stored %s: %+v", task, id, now)
		}
		m.order = append(m.order, id)
	}
}

// isReplaced reports whether a later task of the batch replaces task i.
func isReplaced(tasks []codeq.Task, i int) bool {
	return slices.ContainsFunc(tasks[i+1:], func(t codeq.Task) bool {
		return t.Unique.Replace && t.Queue == tasks[i].Queue && t.Unique.Key == tasks[i].Unique.Key
	})
}

// home returns the shard of a task.
func (m *crowd) home(t *codeq.Task) (shard int, bound bool) {
	ties := queuetest.TiesOf(t)
	return ties.Home(m.opts.Shards)
}

// refuses reports whether the queue must refuse a batch that is too large for one commit.
func (m *crowd) refuses(tasks []codeq.Task) bool {
	parents, bytes := 0, 0
	for i := range tasks {
		t := &tasks[i]
		var rec record.Record
		rec.MaxAttempts, rec.Lease, rec.Timeout = uint32(t.MaxAttempts), record.Millis(t.LeaseFor), record.Millis(t.Timeout)
		rec.Retention, rec.Headers, rec.Payload = record.Retention(t.Retention), t.Headers, t.Payload
		rec.Ties = queuetest.TiesOf(t)
		parents += len(t.After)
		bytes += len(rec.Encode()) + len(t.Queue) + len(t.Tenant)
		bytes += 300 + 64*len(t.After) // as Limits.CommitBytes says
	}
	return parents > m.opts.Limits.Parents || bytes > m.opts.Limits.CommitBytes
}

// duplicatesOf returns the DuplicateErrors in an error.
func duplicatesOf(err error) (all []codeq.DuplicateError) {
	switch e := err.(type) {
	case *codeq.DuplicateError:
		return []codeq.DuplicateError{*e}
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			all = append(all, duplicatesOf(err)...)
		}
	}
	return all
}

// unchanged checks that a refused call has changed nothing.
func (m *crowd) unchanged(before map[codeq.ID]*codeq.TaskInfo, alone bool) {
	if alone && !reflect.DeepEqual(before, m.seen) {
		m.t.Fatalf("a call that was refused has changed tasks: %+v, before %+v", m.seen, before)
	}
}

// finishCall is a call of a verb with a receipt.
type finishCall struct {
	verb    string
	receipt codeq.Receipt
	next    []codeq.Task
	err     error
}

func (m *crowd) drawFinish() crowdCall {
	if len(m.receipts) == 0 {
		m.t.Skip()
	}
	c := &finishCall{
		verb:    oneOf(m, "verb", "complete", "complete", "retry", "release", "dead letter", "extend"),
		receipt: m.receipts[max(0, len(m.receipts)-1-rapid.IntRange(0, 8).Draw(m.t, "receipt"))],
	}
	if c.verb == "complete" && rapid.IntRange(0, 2).Draw(m.t, "next") == 0 {
		c.next = []codeq.Task{m.drawTask(0)}
		c.next[0].Unique, c.next[0].After = codeq.Unique{}, nil
	}
	return c
}

func (c *finishCall) do(q *codeq.Queue) {
	ctx := context.Background()
	switch c.verb {
	case "complete":
		c.err = q.Complete(ctx, c.receipt, []byte("result"), c.next...)
	case "retry":
		c.err = q.Retry(ctx, c.receipt, codeq.RetryOptions{Err: errors.New("cause"), After: -1})
	case "release":
		c.err = q.Release(ctx, c.receipt, 0)
	case "dead letter":
		c.err = q.DeadLetter(ctx, c.receipt, errors.New("cause"))
	case "extend":
		c.err = q.Extend(ctx, c.receipt, 20*time.Second)
	}
}

func (c *finishCall) judge(m *crowd, before map[codeq.ID]*codeq.TaskInfo, alone bool) {
	was, now := before[c.receipt.ID], m.seen[c.receipt.ID]
	last := func(r codeq.Receipt) bool { return r.ID == c.receipt.ID && r.Token > c.receipt.Token }
	held := was != nil && was.State == codeq.Leased && !slices.ContainsFunc(m.receipts, last)
	switch {
	case c.verb == "complete" && m.refuses(c.next):
		require.ErrorIs(m.t, c.err, codeq.ErrInvalid)
		m.unchanged(before, alone)
		return
	case !held && alone:
		require.ErrorIs(m.t, c.err, codeq.ErrLeaseLost)
		m.unchanged(before, alone)
		return
	case c.err != nil && !alone && errors.Is(c.err, codeq.ErrLeaseLost): // another call has ended it
		return
	}
	m.noError(c.err)
	if !alone {
		return
	}
	state := codeq.State(0)
	if now != nil {
		state = now.State
	}
	want := map[string][]codeq.State{
		"complete": {0, codeq.Done}, "retry": {codeq.Ready, codeq.Dead}, "release": {codeq.Ready}, "dead letter": {codeq.Dead}, "extend": {codeq.Leased},
	}
	if !slices.Contains(want[c.verb], state) {
		m.t.Fatalf("after %s of %s it is %+v", c.verb, c.receipt, now)
	}
	if c.verb == "retry" || c.verb == "dead letter" {
		require.Equal(m.t, "cause", now.LastError)
	}
	for _, task := range c.next {
		if !slices.ContainsFunc(slices.Collect(maps.Values(m.seen)), func(t *codeq.TaskInfo) bool { return bytes.Equal(t.Payload, task.Payload) }) {
			m.t.Fatalf("follow-up %q was not produced", task.Payload)
		}
	}
}

// controlCall is a verb that names a task by its ID.
type controlCall struct {
	verb string
	id   codeq.ID
	err  error
}

func (m *crowd) drawControl() crowdCall {
	if len(m.order) == 0 {
		m.t.Skip()
	}
	return &controlCall{verb: oneOf(m, "verb", "cancel", "cancel", "priority", "run at", "redrive"), id: rapid.SampledFrom(m.order).Draw(m.t, "task")}
}

func (c *controlCall) do(q *codeq.Queue) {
	ctx := context.Background()
	switch c.verb {
	case "cancel":
		c.err = q.Cancel(ctx, c.id)
	case "priority":
		c.err = q.SetPriority(ctx, c.id, 9)
	case "run at":
		c.err = q.SetRunAt(ctx, c.id, time.Time{})
	case "redrive":
		c.err = q.RedriveDead(ctx, c.id)
	}
}

func (c *controlCall) judge(m *crowd, before map[codeq.ID]*codeq.TaskInfo, alone bool) {
	was, now := before[c.id], m.seen[c.id]
	var want error
	switch {
	case !alone:
		return
	case was == nil, c.verb == "redrive" && was.State != codeq.Dead:
		want = codeq.ErrNotFound
	case c.verb == "cancel" && (was.State == codeq.Done || was.State == codeq.Canceled),
		(c.verb == "priority" || c.verb == "run at") && was.State >= codeq.Leased:
		want = codeq.ErrNotWaiting
	case c.verb == "redrive" && was.Unique.Key != "" && errors.Is(c.err, codeq.ErrDuplicate):
		want = codeq.ErrDuplicate
	}
	if want != nil {
		require.ErrorIs(m.t, c.err, want)
		m.unchanged(before, alone)
		return
	}
	m.noError(c.err)
	good := map[string]bool{
		"cancel": now == nil || now.State == codeq.Canceled, "priority": now != nil && now.Priority == 9,
		"run at": now != nil && now.RunAt.IsZero(), "redrive": now != nil && now.State < codeq.Leased && now.Attempts == 0,
	}
	if !good[c.verb] {
		m.t.Fatalf("after %s of %+v it is %+v", c.verb, was, now)
	}
}

// configureCall is Configure, Pause or Resume.
type configureCall struct {
	queue, verb string
	to          codeq.Settings
	err         error
}

func (m *crowd) drawConfigure() crowdCall {
	c := &configureCall{queue: oneOf(m, "queue", "a", "b"), verb: oneOf(m, "verb", "", "", "pause", "resume")}
	c.to = codeq.Settings{
		Concurrency:       oneOf(m, "Concurrency", 0, 0, 1, 3),
		ConcurrencyPerKey: oneOf(m, "ConcurrencyPerKey", 0, 1, 2),
		TenantWeights:     oneOf(m, "TenantWeights", nil, map[string]int{"x": 3}),
		HoldGroups:        rapid.Bool().Draw(m.t, "HoldGroups"),
	}
	return c
}

func (c *configureCall) do(q *codeq.Queue) {
	ctx := context.Background()
	switch c.verb {
	case "pause":
		c.err = q.Pause(ctx, c.queue)
	case "resume":
		c.err = q.Resume(ctx, c.queue)
	default:
		c.err = q.Configure(ctx, c.queue, func(s *codeq.Settings) { *s = c.to })
	}
}

func (c *configureCall) judge(m *crowd, _ map[codeq.ID]*codeq.TaskInfo, _ bool) {
	m.noError(c.err)
	set := m.settings[c.queue]
	if c.verb == "" {
		set = c.to
		set.TenantWeights = maps.Clone(c.to.TenantWeights)
	}
	set.Paused = c.verb == "pause"
	if m.settings[c.queue] = set; reflect.DeepEqual(set, codeq.Settings{}) {
		delete(m.settings, c.queue) // default settings are not stored
	}
}
