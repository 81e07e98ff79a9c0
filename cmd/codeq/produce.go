package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/urfave/cli/v3"

	"codeq"
)

// taskFlags returns the flags of a new task, without its queue and payload.
func taskFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringSliceFlag{Name: "header", Usage: "a header, `NAME=VALUE`; may be repeated"},
		&cli.IntFlag{Name: "priority", Usage: "0 to 9; 9 is claimed first"},
		&cli.StringFlag{Name: "tenant", Usage: "the `TENANT`"},
		&cli.StringFlag{Name: "kind", Usage: "the `KIND`, which selects a handler of the queue"},
		&cli.StringFlag{Name: "group", Usage: "tasks of a `GROUP` follow each other"},
		&cli.StringFlag{Name: "limit-key", Usage: "the `KEY` of a limit (set queue -concurrency-per-key)"},
		&cli.StringFlag{Name: "key", Usage: "the idempotency `KEY`"},
		&cli.DurationFlag{Name: "key-for", Usage: "minimum time for which the key is taken"},
		&cli.IntFlag{Name: "max-attempts", Usage: "after `N` attempts it is a dead letter; 0: by Options.MaxAttempts, or 25"},
		&cli.DurationFlag{Name: "run-for", Usage: "cancel the handler after this `TIME`"},
		&cli.StringFlag{Name: "retention", Usage: "keep it for this `TIME` after its end, or forever"},
	}
}

// taskOf reads the flags of a new task.
func taskOf(c *cli.Command) (t codeq.Task, err error) {
	t = codeq.Task{
		Queue: c.String("queue"), Kind: c.String("kind"), Priority: c.Int("priority"), Tenant: c.String("tenant"), Group: c.String("group"),
		LimitKey: c.String("limit-key"), MaxAttempts: c.Int("max-attempts"), Timeout: c.Duration("run-for"),
		Unique: codeq.Unique{Key: c.String("key"), For: c.Duration("key-for")},
	}
	if t.Queue == "" {
		return t, usagef(c, "-queue is needed")
	}
	if t.Retention, err = durationFlag(c, "retention"); err != nil {
		return t, err
	}
	for _, h := range c.StringSlice("header") {
		name, value, ok := strings.Cut(h, "=")
		if !ok || name == "" {
			return t, usagef(c, "-header %q is not NAME=VALUE", h)
		}
		if t.Headers == nil {
			t.Headers = make(map[string]string)
		}
		t.Headers[name] = value
	}
	return t, nil
}

func (a *app) produceCommand() *cli.Command {
	return &cli.Command{
		Name: "produce", Category: categorySteer, ArgsUsage: "[PAYLOAD]",
		Usage: "produce tasks",
		Description: "Produces a task and writes its ID. The payload is the argument, or the content of -file (\"-\": the\n" +
			"standard input). With -lines, each line is the payload of a task. If the idempotency key is\n" +
			"taken, nothing is stored, and the ID is that of the task with the key.",
		Flags: append(taskFlags(),
			&cli.StringFlag{Name: "queue", Usage: "the `QUEUE`; required"},
			&cli.StringFlag{Name: "file", Usage: "read the payload from this `FILE`; -: from the standard input"},
			&cli.BoolFlag{Name: "lines", Usage: "each line is a payload"},
			&cli.StringFlag{Name: "run-at", Usage: "the `TIME` when it becomes ready, or a duration from now"},
			&cli.StringSliceFlag{Name: "after", Usage: "it waits for the task with this `ID`; may be repeated"},
			&cli.BoolFlag{Name: "dry-run", Usage: "write the tasks as JSON, and store nothing"},
		),
		Action: a.produce,
	}
}

// produced is the JSON output of produce for a task.
type produced struct {
	ID        codeq.ID
	Duplicate bool `json:",omitzero"` // ID is that of the earlier task with the key
}

// produceBatch is the number of tasks in a batch of -lines.
const produceBatch = 1000

func (a *app) produce(ctx context.Context, c *cli.Command) error {
	t, err := taskOf(c)
	if err != nil {
		return err
	}
	if t.RunAt, err = a.timeFlag(c, "run-at", 1); err != nil {
		return err
	}
	for _, text := range c.StringSlice("after") {
		id, err := codeq.ParseID(text)
		if err != nil {
			return usageOf(c, err)
		}
		t.After = append(t.After, id)
	}
	switch {
	case c.Args().Len() == 1 && c.IsSet("file"):
		return usagef(c, "PAYLOAD and -file exclude each other")
	case c.Bool("lines") && !c.IsSet("file"):
		return usagef(c, "-lines needs -file")
	}
	from := io.Reader(strings.NewReader(c.Args().First()))
	if name := c.String("file"); name == "-" {
		from = a.in
	} else if name != "" {
		f, err := os.Open(name)
		if err != nil {
			return coded(exitOther, err)
		}
		defer func() { _ = f.Close() }() // it was only read
		from = f
	}
	if c.Bool("dry-run") {
		if _, err := a.target(c); err != nil {
			return err
		}
		return batches(from, t, c.Bool("lines"), func(tasks []codeq.Task) error {
			for _, t := range tasks {
				if err := a.json(t); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return a.withSteerer(ctx, c, func(s steerer) error {
		duplicates := 0
		err := batches(from, t, c.Bool("lines"), func(tasks []codeq.Task) error {
			stored, err := s.ProduceBatch(ctx, tasks)
			taken, only := duplicatesOf(err)
			if duplicates += len(taken); only {
				err = nil
			}
			for i, id := range stored {
				if id == (codeq.ID{}) {
					continue
				}
				note := ""
				if taken[i] {
					note = " has the key already"
				}
				if shown := a.result(produced{id, taken[i]}, "%s%s", id, note); shown != nil {
					return errors.Join(err, shown)
				}
			}
			return err
		})
		if err == nil && duplicates > 0 {
			err = fmt.Errorf("%w: %d of the tasks", codeq.ErrDuplicate, duplicates)
		}
		return err
	})
}

// batches calls f with batches of the tasks of an input: one task for the input, or one for each
// line.
func batches(from io.Reader, t codeq.Task, lines bool, f func([]codeq.Task) error) error {
	if !lines {
		payload, err := io.ReadAll(from)
		if err != nil {
			return err
		}
		t.Payload = payload
		return f([]codeq.Task{t})
	}
	r := bufio.NewReader(from)
	var tasks []codeq.Task
	size := 0
	for {
		line, err := r.ReadBytes('\n')
		if err != nil && err != io.EOF {
			return err
		}
		if len(line) > 0 {
			t.Payload = bytes.TrimRight(line, "\r\n")
			tasks, size = append(tasks, t), size+len(line)
		}
		if len(tasks) == produceBatch || size > 4<<20 || err == io.EOF && len(tasks) > 0 {
			if err := f(tasks); err != nil {
				return err
			}
			tasks, size = tasks[:0], 0
		}
		if err == io.EOF {
			return nil
		}
	}
}

// duplicatesOf returns which tasks of a batch have taken keys; only: the others are stored.
func duplicatesOf(err error) (taken map[int]bool, only bool) {
	taken, only = make(map[int]bool), true
	batch, ok := errors.AsType[*codeq.BatchError](err)
	if !ok {
		return taken, err == nil
	}
	for i, err := range batch.Errors {
		if errors.Is(err, codeq.ErrDuplicate) {
			taken[i] = true
		} else if err != nil {
			only = false
		}
	}
	return taken, only
}
