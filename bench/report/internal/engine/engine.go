// Package engine measures codeq by its own benchmarks, and writes the tables for
// docs/replication.md and others. In the root of the repository:
//
//	go run -C bench/report . engine -out ../results
//
// It takes half an hour, and writes engine.md, and the output of the benchmarks for benchstat as
// engine.txt.
package engine

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"codeq/bench/report/internal/command"
	"codeq/bench/report/internal/document"
)

type config struct {
	command.Options
	root  string
	count int
	away  int64
	kill  time.Duration
}

// Declare declares the flags of the command.
func Declare(f *flag.FlagSet) func(context.Context) error {
	var c config
	c.Directories(f)
	c.Windows(f, "sections whose titles", time.Second, 5*time.Second)
	f.StringVar(&c.root, "root", "../..", "the module of codeq is in `DIR`")
	f.IntVar(&c.count, "count", 6, "run the benchmarks that do not take minutes `N` times; benchstat wants 6")
	f.Int64Var(&c.away, "away", 1_000_000, "a node that catches up has missed `N` cycles")
	f.DurationVar(&c.kill, "kill", time.Minute, "kill nodes for this `TIME` at each durability")
	return c.run
}

// run measures, and writes the results also after an interrupt.
func (c *config) run(ctx context.Context) error {
	machine, err := c.Begin()
	if err != nil {
		return err
	}
	chosen := slices.DeleteFunc(c.sections(), func(s section) bool { return !c.Only.MatchString(s.title) })
	file := filepath.Join(c.Out, "engine.txt")
	printed, err := os.Create(file)
	if err != nil {
		return err
	}
	failed := make(map[string]error) // by the line of a command
	err = errors.Join(c.measure(ctx, c.plan(chosen), failed, printed), printed.Close())
	doc := document.New("The engine", machine)
	return errors.Join(err, c.write(context.WithoutCancel(ctx), doc, chosen, failed, file), doc.Write(filepath.Join(c.Out, "engine.md")))
}

// plan returns the commands: first the repeated ones, round by round, so that slow minutes of the
// machine affect all of them alike, then the others.
func (c *config) plan(sections []section) (all []testRun) {
	if round := c.round(sections); round.args != nil {
		all = slices.Repeat([]testRun{round}, c.count)
	}
	for _, s := range sections {
		all = append(all, s.once...)
	}
	return all
}

// measure runs commands one after the other, writes their output, and returns their failures.
func (c *config) measure(ctx context.Context, plan []testRun, failed map[string]error, printed io.Writer) error {
	for i, cmd := range plan {
		out, err := c.test(ctx, cmd)
		_, werr := io.WriteString(printed, cmd.heading()+out+kills(out)+"\n")
		if ctx.Err() != nil {
			for _, rest := range plan[i:] {
				failed[rest.String()] = context.Cause(ctx)
			}
			return context.Cause(ctx)
		}
		if err = errors.Join(err, werr); err != nil {
			failed[cmd.String()] = err
		}
	}
	var errs []error
	for line, err := range failed {
		errs = append(errs, fmt.Errorf("%s: %w", line, err))
	}
	return errors.Join(errs...)
}

// test runs a command in the module of codeq, and returns its output.
func (c *config) test(ctx context.Context, run testRun) (string, error) {
	command.Progress("%s", run)
	cmd := exec.CommandContext(ctx, "go", run.args...)
	// An interrupt ends the children of the tests as well.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.Dir = c.root
	cmd.Env = slices.Concat(os.Environ(), run.env, []string{"TMPDIR=" + c.Dir})
	var out strings.Builder
	cmd.Stdout = io.MultiWriter(&out, os.Stderr)
	cmd.Stderr = os.Stderr
	err := cmd.Run()
	return out.String(), err
}

// write writes the tables of each section, or the failure of its commands.
func (c *config) write(ctx context.Context, doc *document.Document, sections []section, failed map[string]error, file string) error {
	doc.Paragraph("A cycle is one task of 14 bytes produced, claimed and completed. Single calls are made by 32 producers and 128 " +
		"workers, each waiting for its own commit.")
	doc.Paragraph("benchstat computes medians, 95 %% confidence intervals, and changes from the first column, or line, that are significant: "+
		"of %d runs, and of one where that takes minutes.", c.count)
	round := c.round(sections)
	var errs []error
	for _, s := range sections {
		doc.Heading(s.title)
		commands := s.once
		if s.repeated != nil {
			commands = []testRun{round}
		}
		doc.Paragraph("%s", lines(commands))
		if err := failure(commands, failed); err != nil {
			doc.Paragraph("It failed: %v. What it printed is in engine.txt.", err)
			continue
		}
		for _, t := range s.tables {
			medians, err := t.Run(ctx, file)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			header, rows := medians.Table(words)
			doc.Table(header, rows...)
		}
	}
	return errors.Join(errs...)
}

func failure(commands []testRun, failed map[string]error) error {
	for _, cmd := range commands {
		if err := failed[cmd.String()]; err != nil {
			return err
		}
	}
	return nil
}

// lines returns the distinct command lines.
func lines(commands []testRun) string {
	var each []string
	for _, cmd := range commands {
		if line := "`" + cmd.String() + "`"; !slices.Contains(each, line) {
			each = append(each, line)
		}
	}
	return strings.Join(each, ", in turn with ")
}
