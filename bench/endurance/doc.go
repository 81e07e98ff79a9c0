// Endurance lets a queue work for a long time and looks whether it gets slower
// or larger. From the root of the repository:
//
//	go run -C bench/endurance . -for 10m
//
// It runs the cycle (produce, claim, complete, by single calls, with a bounded
// backlog) at every point: a number of producers and a size of payload. In the
// middle of a point the queue is closed, rests, and is opened again. Every
// second it notes what the clients see, what the process uses, and what the
// stores say, in a CSV file per point; endurance.md and its charts are made from these.
//
// It ends with status 1 if at any point the last tenth of the run was slower
// than 0.9 of the second tenth, if memory or disk was not bounded, or if tasks
// were missing. A point of less than 100 seconds is not judged: its tenths say nothing.
package main
