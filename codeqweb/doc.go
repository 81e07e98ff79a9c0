// Package codeqweb is a dashboard of a queue, as an http.Handler: what waits and why, what fails,
// who works on it, and the means to act on it.
//
//	mux.Handle("/codeq/", http.StripPrefix("/codeq", codeqweb.Handler(q, &codeqweb.Options{
//		Hosts:  []string{"jobs.example.com"},
//		Access: func(r *http.Request) codeqweb.Access { return accessOf(sessionOf(r)) },
//	})))
//
// It may be mounted under any prefix: pages refer to each other relatively. All assets are part of
// the program; nothing is loaded from elsewhere. Each page works without its script, which lets the
// numbers follow the queue and adds keys.
//
// # Access
//
// The dashboard knows no users: put it behind the application's own authentication, and let
// [Options.Access] say what a request may do. With zero [Options], everybody who reaches it may
// look, and nobody may act or see payloads. It answers only to the Host names that it knows
// ([Options.Hosts]), so that a page elsewhere on the web, whose name was bound to this address,
// cannot read it; it refuses changes that come from other origins ([http.CrossOriginProtection]).
// Nothing over HTTP takes a path of files, or changes the members of a cluster.
//
// # JSON
//
// Everything that the pages show and do is at api/v1 as JSON, with the same access; the command
// codeq uses it. There a change is a POST with its parameters in the URL. The values are those of
// package codeq. Only there tasks can be produced, schedules set, and keys released. JSON is UTF-8:
// of names and errors that are not, it has U+FFFD for each byte that is none. The pages show those
// bytes, and their links and forms name them.
//
//	GET  api/v1/            what this client may do
//	GET  api/v1/info        codeq.QueueInfo of all queues
//	GET  api/v1/tasks       a page of tasks: state, queue, tenant, ..., limit, cursor
//	GET  api/v1/task?id=ID  a task
//	POST api/v1/task/redrive?id=ID
//	...
//
// At healthz and readyz, which need no access and no known Host, the dashboard says whether the
// queue is open and no shard has failed, and whether every shard can be called.
//
// # Cost
//
// One goroutine asks the queue how it is, once a second while somebody looks at the dashboard and
// once a minute otherwise, and all viewers share the answer. It keeps what it was told for five
// minutes by second, and for 24 hours by minute, of all queues together and of 50 queues, within 8
// MiB. 256 viewers may follow at a time, 64 of them of one user, who has 32 other requests at the
// most ([Options.User]). An answer is made whole, and then sent: whoever reads nothing of it for
// ten seconds is disconnected.
package codeqweb
