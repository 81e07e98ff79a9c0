package main

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"codeq/bench/report"
)

// section is a part of engine.md.
type section struct {
	title string
	long  bool // takes minutes
	// repeated are the patterns of benchmarks that have rounds together with
	// those of other sections, and disk of those of them at disk, which have
	// further rounds; once is what a section without them runs.
	repeated, disk []string
	once           []command
	table          func(*report.Document, measures)
}

// command is a run of go test.
type command struct {
	name string // before the names of its benchmarks
	env  []string
	args []string
}

func (c command) String() string {
	return strings.TrimSpace(report.Words(slices.Concat(c.env, []string{"go"}, c.args)))
}

var durabilities = []string{"none", "process", "disk"}

func (c *config) sections() []section {
	minutes := func(pattern string, window time.Duration, flags ...string) []command {
		return []command{{args: append(c.bench(pattern, window), flags...)}}
	}
	kills := []command{{args: []string{"test", "-run", "^TestClusterKill$", "-v", "-timeout", "0", "./internal/killtest", "-cluster.for", c.kill.String()}}}
	var collections []command
	for range c.count {
		for _, percent := range gogc {
			collections = append(collections, command{
				percent + "/", []string{percent}, c.bench("^BenchmarkRun$/durability=process/shards=1", c.window),
			})
		}
	}
	const atDisk = "/durability=disk"
	return []section{
		{title: "Cycles", repeated: []string{"RawPebble", "FullCycle", "Run$"}, disk: []string{"FullCycle" + atDisk, "Run$" + atDisk}, table: cycles},
		{title: "Features", repeated: []string{"Features"}, table: features},
		{title: "Nodes", repeated: []string{"FullCycle", "Cluster"}, disk: []string{"FullCycle" + atDisk, "Cluster/nodes=3" + atDisk}, table: nodes},
		{title: "GOGC", long: true, once: collections, table: collection},
		{title: "Backlog", long: true, once: minutes("^Benchmark(Backlog|Idle|HandOff|Fairness)$", 16*time.Second), table: backlog},
		{title: "Checkpoint", long: true, once: minutes("^BenchmarkCheckpoint$/backlog=/shards=2/durability=(process|disk)", 20*time.Second), table: checkpoint},
		{title: "Catching up", long: true, once: minutes("^BenchmarkCatchUp$", c.window, "-away", strconv.FormatInt(c.away, 10)), table: catchUp},
		{title: "Failover", long: true, once: kills, table: failover},
	}
}

// gogc are the settings of the garbage collector that are compared.
var gogc = []string{"GOGC=100", "GOGC=400"}

// rounds are what the sections repeat, each once, and what of it is at disk.
// They have no arguments if there is nothing.
func (c *config) rounds(sections []section) (every, disk command) {
	var all, some []string
	for _, s := range sections {
		all, some = append(all, s.repeated...), append(some, s.disk...)
	}
	for _, r := range []struct {
		*command
		patterns []string
	}{{&every, all}, {&disk, some}} {
		slices.Sort(r.patterns)
		if patterns := slices.Compact(r.patterns); len(patterns) > 0 {
			r.args = c.bench("^Benchmark"+strings.Join(patterns, "|^Benchmark"), c.window)
		}
	}
	return every, disk
}

func (c *config) bench(pattern string, window time.Duration) []string {
	return []string{
		"test", "./bench", "-run", "^$", "-bench", pattern, "-benchtime", "1x", "-timeout", "0",
		"-warmup", c.warmup.String(), "-window", window.String(),
	}
}

func cycles(d *report.Document, m measures) {
	rate := func(format string, unit string) (row []any) {
		for _, level := range durabilities {
			row = append(row, m.median(fmt.Sprintf(format, level), unit))
		}
		name := fmt.Sprintf(format, "disk")
		return append(row, m.least(name, unit), m.most(name, unit))
	}
	var rows [][]any
	for _, kind := range []struct{ name, what string }{
		{"FullCycle", "single calls"},
		{"Run", "batches of 64, and Run with 128 workers"},
	} {
		for shards := 1; shards <= 2; shards++ {
			name := fmt.Sprintf("%s/durability=%%s/shards=%d", kind.name, shards)
			rows = append(rows, append([]any{kind.what + ", " + plural(shards, "shard")}, rate(name, "cycles/s")...))
		}
	}
	for dbs := 1; dbs <= 2; dbs++ {
		rows = append(rows, []any{
			"raw Pebble, four key writes a cycle, " + plural(dbs, "store"), m.median(fmt.Sprintf("RawPebble/dbs=%d", dbs), "cycles/s"),
		})
	}
	d.Table([]string{"cycles/s", "none", "process", "disk", "disk, least", "disk, most"}, rows...)
	single := "FullCycle/durability=%s/shards=1"
	d.Table([]string{"single calls, 1 shard", "none", "process", "disk", "disk, least", "disk, most"},
		append([]any{"from produce to completed, median, us"}, rate(single, "p50-us")...),
		append([]any{"the same, 99 of 100, us"}, rate(single, "p99-us")...),
		append([]any{"allocations a cycle"}, rate(single, "allocs/cycle")...),
		append([]any{"bytes allocated a cycle"}, rate(single, "B/cycle")...),
		append([]any{"processor time a cycle, us"}, rate(single, "cpu-us/cycle")...),
	)
}

func features(d *report.Document, m measures) {
	plain := m.median("Features/plain", "cycles/s")
	var rows [][]any
	for _, f := range []struct{ name, what string }{
		{"plain", "plain"},
		{"unique", "an idempotency key until the task has ended"},
		{"unique-for-1h", "an idempotency key for an hour"},
		{"tenants=1000", "1,000 tenants"},
		{"groups=100000", "100,000 groups"},
	} {
		rate := m.median("Features/"+f.name, "cycles/s")
		rows = append(rows, []any{f.what, rate, rate / plain})
	}
	d.Table([]string{"single calls, 1 shard, process", "cycles/s", "of plain"}, rows...)
}

func nodes(d *report.Document, m measures) {
	row := func(what, format string) (row []any) {
		row = append(row, what)
		for _, level := range []string{"process", "disk"} {
			name := fmt.Sprintf(format, level)
			row = append(row, m.median(name, "cycles/s"), m.median(name, "p50-us")/1e3)
		}
		name := fmt.Sprintf(format, "disk")
		return append(row, m.least(name, "cycles/s"), m.most(name, "cycles/s"))
	}
	d.Table([]string{"single calls", "process, cycles/s", "median latency, ms", "disk, cycles/s", "median latency, ms", "disk, least cycles/s", "disk, most"},
		row("three nodes, 1 shard", "Cluster/nodes=3/durability=%s/shards=1"),
		row("three nodes, 3 shards", "Cluster/nodes=3/durability=%s/shards=3"),
		row("a queue by itself, 1 shard", "FullCycle/durability=%s/shards=1"),
	)
}

func backlog(d *report.Document, m measures) {
	deep := "Backlog/ready=10000000"
	pair := func(unit string) string {
		return report.Number(m.median(deep, unit)) + "/s : " + report.Number(m.median(deep, "empty-"+unit)) + "/s"
	}
	d.Table([]string{"10,000,000 ready tasks, against an empty queue", ""},
		[]any{"single produces", pair("produces/s")},
		[]any{"claims with completion", pair("claims/s")},
		[]any{"from Open to the first claim, ms", m.median(deep, "reopen-ms")},
		[]any{"peak of resident memory, MB", m.median(deep, "peak-rss-MB")},
	)
	hand := "HandOff/durability="
	d.Table([]string{"", ""},
		[]any{"claims until 100 tenants with one task each are served, beside one with 1,000,000, 1 shard", m.median("Fairness/shards=1", "claims")},
		[]any{"the same, 2 shards", m.median("Fairness/shards=2", "claims")},
		[]any{"processor time of an idle queue of 2 shards, % of a core", m.median("Idle", "%core")},
		[]any{"from Produce to a Claim that waits on an idle queue, median, us: none", m.median(hand+"none", "p50-us")},
		[]any{"process", m.median(hand+"process", "p50-us")},
		[]any{"disk", m.median(hand+"disk", "p50-us")},
	)
}

func catchUp(d *report.Document, m measures) {
	row := func(what, unit string) []any {
		return []any{what, m.median("CatchUp/durability=process", unit), m.median("CatchUp/durability=disk", unit)}
	}
	d.Table([]string{"a node that comes back, of three", "process", "disk"},
		row("cycles/s of the others while it is away", "cycles/s"),
		row("and while it catches up", "catchup-cycles/s"),
		row("share", "kept"),
		row("seconds until it has caught up", "catchup-s"),
		row("the most log that a node had, MB", "log-MB"),
	)
}

func failover(d *report.Document, m measures) {
	row := func(what, unit string, shown func(float64) any) []any {
		line := []any{what}
		for _, level := range durabilities[1:] {
			line = append(line, shown(m.median("ClusterKill/"+level, unit)))
		}
		return line
	}
	seconds := func(ms float64) any { return ms / 1e3 }
	d.Table([]string{"three processes, one killed by kill -9 after the other", "process", "disk"},
		row("shards that have lost their leader", "failovers", whole),
		row("seconds until they are claimed from again, median", "median-ms", seconds),
		row("the longest", "max-ms", seconds),
		row("tasks acknowledged, none of them lost", "acknowledged", whole),
	)
}

func collection(d *report.Document, m measures) {
	var rows [][]any
	for _, percent := range gogc {
		name := percent + "/Run/durability=process/shards=1"
		rows = append(rows, []any{
			percent, m.median(name, "cycles/s"), m.least(name, "cycles/s"), m.most(name, "cycles/s"),
			m.median(name, "cpu-us/cycle"), m.median(name, "rss-MB"),
		})
	}
	d.Table([]string{"batches of 64, and Run, 1 shard, process", "cycles/s", "least", "most", "processor time a cycle, us", "resident memory, MB"}, rows...)
}

func checkpoint(d *report.Document, m measures) {
	var rows [][]any
	for _, backlog := range []int{0, 1_000_000} {
		for _, level := range durabilities[1:] {
			name := fmt.Sprintf("Checkpoint/backlog=%d/shards=2/durability=%s", backlog, level)
			row := []any{report.Number(float64(backlog)) + ", " + level}
			for _, unit := range []string{"pause-p50-ms", "pause-max-ms", "call-p50-ms"} {
				row = append(row, m.median(name, unit))
			}
			rows = append(rows, append(row, whole(m.median(name, "checkpoints"))))
		}
	}
	d.Table([]string{"2 shards at work; ready tasks behind", "they stand still for, median, ms", "the longest, ms", "the call takes, median, ms", "calls"}, rows...)
}

// whole is a count, written in full.
func whole(x float64) any {
	if math.IsNaN(x) {
		return x
	}
	return int64(x)
}

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}
