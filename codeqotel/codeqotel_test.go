package codeqotel_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"codeq"
	"codeq/codeqotel"
	"codeq/codeqtest"
)

// telemetry has the output of the exporters in memory.
type telemetry struct {
	spans  *tracetest.InMemoryExporter
	reader *metric.ManualReader
	otel   *codeqotel.Instrumentation
	tracer trace.Tracer // of the program
}

func observe(t *testing.T, opts codeqotel.Options) *telemetry {
	o := &telemetry{spans: tracetest.NewInMemoryExporter(), reader: metric.NewManualReader()}
	tracers := sdktrace.NewTracerProvider(sdktrace.WithSyncer(o.spans))
	opts.TracerProvider, opts.MeterProvider = tracers, metric.NewMeterProvider(metric.WithReader(o.reader))
	var err error
	o.otel, err = codeqotel.New(&opts)
	require.NoError(t, err)
	o.tracer = tracers.Tracer("program")
	return o
}

// options returns options with the middleware of produces.
func (o *telemetry) options(opts codeq.Options) *codeq.Options {
	opts.Producing = []codeq.ProduceMiddleware{o.otel.ProduceMiddleware}
	return &opts
}

// named returns the spans of a name, in the order of their ends.
func (o *telemetry) named(name string) (spans []tracetest.SpanStub) {
	for _, s := range o.spans.GetSpans() {
		if s.Name == name {
			spans = append(spans, s)
		}
	}
	return spans
}

func attributesOf(s tracetest.SpanStub) map[string]any {
	attrs := make(map[string]any, len(s.Attributes))
	for _, a := range s.Attributes {
		attrs[string(a.Key)] = a.Value.AsInterface()
	}
	return attrs
}

// points returns the data points of a metric, by their attributes: the sum of a counter, the count
// of a histogram.
func (o *telemetry) points(t *testing.T, name string) map[string]int64 {
	var data metricdata.ResourceMetrics
	require.NoError(t, o.reader.Collect(t.Context(), &data))
	points := make(map[string]int64)
	text := func(set attribute.Set) string { return set.Encoded(attribute.DefaultEncoder()) }
	for _, scope := range data.ScopeMetrics {
		for _, m := range scope.Metrics {
			if m.Name != name {
				continue
			}
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range d.DataPoints {
					points[text(p.Attributes)] = p.Value
				}
			case metricdata.Histogram[float64]:
				for _, p := range d.DataPoints {
					points[text(p.Attributes)] = int64(p.Count)
				}
			}
		}
	}
	return points
}

// TestLinkedSpans: the span of an attempt is linked to that of the producer, and follow-ups go on
// with the trace of the attempt.
func TestLinkedSpans(t *testing.T) {
	o := observe(t, codeqotel.Options{})
	codeqtest.Test(t, o.options(codeq.Options{}), func(t *testing.T, q *codeqtest.Queue) {
		ctx, request := o.tracer.Start(t.Context(), "request")
		id, err := q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("hello"), Headers: map[string]string{"a": "b"}})
		require.NoError(t, err)
		request.End()

		var seen map[string]string
		var inHandler trace.SpanContext
		var mux codeq.Mux
		mux.Use(o.otel.Middleware)
		codeq.Handle(&mux, "mail", func(ctx context.Context, job *codeq.Job[[]byte]) error {
			seen, inHandler = maps.Clone(job.Headers), trace.SpanContextFromContext(ctx)
			job.FollowUp(codeq.Task{Queue: "log"})
			_, err := q.Produce(ctx, codeq.Task{Queue: "index"})
			return err
		})
		codeq.Handle(&mux, "log", func(context.Context, *codeq.Job[[]byte]) error { return nil })
		codeq.Handle(&mux, "index", func(context.Context, *codeq.Job[[]byte]) error { return nil })
		q.Drain(&mux)

		send, process := o.named("send mail")[0], o.named("process mail")[0]
		require.Equal(t, request.SpanContext().SpanID(), send.Parent.SpanID())
		require.Equal(t, trace.SpanKindProducer, send.SpanKind)
		require.Equal(t, trace.SpanKindConsumer, process.SpanKind)
		require.False(t, process.Parent.IsValid())
		require.Len(t, process.Links, 1)
		require.Equal(t, send.SpanContext.SpanID(), process.Links[0].SpanContext.SpanID())
		require.Equal(t, process.SpanContext, inHandler)
		require.Equal(t, "b", seen["a"])
		require.Contains(t, seen["traceparent"], process.SpanContext.SpanID().String())
		require.Equal(t, map[string]any{
			"messaging.system": "codeq", "messaging.operation.name": "send", "messaging.operation.type": "send",
			"messaging.destination.name": "mail", "messaging.message.id": id.String(),
		}, attributesOf(send))
		require.Equal(t, map[string]any{
			"messaging.system": "codeq", "messaging.operation.name": "process", "messaging.operation.type": "process",
			"messaging.destination.name": "mail", "messaging.message.id": id.String(), "messaging.message.body.size": int64(5),
			"codeq.task.attempt": int64(1), "codeq.verdict": codeq.VerdictOf(nil).String(),
		}, attributesOf(process))

		followUp, index := o.named("process log")[0], o.named("send index")[0]
		require.Equal(t, process.SpanContext.SpanID(), followUp.Links[0].SpanContext.SpanID())
		require.Equal(t, process.SpanContext.SpanID(), index.Parent.SpanID())
		require.Equal(t, "https://opentelemetry.io/schemas/"+codeqotel.SemConvVersion, process.InstrumentationScope.SchemaURL)
	})
}

// TestSameTrace: the span of an attempt may be a child of that of the producer.
func TestSameTrace(t *testing.T) {
	o := observe(t, codeqotel.Options{
		SameTrace:  true,
		Propagator: propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}),
	})
	codeqtest.Test(t, o.options(codeq.Options{}), func(t *testing.T, q *codeqtest.Queue) {
		member, err := baggage.NewMember("user", "anna")
		require.NoError(t, err)
		carried, err := baggage.New(member)
		require.NoError(t, err)
		_, err = q.Produce(baggage.ContextWithBaggage(t.Context(), carried), codeq.Task{Queue: "mail"})
		require.NoError(t, err)
		var mux codeq.Mux
		mux.Use(o.otel.Middleware)
		codeq.Handle(&mux, "mail", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			require.Equal(t, "anna", baggage.FromContext(ctx).Member("user").Value())
			return nil
		})
		q.Drain(&mux)
		send, process := o.named("send mail")[0], o.named("process mail")[0]
		require.Equal(t, send.SpanContext.SpanID(), process.Parent.SpanID())
		require.Equal(t, send.SpanContext.TraceID(), process.SpanContext.TraceID())
		require.Empty(t, process.Links)
	})
}

// TestFailures: an error is in the span and in the metrics, with the verdict. A task that the
// worker gives back has no error.
func TestFailures(t *testing.T) {
	o := observe(t, codeqotel.Options{})
	opts := o.options(codeq.Options{MaxAttempts: 2, Backoff: codeq.Backoff{Base: time.Second, Max: time.Second}})
	codeqtest.Test(t, opts, func(t *testing.T, q *codeqtest.Queue) {
		_, err := q.ProduceBatch(t.Context(), []codeq.Task{{Queue: "mail"}, {Queue: "mail"}})
		require.NoError(t, err)
		calls := 0
		var mux codeq.Mux
		mux.Use(o.otel.Middleware)
		codeq.Handle(&mux, "mail", func(context.Context, *codeq.Job[[]byte]) error {
			calls++
			switch calls {
			case 1:
				return codeq.Snooze(time.Minute)
			case 2:
				return codeq.RetryAfter(time.Second, errors.New("no such address"))
			case 3:
				panic("no server")
			}
			return nil
		})
		q.Drain(&mux)
		var verdicts []any
		for n, s := range o.named("process mail") {
			attrs := attributesOf(s)
			verdicts = append(verdicts, attrs["codeq.verdict"])
			failed := n == 1 || n == 2
			require.Equal(t, failed, s.Status.Code == codes.Error, n)
			require.Equal(t, failed, attrs["error.type"] != nil, n)
		}
		require.Len(t, verdicts, 4)
		require.Equal(t, int64(1), o.points(t, "messaging.process.duration")["error.type=*errors.errorString,messaging.destination.name=mail,messaging.operation.name=process,messaging.system=codeq"])
		require.Equal(t, int64(2), o.points(t, "messaging.process.duration")["messaging.destination.name=mail,messaging.operation.name=process,messaging.system=codeq"])
		require.Equal(t, map[string]int64{
			"messaging.destination.name=mail,messaging.operation.name=process,messaging.system=codeq": 4,
		}, o.points(t, "messaging.client.consumed.messages"))
		require.Equal(t, map[string]int64{
			"messaging.destination.name=mail,messaging.operation.name=send,messaging.system=codeq": 2,
		}, o.points(t, "messaging.client.sent.messages"))
		require.Equal(t, map[string]int64{
			"messaging.destination.name=mail,messaging.operation.name=send,messaging.operation.type=send,messaging.system=codeq": 1,
		}, o.points(t, "messaging.client.operation.duration"))
	})
}

// TestSteps: a handler that waits between two steps has not failed.
func TestSteps(t *testing.T) {
	o := observe(t, codeqotel.Options{})
	codeqtest.Test(t, o.options(codeq.Options{}), func(t *testing.T, q *codeqtest.Queue) {
		_, err := q.Produce(t.Context(), codeq.Task{Queue: "mail"})
		require.NoError(t, err)
		var mux codeq.Mux
		mux.Use(o.otel.Middleware)
		codeq.Handle(&mux, "mail", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			if err := codeq.Sleep(ctx, "nap", time.Minute); err != nil {
				return fmt.Errorf("before the second part: %w", err)
			}
			_, err := codeq.WaitSignal[string](ctx, "paid", time.Minute)
			if errors.Is(err, codeq.ErrNoSignal) {
				return nil
			}
			return err
		})
		q.Drain(&mux)
		var verdicts []any
		for _, s := range o.named("process mail") {
			attrs := attributesOf(s)
			verdicts = append(verdicts, attrs["codeq.verdict"])
			require.Equal(t, codes.Unset, s.Status.Code, s.Status.Description)
			require.NotContains(t, attrs, "error.type")
		}
		require.Equal(t, []any{"suspended", "suspended", "completed"}, verdicts)
		require.Equal(t, map[string]int64{
			"messaging.destination.name=mail,messaging.operation.name=process,messaging.system=codeq": 3,
		}, o.points(t, "messaging.process.duration"))
	})
}

// TestBatches: a batch has one span. Tasks are not changed, and keep a trace context of their own.
func TestBatches(t *testing.T) {
	o := observe(t, codeqotel.Options{})
	q := codeqtest.Open(t, o.options(codeq.Options{}))
	const own = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	tasks := []codeq.Task{
		{Queue: "a"},
		{Queue: "b", Headers: map[string]string{"traceparent": own}},
		{Queue: "b", Headers: map[string]string{"x": "y"}},
	}
	ids, err := q.ProduceBatch(t.Context(), tasks)
	require.NoError(t, err)
	require.Nil(t, tasks[0].Headers)
	require.Equal(t, map[string]string{"x": "y"}, tasks[2].Headers)
	send := o.named("send")[0]
	require.Equal(t, int64(3), attributesOf(send)["messaging.batch.message_count"])
	require.NotContains(t, attributesOf(send), "messaging.destination.name")
	var parents []string
	for _, id := range ids {
		info, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		parents = append(parents, info.Headers["traceparent"])
	}
	require.Equal(t, own, parents[1])
	for _, n := range []int{0, 2} {
		require.Contains(t, parents[n], send.SpanContext.SpanID().String())
	}

	_, err = q.Produce(t.Context(), codeq.Task{})
	require.ErrorIs(t, err, codeq.ErrInvalid)
	refused := o.named("send")[1]
	require.Equal(t, codes.Error, refused.Status.Code)
	require.NotContains(t, attributesOf(refused), "messaging.message.id")
	sent := o.points(t, "messaging.client.sent.messages")
	require.Len(t, sent, 2)
	require.True(t, slices.ContainsFunc(slices.Collect(maps.Keys(sent)), func(k string) bool {
		return strings.Contains(k, "error.type=codeq.ErrInvalid")
	}), sent)
}

// TestDefaults: without options and without providers, only the telemetry is lost.
func TestDefaults(t *testing.T) {
	otel, err := codeqotel.New(nil)
	require.NoError(t, err)
	q := codeqtest.Open(t, &codeq.Options{Producing: []codeq.ProduceMiddleware{otel.ProduceMiddleware}})
	var mux codeq.Mux
	mux.Use(otel.Middleware)
	worked := false
	codeq.Handle(&mux, "mail", func(context.Context, *codeq.Job[[]byte]) error {
		worked = true
		return nil
	})
	id, err := q.Produce(t.Context(), codeq.Task{Queue: "mail"})
	require.NoError(t, err)
	info, err := q.Get(t.Context(), id)
	require.NoError(t, err)
	require.Empty(t, info.Headers)
	q.Drain(&mux)
	require.True(t, worked)
}

// TestSameAsWrapped: a produce in a span returns the same values and error as without it; a trace
// that does not fit is left out.
func TestSameAsWrapped(t *testing.T) {
	q := codeqtest.Open(t, &codeq.Options{Limits: codeq.Limits{Headers: 70}})
	o := observe(t, codeqotel.Options{})
	next := func(ctx context.Context, p codeq.Producing) ([]codeq.ID, error) { return q.ProduceBatch(ctx, p.Tasks) }
	traced := func(tasks ...codeq.Task) ([]codeq.ID, error) {
		return o.otel.ProduceMiddleware(next)(t.Context(), codeq.Producing{Tasks: tasks})
	}
	same := func(task codeq.Task) {
		t.Helper()
		ids, err := q.ProduceBatch(t.Context(), []codeq.Task{task, task})
		tracedIDs, tracedErr := traced(task, task)
		require.Error(t, err)
		require.EqualError(t, tracedErr, err.Error())
		require.Equal(t, ids, tracedIDs)
	}
	keyed := codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k"}}
	_, err := traced(keyed)
	require.NoError(t, err)
	same(keyed)
	same(codeq.Task{})
	same(codeq.Task{Queue: "a", Headers: map[string]string{"x": strings.Repeat("y", 70)}})

	full := codeq.Task{Queue: "a", Headers: map[string]string{"x": strings.Repeat("y", 69)}}
	ids, err := traced(full, codeq.Task{Queue: "a"})
	require.NoError(t, err)
	for _, id := range ids {
		info, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		require.NotContains(t, info.Headers, "traceparent")
	}
}

type nilError struct{ text string }

func (e *nilError) Error() string { return e.text }

// namedError names its own type.
type namedError string

func (e namedError) Error() string     { return "failed" }
func (e namedError) ErrorType() string { return string(e) }

// TestErrorsOfHandlers: with any error of a handler, its attempt ends as without the middleware.
// The span has a text in UTF-8, without the stack of a panic.
func TestErrorsOfHandlers(t *testing.T) {
	o := observe(t, codeqotel.Options{})
	codeqtest.Test(t, o.options(codeq.Options{MaxAttempts: 1}), func(t *testing.T, q *codeqtest.Queue) {
		var mux codeq.Mux
		mux.Use(o.otel.Middleware)
		work := map[string]func() error{
			"nil":   func() error { var e *nilError; return e },
			"panic": func() error { panic("no server") },
			"bytes": func() error { return errors.New("a\xffb") },
			"kind":  func() error { return namedError("a\xffb") },
		}
		for queue, f := range work {
			codeq.Handle(&mux, queue, func(context.Context, *codeq.Job[[]byte]) error { return f() })
			_, err := q.Produce(t.Context(), codeq.Task{Queue: queue})
			require.NoError(t, err)
		}
		q.Drain(&mux)
		status := func(queue string) string { return o.named("process " + queue)[0].Status.Description }
		require.Equal(t, "*codeqotel_test.nilError", status("nil"))
		require.Equal(t, "panic: no server", status("panic"))
		require.Equal(t, "a\uFFFDb", status("bytes"))
		require.Equal(t, "a\uFFFDb", attributesOf(o.named("process kind")[0])["error.type"])
		dead, err := q.Stats(t.Context())
		require.NoError(t, err)
		for _, queue := range []string{"nil", "panic", "bytes"} {
			require.EqualValues(t, 1, dead[queue].Dead, queue)
		}
	})
}
