// Command engine measures codeq by its own benchmarks, and writes the tables
// that README quotes:
//
//	go run -C bench/engine . -out ../results
//
// It takes twenty minutes, and writes engine.md, and engine.txt with what the
// benchmarks printed, for benchstat.
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
	"slices"
	"strings"
	"syscall"
	"time"

	"codeq/bench/report"
)

type config struct {
	out, root, dir string
	only           *regexp.Regexp
	count          int
	warmup         time.Duration
	window         time.Duration
	away           int64
	kill           time.Duration
	short          bool
}

func main() {
	var c config
	flag.StringVar(&c.out, "out", ".", "write engine.md and engine.txt into `DIR`")
	flag.StringVar(&c.root, "root", "../..", "the module of codeq is in `DIR`")
	flag.StringVar(&c.dir, "dir", os.TempDir(), "`DIR` is on the disk to measure; what is stored in it is removed")
	only := flag.String("only", "", "measure the sections whose title matches `REGEXP`")
	flag.IntVar(&c.count, "count", 3, "run the benchmarks that do not take minutes `N` times, those at disk 2N-1 times")
	flag.DurationVar(&c.warmup, "warmup", time.Second, "let each run for this `TIME` before its window")
	flag.DurationVar(&c.window, "window", 5*time.Second, "measure each for this `TIME`; those that take minutes for a fixed one")
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

// run writes what it has also when it is interrupted.
func (c *config) run(ctx context.Context) (err error) {
	if c.dir, err = filepath.Abs(c.dir); err != nil {
		return err
	}
	if err := os.MkdirAll(c.out, 0o755); err != nil {
		return err
	}
	machine, err := report.ThisMachine(c.dir)
	if err != nil {
		return err
	}
	var printed strings.Builder
	sections := slices.DeleteFunc(c.sections(), func(s section) bool { return !c.only.MatchString(s.title) || c.short && s.long })
	r := results{syncs: []float64{machine.Syncs}, measures: make(measures), failed: make(map[string]error)}
	err = c.measure(ctx, c.plan(sections), &r, &printed)
	doc := report.New("The engine", machine)
	r.write(doc, c, sections)
	return errors.Join(err,
		doc.Write(filepath.Join(c.out, "engine.md")),
		os.WriteFile(filepath.Join(c.out, "engine.txt"), []byte(printed.String()), 0o644))
}

// plan is what is run: round by round what is repeated, so that what the machine and
// its disk do from minute to minute meets all alike, and then the rest.
func (c *config) plan(sections []section) (all []command) {
	every, disk := c.rounds(sections)
	for i := range 2*c.count - 1 {
		if round := []command{every, disk}[i%2]; round.args != nil {
			all = append(all, round)
		}
	}
	for _, s := range sections {
		all = append(all, s.once...)
	}
	return all
}

// results are those of the commands that were run.
type results struct {
	measures measures
	syncs    []float64        // fdatasyncs a second of the disk, before each command
	failed   map[string]error // by the line of a command
}

// measure runs commands one after the other, and returns what has gone wrong.
func (c *config) measure(ctx context.Context, plan []command, r *results, printed io.Writer) error {
	for i, cmd := range plan {
		machine, err := report.ThisMachine(c.dir)
		if err != nil {
			return err
		}
		r.syncs = append(r.syncs, machine.Syncs)
		out, err := c.test(ctx, cmd)
		fmt.Fprintf(printed, "command: %s\n%s\n", cmd, out)
		if ctx.Err() != nil {
			for _, rest := range plan[i:] {
				r.failed[rest.String()] = context.Cause(ctx)
			}
			return context.Cause(ctx)
		}
		if err == nil {
			err = r.measures.parse(cmd.name, out)
		}
		if err != nil {
			r.failed[cmd.String()] = err
		}
	}
	var errs []error
	for line, err := range r.failed {
		errs = append(errs, fmt.Errorf("%s: %w", line, err))
	}
	return errors.Join(errs...)
}

// test runs a command in the module of codeq, and returns what it printed.
func (c *config) test(ctx context.Context, run command) (string, error) {
	fmt.Fprintln(os.Stderr, run)
	cmd := exec.CommandContext(ctx, "go", run.args...)
	// The tests have children, which an interrupt is to reach as well.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.Dir = c.root
	cmd.Env = slices.Concat(os.Environ(), run.env, []string{"TMPDIR=" + c.dir})
	var out strings.Builder
	cmd.Stdout = io.MultiWriter(&out, os.Stderr)
	cmd.Stderr = os.Stderr
	err := cmd.Run()
	return out.String(), err
}

// write writes the sections all of whose commands have succeeded, and of the
// others what has gone wrong.
func (r *results) write(doc *report.Document, c *config, sections []section) {
	slices.Sort(r.syncs)
	doc.Paragraph("The disk did %s to %s fdatasyncs a second, %s in the median, when it was measured before each command: what is at *disk* goes up and down with it.",
		report.Number(r.syncs[0]), report.Number(r.syncs[len(r.syncs)-1]), report.Number(median(r.syncs)))
	doc.Paragraph("A cycle is one task of 14 bytes produced, claimed and completed. Single calls are made by 32 producers and 128 " +
		"workers, each waiting for its own commit.")
	every, disk := c.rounds(sections)
	first := "" // section that has rounds
	for _, s := range sections {
		doc.Heading(s.title)
		commands := s.once
		if s.repeated != nil {
			commands = []command{every, disk}
		}
		switch {
		case s.repeated == nil:
			doc.Paragraph("%s", lines(s.once))
		case first != "":
			doc.Paragraph("Of the same runs as %s.", first)
		case disk.args == nil:
			first = s.title
			doc.Paragraph("`%s`; medians of %d runs.", every, c.count)
		default:
			first = s.title
			doc.Paragraph("`%s`, and in turn with it what is at disk, `%s`; medians of %d runs, at disk of %d.", every, disk, c.count, 2*c.count-1)
		}
		failed := false
		for _, cmd := range commands {
			if err := r.failed[cmd.String()]; err != nil && !failed {
				doc.Paragraph("It failed: %v. What it printed is in engine.txt.", err)
				failed = true
			}
		}
		if !failed {
			s.table(doc, r.measures)
		}
	}
}

// lines are the different ones of commands that follow each other in turn.
func lines(commands []command) string {
	var each []string
	for _, cmd := range commands {
		if line := "`" + cmd.String() + "`"; !slices.Contains(each, line) {
			each = append(each, line)
		}
	}
	text := strings.Join(each, ", ")
	if n := len(commands) / len(each); n > 1 {
		text += fmt.Sprintf("; in turn, medians of %d runs", n)
	}
	return text
}
