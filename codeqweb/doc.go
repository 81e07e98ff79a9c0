// Package codeqweb is a dashboard of a queue, as an http.Handler: waiting tasks and the reasons,
// failures, workers, and actions on all of them.
//
//	mux.Handle("/codeq/", http.StripPrefix("/codeq", codeqweb.Handler(q, &codeqweb.Options{
//		Hosts:  []string{"jobs.example.com"},
//		Access: func(r *http.Request) codeqweb.Access { return accessOf(sessionOf(r)) },
//	})))
//
// It may be mounted under any prefix: its links are relative. All assets are embedded in the
// program, with the libraries uPlot, dagre and idiomorph, which draw charts and flows, and change
// what differs. Each page works without scripts: these update the numbers, draw, take the keyboard,
// and show times in the viewer's zone.
//
// The overview begins with the queues in trouble: the oldest task waits longer than is usual for
// that queue, a part of its attempts fails, no worker takes its tasks, or it is paused while tasks
// wait.
//
// # Times
//
// Each time is that of the viewer's zone, with the name of the zone and UTC under the pointer. The
// fields of forms take times of that zone, too: one that a change of clocks skips is refused, and
// one that comes twice is asked about. Without the script, and in JSON, times are in UTC.
//
// # Access
//
// The dashboard has no users: put it behind the application's own authentication, and return the
// rights of a request from [Options.Access]. With zero [Options], every request may read, and none
// may act or see payloads. Only known Host headers are accepted ([Options.Hosts]), so that a
// foreign page cannot bind its own name to this address and read the dashboard. Changes from other
// origins are refused ([http.CrossOriginProtection]). No request takes a file path, or changes the
// members of a cluster.
//
// [Options.Redact] hides parts of tasks from all viewers. A text can be in several of them: that
// of an error is in LastError, in History and perhaps in Logs, and a task in a DeadLetterQueue has
// that of the dead one in a header ([codeq.DeathOf]); a value of the payload may also be in the
// result, in those of steps and cursors, in the metadata and in the note of the progress. Names of
// queues, workers and schedules are shown as they are, except in a task.
//
// # Search
//
// The field at the top takes an ID or a part of one, a tenant, a group, a key, words of an error
// or, with the right to see payloads, of a payload, and the name of a queue or a schedule. A search
// reads all tasks, on snapshots beside the owners, for two seconds a page; a link goes on. Two may
// run at a time, one of a user. Payloads and results that are no UTF-8 are not searched, and parts
// that [Options.Redact] removes are not found, as in all lists. The page says how many tasks were
// looked through.
//
// # Saved lists
//
// Lists can be saved as files, without payloads and results. A file has the tasks of ten seconds of
// reading, at most 20,000, and ends after about 8 MiB. If there are more tasks, its name says that
// it has the first ones, and the header Link has the URL of the next, with rel="next", as the
// parameter cursor. Its URL is save?as=csv, or jsonl, with the parameters of a list. A file takes
// the place of a search, and is refused with 429 beside another one of its user.
//
// # JSON
//
// All content and actions of the pages are also JSON below api/v1, with the same access; the
// command codeq uses it. API.md, beside this package, has each path with its rights, parameters and
// answer. Other parameters are refused, so that a client shows its rights by a header or a cookie.
// Producing tasks, setting schedules and releasing keys exist only as JSON. JSON has U+FFFD for
// each byte of a name or error that is not UTF-8. The pages show those bytes as escapes, and keep
// them in links and forms.
//
//	curl 'localhost:8080/codeq/api/v1/tasks?queue=mail&state=dead'
//	curl -X POST 'localhost:8080/codeq/api/v1/pause?queue=mail'
//
// healthz reports whether the queue is open and no shard has failed, and readyz whether every shard
// can also be called. They need no access and no known Host.
//
// # Cost
//
// One goroutine samples the queue, once a second while the dashboard has viewers and once a minute
// otherwise, and all viewers share the sample. It keeps samples by second for five minutes, by
// minute for two days, and by ten minutes for eight days, of all queues together and of 50 queues,
// in memory, within 14 MiB; charts of 90 days are from [codeq.Queue.TotalsByDay]. There are at most
// 256 streams at a time, at most 64 streams and 32 other requests of one user ([Options.User]). An
// answer is buffered, and then sent, compressed for clients that take it: a client that reads
// nothing for ten seconds is disconnected.
//
// No index leads from a task to those that wait for it: the page of a task reads up to 10,000
// blocked tasks to list them, and the page of a flow up to 30,000 tasks, for two seconds at most,
// to find all of the flow. Both keep the result for fifty times the time of the search.
//
// The page of storage estimates from up to 20,000 tasks, read for two seconds at the most; that of
// schedules looks for their last runs among as many, for one second. Each reads on snapshots beside
// the owners, one reading at a time, and shares the result among all viewers: while such a page is
// open, readings take a twentieth of the time at most.
package codeqweb
