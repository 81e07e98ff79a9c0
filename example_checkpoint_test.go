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

// A backup whose files are handed to another user of the machine. Without Copy they would be links:
// their owner and mode would be those of the files of the queue at work.
func ExampleCheckpointOptions() {
	root, err := os.MkdirTemp("", "")
	check(err)
	defer os.RemoveAll(root)
	q, err := codeq.Open(filepath.Join(root, "queue"), nil)
	check(err)
	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("welcome")})
	check(err)

	backup := filepath.Join(root, "backup-1")
	check(q.Checkpoint(ctx, backup, codeq.CheckpointOptions{Copy: true}))
	tables, err := filepath.Glob(filepath.Join(backup, "shard-*", "*.sst"))
	check(err)
	for _, table := range tables {
		check(os.Chmod(table, 0o440))
	}
	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("the queue goes on")})
	check(err)
	check(q.Close())
	// Output:
}
