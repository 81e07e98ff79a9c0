package endurance

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"time"

	"codeq/bench/report/internal/chart"
	"codeq/bench/report/internal/document"
)

// outcome is the result of a point, or of a part of it.
type outcome struct {
	point
	samples  []sample
	reopened reopening
	err      error // the reason of an early end
	verdicts []verdict
}

const second = float64(time.Second)

// write writes endurance.md and its charts.
func (c *config) write(m document.Machine, all []outcome) error {
	d := document.New("Endurance", m)
	d.Paragraph("Single calls of Produce, Claim and Complete at durability %v; at most %s tasks waiting; %d workers for each producer. "+
		"In the middle of each point the queue was closed, rested for %v and was opened again.", c.durability, document.Number(float64(c.backlog)), c.workers, c.cooldown)
	d.Heading("What it shows")
	var said []string
	for _, o := range all {
		for _, v := range o.verdicts {
			said = append(said, v.String())
		}
		if o.err != nil {
			said = append(said, fmt.Sprintf("FAILED: %v: ended early: %v", o.point, o.err))
		}
	}
	d.List(said...)
	all = slices.DeleteFunc(slices.Clone(all), func(o outcome) bool { return len(o.samples) == 0 })
	if len(all) > 0 {
		tables(d, all)
		if err := c.charts(d, all); err != nil {
			return err
		}
	}
	return d.Write(filepath.Join(c.Out, "endurance.md"))
}

func tables(d *document.Document, all []outcome) {
	var speed, resources, stores [][]any
	for _, o := range all {
		s, last := o.samples, o.samples[len(o.samples)-1]
		parts := tenths(s)
		rate := sum(s, func(s *sample) float64 { return s.Completed }) / last.Seconds
		cycles := sum(s, func(s *sample) float64 { return s.Completed })
		speed = append(speed, []any{
			o.String(), int64(cycles), duration(last.Seconds * second), rate, parts[1].rate(), parts[9].rate(), parts[9].rate() / parts[1].rate(),
			duration(80 << 20 / float64(o.payload) / rate * second),
			duration(median(s, func(s *sample) float64 { return s.P50 }) * 1e3), duration(median(s, func(s *sample) float64 { return s.P90 }) * 1e3),
			duration(median(s, func(s *sample) float64 { return s.P99 }) * 1e3), duration(most(s, func(s *sample) float64 { return s.Max }) * 1e3),
		})
		memory, disk := func(s *sample) float64 { return s.Resident }, func(s *sample) float64 { return s.Disk }
		resources = append(resources, []any{
			o.String(), megabytes(most(s, memory)), megabytes(most(parts[9].samples, memory)), megabytes(most(s, disk)), megabytes(most(parts[9].samples, disk)),
			duration(sum(s, func(s *sample) float64 { return s.CPU }) / cycles * 1e6),
			sum(s, func(s *sample) float64 { return s.Written }) / cycles, sum(s, func(s *sample) float64 { return s.DiskWrite }) / cycles,
			sum(s, func(s *sample) float64 { return s.Writes }) / cycles, percent(steal(parts[1].samples)), percent(steal(parts[9].samples)),
			o.reopened.close, o.reopened.open,
		})
		t := total(s)
		stores = append(stores, []any{
			o.String(), int64(t.Flushes), int64(t.Compactions), t.writeAmp(), int(most(s, func(s *sample) float64 { return s.ReadAmp })),
			int(most(s, func(s *sample) float64 { return s.L0Tables })), int(most(s, func(s *sample) float64 { return s.Tables })),
			megabytes(most(s, func(s *sample) float64 { return s.TableBytes })), megabytes(most(s, func(s *sample) float64 { return s.Debt })),
			megabytes(most(s, func(s *sample) float64 { return s.MemTables })), megabytes(most(s, func(s *sample) float64 { return s.Log })),
			percent(t.CacheHits / (t.CacheHits + t.CacheMisses)),
		})
	}
	d.Heading("Speed")
	d.Paragraph("Latency is from the call of Produce to the return of Complete; p50, p90 and p99 are the medians of those of every second.")
	d.Table([]string{"point", "cycles", "time", "cycles/s", "second tenth", "last tenth", "ratio", "80 MiB in", "p50", "p90", "p99", "longest"}, speed...)
	d.Heading("Resources")
	d.Paragraph("Memory is resident, disk is what the files take, both at their largest. Written is by system calls, to the device what the kernel has sent it. " +
		"Steal is processor time that the host gave to others, in the second and in the last tenth.")
	d.Table([]string{"point", "memory, MB", "last tenth", "disk, MB", "last tenth", "CPU a cycle", "B written a cycle", "B to the device a cycle",
		"writes a cycle", "steal, second", "steal, last", "closed in", "opened in"}, resources...)
	d.Heading("Stores")
	d.Paragraph("What Pebble did in all, and its largest numbers.")
	d.Table([]string{"point", "flushes", "compactions", "write amp", "read amp", "L0 tables", "tables", "MB in tables", "MB of debt",
		"MB in memtables", "MB of log", "cache hits"}, stores...)
}

// total adds the counts of both lives of a queue.
func total(samples []sample) (t sample) {
	for i := range samples {
		if s := &samples[i]; i == len(samples)-1 || samples[i+1].Life != s.Life {
			t.Flushes += s.Flushes
			t.Compactions += s.Compactions
			t.Logged += s.Logged
			t.Flushed += s.Flushed
			t.Compacted += s.Compacted
			t.CacheHits += s.CacheHits
			t.CacheMisses += s.CacheMisses
		}
	}
	return t
}

// charts draws the charts and adds them to the document.
func (c *config) charts(d *document.Document, all []outcome) error {
	first := all[0].samples
	axes := func(title, y string) chart.Axes {
		a := chart.Axes{Title: title, X: "seconds of work", Y: y}
		if i := slices.IndexFunc(first, func(s sample) bool { return s.Life == 2 }); i > 0 {
			a.Marks = []chart.Mark{{X: first[i-1].Seconds, Label: "closed, reopened"}}
		}
		return a
	}
	draw := func(name string, a chart.Axes, series []chart.Series) error {
		file := "endurance-" + name + ".svg"
		d.Image(a.Title, file)
		return chart.Lines(filepath.Join(c.Out, file), a, series...)
	}
	each := func(value func(o *outcome, s *sample) float64) (series []chart.Series) {
		for i := range all {
			o := &all[i]
			series = append(series, line(o.String(), o.samples, func(s *sample) float64 { return value(o, s) }))
		}
		return series
	}
	d.Heading("Charts")
	d.Paragraph("A point of a line is the mean of up to %d s.", together(len(first)))
	relative := axes("Rate, relative to the second tenth", "cycles/s")
	if err := draw("rate", relative, each(func(o *outcome, s *sample) float64 { return s.Rate / tenths(o.samples)[1].rate() })); err != nil {
		return err
	}
	var payloads []int
	for _, o := range all {
		if !slices.Contains(payloads, o.payload) {
			payloads = append(payloads, o.payload)
		}
	}
	for _, payload := range payloads {
		var rates, latencies []chart.Series
		for _, o := range all {
			if o.payload != payload {
				continue
			}
			rates = append(rates, line(o.String(), o.samples, func(s *sample) float64 { return s.Rate }))
			latencies = append(latencies,
				line(fmt.Sprintf("%d producers, p50", o.producers), o.samples, func(s *sample) float64 { return s.P50 / 1e3 }),
				line(fmt.Sprintf("%d producers, p99", o.producers), o.samples, func(s *sample) float64 { return s.P99 / 1e3 }),
				line(fmt.Sprintf("%d producers, longest", o.producers), o.samples, func(s *sample) float64 { return s.Max / 1e3 }))
		}
		if err := draw(fmt.Sprintf("rate-%dB", payload), axes(fmt.Sprintf("Rate, payloads of %s", size(payload)), "cycles/s"), rates); err != nil {
			return err
		}
		a := axes(fmt.Sprintf("Latency, payloads of %s", size(payload)), "ms from Produce to Complete")
		a.LogY = true
		if err := draw(fmt.Sprintf("latency-%dB", payload), a, latencies); err != nil {
			return err
		}
	}
	for _, picture := range []struct {
		name, title, y string
		value          func(s *sample) float64
	}{
		{"memory", "Resident memory", "MB", func(s *sample) float64 { return s.Resident / 1e6 }},
		{"heap", "Objects on Go's heap", "MB", func(s *sample) float64 { return s.Heap / 1e6 }},
		{"disk", "Files of the queue", "MB on disk", func(s *sample) float64 { return s.Disk / 1e6 }},
		{"written", "Written by system calls", "MB/s", func(s *sample) float64 { return s.Written / s.Interval / 1e6 }},
		{"device", "Written to the device", "MB/s", func(s *sample) float64 { return s.DiskWrite / s.Interval / 1e6 }},
		{"cpu", "Processor time", "cores", func(s *sample) float64 { return s.CPU / s.Interval / 1e3 }},
		{"readamp", "Read amplification of the stores", "tables that a read looks at", func(s *sample) float64 { return s.ReadAmp }},
		{"debt", "Compaction debt", "MB that compactions are behind", func(s *sample) float64 { return s.Debt / 1e6 }},
		{"writeamp", "Write amplification since the queue was opened", "bytes written for one of the log", (*sample).writeAmp},
	} {
		if err := draw(picture.name, axes(picture.title, picture.y), each(func(_ *outcome, s *sample) float64 { return picture.value(s) })); err != nil {
			return err
		}
	}
	return nil
}

// longestLine is the maximum number of points of a line of a chart.
const longestLine = 300

// together returns the number of samples in one point of a line.
func together(samples int) int { return max((samples+longestLine-1)/longestLine, 1) }

// line returns the means, with a gap between the lives.
func line(name string, samples []sample, value func(*sample) float64) chart.Series {
	l, most := chart.Series{Name: name}, together(len(samples))
	for len(samples) > 0 {
		n, mean := 0, 0.0
		for n < min(most, len(samples)) && samples[n].Life == samples[0].Life {
			mean += value(&samples[n])
			n++
		}
		l.X = append(l.X, samples[n-1].Seconds)
		l.Y = append(l.Y, mean/float64(n))
		if n < len(samples) && samples[n].Life != samples[0].Life {
			l.X = append(l.X, samples[n-1].Seconds)
			l.Y = append(l.Y, math.NaN())
		}
		samples = samples[n:]
	}
	return l
}

func sum(samples []sample, value func(*sample) float64) (sum float64) {
	for i := range samples {
		sum += value(&samples[i])
	}
	return sum
}

func median(samples []sample, value func(*sample) float64) float64 {
	var all []float64
	for i := range samples {
		all = append(all, value(&samples[i]))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// steal returns the stolen share of the time of one core.
func steal(samples []sample) float64 {
	return sum(samples, func(s *sample) float64 { return s.Steal }) / 1e3 / sum(samples, func(s *sample) float64 { return s.Interval })
}

func percent(share float64) string {
	if math.IsNaN(share) {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100*share)
}

func megabytes(bytes float64) float64 { return bytes / 1e6 }

func duration(ns float64) time.Duration { return time.Duration(ns) }
