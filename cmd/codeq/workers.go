package main

import (
	"context"
	"slices"

	"github.com/urfave/cli/v3"

	"codeq"
)

func (a *app) quietCommand() *cli.Command {
	return &cli.Command{
		Name: "quiet", Category: categorySteer, ArgsUsage: "WORKER | -all",
		Usage: "stop new tasks for workers, before a deployment",
		Description: "Workers (calls of Queue.Run) with this name take no new tasks, in all processes of a cluster;\n" +
			"handlers that run go on. It lasts until quiet -undo, or until Run returns. Without WORKER and\n" +
			"-all, the workers are listed. A process must have the queue open.",
		Flags: append(dryRunFlag(),
			&cli.BoolFlag{Name: "all", Usage: "all workers"},
			&cli.BoolFlag{Name: "undo", Usage: "let them take tasks again"},
		),
		Action: a.quiet,
	}
}

// workersResult is the JSON output of quiet: the workers afterwards.
type workersResult struct {
	Workers []codeq.WorkerInfo
	DryRun  bool `json:",omitzero"`
}

func (a *app) quiet(ctx context.Context, c *cli.Command) error {
	name := c.Args().First()
	if c.Args().Len() > 1 || name != "" && c.Bool("all") {
		return usagef(c, "quiet takes one WORKER, or -all")
	}
	chosen := name != "" || c.Bool("all")
	if c.Bool("undo") && !chosen {
		return usagef(c, "-undo needs a WORKER, or -all")
	}
	return a.withServed(ctx, c, func(s steerer) error {
		if chosen && !c.Bool("dry-run") {
			do := s.QuietWorkers
			if c.Bool("undo") {
				do = s.ResumeWorkers
			}
			if err := do(ctx, name); err != nil {
				return err
			}
		}
		list, err := s.Workers(ctx)
		if err != nil {
			return err
		}
		if name != "" {
			list = slices.DeleteFunc(list, func(w codeq.WorkerInfo) bool { return w.Name != name })
			if len(list) == 0 {
				return codeq.ErrNotFound
			}
		}
		if a.asJSON {
			return a.json(workersResult{list, c.Bool("dry-run")})
		}
		return a.table(a.workerTable(list))
	})
}
