package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"codeq"
)

// The context of a canceled task's handler ends. Whatever the handler returns then, the task is not
// tried again.
func ExampleQueue_Cancel() {
	q, done := open()
	defer done()

	begun, ended := make(chan struct{}), make(chan struct{})
	var mux codeq.Mux
	codeq.Handle(&mux, "video", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		defer close(ended)
		close(begun)
		<-ctx.Done() // or the end of the work
		fmt.Println("canceled:", errors.Is(context.Cause(ctx), codeq.ErrCanceled))
		return ctx.Err()
	})
	run, stop := context.WithCancel(ctx)
	stopped := make(chan error)
	go func() { stopped <- q.Run(run, &mux, nil) }()

	id, err := q.Produce(ctx, codeq.Task{Queue: "video", Retention: time.Hour})
	check(err)
	<-begun
	check(q.Cancel(ctx, id))
	<-ended
	stop()
	check(<-stopped)

	task, err := q.Get(ctx, id)
	check(err)
	fmt.Println("task:", task.State)
	// Output:
	// canceled: true
	// task: canceled
}

// While a mail server is down, its queue is paused, and no claim gets a mail. Tasks can still be
// produced.
func ExampleQueue_Pause() {
	q, done := open()
	defer done()

	check(q.Pause(ctx, "mail"))
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("hello")})
	check(err)

	mail := codeq.ClaimRequest{Queues: []string{"mail"}, NoWait: true}
	_, err = q.Claim(ctx, mail)
	fmt.Println("paused:", errors.Is(err, codeq.ErrEmpty))

	check(q.Resume(ctx, "mail"))
	lease, err := q.Claim(ctx, mail)
	check(err)
	fmt.Printf("resumed: %s\n", lease.Payload)
	// Output:
	// paused: true
	// resumed: hello
}

// A claim that waits gets a task as soon as the queue is resumed.
func ExampleQueue_Resume() {
	q, done := open()
	defer done()
	check(q.Pause(ctx, "mail"))
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("hello")})
	check(err)

	claimed := make(chan *codeq.Lease)
	go func() {
		lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
		check(err)
		claimed <- lease
	}()
	check(q.Resume(ctx, "mail"))
	fmt.Printf("%s\n", (<-claimed).Payload)
	// Output: hello
}

// Settings returns the settings that Configure has stored, also while the queue is paused.
func ExampleQueue_Settings() {
	q, done := open()
	defer done()
	check(q.Configure(ctx, "video", func(s *codeq.Settings) { s.Concurrency = 2 }))
	check(q.Pause(ctx, "video"))

	settings, err := q.Settings("video")
	check(err)
	fmt.Println("concurrency:", settings.Concurrency)
	fmt.Println("paused:", settings.Paused)
	// Output:
	// concurrency: 2
	// paused: true
}

// Stats also returns queues that have settings, but no tasks. Here, it is used to find the paused
// queues.
func ExampleQueue_Stats_settings() {
	q, done := open()
	defer done()
	check(q.Pause(ctx, "mail"))
	check(q.Configure(ctx, "video", func(s *codeq.Settings) { s.Concurrency = 2 }))

	counts, err := q.Stats(ctx)
	check(err)
	for queue := range counts {
		settings, err := q.Settings(queue)
		check(err)
		if settings.Paused {
			fmt.Println(queue, "is paused")
		}
	}
	// Output:
	// mail is paused
}

// A customer upgrades: the customer's waiting task goes first.
func ExampleQueue_SetPriority() {
	q, done := open()
	defer done()

	ids, err := q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "render", Payload: []byte("anna's film")},
		{Queue: "render", Payload: []byte("bert's film")},
	})
	check(err)
	check(q.SetPriority(ctx, ids[1], 5))

	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"render"}})
	check(err)
	fmt.Printf("%s, priority %d\n", lease.Payload, lease.Priority)

	err = q.SetPriority(ctx, ids[1], 0)
	fmt.Println("while it is worked on:", errors.Is(err, codeq.ErrNotWaiting))
	// Output:
	// bert's film, priority 5
	// while it is worked on: true
}

// A reminder is postponed, and then sent now.
func ExampleQueue_SetRunAt() {
	q, done := open()
	defer done()

	id, err := q.Produce(ctx, codeq.Task{Queue: "remind", RunAt: time.Now().Add(time.Hour)})
	check(err)

	tomorrow := time.Now().Add(24 * time.Hour)
	check(q.SetRunAt(ctx, id, tomorrow))
	task, err := q.Get(ctx, id)
	check(err)
	fmt.Println(task.State, "for tomorrow:", task.RunAt.Equal(tomorrow.Truncate(time.Millisecond)))

	check(q.SetRunAt(ctx, id, time.Time{}))
	task, err = q.Get(ctx, id)
	check(err)
	fmt.Println(task.State)
	// Output:
	// scheduled for tomorrow: true
	// ready
}

// A service with a quota gets three calls at a time, and a hundred per second. The limits are
// stored with the queue, and may change while it runs.
func ExampleQueue_Configure() {
	q, done := open()
	defer done()
	check(q.Configure(ctx, "translate", func(s *codeq.Settings) {
		s.Concurrency = 3
		s.Rate, s.Burst = 100, 10
	}))

	for range 20 {
		_, err := q.Produce(ctx, codeq.Task{Queue: "translate"})
		check(err)
	}
	translate := codeq.ClaimRequest{Queues: []string{"translate"}, Max: 20}
	leases, err := q.ClaimBatch(ctx, translate)
	check(err)
	fmt.Println(len(leases), "at a time")

	check(q.Configure(ctx, "translate", func(s *codeq.Settings) { s.Concurrency += 2 }))
	more, err := q.ClaimBatch(ctx, translate)
	check(err)
	fmt.Println(len(more), "more")

	settings, err := q.Settings("translate")
	check(err)
	fmt.Println(settings.Concurrency, settings.Rate)
	// Output:
	// 3 at a time
	// 2 more
	// 5 100
}

// Each customer's shop gets one request at a time. Its further tasks wait, and the tasks of other
// customers go first.
func ExampleSettings_concurrencyPerKey() {
	q, done := open()
	defer done()
	check(q.Configure(ctx, "sync", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 }))

	for _, shop := range []string{"flowers", "flowers", "books"} {
		_, err := q.Produce(ctx, codeq.Task{Queue: "sync", LimitKey: shop})
		check(err)
	}
	leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"sync"}, Max: 3})
	check(err)
	for _, lease := range leases {
		fmt.Println(lease.LimitKey)
	}

	counts, err := q.Stats(ctx)
	check(err)
	fmt.Println(counts["sync"].Blocked, "waits")

	check(q.Complete(ctx, leases[0].Receipt, nil))
	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"sync"}})
	check(err)
	fmt.Println(lease.LimitKey)
	// Output:
	// flowers
	// books
	// 1 waits
	// flowers
}

// The queue of a former customer is deleted as soon as it has no tasks.
func ExampleQueue_DeleteQueue() {
	q, done := open()
	defer done()

	check(q.Configure(ctx, "acme", func(s *codeq.Settings) { s.Concurrency = 2 }))
	id, err := q.Produce(ctx, codeq.Task{Queue: "acme"})
	check(err)
	var used *codeq.NotEmptyError
	if errors.As(q.DeleteQueue(ctx, "acme"), &used) {
		fmt.Println("tasks that are ready:", used.Counts.Ready)
	}
	check(q.Cancel(ctx, id))
	check(q.DeleteQueue(ctx, "acme"))
	queues, err := q.Info(ctx)
	check(err)
	fmt.Println("queues:", len(queues))
	// Output:
	// tasks that are ready: 1
	// queues: 0
}

// Customers of the large plan get three tasks done for each task of the others.
func ExampleSettings_tenantWeights() {
	q, done := open()
	defer done()
	check(q.Configure(ctx, "render", func(s *codeq.Settings) {
		s.TenantWeights = map[string]int{"large": 3}
	}))

	for _, tenant := range []string{"small", "large"} {
		for range 6 {
			_, err := q.Produce(ctx, codeq.Task{Queue: "render", Tenant: tenant})
			check(err)
		}
	}
	leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"render"}, Max: 8})
	check(err)
	for _, lease := range leases {
		fmt.Print(lease.Tenant, " ")
	}
	fmt.Println()
	// Output: small large large large small large large large
}

// A program declares the settings of its queues when it begins. Apply changes what differs.
func ExampleQueue_Apply() {
	q, done := open()
	defer done()
	declared := map[string]codeq.Settings{
		"mail":  {Rate: 10, Policy: codeq.Policy{MaxAttempts: 5, Timeout: time.Minute}},
		"video": {Concurrency: 2},
	}
	check(q.Configure(ctx, "video", func(s *codeq.Settings) { s.Concurrency = 4 }))
	for range 2 {
		changes, err := q.Apply(ctx, declared)
		check(err)
		fmt.Println(len(changes), "changes")
		for _, c := range changes {
			fmt.Println(c.Queue, c.Before.Concurrency, c.After.Concurrency)
		}
	}
	// Output:
	// 2 changes
	// mail 0 0
	// video 4 2
	// 0 changes
}
