package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"codeq"
)

// A task waits for one that has been produced before, and reads its result.
func ExampleTask_after() {
	q, done := open()
	defer done()

	video, err := q.Produce(ctx, codeq.Task{Queue: "encode", Payload: []byte("cats"), Retention: time.Hour})
	check(err)
	mail, err := q.Produce(ctx, codeq.Task{Queue: "notify", After: []codeq.ID{video}})
	check(err)
	task, err := q.Get(ctx, mail)
	check(err)
	fmt.Println("notify is", task.State)

	run, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "encode", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		job.SetResult(append(job.Payload, ".mp4"...))
		return nil
	})
	codeq.Handle(&mux, "notify", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		video, err := q.Get(ctx, job.After[0])
		if err != nil {
			return err
		}
		fmt.Printf("%s is ready\n", video.Result)
		stop()
		return nil
	})
	check(q.Run(run, &mux, nil))
	// Output:
	// notify is blocked
	// cats.mp4 is ready
}

// A report is made of parts that are worked on at the same time. All tasks are
// stored in one commit: the whole flow, or nothing.
func ExampleNth() {
	q, done := open()
	defer done()

	ids, err := q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "fetch", Payload: []byte("orders"), Retention: time.Hour},
		{Queue: "count", Payload: []byte("north"), After: []codeq.ID{codeq.Nth(0)}, Retention: time.Hour},
		{Queue: "count", Payload: []byte("south"), After: []codeq.ID{codeq.Nth(0)}, Retention: time.Hour},
		{Queue: "report", After: []codeq.ID{codeq.Nth(1), codeq.Nth(2)}, Retention: time.Hour},
	})
	check(err)

	var mux codeq.Mux
	codeq.Handle(&mux, "fetch", func(context.Context, *codeq.Job[[]byte]) error { return nil })
	codeq.Handle(&mux, "count", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		job.SetResult(fmt.Appendf(nil, "%s: %d letters", job.Payload, len(job.Payload)))
		return nil
	})
	codeq.Handle(&mux, "report", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		var lines []string
		for _, id := range job.After {
			part, err := q.Get(ctx, id)
			if err != nil {
				return err
			}
			lines = append(lines, string(part.Result))
		}
		job.SetResult([]byte(strings.Join(lines, "\n")))
		return nil
	})
	run, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- q.Run(run, &mux, nil) }()

	report, err := q.Await(ctx, ids[3])
	check(err)
	stop()
	check(<-ended)
	fmt.Printf("%s\n", report.Result)
	// Output:
	// north: 5 letters
	// south: 5 letters
}

// A task says what becomes of it when a task that it waits for is given up.
func ExampleOnDead() {
	q, done := open()
	defer done()

	ids, err := q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "charge"},
		{Queue: "ship", After: []codeq.ID{codeq.Nth(0)}}, // HoldOnDead
		{Queue: "offer", After: []codeq.ID{codeq.Nth(0)}, OnDead: codeq.CancelOnDead, Retention: time.Hour},
		{Queue: "invoice", After: []codeq.ID{codeq.Nth(0)}, OnDead: codeq.RunOnDead},
	})
	check(err)
	claim := func(queue string) *codeq.Lease {
		lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}})
		check(err)
		return lease
	}
	charge := claim("charge")
	check(q.DeadLetter(ctx, charge.Receipt, errors.New("card expired")))

	ship, err := q.Get(ctx, ids[1])
	check(err)
	fmt.Println("ship is", ship.State)
	offer, err := q.Await(ctx, ids[2])
	check(err)
	fmt.Println("offer is", offer.State)
	invoice := claim("invoice")
	fmt.Println("invoice is claimed, attempt", invoice.Attempt)

	check(q.RedriveDead(ctx, charge.ID))
	check(q.Complete(ctx, claim("charge").Receipt, nil))
	fmt.Println("ship is claimed, attempt", claim("ship").Attempt)
	// Output:
	// ship is blocked
	// offer is canceled
	// invoice is claimed, attempt 1
	// ship is claimed, attempt 1
}

// A task says what becomes of it if a task that it waits for does not exist: nobody knows how one
// has ended that is no longer kept.
func ExampleOnMissing() {
	q, done := open()
	defer done()

	order, err := q.Produce(ctx, codeq.Task{Queue: "order"})
	check(err)
	check(q.Cancel(ctx, order))

	_, err = q.Produce(ctx, codeq.Task{Queue: "pack", After: []codeq.ID{order}, OnMissing: codeq.RefuseOnMissing})
	fmt.Println("pack is stored:", !errors.Is(err, codeq.ErrNotFound))
	ship, err := q.Produce(ctx, codeq.Task{
		Queue: "ship", After: []codeq.ID{order}, OnMissing: codeq.CancelOnMissing, Retention: time.Hour,
	})
	check(err)
	end, err := q.Await(ctx, ship)
	check(err)
	fmt.Println("ship is", end.State)
	tidy, err := q.Produce(ctx, codeq.Task{Queue: "tidy", After: []codeq.ID{order}}) // RunOnMissing
	check(err)
	task, err := q.Get(ctx, tidy)
	check(err)
	fmt.Println("tidy is", task.State)
	// Output:
	// pack is stored: false
	// ship is canceled
	// tidy is ready
}
