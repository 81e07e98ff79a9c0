package main

import (
	"fmt"
	"time"

	"github.com/urfave/cli/v3"

	"codeq"
)

// filterFlags are the flags that select tasks.
func filterFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringSliceFlag{Name: "state", Usage: "in this `STATE`: ready, scheduled, blocked, leased, dead, done, canceled; repeated: in one of them"},
		&cli.StringFlag{Name: "queue", Usage: "of this `QUEUE`"},
		&cli.StringSliceFlag{Name: "tenant", Usage: "of this `TENANT` (\"\": without one); repeated: of one of them"},
		&cli.StringFlag{Name: "kind", Usage: "of this `KIND` of tasks"},
		&cli.StringFlag{Name: "group", Usage: "with this `GROUP`"},
		&cli.StringFlag{Name: "key", Usage: "with this idempotency `KEY`"},
		&cli.StringFlag{Name: "error", Usage: "with a last error of this `KIND`: its text with \"#\" for each word with a digit and \"?\" for quotes"},
		&cli.StringFlag{Name: "text", Usage: "with this `TEXT` in ID, kind, tenant, group, keys or last error, in either case of ASCII letters"},
		&cli.BoolFlag{Name: "contents", Usage: "-text is searched in payloads, results, headers and metadata, too"},
		&cli.StringFlag{Name: "from", Usage: "at or after this `TIME`: when they became ready, dead, done or canceled, are due, were produced, or the lease ends"},
		&cli.StringFlag{Name: "to", Usage: "before this `TIME`"},
	}
}

// filter reads the flags that select tasks.
func (a *app) filter(c *cli.Command) (f codeq.TaskFilter, err error) {
	f = codeq.TaskFilter{
		Queue: c.String("queue"), Tenants: c.StringSlice("tenant"),
		Kind: c.String("kind"), Group: c.String("group"), Key: c.String("key"), ErrorKind: c.String("error"),
		Text: c.String("text"), Contents: c.Bool("contents"),
	}
	for _, name := range c.StringSlice("state") {
		var s codeq.State
		if err := s.UnmarshalText([]byte(name)); err != nil {
			return f, usageOf(c, err)
		}
		f.States = append(f.States, s)
	}
	if f.From, err = a.timeFlag(c, "from", -1); err == nil {
		f.To, err = a.timeFlag(c, "to", -1)
	}
	return f, err
}

// isAll reports whether a filter has no condition except states.
func isAll(f *codeq.TaskFilter) bool {
	return f.Queue == "" && len(f.Tenants) == 0 && f.Kind == "" && f.Group == "" && f.Key == "" && f.ErrorKind == "" && f.Text == "" && f.From.IsZero() && f.To.IsZero()
}

// timeFlag reads a time, or a duration from now in a direction, and returns the time in UTC; zero:
// the flag is not set.
func (a *app) timeFlag(c *cli.Command, name string, direction time.Duration) (time.Time, error) {
	text := c.String(name)
	if text == "" {
		return time.Time{}, nil
	}
	if text == "now" {
		return a.now().UTC(), nil
	}
	if d, err := time.ParseDuration(text); err == nil {
		return a.now().UTC().Add(direction * d), nil
	}
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return t, usagef(c, "-%s %q is neither a duration nor a time of RFC 3339", name, text)
	}
	if t = t.UTC(); t.Year() < 0 || t.Year() > 9999 {
		return t, usagef(c, "-%s %q is not in the years 0 to 9999 in UTC", name, text)
	}
	return t, nil
}

// durationFlag reads a duration or "forever".
func durationFlag(c *cli.Command, name string) (time.Duration, error) {
	text := c.String(name)
	if text == "" || text == "0" {
		return 0, nil
	}
	if text == "forever" {
		return codeq.Forever, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, usagef(c, "-%s %q is neither a duration nor \"forever\"", name, text)
	}
	return d, nil
}

// retentionText formats a duration that may be Forever; "" if it is zero.
func retentionText(d time.Duration) string {
	switch d {
	case 0:
		return ""
	case codeq.Forever:
		return "forever"
	default:
		return d.String()
	}
}

// ids reads the arguments as IDs of tasks.
func ids(c *cli.Command) ([]codeq.ID, error) {
	var list []codeq.ID
	for _, text := range c.Args().Slice() {
		id, err := codeq.ParseID(text)
		if err != nil {
			return nil, usageOf(c, fmt.Errorf("%q is not the ID of a task: %w", text, err))
		}
		list = append(list, id)
	}
	return list, nil
}
