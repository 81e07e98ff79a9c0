package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v3"

	"codeq"
)

func (a *app) schedulesCommand() *cli.Command {
	c := &cli.Command{
		Name: "schedules", Category: categorySteer, Usage: "list schedules, set, remove and run them",
		Commands: []*cli.Command{
			{
				Name: "set", ArgsUsage: "NAME [PAYLOAD]", Usage: "store a schedule, or replace the one of this name",
				Flags: append(append(taskFlags(), dryRunFlag()...),
					&cli.StringFlag{Name: "queue", Usage: "the `QUEUE` of its tasks; required"},
					&cli.StringFlag{Name: "cron", Usage: "minute, hour, day, month, day of the week; or @daily and the like"},
					&cli.DurationFlag{Name: "every", Usage: "the `TIME` from tick to tick, in place of -cron"},
					&cli.DurationFlag{Name: "jitter", Usage: "tasks are ready up to this `TIME` after their ticks"},
					&cli.StringFlag{Name: "time-zone", Usage: "the time `ZONE` of -cron, such as Europe/Berlin; default: UTC"},
					&cli.StringFlag{Name: "missed", Value: "once", Usage: "what to do about missed ticks: once, skip, all"},
					&cli.BoolFlag{Name: "stdin", Usage: "read the payload from the standard input"},
				),
				Action: a.setSchedule,
			},
			{
				Name: "rm", ArgsUsage: "NAME", Usage: "remove a schedule; the tasks that it has produced stay",
				Flags: dryRunFlag(), Action: a.removeSchedule,
			},
			{
				Name: "run", ArgsUsage: "NAME", Usage: "produce the task of a schedule now",
				Flags: dryRunFlag(), Action: a.runSchedule,
			},
		},
	}
	c.Action = func(ctx context.Context, c *cli.Command) error {
		return a.withView(ctx, c, func(v view, _ where) error {
			list, err := v.Schedules(ctx)
			if err != nil {
				return err
			}
			if a.asJSON {
				if list == nil {
					list = []codeq.ScheduleInfo{}
				}
				return a.json(schedulesResult{list, hides(v)})
			}
			t := newTable("NAME", "WHEN", "ZONE", "QUEUE", "NEXT", "LAST", "ERROR")
			for i := range list {
				s := &list[i]
				when := s.Cron
				if s.Every != 0 {
					when = "every " + s.Every.String()
				}
				t.add(s.Name, when, s.TimeZone, s.Task.Queue, a.time(s.Next), a.time(s.Last), clip(s.LastError, payloadCells))
			}
			return a.table(t)
		})
	}
	return c
}

// schedulesResult is the JSON output of schedules.
type schedulesResult struct {
	Schedules []codeq.ScheduleInfo
	Hidden    bool `json:",omitzero"` // the contents of their tasks are left out
}

func (a *app) setSchedule(ctx context.Context, c *cli.Command) error {
	args := c.Args().Slice()
	t, err := taskOf(c)
	if err != nil {
		return err
	}
	from := io.Reader(strings.NewReader(strings.Join(args[1:], "")))
	if c.Bool("stdin") {
		from = a.in
	}
	if t.Payload, err = io.ReadAll(from); err != nil {
		return err
	}
	s := codeq.Schedule{Name: args[0], Cron: c.String("cron"), Every: c.Duration("every"), Jitter: c.Duration("jitter"), TimeZone: c.String("time-zone"), Task: t}
	if err := s.Missed.UnmarshalText([]byte(c.String("missed"))); err != nil {
		return usageOf(c, err)
	}
	if c.Bool("dry-run") {
		if _, err := a.target(c); err != nil {
			return err
		}
		return a.json(s)
	}
	return a.withSteerer(ctx, c, func(q steerer) error {
		if err := q.SetSchedule(ctx, s); err != nil {
			return err
		}
		return a.result(s, "schedule %s is set", s.Name)
	})
}

// scheduleResult is the JSON output of the verbs about one schedule.
type scheduleResult struct {
	Name   string
	ID     codeq.ID `json:",omitzero"` // of the produced task
	DryRun bool     `json:",omitzero"`
}

// findSchedule returns a schedule by its name.
func findSchedule(ctx context.Context, v view, name string) (*codeq.ScheduleInfo, error) {
	list, err := v.Schedules(ctx)
	if err != nil {
		return nil, err
	}
	for i := range list {
		if list[i].Name == name {
			return &list[i], nil
		}
	}
	return nil, fmt.Errorf("%w: schedule %q", codeq.ErrNotFound, name)
}

// aboutSchedule calls act with a schedule. In a dry run it only checks that the schedule exists.
func (a *app) aboutSchedule(ctx context.Context, c *cli.Command, done string, act func(steerer, *codeq.ScheduleInfo, *scheduleResult) error) error {
	r := scheduleResult{Name: c.Args().First(), DryRun: c.Bool("dry-run")}
	if r.DryRun {
		return a.withView(ctx, c, func(v view, _ where) error {
			if _, err := findSchedule(ctx, v, r.Name); err != nil {
				return err
			}
			return a.result(r, "schedule %s would be %s", r.Name, done)
		})
	}
	return a.withSteerer(ctx, c, func(q steerer) error {
		s, err := findSchedule(ctx, q, r.Name)
		if err != nil {
			return err
		}
		if err := act(q, s, &r); err != nil {
			return err
		}
		if r.ID != (codeq.ID{}) {
			return a.result(r, "%s", r.ID)
		}
		return a.result(r, "schedule %s is %s", r.Name, done)
	})
}

func (a *app) removeSchedule(ctx context.Context, c *cli.Command) error {
	return a.aboutSchedule(ctx, c, "removed", func(q steerer, s *codeq.ScheduleInfo, _ *scheduleResult) error {
		return q.DeleteSchedule(ctx, s.Name)
	})
}

func (a *app) runSchedule(ctx context.Context, c *cli.Command) error {
	return a.aboutSchedule(ctx, c, "run", func(q steerer, s *codeq.ScheduleInfo, r *scheduleResult) error {
		var err error
		r.ID, err = q.TriggerSchedule(ctx, s.Name)
		return err
	})
}
