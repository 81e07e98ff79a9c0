package engine

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"pgregory.net/rapid"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// call is an operation that callers ask for.
type call interface {
	// do makes the shards decide the call.
	do(m *model)
	// apply checks the answer, and does the same in the model.
	apply(m *model)
}

// single is the action of one call.
func (m *model) single(draw func(*model) call) func(*rapid.T) {
	return func(*rapid.T) { m.run(draw(m)) }
}

// run makes a call while nothing else happens.
func (m *model) run(c call) {
	c.do(m)
	m.rt.Logf("%T %+v", c, c)
	m.deliver()
	c.apply(m)
	m.settle(true)
}

// drain is the action of claims in a row.
func (m *model) drain(*rapid.T) {
	w := m.drawClaim().(*claimCall)
	for range rapid.IntRange(2, 8).Draw(m.rt, "claims") {
		next := *w
		m.run(&next)
	}
}

// handBack is the action of a claim that returns some of its tasks.
func (m *model) handBack(*rapid.T) {
	w := m.drawClaimBatch().(*claimCall)
	m.run(w)
	for _, g := range w.grants {
		if how := oneOf(m, "how", -1, FailReturn, FailRelease, FailRetry); how >= 0 {
			m.run(&failCall{receipt: g.Receipt, how: how})
		}
	}
}

// together is the action of several calls that each shard decides in one group.
func (m *model) together(*rapid.T) {
	draws := []func(*model) call{
		(*model).drawProduce, (*model).drawClaimBatch, (*model).drawComplete, (*model).drawFinish, (*model).drawExtend,
	}
	atOnce := m.plain && !m.isSmall() // certain before the commit, except IDs of follow-ups
	if atOnce {
		draws[2] = (*model).drawCompleteAlone
	}
	calls := make([]call, rapid.IntRange(2, 6).Draw(m.rt, "calls"))
	m.hurriedly(func() {
		for i := range calls {
			calls[i] = oneOf(m, "call", draws...)(m)
		}
	})
	if atOnce {
		for _, c := range calls {
			c.do(m)
			c.apply(m)
		}
	} else {
		for _, c := range calls {
			c.do(m)
		}
		m.deliver()
		m.unordered = true
		for _, c := range calls {
			if w, ok := c.(*claimCall); ok {
				w.among = true
			}
			c.apply(m)
		}
		m.unordered = false
		m.react()
		for _, c := range calls {
			if w, ok := c.(*claimCall); ok {
				w.grantAll(m, false)
			}
		}
	}
	m.deliver()
	m.settle(false)
}

// hurriedly draws calls for one group, or calls without room for their additions.
func (m *model) hurriedly(draw func()) {
	m.hurried = true
	defer func() { m.hurried = false }()
	draw()
}

// inTurn is the action of time that passes, and of calls that the shard decides in the group with
// the work that has become due.
func (m *model) inTurn(t *rapid.T) {
	next := m.nextEvent()
	if !m.plain || m.isSmall() || next == Never || len(m.schedules) > 0 { // a tick's task is found once it is stored
		t.Skip()
	}
	calls := make([]call, rapid.IntRange(1, 3).Draw(t, "calls"))
	for i := range calls {
		calls[i] = oneOf(m, "call", (*model).drawProduce, (*model).drawClaimBatch)(m)
	}
	m.advance(next)
	for shard := range m.shards {
		m.group(shard)
	}
	m.sync()
	for _, c := range calls {
		c.do(m)
		c.apply(m)
	}
	m.deliver()
	m.settle(false)
}

// inOneGroup is the action of calls that change waiting tasks, some tasks several times, and that
// produce tasks with the keys of these tasks. A shard decides all its calls in one group, and each
// call finds the effects of the calls before it.
func (m *model) inOneGroup(*rapid.T) {
	if m.plain {
		m.rt.Skip()
	}
	var calls []call
	for range rapid.IntRange(2, 8).Draw(m.rt, "calls") {
		if rapid.Bool().Draw(m.rt, "produce") {
			m.drawn = tiesKeys
			calls = append(calls, m.produceOf(m.drawTasks(1)))
			continue
		}
		calls = append(calls, m.drawAlteration(oneOf(m, "how", AlterPriority, AlterRunAt, AlterRedrive)))
	}
	if rapid.Bool().Draw(m.rt, "release a key") { // last: it may wait for the next group
		c := m.drawReleaseKey().(*releaseKeyCall)
		if p, ok := calls[len(calls)-1].(*produceCall); ok && p.tasks[0].rec.UniqueKey != "" {
			c.of = p.tasks[0]
		}
		calls = append(calls, c)
	}
	for _, c := range calls {
		c.do(m)
	}
	m.deliver()
	for _, c := range calls {
		c.apply(m)
	}
	m.settle(false)
}

// alterWoken is the action of a call that alters a task in the group with the end of its last
// parent. The task still waits if this group does not release it; else the task has gone on.
func (m *model) alterWoken(t *rapid.T) {
	leased := m.leasedTasks()
	if m.plain || len(leased) == 0 {
		t.Skip()
	}
	parent := oneOf(m, "parent", leased...)
	m.drawn = tiesNone
	c := &produceCall{shard: parent.shard, tasks: m.drawTasks(1)}
	c.tasks[0].rec.Parents = [][record.IDLen]byte{parent.id}
	m.run(c)

	complete := &completeCall{receipt: parent.receipt}
	alter := &alterCall{how: oneOf(m, "how", AlterPriority, AlterRunAt), id: c.out.IDs[0], to: AlterTo{Arg: 5}}
	if alter.how == AlterRunAt {
		alter.to.Arg = m.Wall + oneOf[uint64](m, "later", 0, 1000)
	}
	complete.do(m)
	alter.do(m)
	m.deliver()
	p := keys.Place{}
	if child := m.tasks[alter.id]; child != nil {
		p = m.placeOf(child)
	}
	if p.Range == keys.Task && keys.IsFirstPlace(p.At) {
		alter.apply(m)
		complete.apply(m)
	} else {
		complete.apply(m)
		alter.apply(m)
	}
	m.settle(false)
}

func (m *model) leasedTasks() []*modelTask {
	return slices.DeleteFunc(slices.Clone(m.live), func(t *modelTask) bool { return t.state != Leased })
}

// family is the action of a task that ends while many children wait for it. The first children
// learn its end in the commit of this end.
func (m *model) family(t *rapid.T) {
	leased := m.leasedTasks()
	if m.plain || len(leased) == 0 || len(m.live) > 150 {
		t.Skip()
	}
	parent := oneOf(m, "parent", leased...)
	m.drawn = tiesNone
	child := m.drawTasks(1)[0]
	child.rec.Parents = [][record.IDLen]byte{parent.id}
	produce := &produceCall{shard: parent.shard, tasks: make([]spec, rapid.IntRange(TellAtOnce, 2*TellAtOnce).Draw(t, "children"))}
	for i := range produce.tasks {
		m.serial++
		child.rec.Payload, child.rec.OnDead = fmt.Append(nil, m.serial), uint8(i%3)
		produce.tasks[i] = child
	}
	m.run(produce)

	var end call = &alterCall{how: AlterCancel, id: parent.id}
	switch rapid.IntRange(0, 2).Draw(t, "how") {
	case 1:
		end = &completeCall{receipt: parent.receipt}
	case 2:
		end = &failCall{receipt: parent.receipt, how: FailDead}
	}
	if rapid.Bool().Draw(t, "crash") {
		m.crashAfter(end)
	} else {
		m.run(end)
	}
}

// crowd is the action of tasks of one key with a limit of one or two leases: claims park the other
// tasks. Room may then pass to the next task, and from there to another one.
func (m *model) crowd(t *rapid.T) {
	if m.plain {
		t.Skip()
	}
	m.drawn = tiesNone
	tasks := m.drawBacklogTasks()
	for i := range tasks {
		task := &tasks[i]
		task.rec.LimitKey = "k"
		tie(&task.LaneKey, &task.rec)
	}
	queue := tasks[0].Queue
	m.run(&configureCall{queue: queue, to: record.Settings{ConcurrencyPerKey: rapid.IntRange(1, 2).Draw(t, "limit")}})
	produce := m.produceOf(tasks)
	m.run(produce)
	for range rapid.IntRange(2, 8).Draw(t, "claims") {
		m.run(&claimCall{shard: produce.shard, queue: queue, max: 1, duration: 5000})
	}
	of := func(state TaskState) *modelTask {
		for _, t := range m.live {
			if t.state == state && t.rec.LimitKey == "k" && t.Queue == queue {
				return t
			}
		}
		return nil
	}
	if l := of(Leased); l != nil && rapid.Bool().Draw(t, "finish one") {
		m.run(&completeCall{receipt: l.receipt})
	}
	if next := of(Ready); next != nil && rapid.Bool().Draw(t, "remove the next") {
		m.run(&alterCall{how: oneOf(m, "how", AlterCancel, AlterRunAt), id: next.id, to: AlterTo{Arg: m.Wall + 1000}})
	}
}

// claimCall is a claim of one queue in one shard.
type claimCall struct {
	shard    int
	queue    string
	max      int
	rank     uint64
	duration uint64 // ms
	local    bool
	handled  bool
	grants   []Grant
	among    bool // the shard decides other calls in the same group
}

func (m *model) drawClaim() call {
	local := m.oneIn(3, "local")
	return &claimCall{
		shard: m.drawShard(), queue: oneOf(m, "queue", "a", "a", "b", "b", "c", "d", "e"), max: 1,
		duration: oneOf[uint64](m, "lease", 5000, 1000, 10_000), local: local, handled: local && !m.oneIn(4, "by Claim"),
	}
}

func (m *model) drawClaimBatch() call {
	c := m.drawClaim().(*claimCall)
	c.max = rapid.IntRange(1, 5).Draw(m.rt, "max")
	return c
}

// drawClaimOfRank draws a claim that excludes tasks of low priorities.
func (m *model) drawClaimOfRank() call {
	c := m.drawClaimBatch().(*claimCall)
	c.rank = oneOf(m, "rank", 0, Rank(5), Rank(9))
	return c
}

func (c *claimCall) do(m *model) {
	m.decide(c.shard, func(s *drivenShard) (Verdict, error) {
		q := s.Names.Queues[c.queue]
		for q != nil && len(c.grants) < c.max {
			l, pending := s.Next(q, c.rank)
			if pending && len(c.grants) == 0 {
				return Again, nil
			}
			if l == nil {
				break
			}
			var err error
			c.grants, err = s.Grant(l, c.duration, Holder{Local: c.local, Handled: c.handled}, c.grants)
			m.noError(err)
			g := &c.grants[len(c.grants)-1]
			g.Rec = slices.Clone(g.Rec)
		}
		return Decided, nil
	})
	m.claimed = true
}

func (c *claimCall) apply(m *model) {
	if c.among {
		return
	}
	found := m.ready(c.shard, c.queue, uint8(max(c.rank, 1)-1))
	if found > 0 != (len(c.grants) > 0) {
		m.rt.Fatalf("claim of queue %s in shard %d got %d tasks, with %d ready", c.queue, c.shard, len(c.grants), found)
	}
	c.grantAll(m, true)
}

func (c *claimCall) grantAll(m *model, strict bool) {
	for i := range c.grants {
		m.grant(c, &c.grants[i], strict)
	}
}

// grant checks a task that a claim got.
func (m *model) grant(c *claimCall, g *Grant, strict bool) {
	id := keys.FormatID(g.Receipt.ID)
	t := m.tasks[g.Receipt.ID]
	if t != nil && t.isParked() { // it may go on again
		t.late = true
		m.toReady(t, keys.SinceOf(t.id))
	}
	if t == nil || t.state != Ready || m.keyFull(t) || m.isHeld(t.rec.Group) || m.settings[c.queue].Paused || t.shard != c.shard || t.Queue != c.queue || Rank(t.Priority) < c.rank {
		m.rt.Fatalf("claim %+v returned %s, which is %+v; settings: %+v", c, id, t, m.settings[c.queue])
	}
	for _, o := range m.live {
		if !strict || o.state != Ready || o.Queue != t.Queue || o.shard != t.shard {
			continue
		}
		if o.late || m.parks(o) { // was not ready yet, or a claim may park it
			continue
		}
		if o.Priority > t.Priority {
			m.rt.Fatalf("claim returned %s of priority %d before %s of priority %d", id, t.Priority, keys.FormatID(o.id), o.Priority)
		}
		if o.LaneKey == t.LaneKey && m.comesBefore(o, t) {
			m.rt.Fatalf("claim returned %s (%x) before %s (%x) of the same lane", id, t.since, keys.FormatID(o.id), o.since)
		}
	}
	m.served[t.lane()] = true

	duration := c.duration
	if t.rec.Lease != 0 && !c.local {
		duration = t.rec.Lease
	}
	if g.Receipt.Token <= t.receipt.Token {
		m.rt.Fatalf("token %x of %s is not larger than the last, %x", g.Receipt.Token, id, t.receipt.Token)
	}
	rec, err := record.Decode(g.Rec)
	m.noError(err)
	rec.Attempts = t.rec.Attempts
	m.compareRecord(t, &rec)
	m.begins(t)
	t.receipt = g.Receipt
	m.receipts = append(m.receipts, t.receipt)
	t.over, t.local, t.handled, t.overdue = false, c.local, c.handled, false
	t.deadline, t.state = m.Now+duration, Leased
	m.lease(t, duration)
	t.rec.Attempts++
	m.expect(EventClaimed, t, "")
	if *g.LaneKey != t.LaneKey || g.Attempt != t.rec.Attempts || g.Deadline != t.at || record.Duration(g.Timeout) != m.settings[t.Queue].Timeout {
		m.rt.Fatalf("claim returned %+v, expected %+v", g, t)
	}
}

// comesBefore reports whether claims must get one of two ready tasks of a lane before the other.
// While a shard reports a parent's end in pieces, a new child waits for this report. It then comes
// after the other tasks of its millisecond.
func (m *model) comesBefore(a, b *modelTask) bool {
	if m.isSmall() && keys.SinceMillis(a.since) == keys.SinceMillis(b.since) {
		return false
	}
	return a.compare(b) < 0
}

// drawReceipt draws a receipt, usually of a lease in force.
func (m *model) drawReceipt() Receipt {
	if len(m.receipts) == 0 {
		m.rt.Skip()
	}
	if leased := m.leasedTasks(); len(leased) > 0 && !m.oneIn(5, "stale receipt") {
		return oneOf(m, "lease", leased...).receipt
	}
	return oneOf(m, "receipt", m.receipts...)
}

// lost checks that the shard has refused a verb because its receipt names no lease in force.
func (m *model) lost(r Receipt, err error) {
	if !errors.Is(err, base.ErrLeaseLost) || errors.Is(err, base.ErrCanceled) != m.canceled[r] {
		m.rt.Fatalf("verb with %s, not in force: %v", r, err)
	}
}

// returned is the end of a handler by a verb, after the end of its lease.
func (m *model) returned(r Receipt) {
	if _, ok := m.orphans[r]; ok {
		delete(m.orphans, r)
		m.react()
	}
}

// completeCall is Complete.
type completeCall struct {
	receipt Receipt
	result  string
	next    []spec
	keep    int64 // the retention of its handler, ms
	goesOn  bool  // the handler does
	full    bool
	err     error
}

func (m *model) drawCompleteAlone() call {
	c := &completeCall{receipt: m.drawReceipt(), keep: oneOf[int64](m, "keep", 0, 0, 0, 2500), goesOn: m.oneIn(3, "goes on")}
	if rapid.Bool().Draw(m.rt, "result") {
		c.result = "result of " + c.receipt.String()
	}
	return c
}

func (m *model) drawComplete() call {
	c := m.drawCompleteAlone().(*completeCall)
	if m.drawn = tiesNext; m.hurried {
		m.drawn = tiesNone
	}
	c.next = m.drawTasks(oneOf(m, "next", 0, 0, 1, 2, 4))
	if t := m.tasks[c.receipt.ID]; t != nil && len(c.next) > 0 && !m.hurried && rapid.Bool().Draw(m.rt, "again") {
		n := &c.next[0]
		n.Queue, n.Tenant = t.Queue, t.Tenant
		n.rec.GroupKey, n.rec.LimitKey, n.rec.UniqueKey = t.rec.GroupKey, t.rec.LimitKey, t.rec.UniqueKey
		if n.rec.Ties = (record.Ties{Flags: n.rec.Flags, UniqueFor: n.rec.UniqueFor}); n.rec.UniqueKey == "" {
			n.rec.Ties = record.Ties{}
		}
		tie(&n.LaneKey, &n.rec)
	}
	if len(c.next) > 0 && m.drawn != tiesNone && m.oneIn(3, "after the task itself") {
		r := &c.next[0].rec
		r.Parents = append(r.Parents, c.receipt.ID)
		if onMissing := oneOf[uint8](m, "on missing", 0, 1, 2); !slices.ContainsFunc(r.Parents, m.isMissing) {
			r.OnMissing = onMissing // else the task might be canceled at once, and not be found
		}
	}
	m.singleOut(c.next)
	for i := range c.next { // likewise
		r := &c.next[i].rec
		r.Parents = slices.DeleteFunc(r.Parents, func(p [record.IDLen]byte) bool {
			n, sibling := keys.NthOf(p)
			return sibling && m.standsForEnded(&c.next[n].rec)
		})
		if len(r.Parents) == 0 {
			r.Parents, r.OnDead, r.OnMissing = nil, 0, 0
		}
	}
	return c
}

// standsForEnded reports whether a new task is a duplicate of one that has ended and cancels its
// children, perhaps.
func (m *model) standsForEnded(r *record.Record) bool {
	id, taken := m.holder(r)
	t := m.tasks[id]
	return taken && (t == nil || t.state == Dead || t.state == Canceled)
}

func (c *completeCall) do(m *model) {
	var v Verdict
	v, c.err = m.decide(keys.ShardOf(c.receipt.ID, m.config.Shards), func(s *drivenShard) (Verdict, error) {
		return s.Complete(c.receipt, []byte(c.result), c.keep, prepare(c.next), c.goesOn)
	})
	c.full = v == Full
}

func (c *completeCall) apply(m *model) {
	t := m.held(c.receipt)
	if t == nil {
		if m.lost(c.receipt, c.err); !c.goesOn {
			m.returned(c.receipt)
		}
		return
	}
	own := t.rec.Retention
	t.rec.Retention = cmp.Or(own, c.keep)
	if full := m.shards[t.shard].Room > RoomScarce && m.retention(t) != 0; full || c.full {
		t.rec.Retention = own
		if full != c.full {
			m.rt.Fatalf("complete of %s: full %t, expected %t", c.receipt, c.full, full)
		}
		return
	}
	m.noError(c.err)
	if c.goesOn {
		m.orphan(t)
	}
	m.toDone(t, c.result)
	m.completed = t.id
	m.adopt(t.shard, c.next)
	m.completed = keys.ID{}
	m.react()
}

// adopt finds the follow-ups that a Complete has produced: its answer does not have their IDs.
func (m *model) adopt(shard int, next []spec) {
	if len(next) == 0 {
		return
	}
	byPayload := maps.Clone(m.adopted)
	if byPayload == nil {
		byPayload = make(map[string]keys.ID)
	}
	m.eachStored(func(t *store.Task) { byPayload[string(t.Record.Payload)] = t.ID })
	ids, stored := make([]keys.ID, len(next)), make(map[keys.ID]bool)
	for _, i := range m.orderOf(next, byPayload) {
		task := next[i]
		id, ok := byPayload[string(task.rec.Payload)]
		holder, taken := m.holder(&task.rec)
		if ok {
			holder, taken = m.holderOf(&task.rec, id)
		}
		if taken && !m.takeOver(&task.rec) {
			ids[i] = holder
			if t := m.tasks[holder]; task.rec.Flags&record.ReplaceWaiting != 0 && t != nil && t.waiting() && len(t.steps) == 0 {
				m.replace(t, task)
				stored[holder] = true
			} else if ok {
				m.rt.Fatalf("follow-up %q has the key of task %s", task.rec.Payload, keys.FormatID(holder))
			}
			continue
		}
		if !ok {
			m.rt.Fatalf("follow-up %q was not produced", task.rec.Payload)
		}
		ids[i] = id
		home := m.home(&task.rec)
		if home < 0 && slices.ContainsFunc(task.rec.Parents, isNth) { // it may be with any of its siblings
			home = keys.ShardOf(id, m.config.Shards)
		} else if home < 0 {
			home = shard
		}
		m.admit(home, task, id, ids, home != shard)
		stored[id] = true
	}
	m.markParents(next, ids, stored)
}

// orderOf returns the order of the follow-ups as the shards took them in. In each shard this is the
// order of their IDs. No follow-up comes before its parents, or before an earlier follow-up with
// its key.
func (m *model) orderOf(next []spec, ids map[string]keys.ID) (order []int) {
	isIn := func(i int) bool { return slices.Contains(order, i) }
	before := func(a, b int) bool { // a comes before b
		if slices.Contains(next[b].rec.Parents, keys.Nth(a)) || a < b && next[a].rec.UniqueKey != "" && next[a].rec.Unique == next[b].rec.Unique {
			return true
		}
		x, y := ids[string(next[a].rec.Payload)], ids[string(next[b].rec.Payload)]
		isNew := func(id keys.ID) bool { return id != keys.ID{} && m.tasks[id] == nil } // and has not replaced another one
		return isNew(x) && isNew(y) && keys.ShardOf(x, m.config.Shards) == keys.ShardOf(y, m.config.Shards) && keys.SinceOf(x) < keys.SinceOf(y)
	}
	for len(order) < len(next) {
		n := len(order)
		for i := range next {
			if !isIn(i) && !slices.ContainsFunc(seq(len(next)), func(a int) bool { return a != i && !isIn(a) && before(a, i) }) {
				order = append(order, i)
			}
		}
		if len(order) == n {
			m.rt.Fatalf("follow-ups in no order")
		}
	}
	return order
}

func seq(n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = i
	}
	return s
}

// failCall is Fail.
type failCall struct {
	receipt Receipt
	how     Failure
	policy  *record.Policy // of the handler
	goesOn  bool           // the handler does
	wait    int64          // ms; negative: by the backoff
	cause   string
	waited  uint64 // FailUnhandled: how long the task has gone without a handler, ms
	err     error
}

func (m *model) drawFinish() call {
	return &failCall{
		receipt: m.drawReceipt(), how: oneOf(m, "how", FailRetry, FailRetry, FailRelease, FailReturn, FailDead, FailOverdue, FailUnhandled), goesOn: m.oneIn(2, "goes on"),
		policy: m.drawPolicy(),
		wait:   oneOf[int64](m, "wait", -1, 0, 1, 2000), cause: oneOf(m, "cause", "", "first", "second"),
	}
}

func (m *model) drawPolicy() *record.Policy {
	if m.oneIn(2, "no policy") {
		return nil
	}
	return &record.Policy{
		MaxAttempts: oneOf(m, "MaxAttempts", 0, 1, 3, 5),
		Backoff:     oneOf(m, "Backoff", base.Backoff{}, base.Backoff{Base: 1500 * time.Millisecond, Factor: 1, Jitter: -1}),
		RetryFirst:  rapid.Bool().Draw(m.rt, "RetryFirst"),
	}
}

func (c *failCall) do(m *model) {
	wait := c.wait
	if c.how != FailRetry {
		wait = max(wait, 0)
	}
	_, c.err = m.decide(keys.ShardOf(c.receipt.ID, m.config.Shards), func(s *drivenShard) (Verdict, error) {
		how := c.how
		if c.goesOn {
			how |= StillRuns
		}
		if c.how == FailUnhandled {
			c.waited = m.withoutHandler(s, c.receipt)
		}
		return s.Fail(c.receipt, how, c.policy, wait, c.cause)
	})
}

func (c *failCall) apply(m *model) {
	t := m.held(c.receipt)
	if t == nil {
		if m.lost(c.receipt, c.err); c.how != FailOverdue && !c.goesOn { // the handler has returned
			m.returned(c.receipt)
		}
		return
	}
	m.noError(c.err)
	if c.how == FailOverdue {
		t.overdue = true
		return
	}
	if c.how == FailReturn && t.overdue {
		c.how, c.wait, c.cause = FailRetry, -1, causeOverdue
	}
	t.rec.RetryFirst = false
	if c.goesOn {
		m.orphan(t)
	}
	if c.how == FailRetry || c.how == FailDead {
		if c.cause != "" {
			t.rec.Error = c.cause
		}
	} else {
		t.rec.Attempts--
		if c.cause != "" && c.how != FailUnhandled {
			t.rec.Error = c.cause
		}
		if c.how == FailUnhandled {
			m.unhandled(t, c)
			return
		}
		m.expect(EventReleased, t, "")
	}
	switch c.how {
	case FailRetry:
		by, queue := record.Policy{}, m.settings[t.Queue].Policy
		if c.policy != nil {
			by = *c.policy
		}
		m.retry(t, by.MaxAttempts, c.cause, func() {
			m.expect(EventRetried, t, t.rec.Error)
			wait := c.wait
			if wait < 0 {
				wait = int64(min(1000<<(t.rec.Attempts-1), 3000))
				for _, p := range []record.Policy{queue, by} {
					if backoff, ok := p.Delay(int(t.rec.Attempts), 0.5); ok {
						wait = backoff.Milliseconds()
					}
				}
			}
			m.wait(t, uint64(wait), by.RetryFirst || queue.RetryFirst)
		})
	case FailRelease:
		m.wait(t, uint64(max(c.wait, 0)), false)
	case FailReturn:
		m.toReadyOrHeld(t, t.since)
	case FailDead:
		m.toDead(t)
	}
	m.react()
}

// withoutHandler returns how long a leased task has gone without a handler, ms: since the first
// lease of those that ended for that after each other.
func (m *model) withoutHandler(s *drivenShard, r Receipt) uint64 {
	ls := s.Leases.held(r)
	if ls == nil {
		return 0
	}
	rec, err := s.Leases.recordOf(ls)
	m.noError(err)
	since := keys.GrantedAt(r.Token)
	if h := rec.History; h != nil && EventKind(h.Last().How) == eventUnhandled {
		since = h.Last().Start
	}
	return max(since, s.mint.Stamp()) - since
}

// unhandled is for a task that no handler knows. c.wait is how long it may go without one.
func (m *model) unhandled(t *modelTask, c *failCall) {
	m.expect(eventUnhandled, t, "")
	if t.folded = true; c.wait > 0 && c.waited >= uint64(c.wait) {
		t.rec.Error = c.cause
		m.toDead(t)
	} else {
		wait := min(max(c.waited, 1000), 60_000)
		if c.wait > 0 {
			wait = min(wait, uint64(c.wait)-c.waited)
		}
		m.wait(t, wait, false)
	}
	m.react()
}

// extendCall is Extend.
type extendCall struct {
	receipt Receipt
	ms      uint64
	err     error
}

func (m *model) drawExtend() call {
	return &extendCall{receipt: m.drawReceipt(), ms: oneOf[uint64](m, "ms", 1000, 20_000)}
}

func (c *extendCall) do(m *model) {
	_, c.err = m.decide(keys.ShardOf(c.receipt.ID, m.config.Shards), func(s *drivenShard) (Verdict, error) {
		return Decided, s.Leases.Extend(c.receipt, c.ms)
	})
}

func (c *extendCall) apply(m *model) {
	t := m.held(c.receipt)
	if t == nil {
		m.lost(c.receipt, c.err)
		return
	}
	m.noError(c.err)
	t.deadline = m.Now + c.ms
	if !t.local || m.config.Replicated { // otherwise the deadline is in memory
		m.lease(t, c.ms)
	}
}

// extendAll is the action of calls that extend leases again and again in one group.
func (m *model) extendAll(t *rapid.T) {
	leased := m.leasedTasks()
	if len(leased) < 2 {
		t.Skip()
	}
	calls := make([]*extendCall, rapid.IntRange(3, 8).Draw(t, "calls"))
	for i := range calls {
		calls[i] = &extendCall{receipt: oneOf(m, "lease", leased...).receipt, ms: oneOf[uint64](m, "ms", 1000, 20_000)}
		calls[i].do(m)
	}
	m.deliver()
	for _, c := range calls {
		c.apply(m)
	}
	m.settle(true)
}

// drawBogus draws a call with a receipt that never existed.
func (m *model) drawBogus() call {
	r := m.drawReceipt()
	switch rapid.IntRange(0, 3).Draw(m.rt, "change") {
	case 0:
		r.Token++
	case 1:
		r.Token--
	case 2:
		r.Token = 0
	case 3:
		r.ID[14]++
	}
	m.drawn = tiesNone
	switch rapid.IntRange(0, 2).Draw(m.rt, "verb") {
	case 0:
		return &completeCall{receipt: r, next: m.drawTasks(rapid.IntRange(0, 1).Draw(m.rt, "next"))}
	case 1:
		return &extendCall{receipt: r, ms: 1000}
	}
	return &failCall{receipt: r, how: oneOf(m, "how", FailRetry, FailRelease, FailReturn, FailDead)}
}

// drawID draws the ID of a task, usually of an existing one.
func (m *model) drawID() keys.ID {
	if len(m.order) == 0 {
		m.rt.Skip()
	}
	if len(m.live) > 0 && !m.oneIn(8, "gone") {
		return oneOf(m, "task", m.live...).id
	}
	return oneOf(m, "any task", m.order...)
}

// drawIDIn draws the ID of a task in one of some states, if such a task exists.
func (m *model) drawIDIn(states ...TaskState) keys.ID {
	in := slices.DeleteFunc(slices.Clone(m.live), func(t *modelTask) bool { return !slices.Contains(states, t.state) })
	if len(in) == 0 || m.oneIn(5, "any state") {
		return m.drawID()
	}
	return oneOf(m, "task", in...).id
}
