package main

import (
	"context"
	"errors"
	"io/fs"

	"github.com/urfave/cli/v3"

	"codeq"
)

func (a *app) checkpointCommand() *cli.Command {
	return &cli.Command{
		Name: "checkpoint", Category: categoryKeep, ArgsUsage: "NEWDIR",
		Usage: "copy the open queue to a new directory",
		Description: "Copies the state of the whole queue at one time. NEWDIR must be on the same file system, and\n" +
			"missing or empty. Large files are shared by hard links: do not chmod, chown or change files of NEWDIR\n" +
			"unless it was made with -copy.",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "copy", Usage: "copy all files, so that the files of NEWDIR may be changed"},
		},
		Action: func(ctx context.Context, c *cli.Command) error {
			t, err := a.directory(c)
			if err != nil {
				return err
			}
			s, err := t.steer(ctx)
			if err != nil {
				return err
			}
			dir := c.Args().First()
			err = errors.Join(s.(*codeq.Queue).Checkpoint(ctx, dir, codeq.CheckpointOptions{Copy: c.Bool("copy")}), s.Close()) // -dir opens nothing else
			if errors.Is(err, fs.ErrExist) {
				err = coded(exitRefused, err)
			}
			if err != nil {
				return err
			}
			return a.result(struct{ Dir string }{dir}, "copied to %s", dir)
		},
	}
}
