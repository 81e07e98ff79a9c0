package codeqotel_test

import (
	"context"
	"fmt"
	"os"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"codeq"
	"codeq/codeqotel"
)

func Example() {
	dir, err := os.MkdirTemp("", "codeq-example-")
	check(err)
	defer os.RemoveAll(dir)
	exporter := tracetest.NewInMemoryExporter() // a program has one that sends spans to a collector
	otel, err := codeqotel.New(&codeqotel.Options{
		TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter)),
	})
	check(err)
	q, err := codeq.Open(dir, &codeq.Options{Producing: []codeq.ProduceMiddleware{otel.ProduceMiddleware}})
	check(err)
	defer q.Close()

	ctx, stop := context.WithCancel(context.Background())
	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte(`"ann@example.org"`)})
	check(err)
	var mux codeq.Mux
	mux.Use(otel.Middleware)
	codeq.Handle(&mux, "mail", func(_ context.Context, job *codeq.Job[string]) error {
		defer stop()
		fmt.Println("to", job.Args)
		return nil
	})
	check(q.Run(ctx, &mux, nil))

	for _, span := range exporter.GetSpans() {
		fmt.Println(span.Name, len(span.Links))
	}
	// Output:
	// to ann@example.org
	// send mail 0
	// process mail 1
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
