package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"codeq"
)

// The queues, and the payloads of their tasks, as JSON.
const (
	orderQueue = "order"
	mailQueue  = "mail"
)

type order struct {
	Number  int
	Arrives time.Time // when the goods are in the warehouse
}

type mail struct {
	Order    int
	To, Text string
}

func newOrder(o order) (codeq.Task, error) {
	payload, err := json.Marshal(o)
	return codeq.Task{Queue: orderQueue, Payload: payload}, err
}

func newMail(m mail) (codeq.Task, error) {
	payload, err := json.Marshal(m)
	return codeq.Task{Queue: mailQueue, Payload: payload, Timeout: 10 * time.Second}, err
}

// handlers returns a Mux with the handler of each queue.
func handlers() *codeq.Mux {
	mux := new(codeq.Mux)
	codeq.Handle(mux, orderQueue, handleOrder)
	codeq.Handle(mux, mailQueue, handleMail)
	return mux
}

// handleOrder charges an order. A handler may run more than once for a task, since the process may
// die between the work and its completion: a real one would send the order's ID to the bank as an
// idempotency key.
func handleOrder(ctx context.Context, job *codeq.Job[order]) error {
	o := job.Args
	switch {
	case o.Number%10 == 5:
		// Another attempt would fail as well: the task becomes a dead letter.
		return codeq.DeadLetter(errors.New("card refused"))
	case o.Number%10 == 6 && time.Until(o.Arrives) > 0:
		// Too early is not a failure: the attempt does not count.
		return codeq.Snooze(time.Until(o.Arrives))
	case o.Number%10 == 7 && job.Attempt == 1:
		// After any other error the task is tried again after the queue's backoff.
		return errors.New("the bank does not answer")
	}
	if err := work(ctx, 50*time.Millisecond); err != nil {
		return err
	}
	// The commit that completes the order also produces the mail: there is exactly one mail for
	// each order, even if the process dies.
	next, err := newMail(mail{
		Order: o.Number,
		To:    fmt.Sprintf("customer-%d@example.com", o.Number),
		Text:  fmt.Sprintf("Your order %d is on its way.", o.Number),
	})
	if err != nil {
		return err
	}
	job.FollowUp(next)
	job.SetResult([]byte("charged"))
	return nil
}

func handleMail(ctx context.Context, job *codeq.Job[mail]) error {
	if job.Args.Order%10 == 8 && job.Attempt == 1 {
		// The mail server has named the delay.
		return codeq.RetryAfter(2*time.Second, errors.New("mail server is busy"))
	}
	return work(ctx, 20*time.Millisecond)
}

// work takes time, and ends early with its handler's context.
func work(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
