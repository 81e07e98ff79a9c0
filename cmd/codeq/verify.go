package main

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v3"

	"codeq"
)

func (a *app) verifyCommand() *cli.Command {
	return &cli.Command{
		Name: "verify", Category: categoryKeep, Usage: "read everything in a closed directory, and report damage",
		Description: "Checks all files and records of a closed directory, and changes nothing.\n" +
			"If there is damage, the exit code is 7.",
		Action: func(ctx context.Context, c *cli.Command) error { return a.verify(c, false) },
	}
}

func (a *app) repairCommand() *cli.Command {
	return &cli.Command{
		Name: "repair", Category: categoryKeep, Usage: "repair a closed directory as far as possible",
		Description: "Rebuilds each damaged shard from its readable records; the damaged store is kept beside the new\n" +
			"one. Unreadable records are lost: see VerifyOptions.Repair. If damage is left, the exit code is\n" +
			"7.",
		Flags:  []cli.Flag{&cli.BoolFlag{Name: "dry-run", Usage: "report the repairs, and make none"}},
		Action: func(ctx context.Context, c *cli.Command) error { return a.verify(c, !c.Bool("dry-run")) },
	}
}

// verifyResult is the JSON output of verify and repair.
type verifyResult struct {
	OK bool
	*codeq.VerifyReport
}

func (a *app) verify(c *cli.Command, repair bool) error {
	t, err := a.directory(c)
	if err != nil {
		return err
	}
	r, err := codeq.Verify(t.dir, &codeq.VerifyOptions{Repair: repair, AcceptCopy: t.acceptCopy})
	if err != nil {
		if repair {
			return t.explainClosed(err, "")
		}
		return t.explainClosed(err, ofCheckpoint)
	}
	if a.asJSON {
		err = a.json(verifyResult{r.OK(), r})
	} else {
		err = a.showReport(r)
	}
	if err == nil && !r.OK() {
		left := 0
		for _, p := range r.Problems {
			if !p.Repaired {
				left++
			}
		}
		err = coded(exitDamaged, fmt.Errorf("%d problems in %s", left, t.dir))
	}
	return err
}

func (a *app) showReport(r *codeq.VerifyReport) error {
	t := newTable(">SHARD", ">FILES", ">SIZE", ">TASKS", ">DEAD", "CLOSED IN ORDER", ">MAY REPEAT", "DAMAGED STORE KEPT IN")
	for i, s := range r.Shards {
		sealed := "yes"
		if !s.Sealed {
			sealed = "no"
		}
		t.add(i, s.Files, sizeText(s.Bytes), s.Tasks.Total(), s.Tasks.Dead, sealed, s.MayRepeat, s.Kept)
	}
	if err := a.table(t); err != nil {
		return err
	}
	for _, s := range r.Shards {
		for _, id := range s.NotUTF8 {
			if err := a.line("Not UTF-8: a name, key or header of task %s", id); err != nil {
				return err
			}
		}
	}
	if len(r.Problems) == 0 {
		return a.line("No problem was found.")
	}
	t = newTable(">SHARD", "FILE", "STATE", "PROBLEM")
	for _, p := range r.Problems {
		state := "cannot be repaired"
		switch {
		case p.Repaired:
			state = "repaired"
		case p.Repairable:
			state = "repairable"
		}
		shard := fmt.Sprint(p.Shard)
		if p.Shard < 0 {
			shard = "-"
		}
		t.add(shard, p.File, state, p.Text)
	}
	return a.section("Problems", t)
}
