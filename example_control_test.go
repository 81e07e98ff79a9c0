package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"codeq"
)

// The handler of a canceled task learns of it by its context. Whatever it
// returns then, the task is not tried again.
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

// While a mail server is down, nobody claims what is to be sent. Tasks may be
// produced all the same.
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

// The settings of a queue are those that Configure has stored, also while the queue is paused.
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

// Stats has the queues that have settings, too, tasks or none: here it finds those
// that are paused.
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

// A customer upgrades: what waits for them goes before the rest.
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

// A reminder is put off, and then sent now.
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
