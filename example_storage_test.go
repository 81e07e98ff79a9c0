package codeq_test

import (
	"fmt"
	"time"

	"codeq"
)

// A look at the disk for a dashboard.
func ExampleQueue_StorageStats() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Payload: make([]byte, 10_000)})
	check(err)

	stats, err := q.StorageStats()
	check(err)
	for i, s := range stats.Shards {
		fmt.Printf("shard %d: on disk more than 10 kB: %t, of the log in no table yet: %t\n", i, s.DiskBytes > 10_000, s.LogBytes > 10_000)
	}
	fmt.Println("room for more tasks:", stats.FreeBytes > stats.MinFreeBytes)
	// Output:
	// shard 0: on disk more than 10 kB: true, of the log in no table yet: true
	// room for more tasks: true
}

// Which step of a shard's owner has made callers wait.
func ExampleQueue_StorageStats_steps() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
	check(err)

	stats, err := q.StorageStats()
	check(err)
	for _, s := range stats.Shards[0].Upkeep {
		if s.Kind == codeq.UpkeepGroup {
			fmt.Println(s.Kind, s.Count > 0, s.Quantile(0.5) <= s.Max)
		}
	}
	// Output: group true true
}

// Of four steps, three took from 1 to 2 us, and one from 8 to 16 us.
func ExampleUpkeepStats_Quantile() {
	s := codeq.UpkeepStats{Count: 4, Max: 11 * time.Microsecond}
	s.Buckets[1], s.Buckets[4] = 3, 1

	fmt.Println("half of them within", s.Quantile(0.5))
	fmt.Println("all of them within", s.Quantile(1))
	// Output:
	// half of them within 2µs
	// all of them within 11µs
}
