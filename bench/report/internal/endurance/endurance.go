// Package endurance measures whether a queue gets slower or larger over a long time. In the root of
// the repository:
//
//	go run -C bench/report . endurance -for 10m -out ../results
//
// It runs the cycle (produce, claim, complete, by single calls, with a bounded backlog) at every
// point: a number of producers and a size of payload. In the middle of a point the queue is closed,
// rests, and is opened again. Every second it writes a sample to the CSV file of the point:
// latencies of the clients, resources of the process, statistics of the stores. endurance.md and
// its charts come from these files.
//
// It fails if at any point the last tenth of the run was slower than 0.9 of the second tenth, if
// memory or disk was not bounded, or if tasks were missing. A point of less than 100 seconds is not
// judged: its tenths are too short.
package endurance

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"codeq"
	"codeq/bench/report/internal/command"
)

// config has the flags.
type config struct {
	command.Options
	time       time.Duration // of a point
	producers  []int
	workers    int // for each producer
	payloads   []int
	backlog    int
	cooldown   time.Duration
	durability codeq.Durability
	shards     int
	progress   func(format string, args ...any)
}

// Declare declares the flags of the command.
func Declare(f *flag.FlagSet) func(context.Context) error {
	c := declare(f)
	return func(ctx context.Context) error {
		if err := c.check(); err != nil {
			return err
		}
		return c.run(ctx)
	}
}

func declare(f *flag.FlagSet) *config {
	c := &config{producers: []int{2, 10}, payloads: []int{14, 64 << 10}, progress: command.Progress}
	c.Directories(f)
	f.DurationVar(&c.time, "for", 10*time.Minute, "`TIME` of each point, at least 2s")
	f.Func("producers", "`NUMBERS` of producers (default 2,10)", numbers(&c.producers, 1))
	f.IntVar(&c.workers, "workers", 4, "`N` workers for each producer")
	f.Func("payload", "`BYTES` of the payloads, at least 10 (default 14,65536)", numbers(&c.payloads, 10))
	f.IntVar(&c.backlog, "backlog", 1000, "at most `N` tasks that wait or are worked on")
	f.DurationVar(&c.cooldown, "cooldown", 5*time.Second, "close the queue for this `TIME` in the middle")
	f.TextVar(&c.durability, "durability", codeq.DurabilityProcess, "none, process or disk")
	f.IntVar(&c.shards, "shards", 0, "`N` shards of the queue (default: that of Options.Shards)")
	return c
}

// check refuses impossible flags.
func (c *config) check() error {
	if c.time < 2*time.Second || c.workers < 1 || c.backlog < 1 || c.cooldown < 0 {
		return errors.New("-for is at least 2s, -workers and -backlog are at least 1, -cooldown is at least 0")
	}
	return nil
}

// numbers parses a flag of several numbers.
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

// run measures all points. If ctx ends or a point fails, it still writes the others. Its error
// lists the failed promises.
func (c *config) run(ctx context.Context) error {
	m, err := c.Begin()
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
			if err := c.write(m, all); err != nil { // after each point, in case of a later failure
				return errors.Join(append(failures, err)...)
			}
		}
	}
	return errors.Join(append(failures, ctx.Err())...)
}

// measure runs a point, writes its file, and judges the samples in the file.
func (c *config) measure(ctx context.Context, p point) (o outcome) {
	o.point = p
	c.progress("%v: begins", p)
	path := filepath.Join(c.Out, "endurance-"+p.file()+".csv")
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
