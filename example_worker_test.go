package codeq_test

import (
	"context"
	"fmt"
	"time"

	"codeq"
)

// startWorker starts a worker with a name, and returns when it takes tasks.
func startWorker(q *codeq.Queue, name string) (stop func()) {
	var mux codeq.Mux
	codeq.Handle(&mux, "mail", func(_ context.Context, job *codeq.Job[string]) error {
		fmt.Println(name, "sends", job.Args)
		return nil
	})
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- q.Run(ctx, &mux, &codeq.RunOptions{Name: name, Concurrency: 1}) }()
	for {
		workers, err := q.Workers(ctx)
		check(err)
		for _, w := range workers {
			if w.Name == name {
				return func() {
					cancel()
					check(<-ended)
				}
			}
		}
		time.Sleep(time.Millisecond)
	}
}

// A page of workers.
func ExampleQueue_Workers() {
	q, done := open()
	defer done()
	defer startWorker(q, "anna")()

	workers, err := q.Workers(ctx)
	check(err)
	for _, w := range workers {
		fmt.Println(w.Name, w.Queues, w.Busy, "of", w.Concurrency, w.Quiet)
	}
	// Output: anna [mail] 0 of 1 false
}

// Before a deployment, or when it does harm, a worker takes no more tasks. Another one does.
func ExampleQueue_QuietWorkers() {
	q, done := open()
	defer done()
	defer startWorker(q, "anna")()
	check(q.QuietWorkers(ctx, "anna"))
	defer startWorker(q, "ben")()

	task, err := codeq.NewTask("mail", "a letter")
	check(err)
	_, err = q.Produce(ctx, task)
	check(err)
	check(q.WaitIdle(ctx, "mail"))
	// Output: ben sends a letter
}

// All workers that were told to be quiet go on.
func ExampleQueue_ResumeWorkers() {
	q, done := open()
	defer done()
	defer startWorker(q, "anna")()
	check(q.QuietWorkers(ctx, ""))

	task, err := codeq.NewTask("mail", "a letter")
	check(err)
	_, err = q.Produce(ctx, task)
	check(err)
	counts, err := q.Stats(ctx)
	check(err)
	fmt.Println(counts["mail"].Ready, "waits")

	check(q.ResumeWorkers(ctx, ""))
	check(q.WaitIdle(ctx, "mail"))
	// Output:
	// 1 waits
	// anna sends a letter
}
