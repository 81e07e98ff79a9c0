package peers

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"codeq/bench/report/internal/benchstat"
	"codeq/bench/report/internal/chart"
	"codeq/bench/report/internal/document"
)

const codeqName = "codeq"

// write writes the table, the targets and the charts into a directory.
func write(dir string, m document.Machine, rows []row) error {
	d := document.New("codeq beside other queues", m)
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
	pictures, err := draw(dir, rows)
	for _, p := range pictures {
		d.Image(p.title, p.file)
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
	return errors.Join(err, d.Write(filepath.Join(dir, "peers.md")), benchstat.Write(filepath.Join(dir, "peers.txt"), lines(rows)))
}

// short lists the rows of the short table.
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

// inShort returns the rows of the short table.
func inShort(rows []row) (table [][]any) {
	for _, r := range rows {
		if !slices.Contains(short, r.Name) {
			continue
		}
		line := slices.Concat(cells(rows, r), make([]any, 5)) // a row without results is shorter
		name := fmt.Sprintf("%s %s", r.Queue, line[2])
		if r.Queue == codeqName {
			name = "**codeq**"
		}
		table = append(table, []any{name, line[3], line[7], line[4], line[8], line[9], line[12]})
	}
	return table
}

// completed returns the fate of completed tasks.
func (r row) completed() string {
	if r.Retains {
		return "kept"
	}
	return "deleted"
}

// cells returns a line of the table.
func cells(rows []row, r row) []any {
	leases := "no"
	if r.Leases {
		leases = "yes"
	}
	line := []any{r.Name, r.Queue, "-", r.Driven, r.Keeps, r.Class, leases, r.completed()}
	res := r.result
	if res == nil {
		return append(line, "not run")
	}
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
		rate = document.Number(res.Rate()) + ", fell behind"
	}
	latency := func(p float64) any {
		if len(res.Latencies) == 0 {
			return math.NaN()
		}
		s := document.Duration(res.Latencies.Quantile(p))
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

type picture struct{ title, file string }

// draw draws a chart of single calls and one of batches, fastest first, of the rows with a rate.
func draw(dir string, rows []row) (pictures []picture, err error) {
	for _, p := range []struct {
		picture
		batches bool
	}{{picture{"Single calls", "peers-single.svg"}, false}, {picture{"Batches of 64", "peers-batch.svg"}, true}} {
		of := slices.DeleteFunc(slices.Clone(rows), func(r row) bool { return (r.Batch > 1) != p.batches || math.IsNaN(r.rate()) })
		if len(of) == 0 {
			continue
		}
		slices.SortStableFunc(of, func(a, b row) int { return cmp.Compare(b.rate(), a.rate()) })
		var labels []string
		values := chart.Series{}
		for _, r := range of {
			leases := ""
			if !r.Leases {
				leases = ", no leases"
			}
			labels = append(labels, fmt.Sprintf("%s (%v%s)", r.Name, r.Class, leases))
			values.Y = append(values.Y, r.rate())
		}
		err := chart.Bars(filepath.Join(dir, p.file), chart.Axes{Title: p.title, Y: "cycles/s", LogY: true}, labels, values)
		if err != nil {
			return pictures, err
		}
		pictures = append(pictures, p.picture)
	}
	return pictures, nil
}

// lines returns the rows with a rate, for benchstat.
func lines(rows []row) (all []benchstat.Result) {
	for _, r := range rows {
		if math.IsNaN(r.rate()) {
			continue
		}
		latency := func(p float64) float64 {
			if len(r.result.Latencies) == 0 {
				return math.NaN()
			}
			return float64(r.result.Latencies.Quantile(p).Microseconds())
		}
		part := strings.SplitN(r.Name, "/", 3)
		all = append(all, benchstat.Result{
			Name: fmt.Sprintf("Peers/queue=%s/durability=%s/way=%s", part[0], part[1], part[2]),
			N:    r.result.Cycles(),
			Values: []benchstat.Value{
				{Unit: "cycles/s", Value: r.rate()},
				{Unit: "p50-us", Value: latency(0.5)},
				{Unit: "p99-us", Value: latency(0.99)},
				{Unit: "cpu-us/cycle", Value: r.result.cpuMicros()},
			},
		})
	}
	return all
}
