package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/urfave/cli/v3"

	"codeq"
)

// change is a verb that alters tasks, selected by IDs or flags.
type change struct {
	name, done string
	action     codeq.BulkAction
	// states lists the states of tasks that the verb may alter; defaults applies without -state.
	states, defaults []codeq.State
	one              func(ctx context.Context, c *cli.Command, s steerer, id codeq.ID) error
}

var (
	cancelChange = change{
		"cancel", "canceled", codeq.BulkCancel,
		[]codeq.State{codeq.Ready, codeq.Scheduled, codeq.Blocked, codeq.Leased, codeq.Dead},
		[]codeq.State{codeq.Ready, codeq.Scheduled, codeq.Blocked},
		func(ctx context.Context, _ *cli.Command, s steerer, id codeq.ID) error { return s.Cancel(ctx, id) },
	}
	redriveChange = change{
		"redrive", "redriven", codeq.BulkRedrive,
		[]codeq.State{codeq.Dead}, []codeq.State{codeq.Dead},
		func(ctx context.Context, c *cli.Command, s steerer, id codeq.ID) error {
			return s.RedriveDeadFrom(ctx, id, c.String("from-step"))
		},
	}
	purgeChange = change{
		"purge", "purged", codeq.BulkPurge,
		[]codeq.State{codeq.Dead, codeq.Done, codeq.Canceled}, []codeq.State{codeq.Dead},
		func(ctx context.Context, _ *cli.Command, s steerer, id codeq.ID) error { return s.Forget(ctx, id) },
	}
)

func (a *app) cancelCommand() *cli.Command {
	return a.changeCommand(&cancelChange, "cancel tasks",
		"Cancels tasks by their IDs, or those that the flags select: ready, scheduled and blocked ones,\n"+
			"unless -state says others (leased, dead). Handlers that work on a task are told.")
}

func (a *app) redriveCommand() *cli.Command {
	c := a.changeCommand(&redriveChange, "make dead letters ready again",
		"Redrives dead letters by their IDs, or those that the flags select. Their attempts are counted\n"+
			"from 0 again. Those whose idempotency key another task has taken are refused, and stay.")
	c.Flags = append(c.Flags, &cli.StringFlag{Name: "from-step", Usage: "run the step `NAME`, and those after it, again; for IDs only"})
	return c
}

func (a *app) purgeCommand() *cli.Command {
	return a.changeCommand(&purgeChange, "delete dead letters and kept tasks",
		"Deletes tasks by their IDs, or those that the flags select: dead letters, unless -state says\n"+
			"others (done, canceled).")
}

// bulkFlags returns the flags of a bulk change.
func bulkFlags() []cli.Flag {
	return append(filterFlags(),
		&cli.BoolFlag{Name: "all", Usage: "of all queues; needed if no flag but -state selects tasks"},
		&cli.FloatFlag{Name: "rate", Usage: "alter so many tasks a second, `N`; 0: as fast as possible"},
		&cli.StringFlag{Name: "cursor", Usage: "go on at this `CURSOR`, from the output of the interrupted call"},
		&cli.BoolFlag{Name: "dry-run", Usage: "count the tasks, and change nothing"},
	)
}

func (a *app) changeCommand(ch *change, usage, description string) *cli.Command {
	return &cli.Command{
		Name: ch.name, Category: categorySteer, ArgsUsage: "ID... | flags that select tasks",
		Usage: usage, Description: description, Flags: bulkFlags(),
		Action: func(ctx context.Context, c *cli.Command) error {
			list, opts, err := a.selection(c, ch)
			if err != nil {
				return err
			}
			if len(list) > 0 {
				return a.changeEach(ctx, c, ch, list)
			}
			return a.changeMany(ctx, c, ch, opts)
		},
	}
}

// selection reads the IDs or the flags that select tasks.
func (a *app) selection(c *cli.Command, ch *change) ([]codeq.ID, codeq.BulkOptions, error) {
	opts := codeq.BulkOptions{Action: ch.action, Rate: c.Float("rate"), DryRun: c.Bool("dry-run"), Cursor: c.String("cursor")}
	list, err := ids(c)
	if err != nil {
		return nil, opts, err
	}
	if opts.TaskFilter, err = a.filter(c); err != nil {
		return nil, opts, err
	}
	selects := len(opts.States) > 0 || !isAll(&opts.TaskFilter) || c.Bool("all") || opts.Cursor != "" || opts.Rate != 0
	switch {
	case len(list) > 0 && selects:
		return nil, opts, usagef(c, "IDs and flags that select tasks exclude each other")
	case len(list) > 0:
		return list, opts, nil
	case c.String("from-step") != "":
		return nil, opts, usagef(c, "-from-step needs IDs")
	case isAll(&opts.TaskFilter) && !c.Bool("all"):
		return nil, opts, usagef(c, "%s needs IDs, flags that select tasks, or -all", c.Name)
	}
	if len(opts.States) == 0 {
		opts.States = ch.defaults
	}
	for _, s := range opts.States {
		if !slices.Contains(ch.states, s) {
			return nil, opts, usagef(c, "%s cannot alter tasks that are %s, but %v", ch.name, s, ch.states)
		}
	}
	return nil, opts, nil
}

// taskResult is the JSON output of a verb about one task.
type taskResult struct {
	ID     codeq.ID
	Done   bool
	DryRun bool   `json:",omitzero"`
	Error  string `json:",omitzero"`
}

// changeEach alters tasks by their IDs. It goes on after an error, and returns all errors. When ctx
// ends, the tasks that are left stay as they are, and are reported, too.
func (a *app) changeEach(ctx context.Context, c *cli.Command, ch *change, list []codeq.ID) error {
	each := func(one func(codeq.ID) error) error {
		var all error
		ended := false
		for _, id := range list {
			err := ctx.Err()
			if err == nil {
				err = one(id)
			} else {
				ended, err = true, fmt.Errorf("not reached: %w", err)
			}
			r := taskResult{ID: id, Done: err == nil, DryRun: c.Bool("dry-run")}
			if err != nil {
				r.Error = err.Error()
				all = errors.Join(all, fmt.Errorf("task %s: %w", id, err))
			}
			if err == nil || a.asJSON {
				would := ""
				if r.DryRun {
					would = "would be "
				}
				if err := a.result(r, "%s %s%s", id, would, ch.done); err != nil {
					return err
				}
			}
		}
		if ended {
			all = coded(exitEnded, all) // beside any errors of the others
		}
		return all
	}
	if c.Bool("dry-run") {
		return a.withView(ctx, c, func(v view, _ where) error {
			return each(func(id codeq.ID) error {
				t, err := v.Get(ctx, id)
				if err == nil && !slices.Contains(ch.states, t.State) {
					err = coded(exitRefused, fmt.Errorf("it is %s, not one of %v", t.State, ch.states))
				}
				return err
			})
		})
	}
	return a.withSteerer(ctx, c, func(s steerer) error {
		return each(func(id codeq.ID) error { return ch.one(ctx, c, s, id) })
	})
}

// bulkResult is the JSON output of a bulk change.
type bulkResult struct {
	Action string
	DryRun bool `json:",omitzero"`
	codeq.BulkResult
}

// changeMany alters all selected tasks.
func (a *app) changeMany(ctx context.Context, c *cli.Command, ch *change, opts codeq.BulkOptions) error {
	r, err := a.bulk(ctx, c, opts)
	if err != nil && r == (codeq.BulkResult{}) {
		return err
	}
	var shown error
	if opts.DryRun {
		shown = a.result(bulkResult{ch.name, true, r}, "%d tasks would be %s.", r.Matched, ch.done)
	} else {
		shown = a.result(bulkResult{ch.name, false, r}, "%d tasks of %d %s; %d had changed meanwhile, %d were refused.",
			r.Changed, r.Matched, ch.done, r.Skipped, r.Failed)
	}
	if ctx.Err() != nil {
		err = coded(exitEnded, err) // some tasks of the last commit may have been altered as well
	}
	if err != nil && r.Next != "" {
		a.note("To go on: -cursor %s", r.Next)
	}
	if err == nil && r.Failed > 0 {
		err = coded(exitRefused, fmt.Errorf("%d tasks were refused", r.Failed))
	}
	return errors.Join(err, shown)
}

// bulk alters tasks, or counts them. Counting does not change a closed directory.
func (a *app) bulk(ctx context.Context, c *cli.Command, opts codeq.BulkOptions) (r codeq.BulkResult, err error) {
	if !opts.DryRun {
		err = a.withSteerer(ctx, c, func(s steerer) (err error) {
			r, err = s.Bulk(ctx, opts)
			return err
		})
		return r, err
	}
	err = a.withView(ctx, c, func(v view, _ where) (err error) {
		if s, ok := v.(steerer); ok {
			r, err = s.Bulk(ctx, opts)
			return err
		}
		page := codeq.PageOptions{TaskFilter: opts.TaskFilter, NoPayload: true, Limit: codeq.MaxPage, Cursor: opts.Cursor}
		for {
			p, err := v.ListPage(ctx, page)
			if err != nil {
				return err
			}
			for _, t := range p.Tasks {
				if opts.Action != codeq.BulkSetPriority || t.Priority != opts.Priority {
					r.Matched++
				}
			}
			if page.Cursor, r.Next = p.Next, p.Next; p.Next == "" {
				return nil
			}
		}
	})
	return r, err
}
