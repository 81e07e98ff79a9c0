package codeqotel

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"codeq"
)

// ProduceMiddleware is a [codeq.ProduceMiddleware], for [codeq.Options].Producing: it begins a span
// for each call that produces tasks, and measures it. It stores the span's trace context in the
// headers of the tasks that have none; in no task of a batch if the limits leave no room for it.
// Follow-ups have no span: they inherit the trace context of their task. Nor have schedules, whose
// tasks begin traces of their own.
func (i *Instrumentation) ProduceMiddleware(next codeq.ProduceFunc) codeq.ProduceFunc {
	return func(ctx context.Context, p codeq.Producing) ([]codeq.ID, error) {
		if p.FollowUp || p.Schedule != "" {
			return next(ctx, p)
		}
		return i.send(ctx, p, next)
	}
}

// send produces tasks in a span. If they are refused with the trace context, it produces them
// without it.
func (i *Instrumentation) send(ctx context.Context, p codeq.Producing, next codeq.ProduceFunc) ([]codeq.ID, error) {
	tasks := p.Tasks
	queue := queueOf(tasks)
	attrs := append(about(queue, nil),
		semconv.MessagingSystemKey.String(string(system)),
		semconv.MessagingOperationName(opSend),
		semconv.MessagingOperationTypeSend,
	)
	if len(tasks) != 1 {
		attrs = append(attrs, semconv.MessagingBatchMessageCount(len(tasks)))
	}
	name := opSend
	if queue != "" {
		name += " " + valid(queue)
	}
	ctx, span := i.tracer.Start(ctx, name, trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(attrs...))
	defer span.End()

	p.Tasks = slices.Clone(tasks)
	for n := range p.Tasks {
		p.Tasks[n].Headers = i.inject(ctx, p.Tasks[n].Headers)
	}
	began := time.Now()
	ids, err := next(ctx, p)
	if _, each := errors.AsType[*codeq.BatchError](err); !each && errors.Is(err, codeq.ErrInvalid) { // nothing was stored
		p.Tasks = tasks
		ids, err = next(ctx, p)
	}
	took := time.Since(began)

	failed(span, err)
	if err == nil && len(ids) == 1 {
		span.SetAttributes(semconv.MessagingMessageID(ids[0].String()))
	}
	measured := about(queue, err)
	i.operations.Record(ctx, took.Seconds(), opSend, system, append(measured, semconv.MessagingOperationTypeSend)...)
	i.sent.Add(ctx, int64(len(tasks)), opSend, system, measured...)
	return ids, err
}

// queueOf returns the queue of all tasks; "" if they differ.
func queueOf(tasks []codeq.Task) string {
	for _, t := range tasks {
		if t.Queue != tasks[0].Queue {
			return ""
		}
	}
	if len(tasks) == 0 {
		return ""
	}
	return tasks[0].Queue
}

// inject returns a copy of headers with the trace context of ctx. If headers already has one, it
// returns headers.
func (i *Instrumentation) inject(ctx context.Context, headers map[string]string) map[string]string {
	for _, field := range i.propagator.Fields() {
		if _, has := headers[field]; has {
			return headers
		}
	}
	return i.replace(ctx, headers)
}

// replace is inject, but overwrites the trace context in headers.
func (i *Instrumentation) replace(ctx context.Context, headers map[string]string) map[string]string {
	carrier := propagation.MapCarrier(maps.Clone(headers))
	if carrier == nil {
		carrier = make(propagation.MapCarrier, 2)
	}
	for _, field := range i.propagator.Fields() {
		delete(carrier, field)
	}
	i.propagator.Inject(ctx, carrier)
	if len(carrier) == 0 {
		return nil
	}
	return carrier
}

// failed marks a span as failed.
func failed(span trace.Span, err error, attrs ...attribute.KeyValue) {
	if err == nil {
		return
	}
	span.SetStatus(codes.Error, valid(textOf(err)))
	span.SetAttributes(append(attrs, errorType(err))...)
}
