// Package codeqotel traces and measures tasks of codeq by OpenTelemetry.
//
// [Instrumentation.Produce] begins a span "send {queue}" and stores its trace context with the
// task; [Instrumentation.Middleware] begins a span "process {queue}" for each attempt, with a link
// to the first one:
//
//	otel, err := codeqotel.New(nil)
//	...
//	mux.Use(otel.Middleware)
//	id, err := otel.Produce(ctx, q, task)
//
// Follow-ups of a handler, and tasks that it produces with its context by Produce, continue its
// trace.
//
// Names and attributes are those of the semantic conventions for messaging, version
// [SemConvVersion]:
//
//	span, metric                           attributes
//	send {queue}                           messaging.message.id or messaging.batch.message_count
//	process {queue}                        messaging.message.id, codeq.task.attempt, codeq.verdict
//	messaging.client.operation.duration    of each Produce, in seconds
//	messaging.client.sent.messages         tasks produced, or not
//	messaging.client.consumed.messages     attempts begun
//	messaging.process.duration             of each attempt, in seconds
//
// All have messaging.system (codeq), messaging.operation.name, messaging.destination.name (the
// queue; a batch for several queues has none), and after an error error.type; spans also have
// messaging.operation.type. None has tenants, keys, groups, headers or payloads.
package codeqotel
