package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"os"

	"codeq"
)

// Less is free on the disk than should be: tasks are refused, and stored as soon
// as there is room.
func ExampleErrDiskFull() {
	dir, err := os.MkdirTemp("", "codeq")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	q, err := codeq.Open(dir, &codeq.Options{MinFreeBytes: 1 << 60}) // more than any disk has
	if err != nil {
		panic(err)
	}
	defer func() { _ = q.Close() }()
	_, err = q.Produce(context.Background(), codeq.Task{Queue: "mail"})
	fmt.Println(errors.Is(err, codeq.ErrDiskFull))
	// Output: true
}
