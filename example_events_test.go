package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"codeq"
)

// A subscription tells what happens to the tasks, here of one queue.
func ExampleQueue_Subscribe() {
	q, done := open()
	defer done()

	sub, err := q.Subscribe(codeq.SubscribeOptions{Queues: []string{"mail"}})
	check(err)
	defer sub.Close()

	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Tenant: "gopher"})
	check(err)
	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	check(q.DeadLetter(ctx, lease.Receipt, errors.New("no such address")))

	for range 3 {
		e, err := sub.Next(ctx)
		check(err)
		fmt.Printf("%s %s, attempt %d %q\n", e.Kind, e.Tenant, e.Attempt, e.LastError)
	}
	// Output:
	// produced gopher, attempt 0 ""
	// claimed gopher, attempt 1 ""
	// dead gopher, attempt 1 "no such address"
}

// A monitor that wants the dead letters only costs other changes nothing. It
// ends with its context, or with the queue.
func ExampleSubscription_All() {
	q, done := open()
	defer done()

	sub, err := q.Subscribe(codeq.SubscribeOptions{Kinds: []codeq.EventKind{codeq.EventDeadLettered}})
	check(err)
	defer sub.Close()

	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", MaxAttempts: 1})
	check(err)
	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	check(q.Retry(ctx, lease.Receipt, codeq.RetryOptions{Err: errors.New("mailbox full")}))

	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for e, err := range sub.All(short) {
		check(err)
		fmt.Println(e.Queue, e.LastError)
		break
	}
	fmt.Println("lost:", sub.Lost())
	// Output:
	// mail mailbox full
	// lost: 0
}

// A reader waits for the next event, as long as its context allows.
func ExampleSubscription_Next() {
	q, done := open()
	defer done()
	sub, err := q.Subscribe(codeq.SubscribeOptions{})
	check(err)
	defer sub.Close()

	go func() {
		_, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
		check(err)
	}()
	e, err := sub.Next(ctx)
	check(err)
	fmt.Println(e.Kind, e.Queue)

	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	_, err = sub.Next(short)
	fmt.Println("nothing else:", errors.Is(err, context.DeadlineExceeded))
	// Output:
	// produced mail
	// nothing else: true
}

// A reader that falls behind loses the oldest events, and knows how many.
func ExampleSubscription_Lost() {
	q, done := open()
	defer done()
	sub, err := q.Subscribe(codeq.SubscribeOptions{Buffer: 2})
	check(err)
	defer sub.Close()

	for _, tenant := range []string{"anna", "bert", "cora"} {
		_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Tenant: tenant})
		check(err)
	}
	fmt.Println("lost:", sub.Lost())
	e, err := sub.Next(ctx)
	check(err)
	fmt.Println("next:", e.Tenant)
	// Output:
	// lost: 1
	// next: bert
}

// Whoever waits for an event of a subscription learns that it has been closed.
func ExampleSubscription_Close() {
	q, done := open()
	defer done()
	sub, err := q.Subscribe(codeq.SubscribeOptions{})
	check(err)

	ended := make(chan error)
	go func() {
		_, err := sub.Next(ctx)
		ended <- err
	}()
	sub.Close()
	fmt.Println(errors.Is(<-ended, codeq.ErrClosed))
	// Output: true
}
