package codeqweb

import (
	"context"
	"errors"
	"time"

	"codeq"
)

// The bounds of a walk through a flow.
const (
	flowTasks   = 10_000          // of the flow
	flowRead    = 30_000          // tasks that are listed to find children, of all states
	flowOfState = 12_000          // of these, of one state
	flowTime    = 2 * time.Second // for all of it
	flowLinks   = 200_000         // of the flow: each task may have codeq.MaxParents
	flowParents = 1_000_000       // of the tasks that are listed
)

// flowStates lists the states in the order of the walk: first those of waiting tasks.
var flowStates = []codeq.State{codeq.Blocked, codeq.Leased, codeq.Scheduled, codeq.Ready, codeq.Dead, codeq.Done, codeq.Canceled}

// flowWalk finds the tasks that are connected with one: parents and children of Task.After, and
// tasks that handlers have produced as children of theirs. No index leads from a task to those that
// wait for it, so the walk first lists the tasks of the queue, up to a bound.
type flowWalk struct {
	d       *Dashboard
	listed  map[codeq.ID]*codeq.TaskInfo
	waiting map[codeq.ID][]codeq.ID // by parent
	called  map[codeq.ID][]codeq.ID // by the task with the handler that has produced them

	tasks   []flowTask
	index   map[codeq.ID]int // in tasks
	edges   []flowEdge
	calls   map[flowEdge]bool // those that are known from both ends
	read    int
	parents int  // of the listed tasks
	more    bool // not all tasks were listed, or the flow has too many
}

// flowTask is a task of a flow.
type flowTask struct {
	ID                 codeq.ID
	State, Queue, Kind string // State is "gone" if the task is not kept, "unread" if time was over
}

// flowEdge leads from a parent to a task that waits for it or, if Calls, from a task to the one
// that its handler has produced and waits for. From and To are indexes of flowWalk.tasks.
type flowEdge struct {
	From, To int
	Calls    bool
}

// walk finds the flow of a task.
func (d *Dashboard) walk(ctx context.Context, start *codeq.TaskInfo) (*flowWalk, error) {
	ctx, cancel := context.WithTimeout(ctx, flowTime)
	defer cancel()
	w := &flowWalk{
		d: d, listed: make(map[codeq.ID]*codeq.TaskInfo), waiting: make(map[codeq.ID][]codeq.ID), called: make(map[codeq.ID][]codeq.ID),
		index: make(map[codeq.ID]int), calls: make(map[flowEdge]bool),
	}
	err := w.list(ctx)
	w.listed[start.ID] = start // with its steps, which lists leave out
	w.visit(start.ID)
	for i := 0; i < len(w.tasks) && err == nil; i++ {
		err = w.follow(ctx, i)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		w.more, err = true, nil
		for i := range w.tasks {
			if t := w.listed[w.tasks[i].ID]; t != nil {
				w.tasks[i] = w.taskOf(t)
			}
		}
	}
	return w, err
}

// list reads the tasks of the queue, state by state.
func (w *flowWalk) list(ctx context.Context) error {
	for _, s := range flowStates {
		opts := codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: []codeq.State{s}}, NoPayload: true, Limit: codeq.MaxPage}
		for read := 0; ; {
			if read >= flowOfState || w.read >= flowRead || w.parents >= flowParents {
				w.more = true
				break
			}
			page, err := w.d.q.ListPage(ctx, opts)
			if err != nil {
				return err
			}
			read, w.read = read+page.Scanned, w.read+page.Scanned
			for _, t := range page.Tasks {
				w.listed[t.ID] = t
				w.parents += len(t.After)
				for _, parent := range t.After {
					w.waiting[parent] = append(w.waiting[parent], t.ID)
				}
				if caller, ok := callerOf(t); ok {
					w.called[caller] = append(w.called[caller], t.ID)
				}
			}
			if opts.Cursor = page.Next; opts.Cursor == "" {
				break
			}
		}
	}
	return nil
}

// visit adds a task; its index is -1 if the flow has too many.
func (w *flowWalk) visit(id codeq.ID) int {
	i, ok := w.index[id]
	switch {
	case ok:
	case len(w.tasks) >= flowTasks:
		w.more = true
		return -1
	default:
		i = len(w.tasks)
		w.index[id] = i
		w.tasks = append(w.tasks, flowTask{ID: id, State: "unread"})
	}
	return i
}

func (w *flowWalk) connect(from, to codeq.ID, calls bool) {
	if len(w.edges) >= flowLinks {
		w.more = true
		return
	}
	e := flowEdge{w.visit(from), w.visit(to), calls}
	if e.From < 0 || e.To < 0 || w.calls[e] {
		return
	}
	w.edges = append(w.edges, e)
	if calls {
		w.calls[e] = true
	}
}

// follow reads a task, and visits those that are connected with it.
func (w *flowWalk) follow(ctx context.Context, i int) error {
	id := w.tasks[i].ID
	t := w.listed[id]
	if t == nil {
		var err error
		if t, err = w.d.q.Get(ctx, id); err != nil && !errors.Is(err, codeq.ErrNotFound) {
			return err
		}
	}
	for _, child := range w.waiting[id] {
		w.visit(child) // which connects them
	}
	for _, child := range w.called[id] {
		w.connect(id, child, true)
	}
	if t == nil {
		w.tasks[i].State = "gone"
		return nil
	}
	for _, parent := range t.After {
		w.connect(parent, id, false)
	}
	if caller, ok := callerOf(t); ok {
		w.connect(caller, id, true)
	}
	for _, s := range t.Steps {
		if step := (stepView{StepInfo: s}); step.IsChild() {
			w.connect(id, step.Child(), true)
		}
	}
	w.tasks[i] = w.taskOf(t)
	return nil
}

// taskOf returns a task as it is shown.
func (w *flowWalk) taskOf(t *codeq.TaskInfo) flowTask {
	c := *t
	w.d.redact(&c)
	return flowTask{t.ID, t.State.String(), c.Queue, c.Kind}
}
