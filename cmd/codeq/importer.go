package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"codeq"
	"codeq/internal/heldkeys"
	"codeq/internal/private"
)

// importer makes the tasks of an export in a new queue, by what a queue offers: tasks that were
// worked on are produced, claimed, and worked on again as often as they were. This is possible
// since only they can be claimed meanwhile: tasks that wait are made last, settings that hold
// claims back are set after that, and schedules begin at the end.
//
// Invariant: between two chunks, no task can be claimed until the last chunk is through.
type importer struct {
	ctx   context.Context
	q     *codeq.Queue
	now   func() time.Time
	ids   *json.Encoder
	stage stage
	// news are the IDs of the tasks, by those that they had.
	news      map[codeq.ID]codeq.ID
	settings  []*portableSettings
	schedules []codeq.Schedule

	chunk []*plan
	size  int // of the chunk, in bytes
	// waiting are begun tasks that are not to be claimed again: they get their time in the end.
	waiting []*plan
	fresh   []codeq.Task
	olds    []codeq.ID // of fresh
	counts  map[string]*codeq.Counts
	changed int
}

// The sizes of a chunk, and of what is produced together.
const (
	chunkTasks = 1000
	chunkBytes = 16 << 20
	freshTasks = 256
)

// atOnce is how many leases are ended at the same time: they share commits.
const atOnce = 256

// apart is for how long a task is put off that is not to be claimed: longer than any import.
const apart = 10 * 365 * 24 * time.Hour

// parentsWait is how long tasks may need to learn that their parents have ended.
const parentsWait = 10 * time.Second

// plan is what is to be done with a task that was worked on.
type plan struct {
	old     *portableTask
	task    codeq.Task
	id      codeq.ID
	retries int  // that are left before the end
	redrive bool // it becomes ready again as a redriven dead letter, which keeps its last error
}

func newImporter(ctx context.Context, now func() time.Time, ids *json.Encoder) *importer {
	return &importer{ctx: ctx, now: now, ids: ids, news: make(map[codeq.ID]codeq.ID), counts: make(map[string]*codeq.Counts)}
}

// make makes everything that is in an export: tasks, then the keys, and the schedules after these,
// so that no tick takes one of them.
func (im *importer) make(r *lineReader, open func() (*codeq.Queue, error), dir string) error {
	if err := im.in(open, func() error { return im.all(r) }); err != nil {
		return err
	}
	if err := heldkeys.Write(im.ctx, private.FS, dir, r.keys); err != nil || len(im.schedules) == 0 {
		return err
	}
	return im.in(open, im.schedule)
}

// in opens the queue for a step.
func (im *importer) in(open func() (*codeq.Queue, error), step func() error) (err error) {
	if im.q, err = open(); err != nil {
		return err
	}
	return errors.Join(step(), im.q.Close())
}

// all makes everything that is in an export but keys and schedules.
func (im *importer) all(r *lineReader) error {
	for {
		p, err := r.next(im.ctx)
		if err != nil {
			return err
		}
		switch {
		case p == nil:
			return im.finish()
		case p.Settings != nil:
			err = im.addSettings(p.Settings)
		case p.Schedule != nil:
			im.schedules = append(im.schedules, p.Schedule.Schedule)
		case p.Key != nil: // the reader has it
		default:
			err = im.add(p.Task)
		}
		if err != nil {
			return fmt.Errorf("line %d of the export: %w", r.line, err)
		}
	}
}

// addSettings sets at once how long ended tasks are kept, and the rest in the end.
func (im *importer) addSettings(s *portableSettings) error {
	im.settings = append(im.settings, s)
	if s.Retention == 0 && s.DeadRetention == 0 {
		return nil
	}
	return im.q.Configure(im.ctx, s.Queue, func(now *codeq.Settings) { now.Retention, now.DeadRetention = s.Retention, s.DeadRetention })
}

func (im *importer) add(t *portableTask) error {
	if err := im.enter(t.stage()); err != nil {
		return err
	}
	task, err := im.taskOf(t)
	if err != nil {
		return err
	}
	im.count(t)
	if im.stage == stageFresh {
		return im.addFresh(t, task)
	}
	p := &plan{old: t, task: task}
	p.decide()
	im.chunk = append(im.chunk, p)
	if im.size += len(t.Payload) + len(t.Result); len(im.chunk) < chunkTasks && im.size < chunkBytes {
		return nil
	}
	return im.work()
}

// enter begins a stage.
func (im *importer) enter(next stage) error {
	if next == im.stage {
		return nil
	}
	if err := im.work(); err != nil {
		return err
	}
	if next >= stageHolds && im.stage < stageHolds {
		for _, s := range im.settings {
			if err := im.hold(s, s.HoldGroups); err != nil {
				return err
			}
		}
	}
	im.stage = next
	if next == stageFresh {
		return im.releaseWaiting()
	}
	return nil
}

func (im *importer) hold(s *portableSettings, hold bool) error {
	if !hold {
		return nil
	}
	return im.q.Configure(im.ctx, s.Queue, func(now *codeq.Settings) { now.HoldGroups = hold })
}

// count counts a task as what it is to become.
func (im *importer) count(t *portableTask) {
	c := im.counts[t.Queue]
	if c == nil {
		c = new(codeq.Counts)
		im.counts[t.Queue] = c
	}
	switch t.State {
	case codeq.Dead:
		c.Dead++
	case codeq.Done:
		c.Done++
	case codeq.Canceled:
		c.Canceled++
	default:
		c.Ready++ // ready, scheduled or blocked
	}
}

// taskOf returns the task as it is to be produced.
func (im *importer) taskOf(t *portableTask) (codeq.Task, error) {
	task := t.Task
	task.After = nil
	if t.State != codeq.Done && t.State != codeq.Canceled {
		for _, old := range t.After {
			if slices.ContainsFunc(im.chunk, func(p *plan) bool { return p.old.ID == old }) {
				if err := im.work(); err != nil {
					return task, err
				}
			}
			if id, ok := im.news[old]; ok { // others no longer exist, and count as completed
				task.After = append(task.After, id)
			}
		}
	}
	task.RunAt = time.Time{}
	if t.State == codeq.Scheduled {
		task.RunAt = t.At
	}
	u := &task.Unique
	u.Replace = false // it is about the moment of the produce
	switch ended := t.stage() <= stageHolds; {
	case u.Key == "":
	case u.For > 0 && !(ended && t.KeyFree):
		u.For = max(0, u.For-im.now().Sub(t.ID.Time())) // it is free at the same time as before
	case ended:
		u.For = 0 // it is free when the task ends
	}
	if t.KeyFree && t.stage() > stageHolds {
		*u = codeq.Unique{}
	}
	return task, nil
}

// decide sets what is to be done with the task.
func (p *plan) decide() {
	t := p.old
	attempts, most := t.Attempts, t.MaxAttempts-1
	if t.MaxAttempts == 0 {
		most = attempts // the queue is open with a limit that none reaches
	}
	switch t.State {
	case codeq.Done, codeq.Dead:
		p.retries = max(0, min(attempts-1, most))
		return
	case codeq.Canceled:
		return
	case codeq.Leased: // the attempt that went on does not count
		attempts--
	}
	p.retries = max(0, min(attempts, most))
	p.redrive = p.retries == 0 && t.LastError != ""
	if p.retries == 0 && !p.redrive {
		p.task.RunAt = time.Now().Add(apart)
	} else {
		p.task.RunAt = time.Time{}
	}
}

// isClaimed reports whether the task is to be claimed.
func (p *plan) isClaimed() bool {
	return p.old.State == codeq.Done || p.old.State == codeq.Dead || p.retries > 0 || p.redrive
}

// work makes the tasks of the chunk. Those whose keys are held by others of the chunk are made
// after these have ended.
func (im *importer) work() error {
	left := im.chunk
	im.chunk, im.size = nil, 0
	for len(left) > 0 {
		made, taken, err := im.produce(left)
		if err != nil {
			return err
		}
		if len(made) == 0 {
			return fmt.Errorf("%w: task %s and %d others", codeq.ErrDuplicate, left[0].old.ID, len(left)-1)
		}
		if err := im.workOn(made); err != nil {
			return err
		}
		left = taken
	}
	return nil
}

// produce produces tasks, and returns those that were refused since their keys are taken.
func (im *importer) produce(plans []*plan) (made, taken []*plan, err error) {
	tasks := make([]codeq.Task, len(plans))
	for i, p := range plans {
		tasks[i] = p.task
	}
	stored, err := im.q.ProduceBatch(im.ctx, tasks)
	refused := make(map[int]bool)
	for _, d := range duplicatesOf(err) {
		refused[d.Index] = true
	}
	if err != nil && !(len(refused) > 0 && onlyDuplicates(err)) {
		return nil, nil, err
	}
	for i, p := range plans {
		if refused[i] {
			taken = append(taken, p)
			continue
		}
		if p.id = stored[i]; !slices.Contains([]codeq.State{codeq.Done, codeq.Canceled, codeq.Dead}, p.old.State) {
			im.waiting = append(im.waiting, p)
		}
		if err := im.named(p.old.ID, p.id); err != nil {
			return nil, nil, err
		}
		made = append(made, p)
	}
	return made, taken, nil
}

// named notes the new ID of a task.
func (im *importer) named(old, id codeq.ID) error {
	im.news[old] = id
	return im.ids.Encode(struct{ Old, New codeq.ID }{old, id})
}

// workOn works on tasks until each is what it was.
func (im *importer) workOn(plans []*plan) error {
	left := make(map[codeq.ID]*plan)
	var queues []string
	g, ctx := errgroup.WithContext(im.ctx)
	g.SetLimit(atOnce)
	for _, p := range plans {
		if p.old.State == codeq.Canceled {
			g.Go(func() error { return im.q.Cancel(ctx, p.id) })
		}
		if p.isClaimed() {
			left[p.id] = p
			if !slices.Contains(queues, p.task.Queue) {
				queues = append(queues, p.task.Queue)
			}
		}
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for len(left) > 0 {
		leases, err := im.claim(left, queues)
		if err != nil {
			return err
		}
		if len(leases) == 0 {
			return im.giveUp(left)
		}
		g, ctx := errgroup.WithContext(im.ctx)
		g.SetLimit(atOnce)
		more := make([]bool, len(leases))
		for i, l := range leases {
			p := left[l.ID]
			if p == nil {
				_ = g.Wait() // this error is the cause of all others
				return fmt.Errorf("task %s of queue %q can be claimed, and is none of those that should", l.ID, l.Queue)
			}
			g.Go(func() (err error) {
				more[i], err = im.end(ctx, l, p)
				return err
			})
		}
		if err := g.Wait(); err != nil {
			return err
		}
		for i, l := range leases {
			if !more[i] {
				delete(left, l.ID)
			}
		}
	}
	return nil
}

// claim claims tasks of the plans that are left; none: they wait for others. A task whose parents
// have ended in other shards becomes ready a moment later.
func (im *importer) claim(left map[codeq.ID]*plan, queues []string) ([]*codeq.Lease, error) {
	req := codeq.ClaimRequest{Queues: queues, Max: chunkTasks, LeaseFor: importLease, NoWait: true}
	ctx := im.ctx
	for _, p := range left {
		if len(p.task.After) > 0 {
			req.NoWait = false
		}
	}
	if !req.NoWait {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, parentsWait)
		defer stop()
	}
	leases, err := im.q.ClaimBatch(ctx, req)
	if errors.Is(err, codeq.ErrEmpty) || im.ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
		return nil, nil
	}
	return leases, err
}

// giveUp leaves tasks as they are that wait for others: redriven dead letters behind the turn of
// their group.
func (im *importer) giveUp(left map[codeq.ID]*plan) error {
	for _, p := range left {
		if !p.redrive {
			return fmt.Errorf("task %s, %s, cannot be claimed", p.old.ID, p.old.State)
		}
		p.redrive = false
		im.changed++
	}
	return nil
}

// end ends a lease of a task, and reports whether another one is needed.
func (im *importer) end(ctx context.Context, l *codeq.Lease, p *plan) (more bool, err error) {
	var cause error
	if p.old.LastError != "" {
		cause = errors.New(p.old.LastError)
	}
	waits := p.old.State != codeq.Done && p.old.State != codeq.Dead
	if p.retries > 0 {
		p.retries--
		after := time.Duration(-1)
		if more = p.retries > 0 || !waits; !more {
			after = apart
		}
		return more, im.q.Retry(ctx, l.Receipt, codeq.RetryOptions{Err: cause, After: after})
	}
	if p.old.State == codeq.Done {
		return false, im.q.Complete(ctx, l.Receipt, p.old.Result)
	}
	return false, im.q.DeadLetter(ctx, l.Receipt, cause)
}

// releaseWaiting gives the tasks that were worked on before their times, in the order of the
// export.
func (im *importer) releaseWaiting() error {
	for _, p := range im.waiting {
		if p.redrive {
			if err := im.q.RedriveDead(im.ctx, p.id); err != nil {
				return err
			}
		}
		at := time.Time{}
		if p.old.State == codeq.Scheduled {
			at = p.old.At
		} else if p.redrive {
			continue
		}
		if err := im.q.SetRunAt(im.ctx, p.id, at); err != nil {
			return err
		}
	}
	im.waiting = nil
	return nil
}

// addFresh produces tasks that were never worked on, in the order of the export.
func (im *importer) addFresh(t *portableTask, task codeq.Task) error {
	if slices.ContainsFunc(t.After, func(id codeq.ID) bool { return slices.Contains(im.olds, id) }) {
		if err := im.flush(); err != nil {
			return err
		}
		var err error
		if task, err = im.taskOf(t); err != nil {
			return err
		}
	}
	im.fresh, im.olds = append(im.fresh, task), append(im.olds, t.ID)
	if im.size += len(t.Payload); len(im.fresh) < freshTasks && im.size < chunkBytes {
		return nil
	}
	return im.flush()
}

func (im *importer) flush() error {
	if len(im.fresh) == 0 {
		return nil
	}
	stored, err := im.q.ProduceBatch(im.ctx, im.fresh)
	if err != nil {
		return err
	}
	for i, id := range stored {
		if err := im.named(im.olds[i], id); err != nil {
			return err
		}
	}
	im.fresh, im.olds, im.size = im.fresh[:0], im.olds[:0], 0
	return nil
}

// finish makes what is left, and checks that all tasks are there.
func (im *importer) finish() error {
	if err := im.enter(stageFresh); err != nil {
		return err
	}
	if err := im.flush(); err != nil {
		return err
	}
	if err := im.check(); err != nil {
		return err
	}
	for _, s := range im.settings {
		if err := im.q.Configure(im.ctx, s.Queue, func(now *codeq.Settings) { *now = s.Settings }); err != nil {
			return err
		}
	}
	return nil
}

func (im *importer) schedule() error {
	for _, s := range im.schedules {
		if err := im.q.SetSchedule(im.ctx, s); err != nil {
			return fmt.Errorf("schedule %q: %w", s.Name, err)
		}
	}
	return nil
}

// check compares the counts of the new queue with those of the export. Ended tasks may be fewer:
// their time may have passed. Tasks that wait may be canceled: the end of their parents was on its
// way to them when the queue was closed.
func (im *importer) check() error {
	stats, err := im.q.Stats(im.ctx)
	if err != nil {
		return err
	}
	for name, want := range im.counts {
		got := stats[name]
		missing := want.Ready - (got.Ready + got.Scheduled + got.Blocked)
		if missing > got.Canceled || got.Canceled > want.Canceled+missing || got.Leased != 0 || got.Dead > want.Dead || got.Done > want.Done {
			return fmt.Errorf("queue %q has %+v after the import, and should have %d that wait, %d dead letters, %d done, %d canceled",
				name, got, want.Ready, want.Dead, want.Done, want.Canceled)
		}
	}
	return nil
}
