// Package codeqtest helps to test programs that use codeq: with a queue in memory, a clock that
// costs no real time, and assertions on the tasks that were produced.
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
// to the next deadline when everything waits. So no test ever really sleeps: [Queue.Drain] goes
// through days of retries in milliseconds, and [Queue.Advance] lets a given time pass. The rules of
// bubbles hold: goroutines that the test starts must end with it, and a goroutine that waits for
// the network or another process keeps the clock from moving.
//
// [Open] opens the same queue without a bubble, or in a bubble that the test has made itself.
// Without a bubble time is real, and Drain takes as long as the tasks make it wait.
//
// # What is different from production
//
// The queue has one shard, and Drain and Work run one handler at a time, so that the order of tasks
// is always the same. Backoff has no jitter. Completed tasks are kept, so that assertions find
// them; see [Open]. All of these can be overridden.
package codeqtest
