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

	"codeq/bench/report"
)

const codeqName = "codeq"

// write puts the table, the targets and the charts into a directory.
func write(dir string, m report.Machine, rows []row) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	d := report.New("codeq beside other queues", m)
	d.Paragraph("A cycle is one task of %d bytes produced, claimed and completed; %d producers, %d workers, at most %d tasks that are produced and not done.",
		14, 32, 128, backlog)
	d.Paragraph("Completions are confirmed by the queue. " +
		"Durability is what an acknowledged operation survives: *disk* a power failure, *process* the end of the process that has taken it, *none* neither; " +
		"a peer is in the highest class whose promise it keeps, with what it may lose beside it. " +
		"p50 and p99 are from the call that produces a task to its completion, or to the end of its handler (h) where the queue does not tell when the completion is stored. " +
		"CPU is that of this program and of the servers. " +
		"Some queues keep completed tasks for 24 h, as River does by its defaults, and others delete them. " +
		"The last column is the rate of codeq at the same class, by single calls or by batches as the peer, divided by that of the peer: " +
		"**where the peer keeps completed tasks for 24 h, it is that of codeq with a Retention of 24 h**, and else that of codeq without.")
	header := []string{"row", "queue", "version", "driven by", "a crash, and a power failure, lose", "class", "leases", "completed tasks", "cycles/s", "p50", "p99", "CPU us/cycle", "codeq is faster by"}
	var table [][]any
	for _, r := range rows {
		table = append(table, cells(rows, r))
	}
	d.Table(header, table...)
	charts, err := draw(dir, rows)
	for _, c := range charts {
		d.Image(c.title, c.file)
	}
	d.Heading("In short")
	d.Paragraph("A choice of the rows above; the last column compares with the faster row of codeq at the same durability, driven the same way, and that keeps completed tasks if the peer does.")
	d.Table([]string{"queue", "driven by", "completed tasks", "a crash, and a power failure, lose", "cycles/s", "p50", "codeq is faster by"}, inShort(rows)...)
	d.Heading("Targets")
	d.Paragraph("codeq against the fastest peer that has leases; where that keeps completed tasks, codeq keeps them too.")
	table = nil
	for _, v := range verdicts(rows) {
		line := []any{v.target, v.describe(v.reading)}
		if v.ok {
			line = append(line, v.codeq.rate(), v.peer.Name, v.peer.rate())
		} else {
			line = append(line, math.NaN(), "-", math.NaN())
		}
		table = append(table, append(line, v.ratio(), v.times, v.outcome()))
	}
	d.Table([]string{"codeq", "peers", "codeq, cycles/s", "fastest peer", "its cycles/s", "ratio", "wanted", ""}, table...)
	return errors.Join(err, d.Write(filepath.Join(dir, "peers.md")), writeCSV(filepath.Join(dir, "peers.csv"), rows))
}

// short are the rows of the table that README quotes.
var short = []string{
	"codeq/process/single", "codeq/process/single-shards", "codeq/process/batch", "codeq/process/batch-shards",
	"codeq/process/single-kept", "codeq/process/single-kept-shards", "codeq/process/batch-kept", "codeq/process/batch-kept-shards",
	"codeq/disk/single", "codeq/disk/single-shards", "codeq/disk/batch", "codeq/disk/batch-shards",
	"codeq/disk/single-kept", "codeq/disk/single-kept-shards", "codeq/disk/batch-kept", "codeq/disk/batch-kept-shards",
	"nats/2min/sync", "nats/2min/batch", "nats/always/sync", "beanstalkd/50ms/single", "beanstalkd/fsync/single",
	"asynq/everysec/single", "asynq/always/single", "river/fsync/single", "river/fsync/batch-workers",
	"riversqlite/NORMAL/single", "riversqlite/NORMAL/batch", "riversqlite/FULL/single", "riversqlite/FULL/batch",
	"backlite/FULL/single", "backlite/FULL/batch", "dque/turbo/single",
}

// inShort are the short rows of those that were chosen.
func inShort(rows []row) (table [][]any) {
	for _, r := range rows {
		if !slices.Contains(short, r.Name) {
			continue
		}
		line := slices.Concat(cells(rows, r), make([]any, 5)) // one without results is shorter
		name := fmt.Sprintf("%s %s", r.Queue, line[2])
		if r.Queue == codeqName {
			name = "**codeq**"
		}
		table = append(table, []any{name, line[3], line[7], line[4], line[8], line[9], line[12]})
	}
	return table
}

// completed says what becomes of completed tasks.
func (r row) completed() string {
	if r.Retains {
		return "kept"
	}
	return "deleted"
}

// cells are a line of the table.
func cells(rows []row, r row) []any {
	leases := "no"
	if r.Leases {
		leases = "yes"
	}
	line := []any{r.Name, r.Queue, "-", r.Driven, r.Keeps, r.Class, leases, r.completed()}
	if len(r.results) == 0 {
		return append(line, "not run")
	}
	res := r.median()
	if res.Version != "" {
		line[2] = res.Version
	}
	switch {
	case errors.Is(res.Err, errMissing):
		return append(line, "missing: "+res.Err.Error())
	case res.Err != nil:
		return append(line, "failed: "+res.Err.Error())
	}
	rate := any(res.Rate())
	if res.FellBehind() {
		rate = report.Number(res.Rate()) + ", fell behind"
	}
	latency := func(p float64) any {
		if len(res.Latencies) == 0 {
			return math.NaN()
		}
		s := report.Duration(res.Latencies.Quantile(p))
		if r.AtHandler {
			s += " (h)"
		}
		return s
	}
	line = append(line, rate, latency(0.5), latency(0.99), res.cpuMicros())
	if r.Queue != codeqName {
		line = append(line, ratio(rows, r))
	}
	return line
}

type chart struct{ title, file string }

// draw makes a chart of single calls and one of batches, fastest first, of the
// rows that have a rate.
func draw(dir string, rows []row) ([]chart, error) {
	var charts []chart
	for _, c := range []struct {
		chart
		batches bool
	}{{chart{"Single calls", "peers-single.svg"}, false}, {chart{"Batches of 64", "peers-batch.svg"}, true}} {
		var of []row
		for _, r := range rows {
			if (r.Batch > 1) == c.batches && !math.IsNaN(r.rate()) {
				of = append(of, r)
			}
		}
		if len(of) == 0 {
			continue
		}
		slices.SortStableFunc(of, func(a, b row) int { return cmp.Compare(b.rate(), a.rate()) })
		var labels []string
		values := report.Series{}
		for _, r := range of {
			label := r.Name + " (" + r.Class.String() + ")"
			if !r.Leases {
				label = r.Name + " (" + r.Class.String() + ", no leases)"
			}
			labels = append(labels, label)
			values.Y = append(values.Y, r.rate())
		}
		err := report.Bars(filepath.Join(dir, c.file), report.Axes{Title: c.title, Y: "cycles/s", LogY: true}, labels, values)
		if err != nil {
			return charts, err
		}
		charts = append(charts, c.chart)
	}
	return charts, nil
}

func writeCSV(path string, rows []row) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := csv.NewWriter(f)
	lines := [][]string{{"row", "run", "queue", "version", "class", "leases", "completed_tasks", "batch", "cycles_per_s", "created", "completed", "seconds",
		"p50_us", "p99_us", "latency_ends_at", "cpu_us_per_cycle", "fell_behind", "error"}}
	for _, r := range rows {
		ends := "completion"
		if r.AtHandler {
			ends = "handler"
		}
		for i, res := range r.results {
			line := []string{r.Name, fmt.Sprint(i + 1), r.Queue, res.Version, r.Class.String(), fmt.Sprint(r.Leases), r.completed(), fmt.Sprint(r.Batch)}
			if res.Err != nil {
				line = append(line, "", "", "", "", "", "", ends, "", "", res.Err.Error())
			} else {
				line = append(line, fmt.Sprintf("%.1f", res.Rate()), fmt.Sprint(res.Created), fmt.Sprint(res.Completed), fmt.Sprintf("%.3f", res.Elapsed.Seconds()),
					fmt.Sprint(res.Latencies.Quantile(0.5).Microseconds()), fmt.Sprint(res.Latencies.Quantile(0.99).Microseconds()), ends,
					fmt.Sprintf("%.2f", res.cpuMicros()), fmt.Sprint(res.FellBehind()), "")
			}
			lines = append(lines, line)
		}
	}
	return w.WriteAll(lines)
}
