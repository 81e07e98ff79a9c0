package scaling

import (
	"fmt"
	"strconv"

	"codeq"
	"codeq/bench/report/internal/document"
	"codeq/bench/workload"
)

// setting is a queue and its load.
type setting struct {
	name  string // of its line in a chart
	opts  codeq.Options
	load  workload.Load
	run   bool  // ProduceBatch and Run, and not single calls
	nodes int   // of a cluster in this process; 0: a standalone queue
	ready int   // tasks in the queue before and during the load
	stock stock // of the backlog sweep, without a load
}

// sweep varies one parameter over several settings.
type sweep struct {
	name     string // of files, and on the command line
	title    string
	axis     string // the name of the values
	about    string // the load, beyond title and axis
	values   []int
	label    func(v int) string
	apply    func(s *setting, v int)
	settings []setting
	runs     int  // minimum, for noisy sweeps; 0: 1
	plain    bool // no profiles
	bars     bool // of a few values without a scale
	logY     bool // cycles/s vary by orders of magnitude
	data     bool // shows bytes of payloads a second
	stock    bool // measures settings by tasks, not by time
}

// at returns a setting with a value of the sweep.
func (sw *sweep) at(s setting, v int) setting {
	sw.apply(&s, v)
	return s
}

// each calls f for all values with all settings.
func (sw *sweep) each(outcomes [][]outcome, f func(s setting, v int, o *outcome)) {
	for i, s := range sw.settings {
		for j, v := range sw.values {
			f(s, v, &outcomes[i][j])
		}
	}
}

// size is the size of sweeps.
type size struct {
	ends  bool // the first and the last value only
	ready int  // depth of a deep backlog
}

const (
	batch            = 64
	workersOf        = 4 // for each producer: a cycle is one call of a producer, two of a worker
	defaultProducers = 32
	maxBacklog       = 8192 // few in relation to the cycles of a window
)

// calls returns a setting of single calls, each with its own commit.
func calls(d codeq.Durability) setting {
	return setting{
		name: fmt.Sprint("single calls, ", d),
		opts: codeq.Options{Durability: d, Shards: 1},
		load: load(defaultProducers),
	}
}

// batches returns a setting of batches of 64, and Run.
func batches(d codeq.Durability) setting {
	s := setting{
		name: fmt.Sprint("batches and Run, ", d),
		opts: codeq.Options{Durability: d, Shards: 1},
		load: load(defaultProducers),
		run:  true,
	}
	s.load.Batch = batch
	return s
}

func load(producers int) workload.Load {
	return workload.Load{Producers: producers, Workers: workersOf * producers}
}

// levels returns settings of the levels of durability that survive a crash, each on one shard, on
// two, and on four, the default on 12 processors.
func levels(load func(codeq.Durability) setting) (all []setting) {
	for _, d := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk} {
		for _, shards := range []int{1, 2, 4} {
			s := load(d)
			s.name = fmt.Sprintf("%v, shards: %d", d, shards)
			s.opts.Shards = shards
			all = append(all, s)
		}
	}
	return all
}

// bounded makes producers wait for workers, like a service with back-pressure.
func (s setting) bounded() setting {
	if s.load.Backlog == 0 {
		s.load.Backlog = min(2*s.load.Producers*max(s.load.Batch, 1), maxBacklog)
	}
	return s
}

// sweeps returns all sweeps.
func sweeps(z size) []*sweep {
	const process, disk = codeq.DurabilityProcess, codeq.DurabilityDisk
	all := []*sweep{{
		name: "shards", title: "Shards", axis: "Options.Shards",
		about:    "32 producers and 128 workers.",
		values:   []int{1, 2, 4, 8},
		label:    number,
		apply:    func(s *setting, v int) { s.opts.Shards = v },
		settings: []setting{calls(process), batches(process), calls(disk), batches(disk)},
	}, {
		name: "producers", title: "Producers", axis: "producers",
		about:    "Four workers for each producer; 1 shard.",
		values:   []int{1, 4, 16, 64, 256},
		label:    number,
		apply:    func(s *setting, v int) { s.load.Producers, s.load.Workers = v, workersOf*v },
		settings: []setting{calls(process), batches(process), calls(disk)},
		logY:     true,
	}, {
		name: "payload", title: "Payload", axis: "bytes of a payload",
		about:  "32 producers and 128 workers; 1 shard. Batches are of 64 tasks, but of 256 KiB at the most.",
		values: []int{14, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10},
		label:  bytesLabel,
		apply: func(s *setting, v int) {
			s.load.Payload = v
			s.load.Batch = min(s.load.Batch, 256<<10/v) // few tasks under way blur the counts less
		},
		settings: []setting{calls(process), batches(process), calls(disk)},
		logY:     true,
		data:     true,
	}, {
		name: "group", title: "Operations in a group", axis: "Options.GroupCap",
		about:    "32 producers and 128 workers; 1 shard. With single calls there are no more than 160 operations at a time.",
		values:   []int{1, 16, 64, 256, 1024, 4096},
		label:    number,
		apply:    func(s *setting, v int) { s.opts.GroupCap = v },
		settings: []setting{calls(process), batches(process), calls(disk)},
		logY:     true,
	}, {
		name: "window", title: "Tasks in memory", axis: "Options.WindowTasks",
		about: fmt.Sprintf("32 producers and 128 workers; 1 shard; %s ready tasks are there before, and what is "+
			"claimed are the oldest of them.", document.Number(float64(z.ready))),
		values:   []int{16, 64, 256, 1024, 4096, 16384, 65536},
		label:    number,
		apply:    func(s *setting, v int) { s.opts.WindowTasks, s.ready = v, z.ready },
		settings: []setting{calls(process), batches(process)},
	}, {
		name: "nodes", title: "Nodes", axis: "nodes",
		about: "Nodes of a cluster in one process, which talk over TCP loopback and share processors and disk; " +
			"32 producers and 128 workers, spread over the nodes; 3 shards.",
		values: []int{0, 1, 3, 5},
		label: func(v int) string {
			if v == 0 {
				return "by itself"
			}
			return number(v)
		},
		apply:    func(s *setting, v int) { s.nodes, s.opts.Shards = v, 3 },
		settings: []setting{calls(process), calls(disk)},
		bars:     true,
	}, backlogSweep(z), {
		name: "callers", title: "Callers at both levels", axis: "callers",
		about: "Single calls of a producer and a worker, or of producers and of four workers for each of them. All lines are measured six " +
			"times in turn, as the disk is faster and slower from minute to minute.",
		values: []int{1, 8, 32, 128},
		label: func(v int) string {
			if v == 1 {
				return "1 + 1"
			}
			return fmt.Sprint(v, " + ", workersOf*v)
		},
		apply: func(s *setting, v int) {
			if s.load = load(v); v == 1 { // producer and worker wait for each other
				s.load.Workers, s.load.Backlog = 1, 1
			}
		},
		settings: levels(calls),
		runs:     6,
		plain:    true,
		logY:     true,
	}, {
		name: "batches", title: "Batches at both levels", axis: "producers",
		about:    "Batches of 64 and `Run`, with four workers for each producer. All lines are measured six times in turn.",
		values:   []int{1, 32},
		label:    number,
		apply:    func(s *setting, v int) { s.load.Producers, s.load.Workers = v, workersOf*v },
		settings: levels(batches),
		runs:     6,
		plain:    true,
		bars:     true,
	}}
	for _, sw := range all {
		if z.ends {
			sw.runs = 0
			sw.values = []int{sw.values[0], sw.values[len(sw.values)-1]}
		}
	}
	return all
}

func number(v int) string { return strconv.Itoa(v) }

func bytesLabel(v int) string {
	if v >= 1<<10 {
		return fmt.Sprint(v>>10, " KiB")
	}
	return fmt.Sprint(v, " B")
}
