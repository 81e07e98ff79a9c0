package scaling

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"codeq"
	"codeq/bench/report/internal/benchstat"
	"codeq/bench/report/internal/command"
	"codeq/bench/report/internal/document"
	"codeq/bench/workload"
	"codeq/internal/inspect"
)

// result of a window.
type result struct {
	workload.Result
	commits  int64   // of all shards; 0: unknown, since a shard has changed its leader
	produced float64 // tasks a second, of a sweep of backlogs
}

// group returns the cycles of a commit; NaN if commits are not known.
func (r result) group() float64 {
	if r.commits == 0 {
		return math.NaN()
	}
	return float64(r.Cycles()) / float64(r.commits)
}

// busy returns the part of all cores' time that the process has used.
func (r result) busy() float64 {
	return r.Usage.CPU.Seconds() / r.Elapsed.Seconds() / float64(runtime.GOMAXPROCS(0))
}

// cpu returns the processor time of a cycle, of all cores.
func (r result) cpu() time.Duration { return r.Usage.CPU / time.Duration(max(r.Cycles(), 1)) }

// outcome has the measurements of one value with one setting.
type outcome struct {
	results []result     // one for each run
	profile *attribution // of a further window, at both ends of a profiled sweep; or nil
	err     error
}

// problem returns the reason why an outcome has no numbers; "" if it has some.
func (o *outcome) problem() string {
	switch {
	case o.err != nil:
		return "failed: " + o.err.Error()
	case len(o.results) == 0:
		return "not measured"
	case slices.ContainsFunc(o.results, func(r result) bool { return r.FellBehind() }):
		return "discarded: completions fell behind"
	}
	return ""
}

// measurer runs sweeps.
type measurer struct {
	command.Options
	runs     int
	progress func(format string, args ...any)
}

// runsOf returns the number of measurements of each value of a sweep.
func (m *measurer) runsOf(sw *sweep) int { return max(m.runs, sw.runs) }

// sweep measures all values with all settings, runsOf times in turn, so that slow minutes of the
// machine affect all values alike. When ctx ends, the rest is missing. Errors are in the outcomes.
func (m *measurer) sweep(ctx context.Context, sw *sweep) [][]outcome {
	outcomes := make([][]outcome, len(sw.settings))
	for i := range outcomes {
		outcomes[i] = make([]outcome, len(sw.values))
	}
	for run := range m.runsOf(sw) {
		for i, base := range sw.settings {
			deep := filepath.Join(m.Dir, fmt.Sprintf("%s-%d", sw.name, i)) // kept if deep
			for j, v := range sw.values {
				if ctx.Err() != nil {
					return outcomes
				}
				o := &outcomes[i][j]
				end := j == 0 || j == len(sw.values)-1
				name := ""
				if end && !sw.plain && run == m.runsOf(sw)-1 {
					name = benchstat.Word(fmt.Sprintf("%s %s %s", sw.name, base.name, sw.label(v)))
				}
				var res result
				var err error
				if s := sw.at(base, v); sw.stock {
					res, err = m.stocked(ctx, deep, s)
				} else {
					res, err = m.point(ctx, deep, s, name, &o.profile)
				}
				if err != nil && ctx.Err() == nil {
					o.err = err
					m.progress("%s: %s: %s: %v", sw.name, base.name, sw.label(v), err)
					continue
				}
				if err != nil {
					return outcomes
				}
				o.results = append(o.results, res)
				m.progress("%s: %s: %s: %s cycles/s", sw.name, base.name, sw.label(v), document.Number(res.Rate()))
			}
			if err := os.RemoveAll(deep); err != nil {
				m.progress("%v", err)
			}
		}
	}
	return outcomes
}

// point measures a setting once, and once more with profiles if they have a name. It keeps the
// directory of a deep setting for the next value.
func (m *measurer) point(ctx context.Context, dir string, s setting, profile string, att **attribution) (res result, err error) {
	if s.run || s.ready > 0 {
		s = s.bounded()
	}
	queues, err := open(ctx, dir, s)
	if err != nil {
		return res, err
	}
	defer func() {
		err = errors.Join(err, workload.CloseAll(queues))
		if s.ready == 0 {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	if s.ready > 0 {
		if err := fill(ctx, queues, s.ready); err != nil {
			return res, err
		}
	}
	var d workload.Driver = workload.Calls{Queues: queues}
	if s.run {
		d = workload.Runner{Queues: queues}
	}
	runtime.GC() // garbage of the setting before
	run := workload.Start(ctx, s.load, d)
	defer func() { err = errors.Join(err, run.Stop()) }()
	select {
	case <-time.After(m.Warmup):
	case <-run.Ended():
		return res, run.Stop()
	}
	measure := func() (result, error) {
		before := commits(queues)
		r, err := run.Measure(m.Window)
		return result{Result: r, commits: max(commits(queues)-before, 0)}, err
	}
	if res, err = measure(); err != nil || profile == "" {
		return res, err
	}
	*att, err = m.profile(measure, profile, s)
	return res, err
}

func commits(queues []*codeq.Queue) (n int64) {
	for _, q := range queues {
		n += int64(inspect.Of(q).Commits())
	}
	return n
}

func open(ctx context.Context, dir string, s setting) ([]*codeq.Queue, error) {
	if s.nodes > 0 {
		return workload.OpenCluster(ctx, dir, s.nodes, s.opts)
	}
	q, err := codeq.Open(dir, &s.opts)
	if err != nil {
		return nil, err
	}
	return []*codeq.Queue{q}, nil
}

// fill produces tasks up to a number, and waits until Pebble has compacted them.
func fill(ctx context.Context, queues []*codeq.Queue, tasks int) error {
	stats, err := queues[0].Stats(ctx)
	if err != nil {
		return err
	}
	missing := tasks - int(stats[workload.QueueName].Total())
	if missing < 1000 {
		return nil
	}
	task := codeq.Task{Queue: workload.QueueName, Payload: []byte(`{"bench":true}`)}
	err = workload.Fill(ctx, queues, 4, missing, 1000, func(int) codeq.Task { return task })
	return errors.Join(err, calm(ctx))
}

// calm waits until the process is almost idle, for ten seconds at most.
func calm(ctx context.Context) error {
	const step, most = 250 * time.Millisecond, 10 * time.Second
	for range most / step {
		before := workload.ReadUsage()
		select {
		case <-time.After(step):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if workload.ReadUsage().Since(before).CPU < step/20 {
			return nil
		}
	}
	return nil
}
