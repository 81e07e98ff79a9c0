package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/urfave/cli/v3"

	"codeq"
)

// view reads a queue: a closed directory, another process, or a dashboard.
type view interface {
	Info(ctx context.Context) ([]codeq.QueueInfo, error)
	TotalsByDay(ctx context.Context, queue string) ([]codeq.DayTotals, error)
	Get(ctx context.Context, id codeq.ID) (*codeq.TaskInfo, error)
	FindByKey(ctx context.Context, k codeq.UniqueKey) (*codeq.TaskInfo, error)
	ListPage(ctx context.Context, opts codeq.PageOptions) (*codeq.Page, error)
	Schedules(ctx context.Context) ([]codeq.ScheduleInfo, error)
	Settings(queue string) (codeq.Settings, error)
	StorageStats() (*codeq.StorageStats, error)
	Close() error
}

// steerer reads and changes an open queue: by this process, another one, or a dashboard.
type steerer interface {
	view
	ProduceBatch(ctx context.Context, tasks []codeq.Task) ([]codeq.ID, error)
	Cancel(ctx context.Context, id codeq.ID) error
	RedriveDeadFrom(ctx context.Context, id codeq.ID, step string) error
	Forget(ctx context.Context, id codeq.ID) error
	SetPriority(ctx context.Context, id codeq.ID, priority int) error
	SetRunAt(ctx context.Context, id codeq.ID, t time.Time) error
	Bulk(ctx context.Context, opts codeq.BulkOptions) (codeq.BulkResult, error)
	Configure(ctx context.Context, queue string, change func(*codeq.Settings)) error
	DeleteQueue(ctx context.Context, queue string) error
	SetSchedule(ctx context.Context, s codeq.Schedule) error
	DeleteSchedule(ctx context.Context, name string) error
	TriggerSchedule(ctx context.Context, name string) (codeq.ID, error)
	Workers(ctx context.Context) ([]codeq.WorkerInfo, error)
	QuietWorkers(ctx context.Context, name string) error
	ResumeWorkers(ctx context.Context, name string) error
	ClusterStatus(ctx context.Context) (*codeq.ClusterStatus, error)
	TransferLeadership(ctx context.Context, shard int, node string) error
	Drain(ctx context.Context) error
	Undrain(ctx context.Context) error
}

// hides reports whether the last tasks or schedules of a view came without their contents:
// payloads, results, headers, metadata, steps, cursors, logs and notes of the progress.
func hides(v view) bool {
	r, ok := v.(*remote)
	return ok && r.hidden
}

var (
	_ view    = (*codeq.Reader)(nil)
	_ steerer = (*codeq.Queue)(nil)
	_ steerer = (*remote)(nil)
)

// target is the queue of -dir or -url.
type target struct {
	dir, url   string
	acceptCopy bool
	app        *app
}

// target reads -dir and -url, or the environment if neither is given.
func (a *app) target(c *cli.Command) (*target, error) {
	t := &target{dir: c.String("dir"), url: c.String("url"), acceptCopy: c.Bool("accept-copy"), app: a}
	switch {
	case c.IsSet("dir") && c.IsSet("url"):
		return nil, usagef(c, "-dir and -url exclude each other")
	case !c.IsSet("dir") && !c.IsSet("url"):
		t.dir, t.url = a.env("CODEQ_DIR"), a.env("CODEQ_URL")
		if t.dir != "" && t.url != "" {
			return nil, usagef(c, "CODEQ_DIR and CODEQ_URL exclude each other")
		}
	}
	if t.dir == "" && t.url == "" {
		return nil, usagef(c, "-dir or -url is needed")
	}
	return t, nil
}

// directory returns the target of a verb that needs the files.
func (a *app) directory(c *cli.Command) (*target, error) {
	if c.IsSet("url") {
		return nil, usagef(c, "%s needs -dir: a dashboard takes no paths", c.Name)
	}
	t, err := a.target(c)
	if err == nil && t.dir == "" {
		err = usagef(c, "%s needs -dir", c.Name)
	}
	return t, err
}

// Where a queue was found.
const (
	whereClosed    = "closed"    // a closed directory
	whereServed    = "served"    // by another process, through its socket
	whereDashboard = "dashboard" // by its URL
)

// where describes a target.
type where struct {
	Kind string
	Dir  string `json:",omitzero"`
	URL  string `json:",omitzero"`
	// Killed: the process that had the closed directory open was killed.
	Killed bool   `json:",omitzero"`
	Node   string `json:",omitzero"` // of the closed directory
}

// look opens a target for reading. It changes nothing.
func (t *target) look(ctx context.Context) (view, where, error) {
	at := where{Kind: whereDashboard, URL: t.url}
	if t.url != "" {
		r, err := t.dial()
		if err != nil {
			return nil, at, err
		}
		return r, at, nil
	}
	at = where{Kind: whereServed, Dir: t.dir}
	q, err := codeq.OpenLocal(ctx, t.dir)
	if err == nil {
		return q, at, nil
	}
	if !errors.Is(err, codeq.ErrNotServed) {
		return nil, at, err
	}
	at.Kind = whereClosed
	r, err := t.read()
	if err != nil {
		return nil, at, err
	}
	s := r.Staleness()
	at.Killed, at.Node = !s.Closed, s.Node
	for i, shard := range s.Shards {
		if shard.Logged > shard.Applied {
			t.app.note("codeq: shard %d of node %q has %d entries of its log that are not shown", i, s.Node, shard.Logged-shard.Applied)
		}
	}
	return r, at, nil
}

// read opens a closed directory.
func (t *target) read() (*codeq.Reader, error) {
	r, err := codeq.OpenReadOnly(t.dir, &codeq.ReaderOptions{AcceptCopy: t.acceptCopy})
	return r, t.explain(err)
}

// steer opens a target for changes.
func (t *target) steer(ctx context.Context) (steerer, error) {
	if t.url != "" {
		r, err := t.dial()
		if err != nil {
			return nil, err
		}
		return r, nil
	}
	q, err := codeq.OpenLocal(ctx, t.dir)
	if errors.Is(err, codeq.ErrNotServed) {
		q, err = t.open()
	}
	if err != nil {
		return nil, err
	}
	return q, nil
}

// open opens a closed directory for changes. It refuses the directory of a node of a cluster.
func (t *target) open() (*codeq.Queue, error) {
	q, err := codeq.Open(t.dir, &codeq.Options{Tool: true, AcceptCopy: t.acceptCopy})
	return q, t.explain(err)
}

// served opens a queue that is open in another process, for data such as its workers.
func (t *target) served(ctx context.Context) (steerer, error) {
	if t.url != "" {
		return t.steer(ctx)
	}
	q, err := t.local(ctx)
	if err != nil {
		return nil, err
	}
	return q, nil
}

// local connects to the process with the open directory.
func (t *target) local(ctx context.Context) (*codeq.Queue, error) {
	q, err := codeq.OpenLocal(ctx, t.dir)
	if !errors.Is(err, codeq.ErrNotServed) {
		return q, t.explain(err)
	}
	r, closedErr := t.read() // ErrLocked: a process has it open, and does not serve it
	if closedErr != nil {
		return nil, closedErr
	}
	return nil, errors.Join(coded(exitNotNow, fmt.Errorf("no process has the queue open: %w", err)), r.Close())
}

// explain adds a hint for operators to an error.
func (t *target) explain(err error) error {
	switch {
	case errors.Is(err, codeq.ErrLocked):
		return fmt.Errorf("%w; that process does not serve it (Queue.ServeLocal)", err)
	case errors.Is(err, codeq.ErrNotMember):
		return fmt.Errorf("%w; the node of a cluster is steered while its process has it open", err)
	}
	return err
}

// explainClosed is explain for a verb that needs a closed directory, served or not. instead is an
// alternative for the operator; "": none.
func (t *target) explainClosed(err error, instead string) error {
	if !errors.Is(err, codeq.ErrLocked) {
		return t.explain(err)
	}
	return fmt.Errorf("%w; this needs a closed directory: end that process first%s", err, instead)
}

// ofCheckpoint is the alternative for verbs that only read.
const ofCheckpoint = ", or make a copy with codeq checkpoint and use that"

// withView calls f with a target opened for reading.
func (a *app) withView(ctx context.Context, c *cli.Command, f func(view, where) error) error {
	t, err := a.target(c)
	if err != nil {
		return err
	}
	v, at, err := t.look(ctx)
	if err != nil {
		return err
	}
	return errors.Join(f(v, at), v.Close())
}

// withSteerer calls f with a target opened for changes.
func (a *app) withSteerer(ctx context.Context, c *cli.Command, f func(steerer) error) error {
	return a.with(ctx, c, (*target).steer, f)
}

// withServed calls f with a target that another process has open.
func (a *app) withServed(ctx context.Context, c *cli.Command, f func(steerer) error) error {
	return a.with(ctx, c, (*target).served, f)
}

// with calls f with a target opened by open.
func (a *app) with(ctx context.Context, c *cli.Command, open func(*target, context.Context) (steerer, error), f func(steerer) error) error {
	t, err := a.target(c)
	if err != nil {
		return err
	}
	s, err := open(t, ctx)
	if err != nil {
		return err
	}
	return errors.Join(f(s), s.Close())
}
