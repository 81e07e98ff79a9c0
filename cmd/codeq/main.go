package main

import (
	"context"
	"io"
	"math"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
	_ "time/tzdata" // the machine may have none

	"github.com/urfave/cli/v3"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	a := &app{in: os.Stdin, out: os.Stdout, err: os.Stderr, env: os.Getenv, now: time.Now, loc: time.Local}
	os.Exit(a.run(ctx, os.Args))
}

// app is a run of the command with its input, outputs and clock.
type app struct {
	in       io.Reader
	out, err io.Writer
	env      func(string) string
	now      func() time.Time
	loc      *time.Location // of the times in tables
	asJSON   bool
}

// run carries out a command line, and returns the exit code of the process.
func (a *app) run(ctx context.Context, args []string) int {
	root := a.root()
	err := root.Run(ctx, args)
	if err != nil {
		a.fail(err)
	}
	return exitCode(err)
}

// fail writes an error to the standard error.
func (a *app) fail(err error) {
	text := err.Error()
	a.note("codeq: %s", strings.ReplaceAll(text, "codeq: ", ""))
}

const overview = `Inspects and controls a codeq queue. -dir is its directory:

 - if the directory is closed, verbs that read change nothing (other programs cannot open it
   meanwhile), and verbs that change make only their own change, with the options of the
   application's last Open: no lease expires, no schedule ticks, nothing becomes due; an older
   format is refused, not upgraded;
 - if another process has it open, both use its local socket: the process must call
   Queue.ServeLocal, and run as the same user.

-url is the URL of a dashboard (package codeqweb). CODEQ_TOKEN is sent as "Authorization: Bearer",
or CODEQ_USER and CODEQ_PASSWORD as "Basic". Credentials are never flags, since other users can see
flags. Without -dir and -url, CODEQ_DIR or CODEQ_URL is used.

-json writes JSON, one value a line, with the field names of package codeq.

A flag may have one or two dashes. Times are in RFC 3339, or a duration before now for -from and
-to, and after now for -run-at. Text from tasks is escaped like in Go ("\x1b", "\u202e", "\n"), so
that it cannot control the terminal.`

// root makes the command tree.
func (a *app) root() *cli.Command {
	root := &cli.Command{
		Name:                  "codeq",
		Usage:                 "inspect and control a codeq queue",
		Description:           overview + "\n\n" + exitText(),
		UsageText:             "codeq [-dir DIR | -url URL] VERB [flags] [arguments]",
		EnableShellCompletion: true,
		ConfigureShellCompletionCommand: func(c *cli.Command) {
			c.Hidden, c.Category = false, categoryOther
		},
		Suggest:        true,
		HideVersion:    true,
		Reader:         a.in,
		Writer:         a.out,
		ErrWriter:      a.err,
		ExitErrHandler: func(context.Context, *cli.Command, error) {}, // run returns the code
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "dir", Usage: "the directory of the queue, `DIR`"},
			&cli.StringFlag{Name: "url", Usage: "the `URL` of a dashboard, such as https://host/admin/codeq/"},
			&cli.BoolFlag{Name: "json", Usage: "write JSON, one value a line", Destination: &a.asJSON},
			&cli.DurationFlag{Name: "timeout", Usage: "give up after this `TIME`; 0: never"},
			&cli.BoolFlag{Name: "accept-copy", Usage: "open a directory whose files were copied from a killed process (see Options.AcceptCopy)"},
		},
		Commands: []*cli.Command{
			a.infoCommand(), a.lsCommand(), a.getCommand(), a.topCommand(), a.tailCommand(),
			a.produceCommand(), a.cancelCommand(), a.redriveCommand(), a.purgeCommand(), a.setCommand(),
			a.pauseCommand(), a.resumeCommand(), a.deleteCommand(), a.quietCommand(), a.schedulesCommand(),
			a.verifyCommand(), a.repairCommand(), a.checkpointCommand(), a.exportCommand(), a.importCommand(),
			a.benchCommand(), a.clusterCommand(),
		},
	}
	root.Action = a.group(root)
	a.prepare(root)
	return root
}

// The categories of the verbs in the help.
const (
	categorySee     = "see"
	categorySteer   = "steer"
	categoryKeep    = "keep"
	categoryCluster = "cluster"
	categoryOther   = "other"
)

// prepare configures all commands: a wrong command line is a usage error, a comma does not separate
// values, ArgsUsage bounds the number of arguments, and -timeout bounds the action.
func (a *app) prepare(c *cli.Command) {
	c.DisableSliceFlagSeparator = true
	c.OnUsageError = func(_ context.Context, c *cli.Command, err error, _ bool) error {
		return usageOf(c, err)
	}
	action := c.Action
	c.Action = func(ctx context.Context, c *cli.Command) error {
		if err := checkArguments(c); err != nil {
			return err
		}
		if d := c.Duration("timeout"); d != 0 {
			if d < 0 {
				return usagef(c, "-timeout %s is negative", d)
			}
			var stop context.CancelFunc
			ctx, stop = context.WithTimeout(ctx, d)
			defer stop()
		}
		return action(ctx, c)
	}
	for _, sub := range c.Commands {
		a.prepare(sub)
	}
}

// checkArguments checks the number of arguments by ArgsUsage: "A" stands for one argument, "[A]"
// for one or none, "A..." for one or more; alternatives ("|") are checked by their verbs.
func checkArguments(c *cli.Command) error {
	n, least, most := c.Args().Len(), 0, 0
	for word := range strings.FieldsSeq(c.ArgsUsage) {
		switch {
		case word == "|":
			return nil
		case strings.HasSuffix(word, "..."):
			least, most = least+1, math.MaxInt
		case strings.HasPrefix(word, "["):
			most++
		default:
			least, most = least+1, most+1
		}
	}
	switch {
	case n >= least && n <= most:
		return nil
	case len(c.Commands) > 0:
		return usagef(c, "unknown verb %q", c.Args().First())
	case most == 0:
		return usagef(c, "%s takes no argument %q", c.Name, c.Args().First())
	}
	return usagef(c, "%s takes %s", c.Name, c.ArgsUsage)
}

// group is the action of a command that only has subcommands.
func (a *app) group(c *cli.Command) cli.ActionFunc {
	return func(_ context.Context, now *cli.Command) error {
		if now == now.Root() {
			return cli.ShowRootCommandHelp(now)
		}
		return usagef(now, "one of its verbs is needed: %s", strings.Join(names(c.Commands), ", "))
	}
}

func names(commands []*cli.Command) (names []string) {
	for _, c := range commands {
		if c.Name != "help" {
			names = append(names, c.Name)
		}
	}
	return names
}
