package codeqweb

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"time"

	"codeq"
)

// The bounds of the page of workers.
const (
	leasedRead = codeq.MaxPage // leased tasks, of all queues
	tasksOf    = 50            // shown of one worker
	hungRead   = 100           // hung handlers with tasks that are looked up, beyond those of leasedRead
)

// workersView is the content of the page of workers.
type workersView struct {
	Workers []workerView // those with overdue tasks first
	Read    int          // leased tasks that were looked at
	More    bool         `json:",omitzero"` // there are more
	Unread  string       `json:",omitzero"` // why no leased tasks are known
	Overdue int          `json:",omitzero"` // tasks beyond their timeout, or of hung handlers
	Runs    bool         `json:"-"`         // there is a Queue.Run
	AnyNode bool         `json:"-"`
}

// workerView is a Queue.Run, or a name under which a program claims tasks by itself.
type workerView struct {
	codeq.WorkerInfo
	Claims bool          `json:",omitzero"` // no Queue.Run has the name: Queue.Claim
	Same   int           `json:",omitzero"` // how many calls of Run have the name, if several: Tasks are of all
	Tasks  []runningTask // the overdue ones first, then those that began first
	Left   int           `json:",omitzero"` // tasks that are not in Tasks
}

// runningTask is a task at work.
type runningTask struct {
	ID        codeq.ID
	Queue     string
	Kind      string `json:",omitzero"`
	Attempt   int
	State     codeq.State    `json:",omitzero"` // zero: it is gone; another than leased: only its handler goes on
	Since     time.Time      `json:",omitzero"` // when the attempt began
	LeaseEnds time.Time      `json:",omitzero"`
	Heard     time.Time      `json:",omitzero"` // the last sign of life that is known: begin, renewal or progress
	Timeout   time.Duration  `json:",omitzero"` // Task.Timeout, or that of the queue; a handler may have another
	Beyond    time.Duration  `json:",omitzero"` // how long it is beyond its timeout
	HungFor   time.Duration  `json:",omitzero"` // how long its handler goes on after the end of its context
	Replaced  bool           `json:",omitzero"` // another handler has its place
	Progress  codeq.Progress `json:",omitzero"`
}

// IsLeased reports whether the task may be canceled here.
func (t *runningTask) IsLeased() bool { return t.State == codeq.Leased }

// IsOverdue reports whether the task should have ended.
func (t *runningTask) IsOverdue() bool { return t.Beyond > 0 || t.HungFor > 0 }

// Percent returns how far the task is; negative: not known.
func (t *runningTask) Percent() int {
	if p := t.Progress; p.Total > 0 && p.Done >= 0 {
		return int(min(100, 100*float64(p.Done)/float64(p.Total)))
	}
	return -1
}

// workers returns the workers with what each one runs: the leased tasks, joined by the name.
func (d *Dashboard) workers(ctx context.Context, r *request) (v workersView, err error) {
	infos, err := d.q.Workers(ctx)
	if err != nil {
		return v, err
	}
	leased, timeouts, err := d.leased(ctx, r)
	if err != nil { // of a shard without a leader, for instance: the workers are known
		v.Unread, leased = refusalOf(err).text, new(codeq.Page)
	}
	now := time.Now()
	hung := make(map[codeq.ID]codeq.HungHandler)
	calls := make(map[string]int) // of Run, by name
	for i := range infos {
		if infos[i].LastError == "" {
			calls[infos[i].Name]++
		}
		for _, h := range infos[i].Hung {
			hung[h.ID] = h
		}
	}
	running := make(map[string][]runningTask) // by the name of the worker
	for _, t := range leased.Tasks {
		worker, task := runningOf(t, timeouts[t.Queue], calls, now)
		if h, ok := hung[t.ID]; ok && h.Attempt == task.Attempt {
			task.hang(&h, now)
			delete(hung, t.ID)
		}
		running[worker] = append(running[worker], task)
	}
	v.Workers, v.Read, v.More = []workerView{}, len(leased.Tasks), leased.Next != ""
	seen, lookups := make(map[string]int), hungRead
	for _, info := range infos {
		w := workerView{WorkerInfo: info, Tasks: []runningTask{}}
		v.AnyNode = v.AnyNode || info.Node != ""
		if info.LastError == "" {
			v.Runs = true
			if w.Same = calls[info.Name]; w.Same == 1 {
				w.Same = 0
			}
			if seen[info.Name]++; seen[info.Name] == calls[info.Name] {
				w.Tasks = append(w.Tasks, running[info.Name]...)
				delete(running, info.Name)
			}
		}
		for i := range info.Hung {
			h := &info.Hung[i]
			if _, ok := hung[h.ID]; !ok || lookups == 0 {
				continue
			}
			lookups--
			task, err := d.held(ctx, r, h, timeouts[h.Queue])
			if err != nil && v.Unread == "" {
				v.Unread = refusalOf(err).text
			}
			task.hang(h, now)
			w.Tasks = append(w.Tasks, task)
		}
		v.Workers = append(v.Workers, w)
	}
	for _, name := range slices.Sorted(maps.Keys(running)) {
		v.Workers = append(v.Workers, workerView{WorkerInfo: codeq.WorkerInfo{Name: name}, Claims: true, Tasks: running[name]})
	}
	v.sort()
	return v, nil
}

// leased returns the leased tasks, as a request may see them, and the timeouts of queues, for tasks
// that have none.
func (d *Dashboard) leased(ctx context.Context, r *request) (*codeq.Page, map[string]time.Duration, error) {
	leased, err := d.list(r, codeq.PageOptions{
		TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Leased}}, NoPayload: true, Limit: leasedRead,
	})
	if err != nil || !slices.ContainsFunc(leased.Tasks, func(t *codeq.TaskInfo) bool { return t.Timeout == 0 }) {
		return leased, nil, err
	}
	infos, err := d.q.Info(ctx)
	timeouts := make(map[string]time.Duration)
	for i := range infos {
		if length := infos[i].Settings.Timeout; length > 0 {
			timeouts[infos[i].Queue] = length
		}
	}
	return leased, timeouts, err
}

// runningOf returns a leased task, and the name of its worker. calls has the names of the calls of
// Run, which know themselves which of their tasks are beyond their timeout: a handler may have one
// of its own in place of that of the queue. A task of Queue.Claim goes on after its timeout.
func runningOf(t *codeq.TaskInfo, ofQueue time.Duration, calls map[string]int, now time.Time) (worker string, _ runningTask) {
	r := runningTask{
		ID: t.ID, Queue: t.Queue, Kind: t.Kind, Attempt: t.Attempts, State: t.State, LeaseEnds: t.At, Progress: t.Progress,
		Timeout: cmp.Or(t.Timeout, ofQueue),
	}
	if n := len(t.History); n > 0 && t.History[n-1].End.IsZero() {
		worker, r.Since = t.History[n-1].Worker, t.History[n-1].Start
	}
	r.Heard = latest(r.Since, t.Progress.At)
	if calls[worker] > 0 {
		return worker, r
	}
	if t.LeaseFor > 0 {
		r.Heard = latest(r.Heard, t.At.Add(-t.LeaseFor))
	}
	if r.Timeout > 0 && !r.Since.IsZero() {
		r.Beyond = max(0, now.Sub(r.Since)-r.Timeout)
	}
	return worker, r
}

// held returns the task of a hung handler that is not among the leased ones.
func (d *Dashboard) held(ctx context.Context, r *request, h *codeq.HungHandler, ofQueue time.Duration) (runningTask, error) {
	task := runningTask{ID: h.ID, Queue: h.Queue, Attempt: h.Attempt}
	t, err := d.q.Get(ctx, h.ID)
	switch {
	case errors.Is(err, codeq.ErrNotFound):
		return task, nil
	case err != nil:
		return task, err
	case t.State == codeq.Leased && t.Attempts == h.Attempt: // beyond leasedRead
		_, task = runningOf(d.shown(r, t), ofQueue, nil, h.Since)
		task.Beyond = 0
		return task, nil
	}
	task.Kind, task.State = d.shown(r, t).Kind, t.State
	return task, nil
}

// hang notes that the handler of a task goes on after the end of its context.
func (t *runningTask) hang(h *codeq.HungHandler, now time.Time) {
	t.HungFor, t.Replaced = max(now.Sub(h.Since), 1), h.Replaced
	if t.IsLeased() && t.Timeout > 0 && !h.Since.Before(t.Since.Add(t.Timeout)) {
		t.Beyond = t.HungFor
	}
}

// sort puts overdue tasks first, the longest first, and counts them.
func (v *workersView) sort() {
	for i := range v.Workers {
		w := &v.Workers[i]
		slices.SortStableFunc(w.Tasks, func(a, b runningTask) int {
			return cmp.Or(cmp.Compare(b.overdue(), a.overdue()), a.Since.Compare(b.Since))
		})
		for j := range w.Tasks {
			if w.Tasks[j].IsOverdue() {
				v.Overdue++
			}
		}
		if len(w.Tasks) > tasksOf {
			w.Left, w.Tasks = len(w.Tasks)-tasksOf, w.Tasks[:tasksOf]
		}
	}
	slices.SortStableFunc(v.Workers, func(a, b workerView) int { return cmp.Compare(b.overdue(), a.overdue()) })
}

// Claimed returns the number of the tasks.
func (w *workerView) Claimed() int { return len(w.Tasks) + w.Left }

// overdue returns for how long a task should have ended.
func (t *runningTask) overdue() time.Duration { return max(t.Beyond, t.HungFor) }

// overdue returns that of its first task.
func (w *workerView) overdue() time.Duration {
	if len(w.Tasks) == 0 {
		return 0
	}
	return w.Tasks[0].overdue()
}

// workersPage shows the workers and their tasks.
func (d *Dashboard) workersPage(w http.ResponseWriter, r *request) error {
	v, err := d.workers(r.Context(), r)
	if err != nil {
		return err
	}
	return d.show(w, r, page{Title: "Workers", Screen: "workers", Refresh: 2, Body: v})
}

func (d *Dashboard) apiWorkers(ctx context.Context, r *request) (any, error) {
	return d.workers(ctx, r)
}
