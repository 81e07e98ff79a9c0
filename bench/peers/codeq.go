package main

import (
	"context"
	"path/filepath"

	"codeq"
	"codeq/bench/workload"
)

// codeq with the defaults of its options: single calls of Produce, Claim and
// Complete that each wait for their own commit, and ProduceBatch of 64 tasks
// with Run.
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
		for _, batch := range []int{1, batchSize} {
			s := subject{
				Name: "codeq/" + d.class.String() + "/single", Queue: codeqName, Driven: "Produce, Claim, Complete",
				Keeps: d.keeps, Class: d.class, Batch: batch, Leases: true,
			}
			if batch > 1 {
				s.Name, s.Driven, s.AtHandler = "codeq/"+d.class.String()+"/batch", "ProduceBatch of 64, Run", true
			}
			s.open = func(_ context.Context, dir string, _ workload.Load) (*peer, error) {
				q, err := codeq.Open(filepath.Join(dir, "queue"), &codeq.Options{Durability: d.level})
				if err != nil {
					return nil, err
				}
				p := &peer{version: "this commit", driver: workload.Calls{Queues: []*codeq.Queue{q}}}
				if batch > 1 {
					p.driver = workload.Runner{Queue: q}
				}
				p.onClose(q.Close)
				return p, nil
			}
			all = append(all, s)
		}
	}
	return all
}
