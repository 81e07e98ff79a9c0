package codeqweb

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"codeq"
)

// The bounds of a reading that finds the last runs of schedules.
const (
	runsTime  = time.Second
	runsTasks = 20_000
	runsFirst = 200 // tasks of a queue and state, before others are read further
	runsShown = 5   // of a schedule
)

// lastRuns has the tasks that schedules have produced, as far as they are kept and were found among
// the newest tasks of their queues.
type lastRuns struct {
	of     map[string][]scheduleRun // by the name of the schedule, the newest first
	queues map[string]*queueRuns
}

// queueRuns is how far a queue was read.
type queueRuns struct {
	Read int
	All  bool
}

// scheduleRun is a task that a schedule has produced.
type scheduleRun struct {
	ID       codeq.ID
	Tick     time.Time `json:",omitzero"`
	State    codeq.State
	Attempts int
	Took     time.Duration `json:",omitzero"` // of the last attempt
	At       time.Time     // as in codeq.TaskInfo
	Error    string        `json:",omitzero"`
}

// runsPart is a state of a queue that is read from the newest task on.
type runsPart struct {
	queue  string
	state  codeq.State
	cursor string
	done   bool
}

// readRuns finds the last runs of all schedules, within runsTime.
func (d *Dashboard) readRuns(ctx context.Context) (*lastRuns, error) {
	begin := time.Now()
	schedules, err := d.q.Schedules(ctx)
	if err != nil {
		return nil, err
	}
	found := &lastRuns{make(map[string][]scheduleRun), make(map[string]*queueRuns)}
	names := make(map[string][]string) // by queue
	for i := range schedules {
		s := &schedules[i]
		if s.Task.Queue != "" {
			names[s.Task.Queue] = append(names[s.Task.Queue], s.Name)
			found.of[s.Name] = []scheduleRun{}
		}
	}
	var parts []*runsPart
	for queue := range names {
		found.queues[queue] = &queueRuns{All: true}
		for _, state := range states {
			parts = append(parts, &runsPart{queue: queue, state: state})
		}
	}
	slices.SortFunc(parts, func(a, b *runsPart) int { return cmp.Compare(a.queue, b.queue) })
	ctx, cancel := context.WithDeadline(ctx, begin.Add(2*runsTime)) // a page may take long
	defer cancel()
	read := 0
	isOver := func() bool { return read >= runsTasks || time.Since(begin) >= runsTime }
	lacks := func(queue string) bool {
		return slices.ContainsFunc(names[queue], func(name string) bool { return len(found.of[name]) < runsShown })
	}
	limit := runsFirst
	for again := true; again && !isOver(); limit = codeq.MaxPage {
		again = false
		for _, p := range parts {
			if p.done || limit > runsFirst && !lacks(p.queue) || isOver() {
				continue
			}
			tasks, err := d.q.ListPage(ctx, codeq.PageOptions{
				TaskFilter: codeq.TaskFilter{States: []codeq.State{p.state}, Queue: p.queue}, Newest: true, NoPayload: d.leavesPayloads(), Limit: limit, Cursor: p.cursor,
			})
			if errors.Is(err, context.DeadlineExceeded) && isOver() {
				break
			}
			if err != nil {
				return nil, err
			}
			read += tasks.Scanned
			found.queues[p.queue].Read += tasks.Scanned
			for _, t := range tasks.Tasks {
				d.addRun(found, t)
			}
			p.cursor, p.done = tasks.Next, tasks.Next == ""
			again = again || !p.done
		}
	}
	for _, p := range parts {
		found.queues[p.queue].All = found.queues[p.queue].All && p.done
	}
	for name, runs := range found.of {
		slices.SortFunc(runs, func(a, b scheduleRun) int { return b.ID.Time().Compare(a.ID.Time()) })
		found.of[name] = runs[:min(len(runs), runsShown)]
	}
	return found, nil
}

// addRun adds a task if a schedule has produced it.
func (d *Dashboard) addRun(found *lastRuns, t *codeq.TaskInfo) {
	c := *t
	d.redact(&c)
	runs, ok := found.of[c.Headers[codeq.ScheduleHeader]]
	if _, dead := codeq.DeathOf(c.Headers); !ok || dead { // a dead-letter queue copies the headers
		return
	}
	run := scheduleRun{ID: t.ID, State: t.State, Attempts: t.Attempts, At: t.At, Error: c.LastError}
	run.Tick, _ = time.Parse(time.RFC3339, c.Headers[codeq.TickHeader])
	if n := len(t.History); n > 0 && !t.History[n-1].End.IsZero() {
		run.Took = t.History[n-1].End.Sub(t.History[n-1].Start)
	}
	found.of[c.Headers[codeq.ScheduleHeader]] = append(runs, run)
}

// Outcome is the end of a run, or its state, in words.
func (r scheduleRun) Outcome() string {
	switch r.State {
	case codeq.Ready:
		return "waits for a worker"
	case codeq.Scheduled:
		if r.Attempts > 0 {
			return "failed, and is tried again"
		}
		return "waits for its time"
	case codeq.Blocked:
		return "is blocked"
	case codeq.Leased:
		return "runs"
	case codeq.Done:
		return "completed"
	case codeq.Dead:
		return "failed"
	default:
		return "canceled"
	}
}
