package engine

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"codeq/bench/report/internal/benchstat"
	"codeq/bench/report/internal/document"
)

// section is a part of engine.md.
type section struct {
	title    string
	repeated []string  // patterns of benchmarks, repeated in rounds with those of other sections
	once     []testRun // of a section without repeated benchmarks
	tables   []benchstat.Comparison
}

// testRun is a run of go test.
type testRun struct {
	env  []string
	args []string
}

func (r testRun) String() string {
	return strings.TrimSpace(document.Words(slices.Concat(r.env, []string{"go"}, r.args)))
}

// heading returns the command's heading in engine.txt. Environment variables become keys of
// benchstat.
func (r testRun) heading() string {
	text := "Command: " + r.String() + "\n"
	for _, variable := range r.env {
		key, value, _ := strings.Cut(variable, "=")
		text += strings.ToLower(key) + ": " + value + "\n"
	}
	return text
}

func (c *config) sections() []section {
	minutes := func(pattern string, window time.Duration, flags ...string) []testRun {
		return []testRun{{args: append(c.bench(pattern, window), flags...)}}
	}
	kills := []testRun{{args: []string{"test", "-run", "^TestClusterKill$", "-v", "-timeout", "0", "./internal/killtest", "-cluster.for", c.kill.String()}}}
	var collections []testRun
	for range c.count {
		for _, percent := range []string{"100", "400"} {
			collections = append(collections, testRun{[]string{"GOGC=" + percent}, c.bench("^BenchmarkRun$/durability=process/shards=1", c.Window)})
		}
	}
	const durability = "/durability"
	return []section{
		{title: "Cycles", repeated: []string{"RawPebble", "FullCycle", "Run$"}, tables: []benchstat.Comparison{
			{Filter: ".name:(FullCycle OR Run) -gogc:/./", Units: []string{"cycles/s"}, Row: ".name /shards", Column: durability},
			{Filter: ".name:FullCycle /shards:1", Units: []string{"p50-us", "p99-us", "allocs/cycle", "B/cycle", "cpu-us/cycle"}, Row: ".name /shards", Column: durability},
			{Filter: ".name:RawPebble", Units: []string{"cycles/s"}, Row: ".name /dbs"},
		}},
		{title: "Features", repeated: []string{"Features"}, tables: []benchstat.Comparison{
			{Filter: ".name:Features", Units: []string{"cycles/s"}, Row: ".name /gomaxprocs", Column: ".fullname", Down: true},
		}},
		{title: "Nodes", repeated: []string{"FullCycle", "Cluster"}, tables: []benchstat.Comparison{
			{Filter: "(.name:Cluster OR .name:FullCycle /shards:1) /durability:(process OR disk)", Units: []string{"cycles/s", "p50-us"}, Row: ".name /shards", Column: durability},
		}},
		{title: "GOGC", once: collections, tables: []benchstat.Comparison{
			{Filter: ".name:Run gogc:/./", Units: []string{"cycles/s", "cpu-us/cycle", "rss-MB"}, Row: ".name", Column: "gogc", Down: true},
		}},
		{title: "Backlog", once: minutes("^Benchmark(Backlog|Idle|HandOff|Fairness)$", 16*time.Second), tables: []benchstat.Comparison{
			{Filter: ".name:Backlog", Units: []string{"produces/s", "empty-produces/s", "claims/s", "empty-claims/s", "reopen-ms", "peak-rss-MB"}, Row: ".name"},
			{Filter: ".name:Fairness", Units: []string{"claims"}, Row: ".name /shards"},
			{Filter: ".name:Idle", Units: []string{"%core"}, Row: ".name"},
			{Filter: ".name:HandOff", Units: []string{"p50-us"}, Row: ".name", Column: durability},
		}},
		{title: "Checkpoint", once: minutes("^BenchmarkCheckpoint$/backlog=/shards=2/durability=(process|disk)", 20*time.Second), tables: []benchstat.Comparison{
			{Filter: ".name:Checkpoint", Units: []string{"pause-p50-ms", "pause-max-ms", "call-p50-ms", "checkpoints"}, Row: "/backlog /durability"},
		}},
		{title: "Catching up", once: minutes("^BenchmarkCatchUp$", c.Window, "-away", strconv.FormatInt(c.away, 10)), tables: []benchstat.Comparison{
			{Filter: ".name:CatchUp", Units: []string{"cycles/s", "catchup-cycles/s", "kept", "catchup-s", "log-MB"}, Row: ".name", Column: durability},
		}},
		{title: "Failover", once: kills, tables: []benchstat.Comparison{
			{Filter: ".name:ClusterKill", Units: []string{"failovers", "median-ms", "max-ms", "acknowledged"}, Row: ".name", Column: durability},
		}},
	}
}

// words replaces the names of benchmarks and units in the tables.
var words = map[string]string{
	"FullCycle 1":     "single calls, 1 shard",
	"FullCycle 2":     "single calls, 2 shards",
	"Run 1":           "batches of 64, and Run with 128 workers, 1 shard",
	"Run 2":           "batches of 64, and Run with 128 workers, 2 shards",
	"RawPebble 1":     "raw Pebble, four key writes a cycle, 1 store",
	"RawPebble 2":     "raw Pebble, four key writes a cycle, 2 stores",
	"Cluster 1":       "three nodes, single calls, 1 shard",
	"Cluster 3":       "three nodes, single calls, 3 shards",
	"*/plain":         "plain",
	"*/unique":        "an idempotency key until the task has ended",
	"*/unique-for-1h": "an idempotency key for an hour",
	"*/tenants=1000":  "1,000 tenants",
	"*/groups=100000": "100,000 groups",
	"100":             "GOGC=100",
	"400":             "GOGC=400",
	"Backlog":         "10,000,000 ready tasks",
	"Fairness 1":      "until 100 tenants with one task each are served, beside one with 1,000,000, 1 shard",
	"Fairness 2":      "the same, 2 shards",
	"Idle":            "an idle queue of 2 shards",
	"HandOff":         "from Produce to a Claim that waits on an idle queue",
	"0 process":       "nothing ready behind, process",
	"0 disk":          "nothing ready behind, disk",
	"1000000 process": "1,000,000 ready tasks behind, process",
	"1000000 disk":    "1,000,000 ready tasks behind, disk",
	"CatchUp":         "a node that comes back, of three",
	"ClusterKill":     "three processes, one killed by kill -9 after the other",

	"p50-us":           "latency, median, us",
	"p99-us":           "latency, 99 of 100, us",
	"allocs/cycle":     "allocations a cycle",
	"B/cycle":          "bytes allocated a cycle",
	"cpu-us/cycle":     "processor time a cycle, us",
	"rss-B":            "resident memory",
	"empty-produces/s": "on an empty queue",
	"empty-claims/s":   "beside no backlog",
	"reopen-ms":        "from Open to the first claim, ms",
	"peak-rss-B":       "peak of resident memory",
	"%core":            "processor time, % of a core",
	"pause-p50-ms":     "shards stand still for, median, ms",
	"pause-max-ms":     "the longest, ms",
	"call-p50-ms":      "the call takes, median, ms",
	"checkpoints":      "calls",
	"catchup-cycles/s": "cycles/s of the others while it catches up",
	"kept":             "share of those while it was away",
	"catchup-s":        "seconds until it has caught up",
	"log-B":            "the most log that a node had",
	"failovers":        "shards that have lost their leader",
	"median-ms":        "ms until they are claimed from again, median",
	"max-ms":           "the longest, ms",
	"acknowledged":     "tasks acknowledged, none of them lost",
}

// round returns one run of all repeated benchmarks. It has no arguments if there are none.
func (c *config) round(sections []section) (r testRun) {
	var patterns []string
	for _, s := range sections {
		patterns = append(patterns, s.repeated...)
	}
	slices.Sort(patterns)
	if patterns = slices.Compact(patterns); len(patterns) > 0 {
		r.args = c.bench("^Benchmark"+strings.Join(patterns, "|^Benchmark"), c.Window)
	}
	return r
}

func (c *config) bench(pattern string, window time.Duration) []string {
	return []string{
		"test", "./bench", "-run", "^$", "-bench", pattern, "-benchtime", "1x", "-timeout", "0",
		"-warmup", c.Warmup.String(), "-window", window.String(),
	}
}

// killed matches the last log line of TestClusterKill for a durability.
var killed = regexp.MustCompile(`=== RUN +TestClusterKill/(\w+)(?s:.*?)(\d+) tasks acknowledged, .* failovers of (\d+): .*median (\S+), .*max (\S+)\n`)

// kills returns the results of TestClusterKill as lines for benchstat.
func kills(printed string) (lines string) {
	for _, k := range killed.FindAllStringSubmatch(printed, -1) {
		median, err1 := time.ParseDuration(k[4])
		longest, err2 := time.ParseDuration(k[5])
		if err1 == nil && err2 == nil {
			lines += fmt.Sprintf("BenchmarkClusterKill/durability=%s 1 %s failovers %d median-ms %d max-ms %s acknowledged\n",
				k[1], k[3], median.Milliseconds(), longest.Milliseconds(), k[2])
		}
	}
	return lines
}
