package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"codeq"
)

func (a *app) pauseCommand() *cli.Command {
	return &cli.Command{
		Name: "pause", Category: categorySteer, ArgsUsage: "QUEUE...", Usage: "stop claims from queues",
		Description: "Nothing is claimed from the queues until resume. Leased tasks and produces go on.",
		Flags:       dryRunFlag(), ShellComplete: a.completeQueues,
		Action: a.pauseAction(true),
	}
}

func (a *app) resumeCommand() *cli.Command {
	return &cli.Command{
		Name: "resume", Category: categorySteer, ArgsUsage: "QUEUE...", Usage: "undo pause",
		Flags: dryRunFlag(), ShellComplete: a.completeQueues,
		Action: a.pauseAction(false),
	}
}

func (a *app) deleteCommand() *cli.Command {
	return &cli.Command{
		Name: "delete", Category: categorySteer, ArgsUsage: "QUEUE...", Usage: "remove unused queues",
		Description: "Removes the settings of queues, so that no list has them any more. A queue is refused if it has\n" +
			"tasks of any state, idempotency keys, a schedule or waiting claims.",
		ShellComplete: a.completeQueues,
		Action: func(ctx context.Context, c *cli.Command) error {
			return a.withSteerer(ctx, c, func(s steerer) error {
				for _, name := range c.Args().Slice() {
					if err := s.DeleteQueue(ctx, name); err != nil {
						return err
					}
					if err := a.result(struct{ Queue string }{name}, "queue %s deleted", name); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
}

func dryRunFlag() []cli.Flag {
	return []cli.Flag{&cli.BoolFlag{Name: "dry-run", Usage: "report the changes, and make none"}}
}

func (a *app) pauseAction(paused bool) cli.ActionFunc {
	return func(ctx context.Context, c *cli.Command) error {
		return a.configure(ctx, c, c.Args().Slice(), func(s *codeq.Settings) { s.Paused = paused })
	}
}

// queueSettings is the JSON output of the verbs that change settings, for one queue.
type queueSettings struct {
	Queue    string
	Settings codeq.Settings
	DryRun   bool `json:",omitzero"`
}

// configure changes the settings of queues, and shows them.
func (a *app) configure(ctx context.Context, c *cli.Command, queues []string, change func(*codeq.Settings)) error {
	show := func(r queueSettings) error {
		if a.asJSON {
			return a.json(r)
		}
		title := "Settings of %s:"
		if r.DryRun {
			title = "Settings of %s as they would be:"
		}
		return errors.Join(a.line(title, r.Queue), a.showSettings(r.Settings))
	}
	if c.Bool("dry-run") {
		return a.withView(ctx, c, func(v view, _ where) error {
			for _, name := range queues {
				s, err := v.Settings(name)
				if err != nil {
					return err
				}
				change(&s)
				if err := show(queueSettings{name, s, true}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return a.withSteerer(ctx, c, func(s steerer) error {
		for _, name := range queues {
			r := queueSettings{Queue: name}
			if err := s.Configure(ctx, name, func(s *codeq.Settings) { change(s); r.Settings = *s }); err != nil {
				return fmt.Errorf("queue %q: %w", name, err)
			}
			if err := show(r); err != nil {
				return err
			}
		}
		return nil
	})
}

func (a *app) showSettings(s codeq.Settings) error {
	limit := func(n float64) string {
		if n == 0 {
			return "no limit"
		}
		return strconv.FormatFloat(n, 'g', -1, 64)
	}
	weights := make([]string, 0, len(s.TenantWeights))
	for _, name := range slices.Sorted(maps.Keys(s.TenantWeights)) {
		weights = append(weights, fmt.Sprintf("%s=%d", name, s.TenantWeights[name]))
	}
	fields := []field{
		{"  paused", s.Paused}, {"  concurrency", limit(float64(s.Concurrency))},
		{"  concurrency-per-key", limit(float64(s.ConcurrencyPerKey))}, {"  rate", limit(s.Rate)},
	}
	if s.Burst != 0 {
		fields = append(fields, field{"  burst", limit(float64(s.Burst))})
	}
	for _, f := range []struct {
		field
		set bool
	}{
		{field{"  max-attempts", s.MaxAttempts}, s.MaxAttempts != 0},
		{field{"  backoff", backoffText(s.Backoff)}, s.Backoff != codeq.Backoff{}},
		{field{"  timeout", s.Timeout}, s.Timeout != 0},
		{field{"  retry-first", s.RetryFirst}, s.RetryFirst},
		{field{"  dead-letter-queue", s.DeadLetterQueue}, s.DeadLetterQueue != ""},
	} {
		if f.set {
			fields = append(fields, f.field)
		}
	}
	return a.fields(append(fields,
		field{"  tenant-weight", strings.Join(weights, " ")}, field{"  retention", retentionText(s.Retention)},
		field{"  dead-retention", retentionText(s.DeadRetention)}, field{"  hold-groups", s.HoldGroups}))
}

// backoffText has the fields of a backoff that are set.
func backoffText(b codeq.Backoff) string {
	var text []string
	for _, d := range []struct {
		name string
		time.Duration
	}{{"base", b.Base}, {"max", b.Max}, {"step", b.Step}} {
		if d.Duration != 0 {
			text = append(text, d.name+" "+d.String())
		}
	}
	for _, n := range []struct {
		name  string
		value float64
	}{{"factor", b.Factor}, {"jitter", b.Jitter}} {
		if n.value != 0 {
			text = append(text, fmt.Sprint(n.name, " ", n.value))
		}
	}
	return strings.Join(text, ", ")
}

func (a *app) setCommand() *cli.Command {
	c := &cli.Command{
		Name: "set", Category: categorySteer, Usage: "change settings of queues, or waiting tasks",
		Commands: []*cli.Command{
			{
				Name: "queue", ArgsUsage: "QUEUE...", Usage: "change the settings of queues",
				Description: "Changes the given settings; the others stay. 0 removes a limit.",
				Flags: append(dryRunFlag(),
					&cli.IntFlag{Name: "concurrency", Usage: "lease at most `N` tasks at the same time"},
					&cli.IntFlag{Name: "concurrency-per-key", Usage: "the same for the tasks of each limit key"},
					&cli.FloatFlag{Name: "rate", Usage: "claim at most `N` tasks a second"},
					&cli.IntFlag{Name: "burst", Usage: "claim `N` tasks at once after a pause in the claims"},
					&cli.StringSliceFlag{Name: "tenant-weight", Usage: "`TENANT=N` claims in a row; 0: the default; may be repeated"},
					&cli.StringFlag{Name: "retention", Usage: "keep completed and canceled tasks for this `TIME`, or forever"},
					&cli.StringFlag{Name: "dead-retention", Usage: "keep dead letters for this `TIME`, or forever"},
					&cli.IntFlag{Name: "max-attempts", Usage: "try tasks `N` times; 0: as often as the process says"},
					&cli.StringFlag{Name: "timeout", Usage: "cancel a handler after this `TIME`"},
					&cli.StringFlag{Name: "backoff-base", Usage: "wait for this `TIME` after the first attempt"},
					&cli.StringFlag{Name: "backoff-max", Usage: "wait for this `TIME` at most"},
					&cli.StringFlag{Name: "backoff-step", Usage: "wait for this `TIME` more after each further attempt"},
					&cli.FloatFlag{Name: "backoff-factor", Usage: "wait `N` times as long after each further attempt; 1: as long"},
					&cli.BoolFlag{Name: "retry-first", Usage: "a task that is tried again comes first (=false: last)"},
					&cli.StringFlag{Name: "dead-letter-queue", Usage: "put a task for each dead letter into this `QUEUE`"},
					&cli.BoolFlag{Name: "hold-groups", Usage: "a dead letter holds the turn of its group (=false: not)"},
				),
				ShellComplete: a.completeQueues,
				Action:        a.setQueue,
			},
			{
				Name: "task", ArgsUsage: "ID... | flags that select tasks", Usage: "change waiting tasks, or move them to another queue",
				Description: "Changes the priority (-priority) or the time (-run-at, only by IDs) of waiting tasks, or moves\n" +
					"tasks to another queue (-to-queue with -queue and -state), where they get other IDs.",
				Flags: append(bulkFlags(),
					&cli.IntFlag{Name: "priority", Usage: "the new priority, 0 to 9"},
					&cli.StringFlag{Name: "run-at", Usage: "the `TIME` when they become ready, a duration from now, or now"},
					&cli.StringFlag{Name: "to-queue", Usage: "move them to this `QUEUE`"},
				),
				Action: a.setTask,
			},
		},
	}
	c.Action = a.group(c)
	return c
}

func (a *app) setQueue(ctx context.Context, c *cli.Command) error {
	var changes []func(*codeq.Settings)
	add := func(flag string, change func(*codeq.Settings)) {
		if c.IsSet(flag) {
			changes = append(changes, change)
		}
	}
	add("concurrency", func(s *codeq.Settings) { s.Concurrency = c.Int("concurrency") })
	add("concurrency-per-key", func(s *codeq.Settings) { s.ConcurrencyPerKey = c.Int("concurrency-per-key") })
	add("rate", func(s *codeq.Settings) { s.Rate = c.Float("rate") })
	add("burst", func(s *codeq.Settings) { s.Burst = c.Int("burst") })
	add("hold-groups", func(s *codeq.Settings) { s.HoldGroups = c.Bool("hold-groups") })
	add("max-attempts", func(s *codeq.Settings) { s.MaxAttempts = c.Int("max-attempts") })
	add("backoff-factor", func(s *codeq.Settings) { s.Backoff.Factor = c.Float("backoff-factor") })
	add("dead-letter-queue", func(s *codeq.Settings) { s.DeadLetterQueue = c.String("dead-letter-queue") })
	add("retry-first", func(s *codeq.Settings) { s.RetryFirst = c.Bool("retry-first") })
	for flag, of := range map[string]func(*codeq.Settings) *time.Duration{
		"retention":      func(s *codeq.Settings) *time.Duration { return &s.Retention },
		"dead-retention": func(s *codeq.Settings) *time.Duration { return &s.DeadRetention },
		"timeout":        func(s *codeq.Settings) *time.Duration { return &s.Timeout },
		"backoff-base":   func(s *codeq.Settings) *time.Duration { return &s.Backoff.Base },
		"backoff-max":    func(s *codeq.Settings) *time.Duration { return &s.Backoff.Max },
		"backoff-step":   func(s *codeq.Settings) *time.Duration { return &s.Backoff.Step },
	} {
		d, err := durationFlag(c, flag)
		if err != nil {
			return err
		}
		add(flag, func(s *codeq.Settings) { *of(s) = d })
	}
	for _, text := range c.StringSlice("tenant-weight") {
		i := strings.LastIndexByte(text, '=')
		n, err := strconv.Atoi(text[i+1:])
		if i < 0 || err != nil {
			return usagef(c, "-tenant-weight %q is not TENANT=N", text)
		}
		add("tenant-weight", func(s *codeq.Settings) {
			s.TenantWeights = maps.Clone(s.TenantWeights)
			if s.TenantWeights == nil {
				s.TenantWeights = make(map[string]int)
			}
			if s.TenantWeights[text[:i]] = n; n == 0 {
				delete(s.TenantWeights, text[:i])
			}
		})
	}
	if len(changes) == 0 {
		return usagef(c, "set queue needs a setting")
	}
	return a.configure(ctx, c, c.Args().Slice(), func(s *codeq.Settings) {
		for _, change := range changes {
			change(s)
		}
	})
}

func (a *app) setTask(ctx context.Context, c *cli.Command) error {
	given := 0
	for _, flag := range []string{"priority", "run-at", "to-queue"} {
		if c.IsSet(flag) {
			given++
		}
	}
	if given != 1 {
		return usagef(c, "set task needs one of -priority, -run-at and -to-queue")
	}
	waiting := []codeq.State{codeq.Ready, codeq.Scheduled, codeq.Blocked}
	ch := &change{name: "set task", done: "changed", states: waiting, defaults: waiting}
	priority := c.Int("priority")
	switch {
	case c.IsSet("priority"):
		if priority < codeq.MinPriority || priority > codeq.MaxPriority {
			return usagef(c, "-priority %d is not 0 to 9", priority)
		}
		ch.action = codeq.BulkSetPriority
		ch.one = func(ctx context.Context, _ *cli.Command, s steerer, id codeq.ID) error {
			return s.SetPriority(ctx, id, priority)
		}
	case c.IsSet("run-at"):
		at, err := a.timeFlag(c, "run-at", 1)
		if err != nil {
			return err
		}
		ch.one = func(ctx context.Context, _ *cli.Command, s steerer, id codeq.ID) error {
			return s.SetRunAt(ctx, id, at)
		}
	default:
		ch.done, ch.action = "moved", codeq.BulkMove
		ch.states = []codeq.State{codeq.Ready, codeq.Scheduled, codeq.Dead}
		ch.defaults = ch.states[:2]
	}
	list, opts, err := a.selection(c, ch)
	switch {
	case err != nil:
		return err
	case len(list) > 0 && ch.one == nil:
		return usagef(c, "-to-queue moves tasks selected by flags, not by IDs")
	case len(list) > 0:
		return a.changeEach(ctx, c, ch, list)
	case ch.action == 0:
		return usagef(c, "-run-at needs IDs")
	}
	opts.Priority, opts.ToQueue = priority, c.String("to-queue")
	return a.changeMany(ctx, c, ch, opts)
}
