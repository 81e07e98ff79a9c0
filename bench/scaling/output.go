package main

import (
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"codeq/bench/report"
)

// results are written to files whose names begin with scaling. What a person
// concludes from them is written elsewhere, and stays when they are written again.
type results struct {
	name        string // how the names of the files begin; "": scaling
	machine     report.Machine
	measurer    measurer
	sweeps      []*sweep
	outcomes    [][][]outcome // by sweep, setting, value
	interrupted bool
}

func (r *results) add(sw *sweep, outcomes [][]outcome) {
	r.sweeps = append(r.sweeps, sw)
	r.outcomes = append(r.outcomes, outcomes)
}

// failed are the errors of what could not be measured.
func (r *results) failed() error {
	var errs []error
	r.each(func(sw *sweep, s setting, v int, o *outcome) {
		if o.err != nil {
			errs = append(errs, fmt.Errorf("%s: %s: %s: %w", sw.name, s.name, sw.label(v), o.err))
		}
	})
	return errors.Join(errs...)
}

func (r *results) each(f func(sw *sweep, s setting, v int, o *outcome)) {
	for k, sw := range r.sweeps {
		for i, s := range sw.settings {
			for j, v := range sw.values {
				f(sw, s, v, &r.outcomes[k][i][j])
			}
		}
	}
}

func (r *results) write(dir string) error {
	d := report.New("Scaling", r.machine)
	if r.interrupted {
		d.Paragraph("**It was interrupted; what is missing was not measured.**")
	}
	d.Paragraph("A cycle is one task produced, claimed and completed. Each value was measured for %v after %v with a new queue%s; "+
		"where a table says least and most, cycles/s are the median of several runs; "+
		"backlogs are measured by tasks, and not by time. What bounds each of them is concluded in [README.md](README.md).", r.measurer.window, r.measurer.warmup,
		map[bool]string{true: fmt.Sprintf(", %d times over", r.measurer.runs)}[r.measurer.runs > 1])
	columns := "Columns: p50 and p99 are from the call of Produce until the task is completed; CPU is the processor time of " +
		"the process for a cycle; busy is the share of all processors' time that it used; group is cycles by commit."
	if r.hasProfiles() {
		columns += fmt.Sprintf(" \"Where the time goes\" is from a further window with profiles, at both ends of each line; of the same windows are "+
			"the waits in [%[1]s](%[1]s).", r.file("-contention.md"))
	}
	d.Paragraph("%s", columns)
	var errs []error
	for k, sw := range r.sweeps {
		errs = append(errs, r.section(d, dir, sw, r.outcomes[k]))
	}
	r.advice(d)
	return errors.Join(append(errs,
		d.Write(filepath.Join(dir, r.file(".md"))),
		r.writeContention(filepath.Join(dir, r.file("-contention.md"))),
		r.writeCSV(filepath.Join(dir, r.file(".csv"))))...)
}

// file is the name of one of the files that are written.
func (r *results) file(end string) string { return cmp.Or(r.name, "scaling") + end }

func (r *results) section(d *report.Document, dir string, sw *sweep, outcomes [][]outcome) error {
	d.Heading(sw.title)
	d.Paragraph("%s", sw.about)
	if sw.stock {
		return r.stockSection(d, dir, sw, outcomes)
	}
	chart := r.file("-" + sw.name + ".svg")
	d.Image(sw.title, chart)
	header := []string{"", sw.axis, "cycles/s", "p50", "p99", "CPU", "busy, %", "group"}
	ranges := r.measurer.runsOf(sw) > 1
	if ranges {
		header = append(header, "least", "most")
	}
	if sw.data {
		header = append(header, "payloads, MB/s")
	}
	var rows [][]any
	for i, s := range sw.settings {
		for j, v := range sw.values {
			o := &outcomes[i][j]
			row := r.row(s.name, sw.label(v), o, ranges)
			if sw.data && o.usable() {
				row = append(row, o.median().Rate()*float64(sw.at(s, v).load.Payload)/1e6)
			}
			rows = append(rows, row)
		}
	}
	d.Table(header, rows...)
	profileTable(d, sw, outcomes)
	return sw.draw(filepath.Join(dir, chart), outcomes)
}

func (r *results) row(name, label string, o *outcome, ranges bool) []any {
	switch {
	case o.err != nil:
		return []any{name, label, "failed: " + o.err.Error()}
	case len(o.results) == 0:
		return []any{name, label, "not measured"}
	case o.fellBehind():
		return []any{name, label, "discarded: completions fell behind"}
	}
	m := o.median()
	row := []any{name, label, m.Rate(), latency(m, 0.5), latency(m, 0.99), m.cpu(), math.Round(100 * m.busy()), m.group()}
	if ranges {
		row = append(row, o.results[0].Rate(), o.results[len(o.results)-1].Rate())
	}
	return row
}

// latency is a dash where no task that was sampled has been completed, as with a backlog.
func latency(m result, p float64) any {
	if len(m.Latencies) == 0 {
		return math.NaN()
	}
	return m.Latencies.Quantile(p)
}

func percent(share float64) string { return fmt.Sprintf("%.0f %%", 100*share) }

func (sw *sweep) draw(path string, outcomes [][]outcome) error {
	var lines []report.Series
	for i, s := range sw.settings {
		line := report.Series{Name: s.name}
		for j, v := range sw.values {
			y := math.NaN()
			if o := &outcomes[i][j]; o.usable() {
				y = o.median().Rate()
			}
			line.X = append(line.X, float64(v))
			line.Y = append(line.Y, y)
		}
		lines = append(lines, line)
	}
	axes := report.Axes{Title: sw.title, X: sw.axis, Y: "cycles/s", LogX: !sw.bars, LogY: sw.logY}
	if !sw.bars {
		return report.Lines(path, axes, lines...)
	}
	var labels []string
	for _, v := range sw.values {
		labels = append(labels, sw.label(v))
	}
	return report.Bars(path, axes, labels, lines...)
}

// profiled are the profiles of a sweep, and what they are of.
func profiled(sw *sweep, outcomes [][]outcome) (names []string, profiles []*attribution) {
	for i, s := range sw.settings {
		for j, v := range sw.values {
			if a := outcomes[i][j].profile; a != nil {
				names = append(names, s.name+"; "+sw.label(v))
				profiles = append(profiles, a)
			}
		}
	}
	return names, profiles
}

// profileTable says what the profiles of a sweep do, with a column for each.
func profileTable(d *report.Document, sw *sweep, outcomes [][]outcome) {
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

// perSecond is how much of d falls on a second of the window.
func perSecond(a *attribution, d time.Duration) time.Duration {
	return time.Duration(float64(d) / a.result.Elapsed.Seconds())
}

const topSites = 5

// writeContention writes where goroutines wait for one another.
func (r *results) hasProfiles() bool {
	for k, sw := range r.sweeps {
		if _, profiles := profiled(sw, r.outcomes[k]); len(profiles) > 0 {
			return true
		}
	}
	return false
}

func (r *results) writeContention(path string) error {
	if !r.hasProfiles() {
		return nil
	}
	d := report.New("Scaling: contention", r.machine)
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

func contentionTable(d *report.Document, names []string, profiles []*attribution, of func(*attribution) contention) {
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

// cores are those of machines for which advice is given.
var cores = []int{2, 4, 8, 12, 16, 32, 64}

// advice is what the profiles of one shard say of more processors.
func (r *results) advice(d *report.Document) {
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

// writeCSV writes a line for each run.
func (r *results) writeCSV(path string) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := csv.NewWriter(f)
	_ = w.Write(strings.Split("sweep,setting,value,created,completed,seconds,cycles_per_s,p50_us,p99_us,cpu_us_per_cycle,busy,cycles_per_commit,fell_behind,produced_per_s", ","))
	r.each(func(sw *sweep, s setting, v int, o *outcome) {
		for _, m := range o.results {
			_ = w.Write([]string{
				sw.name, s.name, strconv.Itoa(v),
				strconv.FormatInt(m.Created, 10), strconv.FormatInt(m.Completed, 10), decimal(m.Elapsed.Seconds()), decimal(m.Rate()),
				micros(m.Latencies.Quantile(0.5)), micros(m.Latencies.Quantile(0.99)), micros(m.cpu()), decimal(m.busy()), decimal(m.group()),
				strconv.FormatBool(m.FellBehind()), decimal(m.produced),
			})
		}
	})
	w.Flush()
	return w.Error() // of any write
}

func micros(d time.Duration) string { return decimal(d.Seconds() * 1e6) }

func decimal(x float64) string { return strconv.FormatFloat(x, 'f', 3, 64) }
