package codeq_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	"codeq"
)

// A lease that is bound to the process does not outlive it: after a crash the task is ready
// as soon as the queue is open again, and not when the lease expires.
func ExampleClaimRequest_local() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "codeq")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "queue")
	q, err := codeq.Open(path, nil)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := q.Produce(ctx, codeq.Task{Queue: "films", Payload: []byte("Alien")}); err != nil {
		log.Fatal(err)
	}
	req := codeq.ClaimRequest{Queues: []string{"films"}, LeaseFor: time.Hour, Local: true}
	if _, err := q.Claim(ctx, req); err != nil {
		log.Fatal(err)
	}
	if err := q.Close(); err != nil { // before the task is completed
		log.Fatal(err)
	}

	if q, err = codeq.Open(path, nil); err != nil {
		log.Fatal(err)
	}
	defer q.Close()
	l, err := q.Claim(ctx, req)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s, attempt %d\n", l.Payload, l.Attempt)
	// Output: Alien, attempt 1
}
