package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"codeq"
)

func (a *app) lsCommand() *cli.Command {
	return &cli.Command{
		Name: "ls", Category: categorySee,
		Usage: "list tasks",
		Description: "Lists the tasks that the flags select, a page at a time. With -json, each page is one value\n" +
			"{\"Tasks\": [...], \"Next\": cursor}.",
		Flags: append(filterFlags(),
			&cli.BoolFlag{Name: "newest", Usage: "the newest first"},
			&cli.BoolFlag{Name: "payload", Usage: "show payloads"},
			&cli.IntFlag{Name: "limit", Value: 100, Usage: "`N` tasks a page, up to 1000"},
			&cli.StringFlag{Name: "cursor", Usage: "go on at this `CURSOR`, the Next of the previous page"},
			&cli.BoolFlag{Name: "pages", Usage: "all pages"},
		),
		Action: a.ls,
	}
}

// pageResult is the JSON output of ls for a page.
type pageResult struct {
	Tasks  []*codeq.TaskInfo
	Next   string `json:",omitzero"`
	Hidden bool   `json:",omitzero"` // their contents are left out
}

func (a *app) ls(ctx context.Context, c *cli.Command) error {
	f, err := a.filter(c)
	if err != nil {
		return err
	}
	opts := codeq.PageOptions{
		TaskFilter: f, Newest: c.Bool("newest"), NoPayload: !c.Bool("payload"),
		Limit: c.Int("limit"), Cursor: c.String("cursor"),
	}
	if opts.Limit < 1 {
		return usagef(c, "-limit %d is less than 1", opts.Limit)
	}
	return a.withView(ctx, c, func(v view, _ where) error {
		shown := 0
		for {
			p, err := fullPage(ctx, v, opts)
			if err != nil {
				return err
			}
			if err := a.showPage(p, !opts.NoPayload, shown == 0); err != nil {
				return err
			}
			shown += len(p.Tasks)
			if opts.Cursor = p.Next; p.Next == "" {
				if shown == 0 {
					a.note("No task is selected.")
				}
				return nil
			}
			if !c.Bool("pages") {
				if !a.asJSON {
					a.note("There are more: -pages, or -cursor %s", p.Next)
				}
				return nil
			}
		}
	})
}

// fullPage returns a full page, unless there are no more tasks. The library's pages may be shorter,
// since it bounds the tasks that it reads; fullPage reads several.
func fullPage(ctx context.Context, v view, opts codeq.PageOptions) (pageResult, error) {
	r := pageResult{Tasks: []*codeq.TaskInfo{}}
	limit := opts.Limit
	for {
		opts.Limit = limit - len(r.Tasks)
		p, err := v.ListPage(ctx, opts)
		if err != nil {
			return r, err
		}
		r.Tasks, r.Next, r.Hidden = append(r.Tasks, p.Tasks...), p.Next, hides(v)
		if opts.Cursor = p.Next; p.Next == "" || len(r.Tasks) == limit {
			return r, nil
		}
	}
}

func (a *app) showPage(p pageResult, payloads, first bool) error {
	if a.asJSON {
		return a.json(p)
	}
	if len(p.Tasks) == 0 && !first {
		return nil
	}
	titles := []string{"ID", "STATE", "QUEUE", "TENANT", ">PRIO", ">TRIES", "AT", "LAST ERROR"}
	if payloads {
		titles = append(titles, "PAYLOAD")
	}
	t := newTable(titles...)
	for _, task := range p.Tasks {
		row := []any{
			task.ID, task.State, task.Queue, task.Tenant, task.Priority,
			attempts(task, "/"), a.time(task.At), clip(task.LastError, payloadCells),
		}
		if payloads {
			row = append(row, clipBytes(task.Payload, payloadCells))
		}
		t.add(row...)
	}
	return a.table(t)
}

func (a *app) getCommand() *cli.Command {
	return &cli.Command{
		Name: "get", Category: categorySee, ArgsUsage: "ID... | -queue QUEUE -key KEY",
		Usage: "show all stored data of tasks",
		Description: "Shows tasks by their IDs, or the task with an idempotency key. -raw writes only the bytes of the\n" +
			"payload, but not to a terminal, since they might control it. A dashboard leaves out the contents\n" +
			"of tasks if the user may not see them: -json has Hidden then.",
		Flags: append(keyFlags(),
			&cli.BoolFlag{Name: "raw", Usage: "write the unchanged payload of the task"},
			&cli.BoolFlag{Name: "result", Usage: "with -raw, write the result in its place"},
			&cli.BoolFlag{Name: "full", Usage: "do not shorten payloads and results"},
		),
		Action: a.get,
	}
}

// keyFlags returns the flags of an idempotency key.
func keyFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "key", Usage: "the task with this idempotency `KEY`"},
		&cli.StringFlag{Name: "queue", Usage: "the `QUEUE` of the key"},
		&cli.StringFlag{Name: "tenant", Usage: "the `TENANT` of the key"},
		&cli.StringFlag{Name: "group", Usage: "the `GROUP` of the key"},
		&cli.StringFlag{Name: "limit-key", Usage: "the limit `KEY` of the key"},
	}
}

func (a *app) get(ctx context.Context, c *cli.Command) error {
	list, err := ids(c)
	if err != nil {
		return err
	}
	key := codeq.UniqueKey{
		Queue: c.String("queue"), Tenant: c.String("tenant"), Group: c.String("group"), LimitKey: c.String("limit-key"), Key: c.String("key"),
	}
	raw := c.Bool("raw")
	switch {
	case (key.Key == "") == (len(list) == 0):
		return usagef(c, "get needs IDs, or -queue and -key")
	case raw && (len(list) > 1 || a.asJSON):
		return usagef(c, "-raw writes the payload of one task, and no JSON")
	case raw && terminalOf(a.out) != nil:
		return usagef(c, "-raw does not write to a terminal: redirect it")
	}
	return a.withView(ctx, c, func(v view, _ where) error {
		if key.Key != "" {
			t, err := v.FindByKey(ctx, key)
			if err != nil {
				return err
			}
			return a.showTask(c, t, hides(v))
		}
		for i, id := range list {
			t, err := v.Get(ctx, id)
			if err != nil {
				return fmt.Errorf("task %s: %w", id, err)
			}
			if i > 0 && !a.asJSON {
				if err := a.line(""); err != nil {
					return err
				}
			}
			if err := a.showTask(c, t, hides(v)); err != nil {
				return err
			}
		}
		return nil
	})
}

// attempts formats the number of attempts, and the maximum if the task has one.
func attempts(t *codeq.TaskInfo, of string) string {
	if t.MaxAttempts == 0 {
		return fmt.Sprint(t.Attempts)
	}
	return fmt.Sprint(t.Attempts, of, t.MaxAttempts)
}

// crashes formats the number of times that the process died during the task; "": never.
func crashes(t *codeq.TaskInfo) string {
	switch {
	case t.Suspect:
		return fmt.Sprint(t.Crashes, ", a suspect: it may have ended the process, and starts slowly")
	case t.Crashes > 0:
		return fmt.Sprint(t.Crashes)
	}
	return ""
}

// shownBytes is the number of bytes of a payload that get shows.
const shownBytes = 4096

// taskView is the JSON output of get for a task.
type taskView struct {
	*codeq.TaskInfo
	Hidden bool `json:",omitzero"` // its contents are left out
}

// showTask shows a task; hidden: without its contents.
func (a *app) showTask(c *cli.Command, t *codeq.TaskInfo, hidden bool) error {
	switch {
	case hidden && c.Bool("raw"):
		return coded(exitDenied, errors.New("the dashboard does not show payloads and results to this user"))
	case c.Bool("raw"):
		b := t.Payload
		if c.Bool("result") {
			b = t.Result
		}
		_, err := a.out.Write(b)
		return err
	case a.asJSON:
		return a.json(taskView{t, hidden})
	case hidden:
		a.note("The dashboard does not show the contents of task %s to this user: payload, result, headers, steps and the like.", t.ID)
	}
	content := func(b []byte) string {
		if len(b) <= shownBytes || c.Bool("full") {
			return string(b)
		}
		return fmt.Sprintf("%s... (%d bytes; -full shows all)", bytes.ToValidUTF8(b[:shownBytes], nil), len(b))
	}
	at := map[codeq.State]string{
		codeq.Ready: "ready since", codeq.Scheduled: "due", codeq.Blocked: "produced", codeq.Leased: "lease until",
		codeq.Dead: "dead since", codeq.Done: "done since", codeq.Canceled: "canceled since",
	}[t.State]
	fields := []field{
		{"id", t.ID}, {"state", t.State}, {"queue", t.Queue}, {"kind", t.Kind}, {"tenant", t.Tenant}, {"priority", t.Priority},
		{"produced at", a.time(t.ID.Time())}, {at, a.time(t.At)},
		{"attempts", attempts(t, " of ")}, {"crashes", crashes(t)}, {"last error", t.LastError},
		{"group", t.Group}, {"limit key", t.LimitKey}, {"key", t.Unique.Key}, {"key for", retentionText(t.Unique.For)},
		{"lease for", retentionText(t.LeaseFor)}, {"timeout", retentionText(t.Timeout)}, {"retention", retentionText(t.Retention)},
	}
	if len(t.After) > 0 {
		parents := make([]string, len(t.After))
		for i, id := range t.After {
			parents[i] = id.String()
		}
		fields = append(fields, field{"after", strings.Join(parents, " ")}, field{"if one dies", t.OnDead}, field{"if one is missing", t.OnMissing})
	}
	for _, name := range slices.Sorted(maps.Keys(t.Headers)) {
		fields = append(fields, field{"header " + safe(name), t.Headers[name]})
	}
	fields = append(append(append(fields, history(a, t)...), logs(a, t)...), steps(a, t, content)...)
	return a.fields(append(fields, field{"payload", content(t.Payload)}, field{"result", content(t.Result)}))
}
