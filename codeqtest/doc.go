// Package codeqtest helps to test programs that use codeq: with a queue in memory, a simulated
// clock, and assertions on the produced tasks.
//
//	func TestSignUp(t *testing.T) {
//		codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
//			var mux codeq.Mux
//			codeq.Handle(&mux, "mail", sendMail) // func(context.Context, *codeq.Job[Mail]) error
//
//			signUp(t.Context(), q.Queue, "gopher@example.com")
//
//			// What has been produced?
//			isWelcome := func(m Mail) bool { return m.Template == "welcome" }
//			codeqtest.RequireProduced(t, q, "mail", isWelcome)
//			isReminder := func(m Mail) bool { return m.Template == "reminder" }
//			reminder := codeqtest.RequireProduced(t, q, "mail", isReminder)
//			require.WithinDuration(t, time.Now().Add(72*time.Hour), reminder.RunAt, 0)
//
//			// Only the welcome is due.
//			q.Work(&mux)
//			require.Len(t, outbox, 1)
//
//			// The rest, with all its waiting and retrying.
//			q.Drain(&mux)
//			require.Len(t, outbox, 2)
//			codeqtest.RequireAllDone(t, q)
//		})
//	}
//
// # Time
//
// [Test] calls its function in a bubble of [testing/synctest]. There time.Now, timers, leases,
// timeouts, backoff and Task.RunAt follow a clock that stands still while anything runs, and jumps
// to the next deadline when everything waits. So no test ever really sleeps: [Queue.Drain] runs
// days of retries in milliseconds, and [Queue.Advance] moves the clock. The rules of bubbles apply:
// goroutines of the test must end with it, and a goroutine that waits for the network or another
// process stops the clock.
//
// [Open] opens the same queue without a bubble, or in the test's own bubble. Without a bubble time
// is real, and Drain really waits for the tasks.
//
// # Differences from production
//
// The queue has one shard, and Drain and Work run one handler at a time, so that the order of tasks
// is deterministic. Backoff has no jitter. Completed tasks are kept, so that assertions find them;
// see [Open]. All of these can be overridden.
package codeqtest
