package codeqotel

import (
	"cmp"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/semconv/v1.43.0/messagingconv"
	"go.opentelemetry.io/otel/trace"
)

// SemConvVersion is the version of the semantic conventions for names and attributes.
const SemConvVersion = "1.43.0"

// scope is the name of the tracer and of the meter.
const scope = "codeq/codeqotel"

const system = messagingconv.SystemAttr("codeq")

// The names of the operations.
const (
	opSend    = "send"
	opProcess = "process"
)

// Options are the options of [New]. A zero field means its documented default.
type Options struct {
	// TracerProvider makes the spans. Default: that of [otel.GetTracerProvider].
	TracerProvider trace.TracerProvider
	// MeterProvider takes the metrics. Default: that of [otel.GetMeterProvider].
	MeterProvider metric.MeterProvider
	// Propagator writes the trace context into the headers of a task, and reads it there.
	// codeq.Limits bounds the headers of a task: baggage may exceed them, and is not stored by
	// default. Default: [propagation.TraceContext].
	Propagator propagation.TextMapPropagator
	// SameTrace makes the span of an attempt a child of the span that produced the task. Then a
	// trace lasts until the last attempt of the last follow-up. Default: the span of an attempt has
	// the parent of Run's context, mostly none, and a link to the producer.
	SameTrace bool
}

// Instrumentation traces and measures. Its methods are safe for concurrent use. [New] makes it.
type Instrumentation struct {
	tracer     trace.Tracer
	propagator propagation.TextMapPropagator
	sameTrace  bool

	operations messagingconv.ClientOperationDuration
	sent       messagingconv.ClientSentMessages
	consumed   messagingconv.ClientConsumedMessages
	processing messagingconv.ProcessDuration
}

// New returns an Instrumentation. Nil opts mean all defaults.
//
// Errors: those of the MeterProvider.
func New(opts *Options) (*Instrumentation, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	tracers := cmp.Or(o.TracerProvider, otel.GetTracerProvider())
	meters := cmp.Or(o.MeterProvider, otel.GetMeterProvider())
	meter := meters.Meter(scope, metric.WithSchemaURL(semconv.SchemaURL))
	i := &Instrumentation{
		tracer:     tracers.Tracer(scope, trace.WithSchemaURL(semconv.SchemaURL)),
		propagator: cmp.Or[propagation.TextMapPropagator](o.Propagator, propagation.TraceContext{}),
		sameTrace:  o.SameTrace,
	}
	var errs [4]error
	i.operations, errs[0] = messagingconv.NewClientOperationDuration(meter, seconds)
	i.sent, errs[1] = messagingconv.NewClientSentMessages(meter)
	i.consumed, errs[2] = messagingconv.NewClientConsumedMessages(meter)
	i.processing, errs[3] = messagingconv.NewProcessDuration(meter, seconds)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("codeqotel: instruments: %w", err)
	}
	return i, nil
}

// seconds has the boundaries of the conventions for durations.
var seconds = metric.WithExplicitBucketBoundaries(
	0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)

// about returns the attributes of a metric; queue "": several queues. The instrument adds the
// system and the name of the operation.
func about(queue string, err error) []attribute.KeyValue {
	attrs := make([]attribute.KeyValue, 0, 2)
	if queue != "" {
		attrs = append(attrs, semconv.MessagingDestinationName(valid(queue)))
	}
	if err != nil {
		attrs = append(attrs, errorType(err))
	}
	return attrs
}
