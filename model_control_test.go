package codeq

import (
	"context"
	"errors"
	"maps"
	"reflect"
	"slices"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"codeq/internal/keys"
)

// drawID is of a task that exists rather than of one that is no more.
func (m *model) drawID() ID {
	if len(m.order) == 0 {
		m.t.Skip()
	}
	live := slices.DeleteFunc(slices.Clone(m.order), func(id ID) bool { return m.tasks[id] == nil })
	if len(live) > 0 && rapid.IntRange(0, 7).Draw(m.t, "gone") > 0 {
		return live[rapid.IntRange(0, len(live)-1).Draw(m.t, "task")]
	}
	return m.order[rapid.IntRange(0, len(m.order)-1).Draw(m.t, "task")]
}

// crowd is the action of tasks of one key, of which one or two can be leased:
// claims park the others. Room may then pass to the next, and on from there.
func (m *model) crowd(t *rapid.T) {
	if m.plain {
		t.Skip()
	}
	c := m.drawBacklog().(*produceCall)
	for i := range c.tasks {
		task := &c.tasks[i]
		task.LimitKey, task.Group, task.Unique, task.After = "k", "", Unique{}, nil
	}
	m.run(&configureCall{queue: c.tasks[0].Queue, to: Settings{ConcurrencyPerKey: rapid.IntRange(1, 2).Draw(t, "limit")}})
	m.run(c)
	m.drain(t)
	of := func(state State) *modelTask {
		i := slices.IndexFunc(m.inOrder(), func(t *modelTask) bool {
			return t.want.State == state && t.want.LimitKey == "k" && t.want.Queue == c.tasks[0].Queue
		})
		if i < 0 {
			return nil
		}
		return m.inOrder()[i]
	}
	if l := of(Leased); l != nil && rapid.Bool().Draw(t, "finish one") {
		m.run(&finishCall{verb: "complete", receipt: l.receipt})
	}
	if next := of(Ready); next != nil && rapid.Bool().Draw(t, "remove the next") {
		verb := rapid.SampledFrom([]string{"cancel", "run at"}).Draw(t, "verb")
		m.run(&controlCall{verb: verb, id: next.want.ID, runAt: m.opts.wall().Add(time.Second)})
	}
}

// drawIDIn is of a task in one of some states, if there is one.
func (m *model) drawIDIn(states ...State) ID {
	in := slices.DeleteFunc(slices.Clone(m.order), func(id ID) bool {
		t := m.tasks[id]
		return t == nil || !slices.Contains(states, t.want.State)
	})
	if len(in) == 0 || rapid.IntRange(0, 4).Draw(m.t, "any task") == 0 {
		return m.drawID()
	}
	return in[rapid.IntRange(0, len(in)-1).Draw(m.t, "task")]
}

// controlCall is a verb that names a task by its ID.
type controlCall struct {
	verb     string
	id       ID
	priority int
	runAt    time.Time
	err      error
}

func (m *model) drawControl() call {
	return m.drawAlteration(rapid.SampledFrom([]string{"cancel", "priority", "run at", "redrive"}).Draw(m.t, "verb"))
}

func (m *model) drawAlteration(verb string) *controlCall {
	c := &controlCall{verb: verb}
	switch c.verb {
	case "cancel":
		states := [][]State{{Ready}, {Scheduled}, {Blocked}, {Leased}, {Dead}, {Done, Canceled}}
		c.id = m.drawIDIn(rapid.SampledFrom(states).Draw(m.t, "state")...)
	case "priority":
		c.id = m.drawIDIn(Ready, Scheduled, Blocked)
		c.priority = rapid.SampledFrom([]int{0, 5, 9}).Draw(m.t, "priority")
	case "run at":
		c.id = m.drawIDIn(Ready, Scheduled, Blocked)
		if wait := rapid.SampledFrom([]int64{0, -1, 1, 1000, 8000}).Draw(m.t, "RunAt"); wait != 0 {
			c.runAt = m.opts.wall().Add(time.Duration(wait) * time.Millisecond)
		}
	case "redrive":
		c.id = m.drawIDIn(Dead)
	}
	return c
}

func (c *controlCall) do(q *Queue) {
	ctx := context.Background()
	switch c.verb {
	case "cancel":
		c.err = q.Cancel(ctx, c.id)
	case "priority":
		c.err = q.SetPriority(ctx, c.id, c.priority)
	case "run at":
		c.err = q.SetRunAt(ctx, c.id, c.runAt)
	case "redrive":
		c.err = q.RedriveDead(ctx, c.id)
	}
}

// refusal is the error that the call should return.
func (c *controlCall) refusal(m *model, t *modelTask) error {
	switch {
	case t == nil, c.verb == "redrive" && t.want.State != Dead:
		return ErrNotFound
	case c.verb == "cancel" && (t.want.State == Done || t.want.State == Canceled):
		return ErrNotWaiting
	case (c.verb == "priority" || c.verb == "run at") && !t.waiting():
		return ErrNotWaiting
	case c.verb == "redrive":
		if id, taken := m.holder(&t.want.Task); taken && id != t.want.ID {
			return ErrDuplicate
		}
	}
	return nil
}

func (c *controlCall) apply(m *model) {
	t := m.tasks[c.id]
	if want := c.refusal(m, t); !errors.Is(c.err, want) || want == nil && c.err != nil {
		m.t.Fatalf("%s of %s, %+v: %v, expected %v", c.verb, c.id, t, c.err, want)
	}
	if c.err != nil {
		return
	}
	switch c.verb {
	case "cancel":
		m.toCanceled(t)
	case "priority":
		t.want.Priority = c.priority
		if t.want.State == Ready {
			m.toReady(t, keys.MovedSince(keys.SinceMillis(t.since)))
		}
	case "run at":
		m.setRunAt(t, c.runAt)
	case "redrive":
		if hash, has := m.keyOf(&t.want.Task); has {
			if id, taken := m.holder(&t.want.Task); taken && id == c.id {
				m.keys[hash].ended = false
			} else {
				m.takeKey(c.id, &t.want.Task, keys.SinceMillis(keys.SinceOf(c.id)))
			}
		}
		t.want.Attempts, t.want.RunAt, t.expired = 0, time.Time{}, false
		m.enter(t, m.since(t.shard))
	}
	m.react()
}

func (m *model) setRunAt(t *modelTask, at time.Time) {
	t.want.RunAt = at
	t.want.Task = storedTask(t.want.Task)
	switch due := runAtMillis(at); {
	case t.want.State == Blocked && (t.on == onParents || due <= m.wall()):
	case due > m.wall():
		m.toScheduled(t, due)
	default:
		m.enter(t, m.since(t.shard))
	}
}

// purgeCall is PurgeDead.
type purgeCall struct {
	queue string
	n     int
	err   error
}

func (m *model) drawPurge() call {
	return &purgeCall{queue: rapid.SampledFrom([]string{"", "a", "b"}).Draw(m.t, "queue")}
}

func (c *purgeCall) do(q *Queue) {
	c.n, c.err = q.PurgeDead(context.Background(), DeadFilter{Queue: c.queue})
}

func (c *purgeCall) apply(m *model) {
	m.noError(c.err)
	n := 0
	for _, t := range m.inOrder() {
		if c.covers(m, t) {
			n++
			m.unpin(t, 0)
			m.toGone(t)
			m.ended(t, Outcome{State: Canceled}, true)
		}
	}
	if c.n != n {
		m.t.Fatalf("purged %d, expected %d", c.n, n)
	}
	m.react()
}

// covers reports whether a task is one of those that go.
func (c *purgeCall) covers(m *model, t *modelTask) bool {
	return t.want.State == Dead && (c.queue == "" || t.want.Queue == c.queue) && !t.want.At.After(wallTime(m.wall()))
}

// releaseKeyCall is ReleaseKey.
type releaseKeyCall struct {
	task Task
	err  error
}

func (m *model) drawReleaseKey() call {
	c := new(releaseKeyCall)
	if keyed := slices.DeleteFunc(m.inOrder(), func(t *modelTask) bool { return t.want.Unique.Key == "" }); len(keyed) > 0 {
		c.task = keyed[rapid.IntRange(0, len(keyed)-1).Draw(m.t, "task")].want.Task
	} else {
		c.task = Task{Queue: "a", Unique: Unique{Key: "u"}}
	}
	return c
}

func (c *releaseKeyCall) do(q *Queue) { c.err = q.ReleaseKey(context.Background(), c.task.uniqueKey()) }

func (c *releaseKeyCall) apply(m *model) {
	var want error
	if _, taken := m.holder(&c.task); !taken {
		want = ErrNotFound
	}
	if !errors.Is(c.err, want) || want == nil && c.err != nil {
		m.t.Fatalf("release of key %+v: %v, expected %v", c.task.Unique, c.err, want)
	}
	if hash, _ := m.keyOf(&c.task); want == nil {
		delete(m.keys, hash)
	}
}

// configureCall is Configure, Pause or Resume.
type configureCall struct {
	queue string
	verb  string
	to    Settings
	err   error
}

func (m *model) drawConfigure() call {
	c := &configureCall{queue: rapid.SampledFrom([]string{"a", "b"}).Draw(m.t, "queue")}
	if m.settings[c.queue].Paused {
		c.verb = "resume"
		return c
	}
	if rapid.IntRange(0, 4).Draw(m.t, "pause") == 0 {
		c.verb = "pause"
		return c
	}
	forms := []map[string]int{nil, {"x": 3}, {"": 2, "y": 4}}
	c.to = Settings{
		Concurrency:       rapid.SampledFrom([]int{0, 0, 1, 3}).Draw(m.t, "Concurrency"),
		ConcurrencyPerKey: rapid.SampledFrom([]int{0, 1, 1, 2}).Draw(m.t, "ConcurrencyPerKey"),
		TenantWeights:     rapid.SampledFrom(forms).Draw(m.t, "TenantWeights"),
		Retention:         rapid.SampledFrom([]time.Duration{0, 0, 2 * time.Second, Forever}).Draw(m.t, "Retention"),
		DeadRetention:     rapid.SampledFrom([]time.Duration{0, 3 * time.Second, time.Minute, Forever}).Draw(m.t, "DeadRetention"),
		HoldGroups:        rapid.Bool().Draw(m.t, "HoldGroups"),
	}
	return c
}

func (c *configureCall) do(q *Queue) {
	ctx := context.Background()
	switch c.verb {
	case "pause":
		c.err = q.Pause(ctx, c.queue)
	case "resume":
		c.err = q.Resume(ctx, c.queue)
	default:
		c.err = q.Configure(ctx, c.queue, func(s *Settings) { *s = c.to })
	}
}

func (c *configureCall) apply(m *model) {
	m.noError(c.err)
	set := m.settings[c.queue]
	if c.verb == "" {
		set = c.to
		set.TenantWeights = maps.Clone(c.to.TenantWeights)
	}
	set.Paused = c.verb == "pause"
	m.settings[c.queue], m.reconfigured = set, c.queue
	m.weigh()
	clear(m.passed)
}

// weigh notes how many claims in a row a tenant may get: as many as the largest
// weight since Open says, as a turn that has begun ends as it would have.
func (m *model) weigh() {
	for name, set := range m.settings {
		for tenant, w := range set.TenantWeights {
			k := [2]string{name, tenant}
			m.weights[k] = max(m.weights[k], w)
		}
	}
}

func (m *model) compareSettings() {
	for _, name := range []string{"a", "b"} {
		got, err := m.q.Settings(name)
		m.noError(err)
		if want := m.settings[name]; !reflect.DeepEqual(got, want) {
			m.t.Fatalf("settings of %s are %+v, expected %+v", name, got, want)
		}
	}
}

// awaitCall is Await.
type awaitCall struct {
	id     ID
	cancel context.CancelFunc
	done   chan error // capacity 1
	got    *Outcome
	want   *Outcome // nil: the task has not ended
}

// await is the action of an Await, or of one that gives up.
func (m *model) await(t *rapid.T) {
	if len(m.awaits) == 3 {
		c := m.awaits[0]
		m.awaits = m.awaits[1:]
		c.cancel()
		if err := <-c.done; !errors.Is(err, context.Canceled) {
			t.Fatalf("cancelled Await: %v", err)
		}
		return
	}
	c := &awaitCall{id: m.drawID(), done: make(chan error, 1)}
	var ctx context.Context
	ctx, c.cancel = context.WithCancel(m.ctx)
	q := m.q
	go func() {
		var err error
		c.got, err = q.Await(ctx, c.id)
		c.done <- err
	}()
	synctest.Wait()
	task := m.tasks[c.id]
	if task == nil {
		c.cancel()
		if err := <-c.done; !errors.Is(err, ErrNotFound) {
			t.Fatalf("Await of a task that is no more: %v", err)
		}
		return
	}
	if s := task.want.State; s == Done || s == Dead || s == Canceled {
		c.want = &Outcome{State: s, Result: task.want.Result, LastError: task.want.LastError, Attempts: task.want.Attempts}
		if s == Done {
			c.want.LastError = ""
		}
	}
	m.awaits = append(m.awaits, c)
	m.settle(true)
}

// settleAwaits makes sure that those are told whose task has ended.
func (m *model) settleAwaits() {
	m.awaits = slices.DeleteFunc(m.awaits, func(c *awaitCall) bool {
		select {
		case err := <-c.done:
			m.noError(err)
			if len(c.got.Result) == 0 {
				c.got.Result = nil
			}
			if c.want == nil || !reflect.DeepEqual(c.got, c.want) {
				m.t.Fatalf("Await of %s: %+v, expected %+v", c.id, c.got, c.want)
			}
			c.cancel()
			return true
		default:
			if c.want != nil {
				m.t.Fatalf("Await of %s still waits, expected %+v", c.id, c.want)
			}
			return false
		}
	})
}
