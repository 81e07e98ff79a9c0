// Command peers puts codeq and the queues that would be used instead of it
// under the same load in one run, and writes a table (peers.md, peers.csv) and
// charts of what they did:
//
//	go run -C bench/peers . -out ../results
//
// The load is that of package workload: 32 producers, 128 workers, tasks of 14
// bytes, at most 4,096 tasks that are produced and not done. Each queue is
// driven as the comment on its driver says, and a cycle counts when the queue
// has confirmed the completion. Where a queue keeps completed tasks, codeq does so
// beside it.
//
// Servers are those of the system (Debian: redis-server beanstalkd postgresql);
// the program starts them on free ports of loopback with their data below -dir,
// and ends them. A server that is not installed is missing in the table.
package main
