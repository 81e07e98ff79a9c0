package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	"codeq"
)

// A backup of a running queue has the tasks of the moment of the call.
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

// The files of this backup get another mode, for another user of the machine. Without Copy, they
// would be links, with the owner and the mode of the running queue's files.
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

// If the disk has less free space than MinFreeBytes, tasks are refused until there is room.
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

// closedMail creates the directory of a closed queue. The queue is paused. It holds a ready mail, a
// scheduled mail and a dead letter.
func closedMail() (dir string, waits, dead codeq.ID, end func()) {
	dir, err := os.MkdirTemp("", "readonly")
	check(err)
	q, err := codeq.Open(dir, &codeq.Options{Shards: 2})
	check(err)
	ctx := context.Background()
	dead, err = q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("to nobody")})
	check(err)
	l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	check(q.DeadLetter(ctx, l.Receipt, errors.New("no such mailbox")))
	waits, err = q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("to ann")})
	check(err)
	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("welcome"), RunAt: time.Now().Add(time.Hour), Unique: codeq.Unique{Key: "welcome ann"}})
	check(err)
	check(q.Pause(ctx, "mail"))
	check(q.SetSchedule(ctx, codeq.Schedule{Name: "digest", Every: 24 * time.Hour, Task: codeq.Task{Queue: "mail"}}))
	check(q.Close())
	return dir, waits, dead, func() { check(os.RemoveAll(dir)) }
}

// A Reader shows a queue that no process has open, and does not change it.
func ExampleOpenReadOnly() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	if err != nil {
		log.Fatal(err)
	}
	for task, err := range r.List(context.Background(), codeq.ListOptions{State: codeq.Ready}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s: %s\n", task.Queue, task.Payload)
	}
	_, err = codeq.Open(dir, nil)
	fmt.Println("others cannot change it:", errors.Is(err, codeq.ErrLocked))
	if err := r.Close(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// mail: to ann
	// others cannot change it: true
}

func ExampleReader_List() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	defer func() { check(r.Close()) }()
	for task, err := range r.List(context.Background(), codeq.ListOptions{State: codeq.Dead}) {
		check(err)
		fmt.Printf("%s: %s\n", task.Payload, task.LastError)
	}
	// Output: to nobody: no such mailbox
}

func ExampleReader_Get() {
	dir, waits, dead, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	defer func() { check(r.Close()) }()
	for _, id := range []codeq.ID{waits, dead} {
		task, err := r.Get(context.Background(), id)
		check(err)
		fmt.Printf("%s: %s\n", task.Payload, task.State)
	}
	// Output:
	// to ann: ready
	// to nobody: dead
}

func ExampleReader_Stats() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	defer func() { check(r.Close()) }()
	stats, err := r.Stats(context.Background())
	check(err)
	fmt.Println(stats["mail"].Ready, "ready,", stats["mail"].Dead, "dead")
	// Output: 1 ready, 1 dead
}

func ExampleReader_Schedules() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	defer func() { check(r.Close()) }()
	schedules, err := r.Schedules(context.Background())
	check(err)
	for _, s := range schedules {
		fmt.Println(s.Name, "every", s.Every)
	}
	// Output: digest every 24h0m0s
}

func ExampleReader_Settings() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	defer func() { check(r.Close()) }()
	settings, err := r.Settings("mail")
	check(err)
	fmt.Println("paused:", settings.Paused)
	// Output: paused: true
}

func ExampleReader_StorageStats() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	defer func() { check(r.Close()) }()
	stats, err := r.StorageStats()
	check(err)
	fmt.Println(len(stats.Shards), "shards, it has files:", stats.Shards[0].DiskBytes > 0)
	// Output: 2 shards, it has files: true
}

// Staleness reports how current the directory is.
func ExampleReader_Staleness() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	defer func() { check(r.Close()) }()
	s := r.Staleness()
	for i, shard := range s.Shards { // for a node of a cluster
		if missing := shard.Logged - shard.Applied; missing > 0 {
			fmt.Printf("shard %d: %d entries of its log are not shown\n", i, missing)
		}
	}
	fmt.Printf("node %q, closed in order: %v\n", s.Node, s.Closed)
	// Output: node "", closed in order: true
}

// After a Reader is closed, the queue can be opened.
func ExampleReader_Close() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	check(r.Close())
	q, err := codeq.Open(dir, &codeq.Options{MustExist: true})
	check(err)
	check(q.Close())
	fmt.Println("opened")
	// Output: opened
}

// The tasks of all states, a page at a time, the newest first.
func ExampleReader_ListPage() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	defer r.Close()
	o := codeq.PageOptions{Newest: true, Limit: 2}
	for more := true; more; more = o.Cursor != "" {
		page, err := r.ListPage(context.Background(), o)
		check(err)
		for _, task := range page.Tasks {
			fmt.Printf("%v: %s\n", task.State, task.Payload)
		}
		o.Cursor = page.Next
	}
	// Output:
	// ready: to ann
	// scheduled: welcome
	// dead: to nobody
}

// Is a mail planned already?
func ExampleReader_FindByKey() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	defer r.Close()
	task, err := r.FindByKey(context.Background(), codeq.UniqueKey{Queue: "mail", Key: "welcome ann"})
	check(err)
	fmt.Printf("%v: %s\n", task.State, task.Payload)
	// Output: scheduled: welcome
}

// A script pauses a queue while the application is down. Tasks that are due meanwhile are left to
// the application, with its own options.
func ExampleOptions_tool() {
	dir, _, _, end := closedMail()
	defer end()
	ctx := context.Background()
	q, err := codeq.Open(dir, &codeq.Options{Tool: true})
	check(err)
	defer q.Close()
	check(q.Pause(ctx, "mail"))
	set, err := q.Settings("mail")
	check(err)
	fmt.Println("paused:", set.Paused)
	// Output: paused: true
}

// Verify reads the whole directory of a queue that no process has open, and repairs it if
// necessary.
func ExampleVerify() {
	dir, err := os.MkdirTemp("", "verify")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	q, err := codeq.Open(dir, nil)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := q.Produce(context.Background(), codeq.Task{Queue: "mail"}); err != nil {
		log.Fatal(err)
	}
	if err := q.Close(); err != nil {
		log.Fatal(err)
	}

	report, err := codeq.Verify(dir, nil)
	if err != nil {
		log.Fatal(err)
	}
	for _, p := range report.Problems {
		fmt.Println(p)
	}
	if !report.OK() {
		if report, err = codeq.Verify(dir, &codeq.VerifyOptions{Repair: true}); err != nil {
			log.Fatal(err)
		}
	}
	tasks := uint64(0)
	for _, s := range report.Shards {
		tasks += s.Tasks.Ready
	}
	fmt.Println(tasks, "ready,", len(report.Problems), "problems")
	// Output: 1 ready, 0 problems
}

// A repaired problem stays in the report, and the report is OK.
func ExampleVerifyReport_OK() {
	report := codeq.VerifyReport{Problems: []codeq.Problem{
		{Shard: 2, File: "000004.sst", Text: "a block is damaged", Repairable: true},
	}}
	fmt.Println(report.OK())
	report.Problems[0].Repaired = true
	fmt.Println(report.OK())
	// Output:
	// false
	// true
}
