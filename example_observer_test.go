package codeq_test

import (
	"context"
	"fmt"
	"os"

	"codeq"
)

// metrics is what an exporter keeps: counters, and a histogram for each queue.
type metrics struct {
	produced, completed map[string]uint64
	seconds             map[string][]float64
	missed              uint64 // handlers that are not in seconds
}

// observe is called by one goroutine of the queue. An exporter that is read meanwhile has a lock.
func (m *metrics) observe(o *codeq.Observation) {
	for _, d := range o.Queues {
		m.produced[d.Queue] += d.Produced
		m.completed[d.Queue] += d.Completed
	}
	for _, h := range o.Handlers {
		name := h.Queue + " " + h.Verdict.String()
		m.seconds[name] = append(m.seconds[name], h.Took.Seconds())
	}
	m.missed += o.MissedHandlers
}

// Metrics are made of what an Observer is told.
func ExampleObservation() {
	dir, err := os.MkdirTemp("", "codeq-example-")
	check(err)
	defer os.RemoveAll(dir)
	m := &metrics{make(map[string]uint64), make(map[string]uint64), make(map[string][]float64), 0}
	q, err := codeq.Open(dir, &codeq.Options{Observer: m.observe})
	check(err)

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "mail", func(context.Context, *codeq.Job[[]byte]) error {
		stop()
		return nil
	})
	_, err = q.ProduceBatch(ctx, []codeq.Task{{Queue: "mail"}, {Queue: "video"}, {Queue: "video"}})
	check(err)
	check(q.Run(ctx, &mux, nil))
	check(q.Close()) // by then all has been told

	fmt.Println(m.produced["mail"], m.produced["video"], m.completed["mail"])
	fmt.Println(len(m.seconds["mail completed"]), m.missed)
	// Output:
	// 1 2 1
	// 1 0
}
