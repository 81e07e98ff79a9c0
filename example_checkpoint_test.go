package codeq_test

import (
	"fmt"
	"os"
	"path/filepath"

	"codeq"
)

// A backup of a queue at work, and the queue as it was then.
func ExampleQueue_Checkpoint() {
	root, err := os.MkdirTemp("", "")
	check(err)
	defer os.RemoveAll(root)
	q, err := codeq.Open(filepath.Join(root, "queue"), nil)
	check(err)
	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("welcome")})
	check(err)

	backup := filepath.Join(root, "backup-1") // beside the queue; from here it can be copied to another machine
	check(q.Checkpoint(ctx, backup))

	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("too late for the backup")})
	check(err)
	check(q.Close())

	restored, err := codeq.Open(backup, nil)
	check(err)
	counts, err := restored.Stats(ctx)
	check(err)
	fmt.Println(counts["mail"].Ready)
	check(restored.Close())
	// Output: 1
}
