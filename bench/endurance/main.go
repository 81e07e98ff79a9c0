package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"codeq"
	"codeq/bench/report"
)

// config is what the flags say.
type config struct {
	time       time.Duration // of a point
	cycles     int64         // of a point, in place of the time
	producers  []int
	workers    int // for each producer
	payloads   []int
	backlog    int
	cooldown   time.Duration
	durability codeq.Durability
	shards     int
	out        string
	dir        string
	log        io.Writer
}

// progress tells whoever waits.
func (c config) progress(format string, args ...any) { fmt.Fprintf(c.log, format+"\n", args...) }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	c, end, err := parse(os.Args[1:])
	if err == nil {
		err = errors.Join(c.run(ctx), end())
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "endurance:", err)
		stop()
		os.Exit(1)
	}
}

// parse reads the flags. end removes what is not to be kept.
func parse(args []string) (c config, end func() error, err error) {
	f := flag.NewFlagSet("endurance", flag.ContinueOnError)
	f.DurationVar(&c.time, "for", 10*time.Minute, "time of each point")
	f.Int64Var(&c.cycles, "cycles", 0, "end each point after so many cycles, whatever -for says")
	c.producers, c.payloads = []int{2, 10}, []int{14, 64 << 10}
	f.Func("producers", "numbers of producers (default 2,10)", numbers(&c.producers, 1))
	f.IntVar(&c.workers, "workers", 4, "workers for each producer")
	f.Func("payload", "bytes of the payloads, at least 10 (default 14,65536)", numbers(&c.payloads, 10))
	f.IntVar(&c.backlog, "backlog", 1000, "tasks that wait or are worked on at the most")
	f.DurationVar(&c.cooldown, "cooldown", 5*time.Second, "time for which the queue is closed in the middle")
	f.TextVar(&c.durability, "durability", codeq.DurabilityProcess, "none, process or disk")
	f.IntVar(&c.shards, "shards", 0, "shards of the queue (default: as Options.Shards says)")
	f.StringVar(&c.out, "out", "../results", "directory for what was measured")
	f.StringVar(&c.dir, "dir", "", "directory on the disk to measure (default: that for temporary files)")
	short := f.Bool("short", false, "some seconds in all, judge nothing, keep nothing: endurance.md goes to standard output")
	c.log = os.Stderr
	end = func() error { return nil }
	if err := f.Parse(args); err != nil {
		return c, end, err
	}
	if f.NArg() > 0 || c.time < 2*time.Second || c.cycles < 0 || c.workers < 1 || c.backlog < 1 || c.cooldown < 0 {
		return c, end, fmt.Errorf("bad arguments: %s; -for is at least 2 s, counts are above zero", strings.Join(args, " "))
	}
	if c.dir == "" {
		c.dir = os.TempDir()
	}
	if !*short {
		return c, end, os.MkdirAll(c.out, 0o755)
	}
	c.time, c.cooldown = 2*time.Second, 100*time.Millisecond
	if c.out, err = os.MkdirTemp(c.dir, "endurance-"); err != nil {
		return c, end, err
	}
	return c, func() error {
		text, err := os.ReadFile(filepath.Join(c.out, "endurance.md"))
		if err == nil {
			_, err = os.Stdout.Write(text)
		}
		return errors.Join(err, os.RemoveAll(c.out))
	}, nil
}

// numbers is a flag of several numbers.
func numbers(to *[]int, least int) func(string) error {
	return func(s string) error {
		*to = nil
		for word := range strings.SplitSeq(s, ",") {
			n, err := strconv.Atoi(word)
			if err != nil || n < least {
				return fmt.Errorf("%q is no number of at least %d", word, least)
			}
			*to = append(*to, n)
		}
		return nil
	}
}

// run works through all points, and writes what it has when ctx ends or a point
// fails. Its error says what was not kept.
func (c config) run(ctx context.Context) error {
	m, err := report.ThisMachine(c.dir)
	if err != nil {
		return err
	}
	c.progress("%v", m)
	var all []outcome
	var failures []error
	for _, payload := range c.payloads {
		for _, producers := range c.producers {
			if ctx.Err() != nil {
				break
			}
			o := c.measure(ctx, point{producers, producers * c.workers, payload})
			all = append(all, o)
			for _, v := range o.verdicts {
				c.progress("%v", v)
				if v.failed {
					failures = append(failures, errors.New(v.String()))
				}
			}
			if o.err != nil {
				failures = append(failures, fmt.Errorf("%v ended early: %w", o.point, o.err))
			}
			if err := c.write(m, all); err != nil { // so that it is there whatever comes
				return errors.Join(append(failures, err)...)
			}
		}
	}
	return errors.Join(append(failures, ctx.Err())...)
}

// measure runs a point into its file, and judges what is in the file.
func (c config) measure(ctx context.Context, p point) (o outcome) {
	o.point = p
	c.progress("%v: begins", p)
	path := filepath.Join(c.out, "endurance-"+p.file()+".csv")
	f, err := os.Create(path)
	if err != nil {
		o.err = err
		return o
	}
	o.reopened, o.err = p.run(ctx, c, f)
	o.err = errors.Join(o.err, f.Close())
	text, err := os.ReadFile(path)
	if err == nil && len(bytes.TrimSpace(text)) > 0 {
		o.samples, err = readSamples(text)
	}
	if o.err = errors.Join(o.err, err); o.err == nil {
		o.verdicts = judge(p, o.samples)
	}
	return o
}
