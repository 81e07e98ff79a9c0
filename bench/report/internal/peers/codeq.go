package peers

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime"
	"time"

	"codeq"
	"codeq/bench/workload"
)

// codeqSubjects is codeq by single calls of Produce, Claim and Complete that each wait for their
// own commit, and by ProduceBatch of 64 tasks with Run; with the defaults of its options, and with
// a shard for each processor. At the levels of peers that keep completed tasks, there are also rows
// of codeq that keep them.
func codeqSubjects() []subject {
	var all []subject
	for _, d := range []struct {
		class class
		level codeq.Durability
		keeps string
	}{
		{none, codeq.DurabilityNone, "crash: the last writes; power: the same and more"},
		{process, codeq.DurabilityProcess, "crash: nothing; power: the last seconds"},
		{disk, codeq.DurabilityDisk, "nothing"},
	} {
		for _, retention := range []time.Duration{0, 24 * time.Hour} {
			if retention > 0 && d.class == none {
				continue
			}
			for _, batch := range []int{1, batchSize} {
				for _, shards := range []int{0, runtime.GOMAXPROCS(0)} {
					s := subject{
						Name: "codeq/" + d.class.String() + "/single", Queue: codeqName, Driven: "Produce, Claim, Complete",
						Keeps: d.keeps, Class: d.class, Batch: batch, Leases: true, Retains: retention > 0,
					}
					if batch > 1 {
						s.Name, s.Driven, s.AtHandler = "codeq/"+d.class.String()+"/batch", "ProduceBatch of 64, Run", true
					}
					if s.Retains {
						s.Name += "-kept"
					}
					if shards > 0 {
						s.Name += "-shards"
						s.Driven += fmt.Sprintf("; %d shards", shards)
					}
					s.open = func(_ context.Context, dir string, _ workload.Load) (*peer, error) {
						return openCodeq(dir, codeq.Options{Durability: d.level, Shards: shards}, batch > 1, retention)
					}
					all = append(all, s)
				}
			}
		}
	}
	return all
}

func openCodeq(dir string, opts codeq.Options, batches bool, retention time.Duration) (*peer, error) {
	q, err := codeq.Open(filepath.Join(dir, "queue"), &opts)
	if err != nil {
		return nil, err
	}
	p := &peer{version: "this commit", driver: workload.Calls{Queues: []*codeq.Queue{q}, Retention: retention}}
	if batches {
		p.driver = workload.Runner{Queues: []*codeq.Queue{q}, Retention: retention}
	}
	p.onClose(q.Close)
	return p, nil
}
