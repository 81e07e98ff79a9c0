package codeq_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"codeq"
)

// The directory of a queue that nobody has open is read through, and repaired if need be.
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

// A problem that has been repaired is still reported.
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
