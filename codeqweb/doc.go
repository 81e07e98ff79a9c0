// Package codeqweb is a dashboard of a queue, as an http.Handler: waiting tasks and the reasons,
// failures, workers, and actions on all of them.
//
//	mux.Handle("/codeq/", http.StripPrefix("/codeq", codeqweb.Handler(q, &codeqweb.Options{
//		Hosts:  []string{"jobs.example.com"},
//		Access: func(r *http.Request) codeqweb.Access { return accessOf(sessionOf(r)) },
//	})))
//
// It may be mounted under any prefix: its links are relative. All assets are embedded in the
// program. Each page works without its script, which only updates the numbers and adds keyboard
// shortcuts.
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
// # JSON
//
// All content and actions of the pages are also JSON below api/v1, with the same access; the
// command codeq uses it. A change is a POST with its parameters in the URL. The values are those of
// package codeq. Producing tasks, setting schedules and releasing keys exist only as JSON. JSON has
// U+FFFD for each byte of a name or error that is not UTF-8. The pages show those bytes as escapes,
// and keep them in links and forms.
//
//	GET  api/v1/            the access of this client
//	GET  api/v1/info        codeq.QueueInfo of all queues
//	GET  api/v1/tasks       a page of tasks: state, queue, tenant, ..., limit, cursor
//	GET  api/v1/task?id=ID  a task
//	POST api/v1/task/redrive?id=ID
//	...
//
// healthz reports whether the queue is open and no shard has failed, and readyz whether every shard
// can also be called. They need no access and no known Host.
//
// # Cost
//
// One goroutine samples the queue, once a second while the dashboard has viewers and once a minute
// otherwise, and all viewers share the sample. It keeps samples by second for five minutes, and by
// minute for 24 hours, of all queues together and of 50 queues, within 8 MiB. There are at most 256
// streams at a time, at most 64 streams and 32 other requests of one user ([Options.User]). An
// answer is buffered, and then sent: a client that reads nothing for ten seconds is disconnected.
package codeqweb
