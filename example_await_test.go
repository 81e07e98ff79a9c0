package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"codeq"
)

// Await makes a call of a task: it returns what the handler leaves behind.
func ExampleQueue_Await() {
	q, done := open()
	defer done()
	var mux codeq.Mux
	codeq.Handle(&mux, "square", func(ctx context.Context, job *codeq.Job[int]) error {
		if job.Args > 100 {
			return codeq.DeadLetter(errors.New("too large"))
		}
		return job.SetResultValue(job.Args * job.Args)
	})
	run, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- q.Run(run, &mux, nil) }()

	for _, n := range []string{"12", "1000"} {
		id, err := q.Produce(ctx, codeq.Task{Queue: "square", Payload: []byte(n), Retention: time.Minute})
		check(err)
		call, cancel := context.WithTimeout(ctx, 10*time.Second)
		outcome, err := q.Await(call, id)
		cancel()
		check(err)
		if outcome.State == codeq.Done {
			fmt.Printf("%s squared is %s\n", n, outcome.Result)
		} else {
			fmt.Printf("%s is %s: %s\n", n, outcome.State, outcome.LastError)
		}
	}
	stop()
	check(<-ended)
	// Output:
	// 12 squared is 144
	// 1000 is dead: too large
}
