package codeqotel

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"codeq"
)

// Middleware is a [codeq.Middleware] that begins a span for each attempt of a task, and measures
// it. The first middleware of a Mux is the outermost: the span does not include the middlewares
// before this one.
//
// The handler gets the headers of the task with the trace context of the span. Follow-ups inherit
// it.
func (i *Instrumentation) Middleware(next codeq.Handler) codeq.Handler {
	return func(ctx context.Context, l *codeq.Lease) error {
		i.consumed.Add(ctx, 1, opProcess, system, about(l.Queue, nil)...)
		began := time.Now()
		ctx, span := i.begin(ctx, l)
		defer span.End()
		l.Headers = i.replace(ctx, l.Headers)

		err := next(ctx, l)

		verdict := codeq.VerdictOf(err)
		span.SetAttributes(attribute.String("codeq.verdict", verdict.String()))
		failure := err
		if verdict == codeq.VerdictReleased || verdict == codeq.VerdictSuspended {
			failure = nil // the attempt does not count
		}
		failed(span, failure)
		i.processing.Record(ctx, time.Since(began).Seconds(), opProcess, system, about(l.Queue, failure)...)
		return err
	}
}

// begin begins the span of an attempt.
func (i *Instrumentation) begin(ctx context.Context, l *codeq.Lease) (context.Context, trace.Span) {
	opts := []trace.SpanStartOption{
		trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithAttributes(append(about(l.Queue, nil),
			semconv.MessagingSystemKey.String(string(system)),
			semconv.MessagingOperationName(opProcess),
			semconv.MessagingOperationTypeProcess,
			semconv.MessagingMessageID(l.ID.String()),
			semconv.MessagingMessageBodySize(len(l.Payload)),
			attribute.Int("codeq.task.attempt", l.Attempt),
		)...),
	}
	if l.Kind != "" {
		opts = append(opts, trace.WithAttributes(attribute.String("codeq.task.kind", valid(l.Kind))))
	}
	producer := i.propagator.Extract(context.WithoutCancel(ctx), propagation.MapCarrier(l.Headers))
	ctx = baggage.ContextWithBaggage(ctx, baggage.FromContext(producer))
	if sc := trace.SpanContextFromContext(producer); sc.IsValid() && sc.IsRemote() {
		if i.sameTrace {
			ctx = trace.ContextWithRemoteSpanContext(ctx, sc)
		} else {
			opts = append(opts, trace.WithLinks(trace.Link{SpanContext: sc}))
		}
	}
	return i.tracer.Start(ctx, opProcess+" "+valid(l.Queue), opts...)
}
