// Command engine measures codeq by its own benchmarks, and writes the tables
// that README quotes:
//
//	go run -C bench/engine . -out ../results
//
// It writes engine.md, and engine.txt with what the benchmarks printed, for
// benchstat. Every number of a table is the median of -count runs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"codeq/bench/report"
)

type config struct {
	out, root string
	only      *regexp.Regexp
	count     int
	warmup    time.Duration
	window    time.Duration
	away      int64
	kill      time.Duration
	short     bool
}

func main() {
	var c config
	flag.StringVar(&c.out, "out", ".", "write engine.md and engine.txt into `DIR`")
	flag.StringVar(&c.root, "root", "../..", "the module of codeq is in `DIR`")
	only := flag.String("only", "", "measure the sections whose title matches `REGEXP`")
	flag.IntVar(&c.count, "count", 3, "run each benchmark `N` times; those that take minutes once")
	flag.DurationVar(&c.warmup, "warmup", time.Second, "let each run for this `TIME` before its window")
	flag.DurationVar(&c.window, "window", 5*time.Second, "measure each for this `TIME`")
	flag.Int64Var(&c.away, "away", 1_000_000, "a node that catches up has missed `N` cycles")
	flag.DurationVar(&c.kill, "kill", time.Minute, "kill nodes for this `TIME` at each durability")
	flag.BoolVar(&c.short, "short", false, "leave out what takes minutes")
	flag.Parse()
	var err error
	if c.only, err = regexp.Compile(*only); err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		err = c.run(ctx)
		stop()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "engine:", err)
		os.Exit(1)
	}
}

// run measures the sections one after the other, and writes what it has also
// when it is interrupted.
func (c *config) run(ctx context.Context) error {
	if err := os.MkdirAll(c.out, 0o755); err != nil {
		return err
	}
	machine, err := report.ThisMachine(c.out)
	if err != nil {
		return err
	}
	doc := report.New("The engine", machine)
	doc.Paragraph("A cycle is one task of 14 bytes produced, claimed and completed. Single calls are made by 32 producers and 128 " +
		"workers, each waiting for its own commit. The numbers of a table were taken in one run, and are medians of as many runs as it says.")
	var printed strings.Builder
	err = c.measure(ctx, doc, &printed)
	return errors.Join(err,
		doc.Write(filepath.Join(c.out, "engine.md")),
		os.WriteFile(filepath.Join(c.out, "engine.txt"), []byte(printed.String()), 0o644))
}

func (c *config) measure(ctx context.Context, doc *report.Document, printed io.Writer) error {
	var errs []error
	for _, s := range c.sections() {
		if !c.only.MatchString(s.title) || c.short && s.long {
			continue
		}
		out, err := c.test(ctx, s.args)
		fmt.Fprintf(printed, "command: go%s\n%s\n", report.Words(s.args), out)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var m measures
		if err == nil {
			m, err = parse(out)
		}
		doc.Heading(s.title)
		doc.Paragraph("`go%s`", report.Words(s.args))
		if err != nil {
			doc.Paragraph("It failed: %v. What it printed is in engine.txt.", err)
			errs = append(errs, fmt.Errorf("%s: %w", s.title, err))
			continue
		}
		s.table(doc, m)
	}
	return errors.Join(errs...)
}

// test runs the go command in the module of codeq, and returns what it printed.
func (c *config) test(ctx context.Context, args []string) (string, error) {
	fmt.Fprintln(os.Stderr, "go"+report.Words(args))
	cmd := exec.CommandContext(ctx, "go", args...)
	// The tests have children, which an interrupt is to reach as well.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.Dir = c.root
	var out strings.Builder
	cmd.Stdout = io.MultiWriter(&out, os.Stderr)
	cmd.Stderr = os.Stderr
	err := cmd.Run()
	return out.String(), err
}
