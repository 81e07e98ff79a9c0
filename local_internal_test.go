package codeq

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/call"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/localsocket"
	"codeq/internal/testkit"
)

// TestLocalPanics: a panic in a goroutine that serves another program ends only that call or that
// subscription.
func TestLocalPanics(t *testing.T) {
	for _, name := range []string{
		"call of a local client", "end of a local subscription", "events of another process", "end of events of another process",
	} {
		t.Run(name, func(t *testing.T) {
			p := &testkit.PanicIn{Names: []string{name}}
			p.Begin(t)
			dir := t.TempDir()
			q, err := Open(dir, &Options{Shards: 1})
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- q.ServeLocal(ctx) }()
			var c *Queue
			for c, err = OpenLocal(ctx, dir); err != nil; c, err = OpenLocal(ctx, dir) {
				require.ErrorIs(t, err, ErrNotServed) // not served yet
			}
			p.Armed.Store(true)
			_, err = c.Stats(ctx)
			if name == "call of a local client" {
				require.ErrorContains(t, err, "panic in "+name)
			} else {
				require.NoError(t, err)
			}
			sub, err := c.Subscribe(SubscribeOptions{})
			require.NoError(t, err)
			if name == "events of another process" {
				_, err := sub.Next(ctx)
				require.ErrorContains(t, err, "panic in "+name)
			}
			sub.Close()
			produce(t, c, Task{Queue: "a"})
			require.NoError(t, c.Close())
			produce(t, q, Task{Queue: "a"})
			cancel()
			require.NoError(t, <-ended)
			require.Empty(t, p.Left())
			require.NoError(t, q.Close())
		})
	}
}

// TestLocalOldSubscription: the end of serving ends a subscription. When the queue is served again,
// late calls for the old subscription do not affect the new ones. A closed subscription leaves
// nothing in the process.
func TestLocalOldSubscription(t *testing.T) {
	ctx := t.Context()
	dir := t.TempDir()
	q, err := Open(dir, &Options{Shards: 1})
	require.NoError(t, err)
	serve := func() (c *Queue, stop func()) {
		ctx, cancel := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- q.ServeLocal(ctx) }()
		for c, err = OpenLocal(ctx, dir); err != nil; c, err = OpenLocal(ctx, dir) {
			require.ErrorIs(t, err, ErrNotServed) // not served yet
		}
		return c, func() {
			cancel()
			require.NoError(t, <-ended)
		}
	}
	first, stop := serve()
	const n = 3
	var old [n]uint64
	for i := range old {
		require.NoError(t, first.backend.(*remote).Tell(ctx, localsocket.Subscribe, SubscribeOptions{}, &old[i]))
	}
	stop()
	require.NoError(t, first.Close())
	require.False(t, q.events.Wanted() != 0)

	c, stop := serve()
	leaks := testkit.WatchLeaks()
	var subs [n]*Subscription
	for i := range subs {
		subs[i], err = c.Subscribe(SubscribeOptions{})
		require.NoError(t, err)
	}
	for _, number := range old {
		for _, kind := range []byte{localsocket.Unsubscribe, localsocket.Events} {
			err := testkit.InTime(t, "call", func() error { return c.backend.(*remote).Tell(ctx, kind, number, nil) })
			require.ErrorIs(t, err, ErrNotServed)
		}
	}
	id := produce(t, q, Task{Queue: "a"})[0]
	for _, sub := range subs {
		e, err := sub.Next(ctx)
		require.NoError(t, err)
		require.Equal(t, id, e.ID)
		sub.Close()
	}
	leaks.Require(t, "when the subscriptions were closed")
	require.False(t, q.events.Wanted() != 0)
	stop()
	require.NoError(t, c.Close())
	require.NoError(t, q.Close())
}

// FuzzPrograms: a queue without a cluster refuses or executes any call of a program, and continues.
func FuzzPrograms(f *testing.F) {
	for _, op := range sampleCalls() {
		f.Add(byte(op.base().kind), op.Append([]byte{0, 0}))
	}
	// The headers of this record are missing.
	bad := engine.NewTask{Key: engine.LaneKey{Queue: "a"}, Rec: []byte{1<<6 | 1<<5, 1, 'e', 9}}
	for _, op := range []request{
		&produceOp{completion: newCompletion(callProduce), Produce: call.Produce{Tasks: []engine.NewTask{bad}}},
		rule(callAdopt, &call.Adopt{Queue: "b", Value: []byte(`{"Concurrency":1}`)}),
		rule(callConfigure, &call.Configure{Queue: "b", Value: []byte(`{"Rate":-1}`)}),
	} {
		f.Add(byte(op.base().kind), op.Append([]byte{0, 1}))
	}
	q, err := Open("q", inspect.With(&Options{Shards: 2}, inspect.Private{FS: crashfs.New()}))
	require.NoError(f, err)
	f.Cleanup(func() { require.NoError(f, q.Close()) })
	f.Fuzz(func(t *testing.T, kind byte, body []byte) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if waitsLong(kind) {
			cancel()
		}
		_, _ = q.serveProgram(ctx, kind, bytes.Clone(body))
		for _, s := range q.led() {
			require.NoError(t, s.probe(func(*shard) error { return nil }))
		}
	})
}
