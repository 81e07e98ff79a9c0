package scaling

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"codeq/bench/report/internal/benchstat"
	"codeq/bench/report/internal/chart"
	"codeq/bench/report/internal/document"
)

// results has all measurements of a run of the command.
type results struct {
	name        string // prefix of the file names; "": scaling
	machine     document.Machine
	measurer    measurer
	sweeps      []*sweep
	outcomes    [][][]outcome // by sweep, setting, value
	interrupted bool
}

func (r *results) add(sw *sweep, outcomes [][]outcome) {
	r.sweeps = append(r.sweeps, sw)
	r.outcomes = append(r.outcomes, outcomes)
}

// failed returns the errors of all values.
func (r *results) failed() error {
	var errs []error
	for k, sw := range r.sweeps {
		sw.each(r.outcomes[k], func(s setting, v int, o *outcome) {
			if o.err != nil {
				errs = append(errs, fmt.Errorf("%s: %s: %s: %w", sw.name, s.name, sw.label(v), o.err))
			}
		})
	}
	return errors.Join(errs...)
}

func (r *results) write(ctx context.Context, dir string) error {
	d := document.New("Scaling", r.machine)
	if r.interrupted {
		d.Paragraph("**It was interrupted.**")
	}
	d.Paragraph("A cycle is one task produced, claimed and completed. Each value was measured for %v after %v with a new queue%s, "+
		"backlogs by tasks, and not by time. Numbers are the medians of benchstat.", r.measurer.Window, r.measurer.Warmup,
		map[bool]string{true: fmt.Sprintf(", %d times over", r.measurer.runs)}[r.measurer.runs > 1])
	columns := "Columns: p50 and p99 are from the call of Produce until the task is completed; CPU is the processor time of " +
		"the process for a cycle; busy is the share of all processors' time that it used; group is cycles by commit."
	if r.hasProfiles() {
		columns += fmt.Sprintf(" \"Where the time goes\" is from a further window with profiles, at both ends of each line; of the same windows are "+
			"the waits in [%[1]s](%[1]s).", r.file("-contention.md"))
	}
	d.Paragraph("%s", columns)
	errs := []error{benchstat.Write(filepath.Join(dir, r.file(".txt")), r.lines())}
	for k, sw := range r.sweeps {
		errs = append(errs, r.section(ctx, d, dir, sw, r.outcomes[k]))
	}
	r.advice(d)
	return errors.Join(append(errs,
		d.Write(filepath.Join(dir, r.file(".md"))),
		r.writeContention(filepath.Join(dir, r.file("-contention.md"))))...)
}

// file returns the name of an output file.
func (r *results) file(end string) string { return cmp.Or(r.name, "scaling") + end }

// words maps units to the headers of columns.
var words = map[string]string{
	"p50-us": "p50, us", "p99-us": "p99, us", "cpu-us/cycle": "CPU, us", "busy-%": "busy, %", "cycles/commit": "group", "payload-MiB/s": "payloads, MiB/s",
}

func (r *results) section(ctx context.Context, d *document.Document, dir string, sw *sweep, outcomes [][]outcome) error {
	d.Heading(sw.title)
	d.Paragraph("%s", sw.about)
	names, measured := maps.Clone(words), false
	var missing []string
	sw.each(outcomes, func(s setting, v int, o *outcome) {
		name := s.name + "; " + sw.label(v)
		names[key(s, v)] = name
		if problem := o.problem(); problem != "" {
			missing = append(missing, name+": "+problem)
		} else {
			measured = true
		}
	})
	if len(missing) > 0 {
		d.List(missing...)
	}
	if !measured {
		return nil
	}
	medians, err := benchstat.Comparison{
		Filter: "/sweep:" + sw.name, Row: "/setting /value",
		Units: []string{"cycles/s", "done/s", "produced/s", "p50-us", "p99-us", "cpu-us/cycle", "busy-%", "cycles/commit", "payload-MiB/s"},
	}.Run(ctx, filepath.Join(dir, r.file(".txt")))
	if err != nil {
		return err
	}
	pictures := []picture{{"", sw.title, "cycles/s"}}
	if sw.stock {
		pictures = []picture{{"", sw.title + ", tasks done", "done/s"}, {"-produced", sw.title + ", tasks produced", "produced/s"}}
	}
	var errs []error
	for _, p := range pictures {
		file := r.file("-" + sw.name + p.end + ".svg")
		d.Image(p.title, file)
		errs = append(errs, sw.draw(filepath.Join(dir, file), p, medians))
	}
	header, rows := medians.Table(names)
	d.Table(header, rows...)
	profileTable(d, sw, outcomes)
	return errors.Join(errs...)
}

// picture is a chart of a sweep.
type picture struct {
	end   string // of the name of the file
	title string
	unit  string
}

func (sw *sweep) draw(path string, p picture, medians benchstat.Medians) error {
	axes := chart.Axes{Title: p.title, X: sw.axis, Y: p.unit, LogX: !sw.bars && !sw.stock, LogY: sw.logY}
	var labels []string
	for _, v := range sw.values {
		labels = append(labels, sw.label(v))
	}
	if sw.stock { // a logarithmic axis has no place for 0 tasks
		axes.Labels = labels
	}
	var lines []chart.Series
	for _, s := range sw.settings {
		line := chart.Series{Name: s.name}
		for j, v := range sw.values {
			if sw.stock {
				line.X = append(line.X, float64(j))
			} else {
				line.X = append(line.X, float64(v))
			}
			line.Y = append(line.Y, medians.Of(key(s, v), p.unit))
		}
		lines = append(lines, line)
	}
	if sw.bars {
		return chart.Bars(path, axes, labels, lines...)
	}
	return chart.Lines(path, axes, lines...)
}

// lines returns all runs, for benchstat.
func (r *results) lines() (all []benchstat.Result) {
	for k, sw := range r.sweeps {
		sw.each(r.outcomes[k], func(s setting, v int, o *outcome) {
			if o.problem() != "" {
				return
			}
			for _, m := range o.results {
				name := fmt.Sprintf("Scaling/sweep=%s/setting=%s/value=%d", sw.name, benchstat.Word(s.name), v)
				all = append(all, benchstat.Result{Name: name, N: m.Cycles(), Values: m.values(sw, sw.at(s, v))})
			}
		})
	}
	return all
}

// values returns the numbers of a run.
func (m result) values(sw *sweep, s setting) []benchstat.Value {
	values := []benchstat.Value{
		{Unit: "cpu-us/cycle", Value: micros(m.cpu())},
		{Unit: "busy-%", Value: math.Round(100 * m.busy())},
		{Unit: "cycles/commit", Value: m.group()},
	}
	if sw.stock {
		return append(values, benchstat.Value{Unit: "done/s", Value: m.Rate()}, benchstat.Value{Unit: "produced/s", Value: m.produced})
	}
	values = append(values, benchstat.Value{Unit: "cycles/s", Value: m.Rate()})
	if sw.data {
		values = append(values, benchstat.Value{Unit: "payload-MiB/s", Value: m.Rate() * float64(s.load.Payload) / (1 << 20)})
	}
	if len(m.Latencies) > 0 { // with a backlog, no task of the sample is completed
		values = append(values, benchstat.Value{Unit: "p50-us", Value: micros(m.Latencies.Quantile(0.5))},
			benchstat.Value{Unit: "p99-us", Value: micros(m.Latencies.Quantile(0.99))})
	}
	return values
}

// key returns the name of a value with a setting in benchstat's tables.
func key(s setting, v int) string { return benchstat.Word(s.name) + " " + strconv.Itoa(v) }

func micros(d time.Duration) float64 { return d.Seconds() * 1e6 }

func percent(share float64) string { return fmt.Sprintf("%.0f %%", 100*share) }

// profiled returns the profiles of a sweep and their names.
func profiled(sw *sweep, outcomes [][]outcome) (names []string, profiles []*attribution) {
	sw.each(outcomes, func(s setting, v int, o *outcome) {
		if o.profile != nil {
			names = append(names, s.name+"; "+sw.label(v))
			profiles = append(profiles, o.profile)
		}
	})
	return names, profiles
}

// profileTable writes a table of the profiles of a sweep, with a column for each.
func profileTable(d *document.Document, sw *sweep, outcomes [][]outcome) {
	names, profiles := profiled(sw, outcomes)
	if len(profiles) == 0 {
		return
	}
	d.Paragraph("Where the time goes (%s):", sw.axis)
	rows := make([][]any, 0, len(layers))
	row := func(name string, f func(a *attribution) any) {
		cells := []any{name}
		for _, a := range profiles {
			cells = append(cells, f(a))
		}
		rows = append(rows, cells)
	}
	for _, l := range layers {
		if !slices.ContainsFunc(profiles, func(a *attribution) bool { return a.share(a.layers[l]) >= 0.005 }) {
			continue
		}
		row(string(l), func(a *attribution) any { return percent(a.share(a.layers[l])) })
	}
	row("*CPU time of all samples*", func(a *attribution) any { return a.cpu })
	row("*CPU of a cycle, us*", func(a *attribution) any { return a.total() })
	row("*of it in owners*", func(a *attribution) any { return percent(a.share(a.owner)) })
	row("*of it in writers of the log*", func(a *attribution) any { return percent(a.share(a.log)) })
	row("*processors busy*", func(a *attribution) any { return percent(a.result.busy()) })
	row("*cycles by commit*", func(a *attribution) any { return a.result.group() })
	row("*commits/s*", func(a *attribution) any { return float64(a.result.commits) / a.result.Elapsed.Seconds() })
	row("*an owner: on a processor*", func(a *attribution) any { return percent(a.owner.Seconds() / a.ownersTime()) })
	row("*waits for its commit*", func(a *attribution) any { return percent(a.persistWait.Seconds() / a.ownersTime()) })
	row("*waits for operations*", func(a *attribution) any { return percent(a.idle.Seconds() / a.ownersTime()) })
	row("*a commit's wait, us*", func(a *attribution) any {
		return ratio(a.persistWait.Seconds()*1e6, float64(a.result.commits))
	})
	row("*mutexes: contentions a second*", func(a *attribution) any { return float64(a.mutex.count) / a.result.Elapsed.Seconds() })
	row("*mutexes: delay a second*", func(a *attribution) any { return perSecond(a, a.mutex.delay) })
	d.Table(append([]string{"share of CPU time"}, names...), rows...)
}

// perSecond returns d for each second of the window.
func perSecond(a *attribution, d time.Duration) time.Duration {
	return time.Duration(float64(d) / a.result.Elapsed.Seconds())
}

const topSites = 5

func (r *results) hasProfiles() bool {
	for k, sw := range r.sweeps {
		if _, profiles := profiled(sw, r.outcomes[k]); len(profiles) > 0 {
			return true
		}
	}
	return false
}

// writeContention writes the sites where goroutines wait for one another.
func (r *results) writeContention(path string) error {
	if !r.hasProfiles() {
		return nil
	}
	d := document.New("Scaling: contention", r.machine)
	d.Paragraph("The mutex and the block profile of each window that is profiled for [%[2]s](%[2]s): the %[1]d sites with the longest "+
		"delays, summed over all goroutines. A site is the innermost function of codeq, or of a library where there is none; for a mutex it is the one "+
		"that held it while others waited. One of a hundred contentions is sampled, and counted a hundred times.", topSites, r.file(".md"))
	for k, sw := range r.sweeps {
		names, profiles := profiled(sw, r.outcomes[k])
		if len(profiles) == 0 {
			continue
		}
		d.Heading(sw.title)
		d.Paragraph("Mutexes:")
		contentionTable(d, names, profiles, func(a *attribution) contention { return a.mutex })
		d.Paragraph("Waits of all kinds:")
		contentionTable(d, names, profiles, func(a *attribution) contention { return a.block })
	}
	return d.Write(path)
}

func contentionTable(d *document.Document, names []string, profiles []*attribution, of func(*attribution) contention) {
	var rows [][]any
	for i, a := range profiles {
		c, name := of(a), names[i]
		if len(c.sites) == 0 {
			rows = append(rows, []any{name, "none"})
		}
		for _, s := range c.sites[:min(len(c.sites), topSites)] {
			rows = append(rows, []any{name, "`" + s.function + "`", "`" + s.by + "`", float64(s.count) / a.result.Elapsed.Seconds(),
				perSecond(a, s.delay), math.Round(100 * ratio(s.delay.Seconds(), c.delay.Seconds()))})
			name = ""
		}
	}
	d.Table([]string{"", "site", "by", "times a second", "delay a second", "of all, %"}, rows...)
}

// cores has the numbers of processors in the advice.
var cores = []int{2, 4, 8, 12, 16, 32, 64}

// advice writes the best number of shards for more processors, by the profiles of one shard.
func (r *results) advice(d *document.Document) {
	for k, sw := range r.sweeps {
		if sw.name != "shards" {
			continue
		}
		var rows, needs [][]any
		for i, s := range sw.settings {
			a := r.outcomes[k][i][0].profile
			if a == nil || sw.values[0] != 1 {
				continue
			}
			rows = append(rows, []any{s.name, a.total(), a.serial(), a.ceiling(), a.coresPerShard()})
			need := []any{s.name}
			for _, n := range cores {
				need = append(need, int(math.Ceil(float64(n)/a.coresPerShard())))
			}
			needs = append(needs, need)
		}
		if len(rows) == 0 {
			return
		}
		d.Heading("Shards for more processors")
		d.Paragraph("From the profiles of one shard. A cycle takes so much CPU time in all; of it, the cycles of a shard spend the serial " +
			"part one after the other, in its owner and the writer of its log. By Amdahl's law one shard can then do at most 1/serial cycles/s, on " +
			"any number of processors, and keeps all/serial of them busy; n processors are used by n * serial / all shards. " +
			"Waits, as for an fsync, come on top.")
		d.Table([]string{"1 shard", "CPU of a cycle, us", "serial, us", "at most cycles/s", "processors per shard"}, rows...)
		header := []string{"shards to use so many processors"}
		for _, n := range cores {
			header = append(header, strconv.Itoa(n))
		}
		d.Table(header, needs...)
	}
}
