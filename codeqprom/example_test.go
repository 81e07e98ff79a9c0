package codeqprom_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"codeq"
	"codeq/codeqprom"
)

// A program mounts the metrics on its own server, behind its own authentication.
func Example() {
	dir, err := os.MkdirTemp("", "codeq-example-")
	check(err)
	defer os.RemoveAll(dir)

	metrics := codeqprom.New(&codeqprom.Options{Queues: []string{"mail"}})
	q, err := codeq.Open(dir, &codeq.Options{Observer: metrics.Observer(nil)})
	check(err)
	defer q.Close()
	metrics.Watch(q)

	registry := prometheus.NewRegistry() // or the default one, by prometheus.MustRegister
	registry.MustRegister(metrics)
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	server := httptest.NewServer(mux) // a program calls http.ListenAndServe
	defer server.Close()

	_, err = q.Produce(context.Background(), codeq.Task{Queue: "mail"})
	check(err)
	show(server.URL+"/metrics", `codeq_tasks{queue="mail",state="ready"}`)
	// Output: codeq_tasks{queue="mail",state="ready"} 1
}

// An application that has an Observer of its own keeps it.
func ExampleCollector_Observer() {
	own := func(o *codeq.Observation) { fmt.Println("told of", len(o.Queues), "queue") }

	metrics := codeqprom.New(nil)
	opts := &codeq.Options{Observer: metrics.Observer(own)}

	// The queue calls it after Open.
	opts.Observer(&codeq.Observation{Queues: []codeq.QueueDelta{{Queue: "mail"}}})
	// Output: told of 1 queue
}

// A label distinguishes two queues of one process.
func ExampleCollector_Watch() {
	dir, err := os.MkdirTemp("", "codeq-example-")
	check(err)
	defer os.RemoveAll(dir)

	registry := prometheus.NewRegistry()
	for _, name := range []string{"mail", "reports"} {
		metrics := codeqprom.New(nil)
		q, err := codeq.Open(dir+"/"+name, &codeq.Options{Shards: 1, Observer: metrics.Observer(nil)})
		check(err)
		defer q.Close()
		metrics.Watch(q)
		prometheus.WrapRegistererWith(prometheus.Labels{"db": name}, registry).MustRegister(metrics)
	}
	server := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	defer server.Close()
	show(server.URL, "codeq_shard_up")
	// Output:
	// codeq_shard_up{db="mail",shard="0"} 1
	// codeq_shard_up{db="reports",shard="0"} 1
}

// show prints the lines of a page that begin with a prefix.
func show(url, prefix string) {
	r, err := http.Get(url)
	check(err)
	defer r.Body.Close()
	page, err := io.ReadAll(r.Body)
	check(err)
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, prefix) {
			fmt.Print(line)
		}
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
