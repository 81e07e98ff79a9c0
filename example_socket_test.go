package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"

	"codeq"
)

// serving is a log handler that closes began when the queue is served.
type serving struct {
	slog.Handler
	began chan struct{}
}

func (s serving) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "serving programs on this machine" {
		close(s.began)
	}
	return nil
}

// servedMail opens a queue with a dead letter, and serves it.
func servedMail() (dir string, end func()) {
	dir, err := os.MkdirTemp("", "served")
	check(err)
	began := make(chan struct{})
	q, err := codeq.Open(dir, &codeq.Options{Logger: slog.New(serving{slog.Default().Handler(), began})})
	check(err)
	ctx := context.Background()
	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("to ann")})
	check(err)
	l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	check(q.DeadLetter(ctx, l.Receipt, errors.New("no such mailbox")))
	ended := make(chan error)
	go func() { ended <- q.ServeLocal(ctx) }()
	<-began
	return dir, func() {
		check(q.Close())
		fmt.Println("served until", <-ended)
		check(os.RemoveAll(dir))
	}
}

// Another program reads and changes the queue that this process has open.
func ExampleOpenLocal() {
	dir, end := servedMail()
	defer end()

	ctx := context.Background()
	q, err := codeq.OpenLocal(ctx, dir)
	if err != nil {
		log.Fatal(err)
	}
	for task, err := range q.List(ctx, codeq.ListOptions{State: codeq.Dead}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s: %s\n", task.Payload, task.LastError)
		if err := q.RedriveDead(ctx, task.ID); err != nil {
			log.Fatal(err)
		}
	}
	counts, err := q.Stats(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(counts["mail"].Ready, "ready")
	if err := q.Close(); err != nil { // closes the connection; the process continues
		log.Fatal(err)
	}
	// Output:
	// to ann: no such mailbox
	// 1 ready
	// served until codeq: queue is closed
}

// A process serves its queue to programs on the same machine until its context ends.
func ExampleQueue_ServeLocal() {
	dir, err := os.MkdirTemp("", "served")
	check(err)
	defer func() { check(os.RemoveAll(dir)) }()
	q, err := codeq.Open(dir, nil)
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- q.ServeLocal(ctx) }()

	// ... the work of the process

	stop()
	fmt.Println("serving has ended:", <-ended)
	_, err = codeq.OpenLocal(context.Background(), dir)
	fmt.Println("not served:", errors.Is(err, codeq.ErrNotServed))
	check(q.Close())
	// Output:
	// serving has ended: <nil>
	// not served: true
}
