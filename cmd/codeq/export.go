package main

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/urfave/cli/v3"

	"codeq/internal/offline"
	"codeq/internal/platform"
)

func (a *app) exportCommand() *cli.Command {
	return &cli.Command{
		Name: "export", Category: categoryKeep, Usage: "write the content of a closed directory as JSON lines",
		Description: "Writes everything in the directory for import, which may change the number of shards. The\n" +
			"directory must not be open for writing: of a queue in use, export a checkpoint. The command's\n" +
			"README.md describes the lines. After an error, the file is removed.",
		Flags:  []cli.Flag{&cli.StringFlag{Name: "file", Usage: "write to this new `FILE`; default: the standard output"}},
		Action: a.export,
	}
}

func (a *app) export(ctx context.Context, c *cli.Command) (err error) {
	t, err := a.directory(c)
	if err != nil {
		return err
	}
	out, finish, err := newFile(c.String("file"), a.out)
	if err != nil {
		return err
	}
	defer func() { err = finish(err) }()
	p := a.progress()
	defer p.end()
	n, err := offline.Export(ctx, platform.FS, t.dir, t.acceptCopy, out, p.tell)
	p.end()
	if err != nil {
		return transferError(t.explainClosed(err, ofCheckpoint))
	}
	a.note("codeq: exported %d tasks, %d schedules, the settings of %d queues, %d keys of tasks that are gone",
		n.Tasks, n.Schedules, n.Settings, n.Keys)
	return nil
}

// transferError adds the exit code to an error of an export or import.
func transferError(err error) error {
	switch {
	case errors.Is(err, offline.ErrFile):
		return coded(exitDamaged, err)
	case errors.Is(err, offline.ErrNode):
		return coded(exitRefused, err)
	case errors.Is(err, offline.ErrZone):
		return coded(exitNotNow, err)
	}
	return err
}

// newFile opens a new file for writing; without a name it returns other. finish syncs and closes
// the file, or removes it if the command has failed.
func newFile(name string, other io.Writer) (out io.Writer, finish func(error) error, err error) {
	if name == "" {
		return other, func(err error) error { return err }, nil
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, nil, coded(exitOther, err)
	}
	return f, func(err error) error {
		if err == nil {
			err = f.Sync()
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return errors.Join(err, os.Remove(name))
		}
		return nil
	}, nil
}

// canMake checks that newFile can create a file, if it has a name.
func canMake(name string) error {
	_, finish, err := newFile(name, io.Discard)
	if err == nil && name != "" {
		err = errors.Join(finish(nil), os.Remove(name))
	}
	return err
}
