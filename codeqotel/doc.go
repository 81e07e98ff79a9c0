// Package codeqotel traces and measures tasks of codeq by OpenTelemetry.
//
// [Instrumentation.ProduceMiddleware] begins a span "send {queue}" for each produce, and stores its
// trace context with the task; [Instrumentation.Middleware] begins a span "process {queue}" for
// each attempt, with a link to the first one:
//
//	otel, err := codeqotel.New(nil)
//	...
//	q, err := codeq.Open(dir, &codeq.Options{Producing: []codeq.ProduceMiddleware{otel.ProduceMiddleware}})
//	...
//	mux.Use(otel.Middleware)
//
// Follow-ups of a handler, and tasks that it produces with its context, continue its trace.
//
// Names and attributes are those of the semantic conventions for messaging, version
// [SemConvVersion]:
//
//	span, metric                           attributes
//	send {queue}                           messaging.message.id or messaging.batch.message_count
//	process {queue}                        messaging.message.id, codeq.task.attempt, codeq.verdict
//	messaging.client.operation.duration    of each produce, in seconds
//	messaging.client.sent.messages         tasks produced, or not
//	messaging.client.consumed.messages     attempts begun
//	messaging.process.duration             of each attempt, in seconds
//
// All have messaging.system (codeq), messaging.operation.name, messaging.destination.name (the
// queue; a batch for several queues has none), and after an error error.type; spans also have
// messaging.operation.type. None has tenants, keys, groups, headers or payloads. A task that is
// given back, or that waits between two steps, is no error.
package codeqotel
