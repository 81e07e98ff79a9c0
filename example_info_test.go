package codeq_test

import (
	"context"
	"errors"
	"fmt"

	"codeq"
)

// A dashboard asks each second what waits, since when, and what has been done.
func ExampleQueue_Info() {
	q, done := open()
	defer done()
	for range 3 {
		_, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
		check(err)
	}
	l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	check(q.Complete(ctx, l.Receipt, nil))

	queues, err := q.Info(ctx)
	check(err)
	for _, i := range queues {
		fmt.Printf("%s: %d ready, the oldest waits: %t\n", i.Queue, i.Counts.Ready, !i.OldestReady.IsZero())
		fmt.Printf("%d produced, %d completed\n", i.Totals.Produced, i.Totals.Completed)
	}
	// Output:
	// mail: 2 ready, the oldest waits: true
	// 3 produced, 1 completed
}

func ExampleQueue_TotalsByDay() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
	check(err)

	days, err := q.TotalsByDay(ctx, "mail")
	check(err)
	for _, d := range days {
		fmt.Printf("%d produced on a day that began at %s\n", d.Produced, d.Day.Format("15:04 MST"))
	}
	// Output:
	// 1 produced on a day that began at 00:00 UTC
}

func ExampleReader_Info() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	queues, err := r.Info(context.Background())
	check(err)
	for _, i := range queues {
		fmt.Printf("%s: paused: %t, %d dead of %d\n", i.Queue, i.Settings.Paused, i.Totals.Dead, i.Totals.Produced)
	}
	check(r.Close())
	// Output:
	// mail: paused: true, 1 dead of 3
}

func ExampleReader_TotalsByDay() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	days, err := r.TotalsByDay(context.Background(), "mail")
	check(err)
	dead := 0
	for _, d := range days {
		dead += int(d.Dead)
	}
	fmt.Println(dead, "dead in the last three months")
	check(r.Close())
	// Output:
	// 1 dead in the last three months
}

// A probe of a load balancer: whether this process is to get work.
func ExampleQueue_Health() {
	q, done := open()
	defer done()

	switch err := q.Health(ctx); {
	case errors.Is(err, codeq.ErrStalled):
		fmt.Println("the disk does not answer:", err)
	case err != nil:
		fmt.Println("the queue does not work:", err)
	default:
		fmt.Println("ok")
	}
	// Output: ok
}

// What a process exports as metrics: a node of a cluster shows the shards that it leads.
func ExampleQueue_ProcessInfo() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
	check(err)

	info, err := q.ProcessInfo(ctx)
	check(err)
	for i, s := range info.Shards {
		fmt.Printf("shard %d: leads: %t, %d operations wait\n", i, s.Leads, s.Inbox)
		for _, of := range s.Queues {
			fmt.Println(of.Queue, of.Counts.Ready)
		}
	}
	// Output:
	// shard 0: leads: true, 0 operations wait
	// mail 1
}
