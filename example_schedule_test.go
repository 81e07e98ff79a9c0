package codeq_test

import (
	"fmt"
	"time"

	"codeq"
)

func ExampleQueue_SetSchedule() {
	q, done := open()
	defer done()

	// A program does this at every start; a stored schedule does not change.
	for range 2 {
		check(q.SetSchedule(ctx, codeq.Schedule{
			Name:     "nightly report",
			Cron:     "30 4 * * mon-fri",
			TimeZone: "Europe/Berlin",
			Task:     codeq.Task{Queue: "reports"},
			Missed:   codeq.MissedSkip,
		}))
	}
	check(q.SetSchedule(ctx, codeq.Schedule{
		Name:  "heartbeat",
		Every: time.Second,
		Task:  codeq.Task{Queue: "beats", Payload: []byte("alive")},
	}))

	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"beats"}})
	check(err)
	tick, err := time.Parse(time.RFC3339, lease.Headers[codeq.TickHeader])
	check(err)
	fmt.Printf("%s of %s, late: %t\n", lease.Payload, lease.Headers[codeq.ScheduleHeader], time.Since(tick) > time.Minute)
	// Output: alive of heartbeat, late: false
}

func ExampleQueue_Schedules() {
	q, done := open()
	defer done()
	check(q.SetSchedule(ctx, codeq.Schedule{
		Name: "new year", Cron: "@yearly", TimeZone: "Asia/Tokyo", Task: codeq.Task{Queue: "greetings"},
	}))

	schedules, err := q.Schedules(ctx)
	check(err)
	for _, s := range schedules {
		fmt.Println(s.Name, s.Cron, s.Next.UTC().Format("02 Jan 15:04"), s.Last.IsZero())
	}
	// Output: new year @yearly 31 Dec 15:00 true
}

func ExampleQueue_DeleteSchedule() {
	q, done := open()
	defer done()
	check(q.SetSchedule(ctx, codeq.Schedule{Name: "poll", Every: time.Minute, Task: codeq.Task{Queue: "polls"}}))

	check(q.DeleteSchedule(ctx, "poll"))
	schedules, err := q.Schedules(ctx)
	check(err)
	fmt.Println(len(schedules))
	// Output: 0
}

// A page of schedules shows their next times.
func ExampleScheduleInfo_Upcoming() {
	q, done := open()
	defer done()
	check(q.SetSchedule(ctx, codeq.Schedule{
		Name: "quarterly", Cron: "0 9 1 jan,apr,jul,oct *", Task: codeq.Task{Queue: "reports"},
	}))

	schedules, err := q.Schedules(ctx)
	check(err)
	for _, at := range schedules[0].Upcoming(4) {
		if at.Month() == time.July {
			fmt.Println("next summer:", at.UTC().Format("02 Jan 15:04"))
		}
	}
	// Output: next summer: 01 Jul 09:00
}

// An operator pauses a schedule. A program that sets the schedule at every start does not undo
// that.
func ExampleQueue_PauseSchedule() {
	q, done := open()
	defer done()
	poll := codeq.Schedule{Name: "poll", Every: time.Minute, Task: codeq.Task{Queue: "polls"}}
	check(q.SetSchedule(ctx, poll))

	check(q.PauseSchedule(ctx, "poll"))
	check(q.SetSchedule(ctx, poll))
	schedules, err := q.Schedules(ctx)
	check(err)
	fmt.Println("paused:", schedules[0].Paused)
	// Output: paused: true
}

func ExampleQueue_ResumeSchedule() {
	q, done := open()
	defer done()
	check(q.SetSchedule(ctx, codeq.Schedule{Name: "poll", Every: time.Minute, Task: codeq.Task{Queue: "polls"}}))
	check(q.PauseSchedule(ctx, "poll"))

	check(q.ResumeSchedule(ctx, "poll"))
	schedules, err := q.Schedules(ctx)
	check(err)
	fmt.Println("ticks again within a minute:", time.Until(schedules[0].Next) <= time.Minute)
	// Output: ticks again within a minute: true
}

// An operator does not wait for the night.
func ExampleQueue_TriggerSchedule() {
	q, done := open()
	defer done()
	check(q.SetSchedule(ctx, codeq.Schedule{
		Name: "nightly report", Cron: "@daily",
		Jitter: 10 * time.Minute, // not all reports at midnight
		Task:   codeq.Task{Queue: "reports", Payload: []byte("of all shops")},
	}))

	_, err := q.TriggerSchedule(ctx, "nightly report")
	check(err)
	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"reports"}})
	check(err)
	fmt.Printf("report %s\n", lease.Payload)
	// Output: report of all shops
}
