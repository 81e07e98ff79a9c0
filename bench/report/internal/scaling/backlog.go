package scaling

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"

	"codeq"
	"codeq/bench/report/internal/document"
	"codeq/bench/workload"
)

// stock describes the measurement of a feature: tasks with it are produced and worked off, in
// rounds until enough tasks are done.
type stock struct {
	feature workload.Feature
	tasks   int // of a round, all produced before the work begins; 0: worked off meanwhile
	least   int // minimum of all rounds
}

// backlogSweep varies the backlog for each feature of a task.
func backlogSweep(z size) *sweep {
	sw := &sweep{
		name: "backlog", title: "Backlog", axis: "tasks that wait",
		about: fmt.Sprintf("Tasks that all use a feature, produced in batches of 1,000 by four callers, and then worked off by `Run` with %d workers; "+
			"where none wait, it works while they are produced; durability *process*, 1 shard. Features are those of `BenchmarkDepth`. A task that is "+
			"retried or snoozed runs twice; one that is due is so 1 s after it was produced, and the second counts where none wait. "+
			"Of small backlogs there are several in turn, until they are %s tasks. CPU, busy and group are of working off.",
			workersOf*defaultProducers, document.Number(float64(z.ready/10))),
		values: []int{0, z.ready / 100, z.ready / 10, z.ready},
		label: func(v int) string {
			if v == 0 {
				return "none"
			}
			return document.Number(float64(v))
		},
		apply: func(s *setting, v int) { s.stock.tasks, s.stock.least = v, z.ready/10 },
		plain: true,
		logY:  true,
		stock: true,
	}
	for _, f := range workload.Features() {
		sw.settings = append(sw.settings, setting{
			name: f.Name, opts: codeq.Options{Durability: codeq.DurabilityProcess, Shards: 1},
			load: load(defaultProducers), stock: stock{feature: f},
		})
	}
	return sw
}

// stocked measures a feature, in a new queue.
func (m *measurer) stocked(ctx context.Context, dir string, s setting) (res result, err error) {
	queues, err := open(ctx, dir, s)
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, workload.CloseAll(queues), os.RemoveAll(dir)) }()
	runtime.GC() // garbage of the previous setting
	l := workload.FeatureLoad{Feature: s.stock.feature, Queues: queues, Workers: s.load.Workers, Tasks: s.stock.tasks}
	if l.Tasks == 0 {
		l.Tasks = s.stock.least
	}
	var all workload.FeatureResult
	for all.Produced < s.stock.least || all.Produced == 0 {
		var before workload.Usage
		var committed int64
		round, err := l.Run(ctx, s.stock.tasks > 0, func() error {
			before, committed = workload.ReadUsage(), commits(queues)
			return nil
		})
		if err != nil {
			return res, err
		}
		used := workload.ReadUsage().Since(before)
		res.Usage.CPU += used.CPU
		res.Usage.Allocs += used.Allocs
		res.Usage.AllocBytes += used.AllocBytes
		res.commits += max(commits(queues)-committed, 0)
		all.Add(round)
		l.First += l.Tasks
	}
	res.Created, res.Completed, res.Elapsed = int64(all.Ended), int64(all.Ended), all.Working
	res.produced = all.ProducedRate()
	return res, nil
}
